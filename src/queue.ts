// The queue folder: requests that wait for their commit, one a sandbox, and what their owners must be told. Every
// step is one rename or unlink, so a process killed anywhere leaves a state that the next one understands.
//
//   request ──claim──▶ taken ──finish──▶ result
//      ▲                 │
//      └────give back────┘
import { linkSync, readdirSync, renameSync } from 'node:fs';
import { join } from 'node:path';
import * as z from 'zod/mini';
import { sandboxHash } from './chain.ts';
import { errorCodes, PortmapError, systemCode, toPortmapError } from './errors.ts';
import {
  isRunning,
  isSeenRunning,
  ownName,
  type ProcessId,
  processId,
  readProcessName,
  uptimeMs,
} from './process.ts';
import { processSchema } from './lock.ts';
import { once } from './once.ts';
import { type Attachment, attachmentSchema } from './record.ts';
import {
  isPresent,
  readState,
  removeState,
  type SandboxFiles,
  sandboxFiles,
  type StateFolder,
  writeState,
} from './state.ts';

/** A change to one sandbox that a call wants. */
export interface Request {
  readonly network: string;
  readonly containerId: string;
  /** Tells this request from any other for the same sandbox. */
  readonly token: string;
  readonly owner?: ProcessId | undefined;
  /** Its place among all, in microseconds since the machine was started: who wanted something later has a greater one. */
  readonly order: number;
  readonly change:
    | { readonly verb: 'ADD'; readonly attachment: Attachment; readonly onConflict: 'warn' | 'fail' }
    | {
        readonly verb: 'DEL';
        readonly ifname: string;
        /** Only what the request with this token has made. */
        readonly of?: string | undefined;
      };
}

/** What a request came to. */
export interface Answer {
  readonly warnings: readonly string[];
  readonly error?: PortmapError | undefined;
}

/** The hash of the sandbox that a request is for. */
export function hashOf(request: Pick<Request, 'network' | 'containerId'>): string {
  return sandboxHash(request.network, request.containerId);
}

/** A request of this process. */
export function newRequest(network: string, containerId: string, change: Request['change']): Request {
  const token = ownName();
  return {
    network,
    containerId,
    token,
    owner: processId('self'),
    order: uptimeMs() * 1000,
    change: change.verb === 'DEL' ? change : { ...change, attachment: { ...change.attachment, token } },
  };
}

/** Puts a request into the queue; it takes the place of an older one for the same sandbox. */
export function enqueue(state: StateFolder, request: Request): void {
  writeState(sandboxFiles(state, hashOf(request)).request, JSON.stringify(request));
}

/**
 * Takes all requests that wait, the oldest first, also those that a killed process had in its hands. An ADD whose owner
 * is dead is dropped: nobody would hear that it was done. Must be called with the commit lock held. `own` is this
 * process's request, which it need not read again.
 */
export function claim(state: StateFolder, own?: Request): Request[] {
  removeLeftovers(state.path, readdirSync(state.path));
  const names = readdirSync(state.queue);
  removeLeftovers(state.queue, names);
  const hashes = new Set(
    names.flatMap((name) => /^([0-9a-f]{21})\.(?:request|taken)$/.exec(name)?.[1] ?? []),
  );
  const requests = [...hashes].flatMap((hash) => {
    const { taken } = sandboxFiles(state, hash);
    take(sandboxFiles(state, hash));
    const text = readState(taken);
    const request = own !== undefined && isTextOf(text, own) ? own : readRequest(text);
    if (request !== undefined && hashOf(request) === hash && !isAbandoned(request)) return [request];
    removeState(taken);
    return [];
  });
  const undos = names
    .filter((name) => name.endsWith('.undo'))
    .flatMap((name) => {
      const request = readRequest(readState(join(state.queue, name)));
      if (request !== undefined && undoFile(state, request) === join(state.queue, name)) return [request];
      removeState(join(state.queue, name));
      return [];
    });
  return inOrder([...requests, ...undos]);
}

// When none is waiting, what is taken was left by a killed process.
function take({ request, taken }: SandboxFiles): void {
  try {
    renameSync(request, taken);
  } catch (error) {
    // No process has made what is in the way.
    if (systemCode(error) !== 'ENOENT' && removeState(taken)) renameSync(request, taken);
  }
}

/** Requests by their place, those that share one told apart. */
export function inOrder(requests: readonly Request[]): Request[] {
  let last = 0;
  return requests
    .toSorted((one, other) => one.order - other.order)
    .map((request) => ({ ...request, order: (last = Math.max(request.order, last + 1)) }));
}

/** Says whether a request in this process's hands is still the one its owner wants: none came after it. */
export function isWanted(state: StateFolder, request: Request): boolean {
  if (isUndo(request)) return isPresent(undoFile(state, request));
  return (
    isTaken(state, request) &&
    !isPresent(sandboxFiles(state, hashOf(request)).request) &&
    !isPresent(undoFile(state, { ...request, token: `${request.token}${undoMark}` }))
  );
}

/**
 * Says whether something waits that nobody will come for: its owner is dead, or has taken back an ADD and gone. The
 * process that commits sees to it before it gives up the commit lock.
 */
export function hasOrphans(state: StateFolder): boolean {
  const here = JSON.stringify(processId('self')?.namespace ?? '');
  return readdirSync(state.queue).some((name) => {
    if (name.endsWith('.undo')) return true;
    const text = name.endsWith('.request') ? readState(join(state.queue, name)) : undefined;
    if (text === undefined) return false;
    // Looked at as text: while a storm lasts, many wait whose turn will come.
    const pid = text.includes(`"namespace":${here}`) ? /"pid":(\d+)/.exec(text)?.[1] : undefined;
    return pid !== undefined && !isPresent(`/proc/${pid}`);
  });
}

/** A live owner of a request that waits, to be woken by whoever gives up the commit lock. */
export function nextOwner(state: StateFolder): ProcessId | undefined {
  for (const name of readdirSync(state.queue)) {
    const text = name.endsWith('.request') ? readState(join(state.queue, name)) : undefined;
    const owner = readRequest(text)?.owner;
    if (owner !== undefined && isSeenRunning(owner)) return owner;
  }
  return undefined;
}

/** Says whether nobody will come for a request. */
export function isOrphan(request: Request): boolean {
  return isUndo(request) || isOwnerDead(request);
}

function isUndo(request: Request): boolean {
  return request.token.endsWith(undoMark);
}

function isTaken(state: StateFolder, request: Request): boolean {
  return isTextOf(readState(sandboxFiles(state, hashOf(request)).taken), request);
}

// A token is no part of any other text in a request: there its quotes would be escaped.
function isTextOf(text: string | undefined, request: Request): boolean {
  return text?.includes(`"token":${JSON.stringify(request.token)}`) === true;
}

const undoMark = '-undo';

/** Puts back requests that this process has no time for; newer ones for the same sandbox stay. */
export function giveBack(state: StateFolder, requests: readonly Request[]): void {
  for (const request of requests.filter((one) => !isUndo(one))) {
    const taken = sandboxFiles(state, hashOf(request)).taken;
    try {
      linkSync(taken, sandboxFiles(state, hashOf(request)).request);
    } catch {
      // A newer one waits, or this one was withdrawn.
    }
    removeState(taken);
  }
}

/** Ends a request, for an owner that waits for its answer: it finds that no later than it sees the request gone. */
export function finish(state: StateFolder, request: Request, answer: Answer): void {
  const result = resultFile(state, request);
  if (isOrphan(request)) discard(state, request);
  else if (answer.error === undefined && answer.warnings.length === 0 && isTaken(state, request))
    // The request itself, under this name, says that it was done.
    renameSync(sandboxFiles(state, hashOf(request)).taken, result);
  else {
    const { code, message, details } = answer.error ?? {};
    const error = code === undefined ? undefined : { code, message, details };
    writeState(result, JSON.stringify({ warnings: answer.warnings, error }));
    discard(state, request);
  }
}

/** Ends a request in this process's hands of which nobody asks what became of it. */
export function discard(state: StateFolder, request: Request): void {
  if (isUndo(request)) removeState(undoFile(state, request));
  else if (isTaken(state, request)) removeState(sandboxFiles(state, hashOf(request)).taken);
}

/** The answer to a request of this process that is no longer queued. */
export function readAnswer(state: StateFolder, request: Request): Answer {
  const path = resultFile(state, request);
  const text = readState(path);
  removeState(path);
  if (text === undefined) return { warnings: [], error: unanswered(path) };
  if (isTextOf(text, request)) return { warnings: [] };
  try {
    const { warnings, error } = z.parse(answerSchema(), JSON.parse(text));
    return { warnings, error: error && new PortmapError(error.code, error.message, error.details) };
  } catch (error) {
    return { warnings: [], error: toPortmapError(error) };
  }
}

/**
 * Takes back a request of this process that did not come to its turn. `taken`: it is in the hands of the committing
 * process, which will finish it or give it back. `finished`: it was done meanwhile.
 */
export function withdraw(state: StateFolder, request: Request): 'withdrawn' | 'taken' | 'finished' {
  const files = sandboxFiles(state, hashOf(request));
  // One that is just given back still lies in the other place for a moment, but nobody will do it any more.
  if (removeState(files.request)) return 'withdrawn';
  return isPresent(files.taken) ? 'taken' : 'finished';
}

/**
 * Leaves a DEL behind for an ADD that failed and may have left something. It has a file of its own, for requests of the
 * sandbox that come later don't replace it, and removes nothing that they have made.
 */
export function undoLater(state: StateFolder, request: Request): void {
  if (request.change.verb === 'DEL') return;
  const { ifname } = request.change.attachment;
  const undo: Request = {
    ...request,
    token: `${request.token}${undoMark}`,
    change: { verb: 'DEL', ifname, of: request.token },
  };
  writeState(undoFile(state, undo), JSON.stringify(undo));
}

function undoFile(state: StateFolder, { token, ...request }: Request): string {
  return join(state.queue, `${hashOf(request)}.${token.slice(0, -undoMark.length)}.undo`);
}

function isAbandoned(request: Request): boolean {
  return request.change.verb === 'ADD' && isOwnerDead(request);
}

/**
 * Removes every trace of a request of this process, which then goes on without the queue. It isn't read first: the
 * process holds the sandbox's lock, and may have no file descriptor left.
 */
export function drop(state: StateFolder, request: Request): void {
  const files = sandboxFiles(state, hashOf(request));
  for (const path of [files.request, files.taken]) removeState(path);
}

function isOwnerDead(request: Request): boolean {
  return request.owner !== undefined && !isRunning(request.owner);
}

function unanswered(path: string): PortmapError {
  return new PortmapError(
    'BUSY',
    `${path}: the answer to this call is missing: it may have been done or not`,
    'somebody has removed it, or the call was stopped for very long; it is safe to repeat',
  );
}

function readRequest(text: string | undefined): Request | undefined {
  try {
    return text === undefined ? undefined : z.parse(requestSchema(), JSON.parse(text));
  } catch {
    return undefined;
  }
}

// Files that only a killed process can have left: temporary ones, names of broken locks, results nobody will read; and
// what was noted of a lock that is gone.
function removeLeftovers(folder: string, names: readonly string[]): void {
  for (const name of names) {
    const owner = readProcessName(
      /\.([\d-]+)\.(?:new|result)$|\.holder\.([\d-]+)$/.exec(name)?.slice(1).join('') ?? '',
    );
    const lock = /^(.*)\.seen$/.exec(name)?.[1];
    if (
      (owner !== undefined && !isRunning(owner)) ||
      (lock !== undefined && !isPresent(join(folder, `${lock}.lock`)))
    )
      removeState(join(folder, name));
  }
}

function resultFile(state: StateFolder, request: Request): string {
  return join(state.queue, `${hashOf(request)}.${request.token}.result`);
}

const requestSchema = once(() =>
  z.object({
    network: z.string(),
    containerId: z.string(),
    token: z.string(),
    owner: z.optional(processSchema()),
    order: z.number(),
    change: z.discriminatedUnion('verb', [
      z.object({
        verb: z.literal('ADD'),
        attachment: attachmentSchema(),
        onConflict: z.enum(['warn', 'fail']),
      }),
      z.object({ verb: z.literal('DEL'), ifname: z.string(), of: z.optional(z.string()) }),
    ]),
  }),
);

const answerSchema = once(() =>
  z.object({
    warnings: z.array(z.string()),
    error: z.optional(z.object({ code: z.enum(errorCodes), message: z.string(), details: z.string() })),
  }),
);
