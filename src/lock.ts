// Locks between processes, over proper-lockfile. It knows who holds a lock and whether that process still lives; it
// does not know what the lock is for.
//
//   FILE.lock/    made by the holder; proper-lockfile keeps its time fresh while the holder lives
//   FILE.holder   the holder's process, and the child that may go on with its work when the holder is killed
//
// A lock is given up by its holder, or taken over once its holder and that child are provably dead. Where that can't
// be told (another pid namespace, a holder killed before it wrote its name) it is stale after `staleMs`.
import { renameSync, rmdirSync } from 'node:fs';
import * as z from 'zod/mini';
import { PortmapError, systemCode } from './errors.ts';
import { once } from './once.ts';
import { type Budget, isRunning, type ProcessId, processId, sleep } from './program.ts';
import { isPresent, readState, removeState, writeState } from './state.ts';

/**
 * The bound after which any lock of a dead process is free, in milliseconds. It is longer than a child can outlive a
 * killed call: the longest wait for the xtables lock plus the time one transaction takes on the largest tables.
 */
export const staleMs = 20_000;

const lookMs = 500;

/** A lock that is held. */
export interface HeldLock {
  /** Names a child whose work the lock covers even if this process dies; the lock is not broken while it runs. */
  readonly cover: (pid: number) => void;
  readonly release: () => Promise<void>;
}

/** What one process has seen of a lock while it waits for it. */
export interface LockWatch {
  readonly file: string;
  nextLookMs: number;
}

/** Begins to wait for the lock on `file`. */
export function watchLock(file: string): LockWatch {
  return { file, nextLookMs: 0 };
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
  const { lock } = await import('proper-lockfile');
  for (const attempt of [1, 2]) {
    try {
      const release = await lock(watch.file, {
        realpath: false,
        lockfilePath: paths.lock,
        stale: staleMs,
        update: staleMs / 4,
        retries: 0,
        // A lost lock costs work, not correctness: a transaction is refused when its premises are gone.
        onCompromised: () => undefined,
      });
      try {
        return heldLock(paths.holder, release);
      } catch (error) {
        await release();
        throw error;
      }
    } catch (error) {
      if (systemCode(error) !== 'ELOCKED') throw error;
      if (attempt === 2 || !breakDeadLock(paths)) return undefined;
    }
  }
  return undefined;
}

/**
 * Runs `work` while holding the lock on `file`.
 * @throws PortmapError BUSY, naming the lock and its holder, when the budget ends before the lock is had.
 */
export async function withLock<T>(
  file: string,
  budget: Budget,
  work: (held: HeldLock) => Promise<T>,
): Promise<T> {
  const watch = watchLock(file);
  for (let wait = 4; ; wait = Math.min(wait * 2, 60)) {
    const held = await tryLock(watch);
    if (held !== undefined) {
      try {
        return await work(held);
      } finally {
        await held.release();
      }
    }
    await sleep(wait * (0.5 + Math.random()), budget);
    if (budget.signal.aborted) throw lockBusy(file);
  }
}

/** The error for a lock that was not had in time. */
export function lockBusy(file: string): PortmapError {
  const { lock, holder } = lockPaths(file);
  const pid = readHolder(readState(holder))[0]?.pid;
  return new PortmapError(
    'BUSY',
    `${lock}: held by ${pid === undefined ? 'another call' : `process ${pid}`} for the whole time this call has`,
    `the holder works for the same sandbox or commits for all; a lock of a dead process is free after ${staleMs / 1000} s`,
  );
}

function lockPaths(file: string): { lock: string; holder: string } {
  const base = file.replace(/\.[a-z]+$/, '');
  return { lock: `${base}.lock`, holder: `${base}.holder` };
}

function heldLock(holder: string, release: () => Promise<void>): HeldLock {
  const processes = [processId('self')];
  const note = () => writeState(holder, JSON.stringify(processes.filter((process) => process !== undefined)));
  note();
  return {
    cover: (pid) => {
      processes.push(processId(pid));
      note();
    },
    release: async () => {
      // The name goes first: a name without a lock is nothing, a lock with a dead name would be broken.
      removeState(holder);
      await release().catch(() => undefined);
    },
  };
}

// Removes a lock whose holder is dead; says whether it did. Renaming the holder's file is what only one can do; that it
// is still the dead holder's is looked at after, for the lock may have been given up and taken since it was read.
function breakDeadLock(paths: { lock: string; holder: string }): boolean {
  const text = readState(paths.holder);
  const processes = readHolder(text);
  if (processes.length === 0 || processes.some(isRunning)) return false;
  const claimed = `${paths.holder}.${process.pid}`;
  try {
    renameSync(paths.holder, claimed);
    const isSame = readState(claimed) === text;
    removeState(claimed);
    // A live holder that lost its name this way keeps its lock; only the bound tells then when it has died.
    if (isSame) rmdirSync(paths.lock);
    return isSame;
  } catch {
    return false;
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
  z.object({ pid: z.number(), started: z.string(), namespace: z.string() }),
);
