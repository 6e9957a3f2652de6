// Who is who among the processes of this machine, also for files that outlive them.
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { systemCode } from './errors.ts';

/**
 * A process in a way that survives the reuse of its number: the number, its start in clock ticks after boot, and the
 * pid namespace in which the number counts.
 */
export interface ProcessId {
  readonly pid: number;
  readonly started: string;
  readonly namespace: string;
  /** It leads a process group, and stands for all that is in it: a script may be gone before what it has started. */
  readonly isGroup?: boolean | undefined;
}

/**
 * The process with this number now, or undefined when there is none or it is a zombie. Throws when the system will not
 * say.
 */
export function processId(pid: number | 'self'): ProcessId | undefined {
  const stat = readStat(pid);
  if (stat?.started === undefined || !stat.isAlive) return undefined;
  return { pid: stat.pid, started: stat.started, namespace: namespaceOf(stat.pid, pid) };
}

// Where /proc is that of another pid namespace, its numbers are not those that a process gives and gets.
function namespaceOf(shown: number, asked: number | 'self'): string {
  return asked === 'self' && shown !== process.pid
    ? `${unseen} ${process.pid}`
    : readlinkSync('/proc/self/ns/pid');
}

const unseen = 'not that of /proc';

interface Stat {
  readonly pid: number;
  readonly isAlive: boolean;
  readonly group: number;
  readonly started: string | undefined;
}

function readStat(pid: number | string): Stat | undefined {
  let stat: string;
  try {
    stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
  } catch (error) {
    if (['ENOENT', 'ESRCH'].includes(systemCode(error))) return undefined;
    throw error;
  }
  // The second field is the program's name in parentheses and may itself hold spaces and parentheses.
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  return {
    pid: Number.parseInt(stat, 10),
    isAlive: fields[0] !== 'Z' && fields[0] !== 'X',
    group: Number(fields[2]),
    started: fields[19],
  };
}

/**
 * Says whether exactly this process, or anything of its group, still runs. One that this process can't see for want of
 * file descriptors counts as running; one of another pid namespace does for as long as a call can last.
 */
export function isRunning(process: ProcessId): boolean {
  try {
    if (!isHere(process)) return ageMs(process) < longestCallMs;
    const found = processId(process.pid);
    if (found === undefined) return process.isGroup === true && isGroupAlive(process.pid);
    return found.started === process.started;
  } catch {
    return true;
  }
}

/** Says whether this process can see that the other runs: never for one of another pid namespace. */
export function isSeenRunning(process: ProcessId): boolean {
  return isHere(process) && isRunning(process);
}

function isHere({ namespace }: ProcessId): boolean {
  return !namespace.startsWith(unseen) && processId('self')?.namespace === namespace;
}

/** A process as a part of a file's name. */
export function processName({ pid, started, namespace }: ProcessId): string {
  return `${pid}-${started}-${/\d+/.exec(namespace)?.[0] ?? ''}`;
}

/** This process's name in files. */
export function ownName(): string {
  const own = processId('self');
  return own === undefined ? String(process.pid) : processName(own);
}

/** The process that `processName` has named, or undefined. */
export function readProcessName(name: string): ProcessId | undefined {
  const [, pid, started, namespace] = /^(\d+)-(\d+)-(\d+)$/.exec(name) ?? [];
  if (pid === undefined || started === undefined) return undefined;
  return { pid: Number(pid), started, namespace: `pid:[${namespace}]` };
}

/** Milliseconds since the machine was started, in steps of 10: the one clock that all processes share and nobody sets. */
export function uptimeMs(): number {
  return Math.round(Number.parseFloat(readFileSync('/proc/uptime', 'utf8')) * 1000);
}

// No netconf can ask for more than an hour; a process that is stopped meanwhile finds its work undone, or done by others.
const longestCallMs = 3_700_000;
const ticksPerSecond = 100;

function ageMs(process: ProcessId): number {
  return uptimeMs() - (Number(process.started) / ticksPerSecond) * 1000;
}

// Says whether a group has a member that is no zombie. While it has any, its number is given to no other process.
function isGroupAlive(group: number): boolean {
  try {
    process.kill(-group, 0);
  } catch (error) {
    if (systemCode(error) === 'ESRCH') return false;
  }
  return readdirSync('/proc').some((name) => {
    const stat = /^\d+$/.test(name) ? readStat(name) : undefined;
    return stat?.group === group && stat.isAlive;
  });
}

/** What `wake` sends. Nothing happens to a process that gets it and does not listen. */
export const wakeSignal = 'SIGCONT';

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
