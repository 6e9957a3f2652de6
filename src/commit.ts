// The commit queue (group commit, as databases do it): calls that wait for their turn are committed together. Whoever
// gets the node's commit lock works for all; a call that finds its request gone is finished. Everything is
// idempotent, so a process killed half-way costs nothing: the next one does it again.
import { join } from 'node:path';
import { commitPlan } from './batch.ts';
import { blame, inTheWay, rulesInTheWay } from './blame.ts';
import { isLineRefused } from './iptables.ts';
import { PortmapError, toPortmapError } from './errors.ts';
import { type HeldLock, lockBusy, tryLock, watchLock, withLockIfPossible } from './lock.ts';
import { type BatchContext, planBatch } from './plan.ts';
import { type Budget, graceBudget, openAlarm, sleep } from './budget.ts';
import { wake } from './process.ts';
import { notStarted } from './program.ts';
import {
  type Answer,
  claim,
  discard,
  enqueue,
  finish,
  giveBack,
  hashOf,
  inOrder,
  hasOrphans,
  isOrphan,
  undoLater,
  isWanted,
  nextOwner,
  readAnswer,
  type Request,
  withdraw,
} from './queue.ts';
import { readRecord } from './record.ts';
import { isQueued, type StateFolder } from './state.ts';
import { tableKey } from './target.ts';

const maxConflicts = 4;
const orphanMs = 3000;
// For a call that was told to end, or is over its time.
const endedMs = 600;
const givenBackMs = 1500;
const firstWaitMs = 4;
// Whoever commits wakes those that wait; they look for themselves in case it was killed.
const longestWaitMs = 300;

/**
 * Brings a request to its commit, by this process or by another, and returns the warnings it came with. The caller
 * holds the sandbox's lock. Without a state folder there is no queue: the request is committed on its own.
 * @throws PortmapError what the request came to, or BUSY when the budget ended before its turn came.
 */
export async function submit(
  request: Request,
  state: StateFolder | undefined,
  budget: Budget,
): Promise<readonly string[]> {
  if (state === undefined) {
    const answers = new Map<string, Answer>();
    await commitRequests(
      [request],
      answers,
      { budget, state },
      { cover: () => undefined, isWanted: () => true },
    );
    return settle(answers.get(request.token));
  }
  enqueue(state, request);
  const lock = commitLock(state);
  const watch = watchLock(lock);
  const alarm = openAlarm();
  for (let wait = firstWaitMs; ; wait = Math.min(wait * 2, longestWaitMs)) {
    if (!isQueued(state, hashOf(request))) return settle(readAnswer(state, request));
    if (budget.signal.aborted) {
      if ((await takeBack(request, state, budget)) === 'finished') return settle(readAnswer(state, request));
      throw outOfTime(budget, lockBusy(lock));
    }
    const held = await tryLock(watch);
    if (held === undefined) {
      await sleep(wait * (0.5 + Math.random()), budget, alarm);
      continue;
    }
    if (budget.signal.aborted) {
      // Its turn came when its time was over: it leads for nobody.
      passOn(held, state);
      continue;
    }
    let answer: Answer | undefined;
    try {
      answer = await lead(request, state, budget, held);
    } finally {
      passOn(held, state);
    }
    if (answer?.error !== undefined && request.change.verb === 'ADD' && isRecorded(state, request))
      undoLater(state, request);
    await tendOrphans(state, budget);
    if (answer !== undefined) return settle(answer);
    await sleep(wait, budget);
  }
}

/**
 * Commits requests that this process puts together itself, not through the queue. They are made under the commit lock,
 * so that what they rest on, the records, is what no other call is changing. Returns an answer for each.
 */
export async function commitTogether(
  makeRequests: () => readonly Request[],
  state: StateFolder | undefined,
  call: { readonly budget: Budget; readonly warn: (text: string) => void },
): Promise<(Answer & { readonly request: Request })[]> {
  const { budget } = call;
  const answers = new Map<string, Answer>();
  const work = async (held: HeldLock | undefined) => {
    const requests = inOrder(
      makeRequests().map((one, index) => ({ ...one, token: `${one.token}-${index}` })),
    );
    const round = { cover: held?.cover ?? (() => undefined), isWanted: () => true };
    await commitRequests(requests, answers, { budget, state }, round);
    return requests.flatMap((request) => {
      const answer = answers.get(request.token);
      return answer === undefined ? [] : [{ ...answer, request }];
    });
  };
  if (state === undefined) return work(undefined);
  const onProblem = (problem: string) => call.warn(`state folder: ${problem}; working without a lock`);
  return withLockIfPossible(commitLock(state), budget, onProblem, work);
}

// A call that was stopped for long finds its locks broken and its request replaced.
function overtaken({ containerId }: Request): PortmapError {
  return new PortmapError(
    'BUSY',
    `container ${containerId}: a later call for it has taken the place of this one`,
    'this call was stopped for a time, or its lock was removed; what the later one wants holds',
  );
}

// Says whether an ADD that failed has left its record: then nobody knows what became of its rules.
function isRecorded(state: StateFolder, request: Request): boolean {
  const record = readRecord(state, hashOf(request));
  return typeof record !== 'string' && record.order >= request.order;
}

// A request in the hands of a leader is mostly given back at once, for the leader's time is over as well. Where it is
// not, the ADD is undone by whoever commits next.
async function takeBack(
  request: Request,
  state: StateFolder,
  call: Budget,
): Promise<'withdrawn' | 'finished'> {
  const end = performance.now() + (call.isTold() ? endedMs : givenBackMs);
  for (;;) {
    const outcome = withdraw(state, request);
    if (outcome !== 'taken') return outcome;
    if (performance.now() > end) {
      undoLater(state, request);
      await tendOrphans(state, call);
      return 'withdrawn';
    }
    await new Promise((resolve) => setTimeout(resolve, firstWaitMs * 5));
  }
}

// Gives the commit lock up, to the next in turn if there is one.
function passOn(held: HeldLock, state: StateFolder): void {
  held.release();
  const next = nextOwner(state);
  if (next !== undefined) wake([next]);
}

/** What the node's commit lock is on. */
export function commitLock(state: StateFolder): string {
  return join(state.path, 'commit.queue');
}

// Commits all that wait. Undefined: the own request was not among it, because another process has done it meanwhile.
async function lead(
  request: Request,
  state: StateFolder,
  budget: Budget,
  held: HeldLock,
): Promise<Answer | undefined> {
  const requests = claim(state, request);
  const unfinished = new Set(requests);
  try {
    const own = requests.find(({ token }) => token === request.token);
    if (own === undefined) return undefined;
    const answers = new Map<string, Answer>();
    let failure: PortmapError | undefined;
    try {
      const isStillWanted = (one: Request) => isWanted(state, one);
      await commitRequests(
        requests,
        answers,
        { budget, state },
        { cover: held.cover, isWanted: isStillWanted },
      );
    } catch (error) {
      failure = toPortmapError(error);
    }
    const told = requests.filter((one) => one !== own && report(state, one, answers.get(one.token)));
    for (const one of [own, ...told]) unfinished.delete(one);
    wake(told.flatMap(({ owner }) => owner ?? []));
    discard(state, own);
    await commitOrphans(state, held, budget);
    return answers.get(own.token) ?? { warnings: [], error: failure ?? overtaken(own) };
  } finally {
    giveBack(state, [...unfinished]);
  }
}

// Who leaves an orphan behind, and who gives up the commit lock, looks once more: either gets the lock, or somebody holds
// it who will look after giving it up.
async function tendOrphans(state: StateFolder, call: Budget): Promise<void> {
  if (!hasOrphans(state)) return;
  const held = await tryLock(watchLock(commitLock(state)));
  if (held === undefined) return;
  try {
    await commitOrphans(state, held, call);
  } finally {
    held.release();
  }
}

// What is left of calls that are gone waits for nobody else. It gets a moment of its own, for the leader may be at its
// end as well; what is not done then stays for the next call.
async function commitOrphans(state: StateFolder, held: HeldLock, call: Budget): Promise<void> {
  if (!hasOrphans(state)) return;
  const all = claim(state);
  const requests = all.filter(isOrphan);
  // Live owners come for themselves, and this one may have been told to end.
  giveBack(
    state,
    all.filter((one) => !isOrphan(one)),
  );
  const answers = new Map<string, Answer>();
  try {
    const round = { cover: held.cover, isWanted: (one: Request) => isWanted(state, one) };
    await commitRequests(
      requests,
      answers,
      { budget: graceBudget(call.signal.aborted ? endedMs : orphanMs), state },
      round,
    );
  } catch {
    // Out of time.
  }
  giveBack(
    state,
    requests.filter((one) => !report(state, one, answers.get(one.token))),
  );
}

// Tells an owner its answer; says whether there was one and it could be told.
function report(state: StateFolder, request: Request, answer: Answer | undefined): boolean {
  try {
    if (answer !== undefined) finish(state, request, answer);
    return answer !== undefined;
  } catch {
    // An answer that can't be written must not look like success: the owner does it again.
    return false;
  }
}

interface Round {
  readonly cover: (pid: number) => void;
  readonly isWanted: (request: Request) => boolean;
}

// Commits requests in one transaction a table; when that is refused for good, halves of them, down to the one that is
// to blame. Puts an answer for each that is done or has failed into `answers`; throws when the time is over.
async function commitRequests(
  requests: readonly Request[],
  answers: Map<string, Answer>,
  context: BatchContext,
  round: Round,
): Promise<void> {
  let busy: PortmapError | undefined;
  let isTextRefused = false;
  for (let conflicts = 0; ;) {
    const wanted = requests.filter(round.isWanted);
    if (wanted.length === 0) return;
    const naming = conflicts === maxConflicts - 1 && isTextRefused ? 'place' : 'text';
    const error = await attempt(wanted, answers, { ...context, naming }, round);
    if (error === undefined) return;
    // What the call waited for before says more than the step that was cut short at its end.
    if (context.budget.signal.aborted) throw outOfTime(context.budget, busy ?? waitOf(error, context));
    if (error.code === 'BUSY') {
      busy = error;
      await sleep(firstWaitMs, context.budget);
      continue;
    }
    isTextRefused = isLineRefused(error);
    if (error.code === 'CONFLICT' && ++conflicts < maxConflicts) {
      await sleep(10 * 3 ** conflicts * (0.5 + Math.random()), context.budget);
      continue;
    }
    const [only, ...others] = wanted;
    if (only !== undefined && others.length === 0) {
      await settleAlone(only, error, answers, context, round);
      return;
    }
    const middle = Math.ceil(wanted.length / 2);
    await commitRequests(wanted.slice(0, middle), answers, context, round);
    await commitRequests(wanted.slice(middle), answers, context, round);
    return;
  }
}

// What is refused even alone, and planned anew each time, is refused for good. A DEL removes what it can then: all but a
// chain that other programs' rules lead to.
async function settleAlone(
  request: Request,
  error: PortmapError,
  answers: Map<string, Answer>,
  context: BatchContext,
  round: Round,
): Promise<void> {
  const rules = await rulesInTheWay(request, error, context.budget);
  const keepsChains = new Set(rules.map(({ table }) => tableKey(table)));
  const isLeft =
    rules.length > 0 && (await attempt([request], answers, { ...context, keepsChains }, round)) === undefined;
  if (!isLeft) answers.set(request.token, { warnings: [], error: blame(request, error, rules) });
  else {
    const { warnings = [] } = answers.get(request.token) ?? {};
    answers.set(request.token, { warnings: [...warnings, `${inTheWay(request, rules)}; it is left empty`] });
  }
}

async function attempt(
  requests: readonly Request[],
  answers: Map<string, Answer>,
  context: BatchContext,
  round: Round,
): Promise<PortmapError | undefined> {
  try {
    const plan = await planBatch(requests, { ...context, keepsOpen: true });
    let problems: string[];
    try {
      // Observing takes its time, and owners may have gone meanwhile: then the plan is made again without them.
      if (!requests.every(round.isWanted)) return new PortmapError('CONFLICT', 'a request was taken back');
      problems = await commitPlan(plan, context, round.cover);
    } finally {
      await plan.close();
    }
    for (const { token } of requests)
      answers.set(token, {
        warnings: [...problems, ...(plan.warnings.get(token) ?? [])],
        error: plan.failures.get(token),
      });
    return undefined;
  } catch (error) {
    return toPortmapError(error);
  }
}

function settle(answer: Answer | undefined): readonly string[] {
  if (answer?.error !== undefined) throw answer.error;
  return answer?.warnings ?? [];
}

// A turn that came in the last moment has nothing to tell but the wait for it.
function waitOf(error: PortmapError, { state }: BatchContext): PortmapError {
  return state !== undefined && error.message.includes(notStarted) ? lockBusy(commitLock(state)) : error;
}

// Why the call ended, and what it was waiting for then.
function outOfTime(budget: Budget, last: PortmapError): PortmapError {
  const reason = toPortmapError(budget.signal.reason);
  return new PortmapError(reason.code, `${reason.message}: ${last.message}`, last.details || reason.details, {
    cause: last,
  });
}
