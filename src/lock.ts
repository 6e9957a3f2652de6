// Locks between processes, over proper-lockfile. It knows who holds a lock and whether that process still lives; it
// does not know what the lock is for.
//
//   FILE.lock/    made by the holder; proper-lockfile keeps its time fresh while the holder lives
//   FILE.holder   the holder's process, and the child that may go on with its work when the holder is killed
//   FILE.seen     since when a lock was seen just as it is, of which nobody can tell whether its holder lives
//
// A lock is given up by its holder, or taken over once its holder and that child are provably dead. A lock without a
// name is taken over after `namelessMs`; one whose holder can't be seen (another pid namespace) after `staleMs`.
import { linkSync, lstatSync, mkdirSync, renameSync, rmdirSync, statSync, utimesSync } from 'node:fs';
import * as z from 'zod/mini';
import { PortmapError, systemCode } from './errors.ts';
import { once } from './once.ts';
import { type Budget, sleep } from './budget.ts';
import { isRunning, isSeenRunning, ownName, type ProcessId, processId, uptimeMs } from './process.ts';
import { isPresent, readState, removeOdd, removeState, writeState } from './state.ts';

/**
 * The bound after which any lock of a dead process is free, in milliseconds. It is longer than a child can outlive a
 * killed call: the longest wait for the xtables lock plus the time one transaction takes on the largest tables.
 */
export const staleMs = 20_000;

// How long a lock may have no holder's name: far longer than a live process takes to write it, on any load.
const namelessMs = 4000;
const refreshMs = 2000;
const neverMs = 365 * 24 * 3_600_000;
const lookMs = 500;
// Soon enough for the shortest of calls.
const secondLookMs = 40;
// What proper-lockfile needs of one. Five calls that take microseconds are not worth a pool of threads.
const lockFileSystem = { mkdirSync, statSync, utimesSync, rmdirSync };

/** A lock that is held. */
export interface HeldLock {
  /**
   * Names a child, the leader of its process group, whose work the lock covers even if this process dies: the lock is
   * not broken while anything of the group runs.
   */
  readonly cover: (pid: number) => void;
  readonly release: () => void;
}

/** What one process has seen of a lock while it waits for it. */
export interface LockWatch {
  readonly file: string;
  nextLookMs: number;
  /** The lock as it was last seen, and since when, after the start of the machine, it is just so. */
  seen: { readonly identity: string; readonly sinceMs: number } | undefined;
}

/** Begins to wait for the lock on `file`. */
export function watchLock(file: string): LockWatch {
  return { file, nextLookMs: 0, seen: undefined };
}

/**
 * Takes the lock if it is free, or if its holder is dead. Never waits for a live holder. While the lock is seen to be
 * held, whose it is and whether it is stale is looked into only now and then: a hundred calls wait for one.
 */
export async function tryLock(watch: LockWatch): Promise<HeldLock | undefined> {
  const paths = lockPaths(watch.file);
  if (isPresent(paths.lock)) {
    if (performance.now() < watch.nextLookMs) return undefined;
    watch.nextLookMs = performance.now() + lookMs * (0.5 + Math.random());
  }
  const { lockSync } = await import('proper-lockfile');
  for (const attempt of [1, 2]) {
    try {
      const release = lockSync(watch.file, {
        fs: lockFileSystem,
        realpath: false,
        lockfilePath: paths.lock,
        // Whether a lock is stale is judged below: proper-lockfile asks the wall clock, which somebody may set.
        stale: neverMs,
        update: refreshMs,
        retries: 0,
        // A lost lock costs work, not correctness: a transaction is refused when its premises are gone.
        onCompromised: () => undefined,
      });
      try {
        return heldLock(paths, release);
      } catch (error) {
        release();
        throw error;
      }
    } catch (error) {
      if (systemCode(error) !== 'ELOCKED') throw error;
      if (attempt === 2 || !(breakDeadLock(paths) || breakSilentLock(watch, paths))) return undefined;
    }
  }
  return undefined;
}

/**
 * Runs `work` while holding the lock on `file`. The lock on `next`, which will be needed then, ages meanwhile if nobody
 * holds it.
 * @throws PortmapError BUSY, naming the lock and its holder, when the budget ends before the lock is had. Throws what
 * the system says when there can be no lock.
 */
export async function withLock<T>(
  file: string,
  budget: Budget,
  work: (held: HeldLock) => Promise<T>,
  next?: string,
): Promise<T> {
  const held = await takeLock(file, budget, next);
  try {
    return await work(held);
  } finally {
    held.release();
  }
}

/**
 * Runs `work` while holding the lock on `file`, or without it where there can be no lock, in a full or read-only folder:
 * `onProblem` then gets to know why.
 * @throws PortmapError BUSY as `withLock` does.
 */
export async function withLockIfPossible<T>(
  file: string,
  budget: Budget,
  onProblem: (problem: string) => void,
  work: (held: HeldLock | undefined) => Promise<T>,
): Promise<T> {
  let held: HeldLock | undefined;
  try {
    held = await takeLock(file, budget);
  } catch (error) {
    if (error instanceof PortmapError) throw error;
    onProblem(error instanceof Error ? error.message : String(error));
  }
  try {
    return await work(held);
  } finally {
    held?.release();
  }
}

async function takeLock(file: string, budget: Budget, next?: string): Promise<HeldLock> {
  const watch = watchLock(file);
  const later = next === undefined ? undefined : watchLock(next);
  for (let wait = 4; ; wait = Math.min(wait * 2, 60)) {
    const held = await tryLock(watch);
    if (held !== undefined) return held;
    if (later !== undefined) noteSilence(later);
    await sleep(wait * (0.5 + Math.random()), budget);
    if (budget.signal.aborted) throw lockBusy(file);
  }
}

/** The error for a lock that was not had in time. */
export function lockBusy(file: string): PortmapError {
  const { lock, holder } = lockPaths(file);
  const processes = readHolder(readState(holder));
  const pid = (processes.find(isSeenRunning) ?? processes[0])?.pid;
  return new PortmapError(
    'BUSY',
    `${lock}: held by ${pid === undefined ? 'an unknown process' : `process ${pid}`} for the whole time this call has`,
    'the holder works for the same sandbox or commits for all; once it and its iptables have ended, the next call takes its lock over',
  );
}

interface LockPaths {
  readonly lock: string;
  readonly holder: string;
  readonly seen: string;
}

function lockPaths(file: string): LockPaths {
  const base = file.replace(/\.[a-z]+$/, '');
  return { lock: `${base}.lock`, holder: `${base}.holder`, seen: `${base}.seen` };
}

function heldLock({ holder, seen }: LockPaths, release: () => void): HeldLock {
  const processes: ProcessId[] = [];
  const note = (process: ProcessId | undefined) => {
    if (process !== undefined) processes.push(process);
    writeState(holder, JSON.stringify(processes));
  };
  note(processId('self'));
  return {
    cover: (pid) => {
      try {
        const child = processId(pid);
        note(child && { ...child, isGroup: true });
      } catch {
        // In a full folder the lock does not cover the child, which is no reason to do nothing at all.
      }
    },
    release: () => {
      // The name goes first: a name without a lock is nothing, a lock with a dead name would be broken.
      removeState(holder);
      removeState(seen);
      try {
        release();
      } catch {
        // Somebody has removed it.
      }
    },
  };
}

// Removes a lock whose holder is dead; says whether it did. Renaming the holder's file is what only one can do; that it
// is still the dead holder's is looked at after, for the lock may have been given up and taken since it was read.
function breakDeadLock(paths: LockPaths): boolean {
  const text = readState(paths.holder);
  const processes = readHolder(text);
  if (processes.length === 0 || processes.some(isRunning)) return false;
  const claimed = `${paths.holder}.${ownName()}`;
  try {
    renameSync(paths.holder, claimed);
    const isSame = readState(claimed) === text;
    // The name of a live holder goes back, unless it has written it anew.
    if (!isSame && !isPresent(paths.holder)) linkSync(claimed, paths.holder);
    removeState(claimed);
    if (isSame) removeOdd(paths.lock);
    return isSame;
  } catch {
    return false;
  }
}

// Removes a lock that nobody keeps fresh; says whether it did. Without a holder's name, its holder was killed before it
// had written its name, or after it had withdrawn it, and no child was at work then. A holder of another pid namespace
// can't be seen. The time of the folder means nothing once somebody has set the clock.
function breakSilentLock(watch: LockWatch, paths: LockPaths): boolean {
  const identity = identityOf(paths.lock);
  const holder = readHolder(readState(paths.holder));
  if (identity === undefined) return false;
  const [owner, ...children] = holder;
  if (owner !== undefined && isSeenRunning(owner)) return false;
  if (children.some(isSeenRunning)) {
    // Nobody waits for the end of what a dead call has started, and no transaction takes that long.
    if (uptimeMs() - seenSince(identity, watch, paths) >= staleMs) endChildren(children);
    return false;
  }
  if (uptimeMs() - seenSince(identity, watch, paths) < (holder.length === 0 ? namelessMs : staleMs))
    return false;
  removeState(paths.holder);
  removeState(paths.seen);
  return removeOdd(paths.lock);
}

function endChildren(children: readonly ProcessId[]): void {
  for (const { pid } of children.filter(isSeenRunning))
    try {
      process.kill(-pid, 'SIGKILL');
    } catch {
      // It has ended meanwhile.
    }
}

// Since when a lock is just as it is. Calls may be shorter than it takes to tell that a holder is gone, so one that sees
// the lock unchanged leaves a note to the next.
function seenSince(identity: string, watch: LockWatch, paths: LockPaths): number {
  const now = uptimeMs();
  const [noted, since] = readState(paths.seen)?.split('\n') ?? [];
  if (noted === identity && Number(since) <= now) return Number(since);
  if (watch.seen?.identity !== identity) {
    watch.seen = { identity, sinceMs: now };
    watch.nextLookMs = performance.now() + secondLookMs;
  } else
    try {
      writeState(paths.seen, `${identity}\n${watch.seen.sinceMs}`);
    } catch {
      // Then the next call begins anew.
    }
  return watch.seen.sinceMs;
}

// Notes a lock that nobody may hold, for the time when it is waited for.
function noteSilence(watch: LockWatch): void {
  if (performance.now() < watch.nextLookMs) return;
  watch.nextLookMs = performance.now() + lookMs;
  const paths = lockPaths(watch.file);
  const identity = identityOf(paths.lock);
  if (identity !== undefined && !readHolder(readState(paths.holder)).some(isSeenRunning))
    seenSince(identity, watch, paths);
}

function identityOf(path: string): string | undefined {
  try {
    const { ino, mtimeMs } = lstatSync(path);
    return `${ino} ${mtimeMs}`;
  } catch {
    return undefined;
  }
}

function readHolder(text: string | undefined): ProcessId[] {
  try {
    return z.parse(z.array(processSchema()), JSON.parse(text ?? '[]'));
  } catch {
    return [];
  }
}

/** A process as it stands in files. */
export const processSchema = once(() =>
  z.object({
    pid: z.number(),
    started: z.string(),
    namespace: z.string(),
    isGroup: z.optional(z.boolean()),
  }),
);
