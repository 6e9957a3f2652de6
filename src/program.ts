// Runs other programs, and bounds every wait of the call. It knows nothing of what the programs are for.
import { accessSync, constants, readFileSync, readlinkSync, realpathSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { runtime } from '#runtime';
import { systemCode } from './errors.ts';

/** The time one call has, and the signal that ends it early. */
export interface Budget {
  /** Aborted when the time is up or the call is told to stop; its reason is a PortmapError. */
  readonly signal: AbortSignal;
  /** Milliseconds left, never below zero; measured by the monotonic clock. */
  readonly remaining: () => number;
  /** Says whether somebody told the call to end, rather than its time. */
  readonly isTold: () => boolean;
}

/** A budget of its own for what must be put back after the call's time is over. */
export function graceBudget(milliseconds: number): Budget {
  const end = performance.now() + milliseconds;
  return {
    signal: AbortSignal.timeout(milliseconds),
    remaining: () => Math.max(0, end - performance.now()),
    isTold: () => false,
  };
}

/** How a program ended. `failure` is set when it could not run or was killed, `isUnstarted` when it did not even begin. */
export interface Outcome {
  readonly isUnstarted?: boolean;
  readonly exitCode: number | undefined;
  readonly stderr: string;
  readonly failure?: string;
}

/** A process in a way that survives the reuse of its number: the number, its start in clock ticks after boot, and the
 * pid namespace in which the number counts. */
export interface ProcessId {
  readonly pid: number;
  readonly started: string;
  readonly namespace: string;
}

const timeWasUp = 'ended: the time was up';

/** What became of a program whose turn came after the call's end. */
export const notStarted = 'not started: the call was ended';

const systemFolders = ['/usr/sbin', '/sbin', '/usr/local/sbin', '/usr/bin', '/bin'];
// What a program may still do when it was told to end: a script's child can hold its pipes for ever.
const graceMs = 300;

/** The folders in which programs are looked for: PATH, then where iptables lives when a runtime's PATH lacks it. */
export function searchFolders(path: string | undefined): string[] {
  const own = (path ?? '').split(':').filter((folder) => folder.startsWith('/'));
  return [...new Set([...own, ...systemFolders])];
}

/** The first executable file of this name in the folders, or undefined. */
export function findProgram(name: string, folders: readonly string[]): string | undefined {
  return folders.map((folder) => join(folder, name)).find(isExecutable);
}

/** The file a program's path leads to through all links. */
export function realProgram(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    return path;
  }
}

function isExecutable(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return statSync(path).isFile();
  } catch {
    return false;
  }
}

/**
 * Runs a program to its end. Text is bytes, one a character, in both directions. `onLine` gets stdout line by line as
 * it comes, so that large output is never held;
 * `onStart` runs before the program gets its input, which a program killed before then sees as empty. Never
 * rejects for what the program does; returns soon after the budget's signal is aborted, whatever still holds the
 * program's pipes.
 */
export async function runProgram(
  program: string,
  argv: readonly string[],
  options: {
    budget: Budget;
    input?: string;
    env?: Readonly<Record<string, string>>;
    onLine?: (line: string) => void;
    onStart?: (pid: number) => void;
  },
): Promise<Outcome> {
  const { budget, input, env, onLine, onStart } = options;
  if (budget.signal.aborted)
    return { exitCode: undefined, stderr: '', failure: notStarted, isUnstarted: true };
  const lines = onLine === undefined ? undefined : lineReader(onLine, budget);
  const done = runtime.execute(program, argv, {
    signal: budget.signal,
    graceMs,
    input,
    onText: lines?.take,
    // What is said is read, and in no other language.
    env: { ...env, LC_ALL: 'C' },
    onStart,
  });
  const ending = await Promise.race([done, given(budget.signal)]);
  if (ending === undefined) return { exitCode: undefined, stderr: '', failure: timeWasUp };
  if (lines?.end() === 'cut short') return { exitCode: undefined, stderr: '', failure: timeWasUp };
  const { exitCode, signal, error, stderr } = ending;
  if (exitCode !== undefined) return { exitCode, stderr };
  if (error !== undefined)
    return { exitCode, stderr, failure: `could not be started: ${error}`, isUnstarted: true };
  return { exitCode, stderr, failure: budget.signal.aborted ? timeWasUp : `killed by ${signal}` };
}

// Resolves a while after the signal is aborted, for a program that does not go.
function given(signal: AbortSignal): Promise<undefined> {
  return new Promise((resolve) => {
    const later = () => setTimeout(() => resolve(undefined), graceMs).unref();
    if (signal.aborted) later();
    else signal.addEventListener('abort', later, { once: true });
  });
}

// Hands on text line by line. A program that prints without end keeps this process too busy for its own timer, so the
// time is looked at here too.
function lineReader(
  onLine: (line: string) => void,
  budget: Budget,
): { take: (text: string) => boolean; end: () => 'cut short' | 'whole' } {
  let rest = '';
  let isCut = false;
  return {
    take: (text) => {
      isCut ||= budget.signal.aborted || budget.remaining() === 0;
      if (isCut) return false;
      const lines = (rest + text).split('\n');
      rest = lines.pop() ?? '';
      for (const line of lines) onLine(line);
      return true;
    },
    end: () => {
      if (isCut) return 'cut short';
      if (rest !== '') onLine(rest);
      return 'whole';
    },
  };
}

/**
 * The process with this number now, or undefined when there is none or it is a zombie. Throws when the system will not
 * say.
 */
export function processId(pid: number | 'self'): ProcessId | undefined {
  let stat: string;
  try {
    stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
  } catch (error) {
    if (['ENOENT', 'ESRCH'].includes(systemCode(error))) return undefined;
    throw error;
  }
  // The second field is the program's name in parentheses and may itself hold spaces and parentheses.
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  const [state, started] = [fields[0], fields[19]];
  if (started === undefined || state === 'Z' || state === 'X') return undefined;
  return { pid: Number.parseInt(stat, 10), started, namespace: readlinkSync('/proc/self/ns/pid') };
}

/**
 * Says whether exactly this process still runs. One that can't be seen, in another pid namespace or because this
 * process is out of file descriptors, counts as running.
 */
export function isRunning(process: ProcessId): boolean {
  try {
    if (processId('self')?.namespace !== process.namespace) return true;
    return processId(process.pid)?.started === process.started;
  } catch {
    return true;
  }
}

/** Says whether this process can see that the other runs: never for one of another pid namespace. */
export function isSeenRunning(process: ProcessId): boolean {
  return processId('self')?.namespace === process.namespace && isRunning(process);
}

/** What cuts a sleep short: another process, by `wake`. One that rings between two sleeps cuts the next. */
export interface Alarm {
  isRung: boolean;
  onRing: () => void;
}

// Nothing happens to a process that gets it and does not listen.
const wakeSignal = 'SIGCONT';

/** Listens for `wake` from now on. */
export function openAlarm(): Alarm {
  const alarm: Alarm = { isRung: false, onRing: () => undefined };
  process.on(wakeSignal, () => {
    alarm.isRung = true;
    alarm.onRing();
  });
  return alarm;
}

/** Wakes those of these processes that can be seen from here. Whether they slept, or listen at all, does not matter. */
export function wake(sleepers: readonly ProcessId[]): void {
  const here = sleepers.length === 0 ? undefined : processId('self')?.namespace;
  for (const { pid, started, namespace } of sleepers)
    try {
      if (namespace === here && processId(pid)?.started === started) process.kill(pid, wakeSignal);
    } catch {
      // It has ended meanwhile.
    }
}

/** Waits, or less when the budget ends first or the alarm rings. */
export async function sleep(milliseconds: number, budget: Budget, alarm?: Alarm): Promise<void> {
  await new Promise<void>((resolve) => {
    if (budget.signal.aborted || alarm?.isRung === true) {
      resolve();
      return;
    }
    const end = () => {
      clearTimeout(timer);
      budget.signal.removeEventListener('abort', end);
      resolve();
    };
    const timer = setTimeout(end, Math.min(milliseconds, budget.remaining()));
    budget.signal.addEventListener('abort', end, { once: true });
    if (alarm !== undefined) alarm.onRing = end;
  });
  if (alarm !== undefined) alarm.isRung = false;
}
