// The state folder: where it is, whether it can be trusted, and files that are whole or not there. It is on tmpfs,
// so that it dies with the rules at a reboot.
//
//   /run/portmap/
//     <hash>.record             what is installed for a sandbox
//     <hash>.lock/ .holder      a call is at work on this sandbox, and which process that is
//     commit.lock/ .holder      a process commits for all that wait
//     queue/<hash>.request      a change that waits for its commit
//     queue/<hash>.taken        the same, in the hands of the committing process
//     queue/<hash>.<n>.result   what became of it, for its owner
//     queue/<hash>.<n>.undo     an ADD that failed and may have left something
import {
  closeSync,
  constants,
  lstatSync,
  mkdirSync,
  openSync,
  readFileSync,
  renameSync,
  rmSync,
  type Stats,
  unlinkSync,
  writeSync,
} from 'node:fs';
import { isAbsolute, join } from 'node:path';
import { systemCode } from './errors.ts';
import { ownName } from './process.ts';

/** A state folder that was found to be the caller's own. */
export interface StateFolder {
  readonly path: string;
  readonly queue: string;
}

/** The files of one sandbox, by the hash that names it. */
export interface SandboxFiles {
  readonly record: string;
  readonly lock: string;
  readonly request: string;
  readonly taken: string;
}

/** Where the files of a sandbox are. The lock is on the record and beside it. */
export function sandboxFiles(state: StateFolder, hash: string): SandboxFiles {
  return {
    record: join(state.path, `${hash}.record`),
    lock: join(state.path, `${hash}.lock`),
    request: join(state.queue, `${hash}.request`),
    taken: join(state.queue, `${hash}.taken`),
  };
}

/** Says whether a request waits, or is being done, for a sandbox. */
export function isQueued(state: StateFolder, hash: string): boolean {
  const { request, taken } = sandboxFiles(state, hash);
  // Between the first two looks a request may have been given back.
  return isPresent(request) || isPresent(taken) || isPresent(request);
}

/** Where the state folder is: `PORTMAP_STATE_DIR`, or /run/portmap. */
export function statePath(): string {
  const own = process.env['PORTMAP_STATE_DIR'];
  return own === undefined || own === '' ? '/run/portmap' : own;
}

/** Why there is no state folder to use; without a problem, none was ever made. */
export interface NoStateFolder {
  readonly problem: string | undefined;
}

/**
 * Opens the state folder, and makes it if asked to. The problem of one that can't be used is that it is no folder, a
 * symbolic link, another user's, open to others, or can't be made.
 */
export function openState(create: boolean): StateFolder | NoStateFolder {
  const path = statePath();
  if (!isAbsolute(path)) return { problem: `PORTMAP_STATE_DIR: ${path}: not an absolute path` };
  const queue = join(path, 'queue');
  try {
    if (create) makeFolder(queue);
    for (const folder of [path, queue]) {
      // A queue that somebody has removed says nothing of the records.
      if (folder === queue && !create && !isPresent(queue)) continue;
      const stat = lstatSync(folder);
      if (!stat.isDirectory()) return { problem: `${folder}: not a folder` };
      if (stat.uid !== process.geteuid?.()) return { problem: `${folder}: belongs to user ${stat.uid}` };
      if (isOpenToOthers(stat)) return { problem: `${folder}: others can write to it: chmod 700 ${folder}` };
    }
    return { path, queue };
  } catch (error) {
    if (systemCode(error) === 'ENOENT' && !create) return { problem: undefined };
    return { problem: `${path}: ${error instanceof Error ? error.message : String(error)}` };
  }
}

function isOpenToOthers({ mode, gid }: Stats): boolean {
  return (mode & 0o002) !== 0 || ((mode & 0o020) !== 0 && gid !== process.getegid?.());
}

function makeFolder(path: string): void {
  try {
    // mkdir itself says in one call that the folder is there, the common case.
    mkdirSync(path, { mode: 0o700 });
  } catch (error) {
    if (systemCode(error) === 'EEXIST') return;
    if (systemCode(error) !== 'ENOENT') throw error;
    mkdirSync(path, { recursive: true, mode: 0o700 });
  }
}

/** The text of a file, or undefined when there is none or it is not a plain file of ours. */
export function readState(path: string): string | undefined {
  let file: number | undefined;
  try {
    // No symbolic link is followed: nobody can make a root process read, or trust, a file elsewhere. Nor does it wait
    // for the other end of a pipe.
    file = openSync(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
    return readFileSync(file, 'utf8');
  } catch {
    return undefined;
  } finally {
    if (file !== undefined) closeSync(file);
  }
}

/** Says whether something is there, links not followed. */
export function isPresent(path: string): boolean {
  try {
    lstatSync(path);
    return true;
  } catch {
    return false;
  }
}

/** Writes a file that is seen whole or not at all, readable by its owner alone. Throws what the system says. */
export function writeState(path: string, text: string): void {
  const temporary = `${path}.${ownName()}.new`;
  try {
    const flags = constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL | constants.O_NOFOLLOW;
    removeState(temporary);
    const file = openSync(temporary, flags, 0o600);
    try {
      const bytes = Buffer.from(text);
      if (writeSync(file, bytes) !== bytes.length) throw new Error(`${path}: written in part only`);
    } finally {
      closeSync(file);
    }
    putInPlace(temporary, path);
  } catch (error) {
    removeState(temporary);
    throw error;
  }
}

function putInPlace(temporary: string, path: string): void {
  try {
    renameSync(temporary, path);
  } catch (error) {
    // No process has made what is in the way.
    if (systemCode(error) !== 'EISDIR' || !removeOdd(path)) throw error;
    renameSync(temporary, path);
  }
}

/** Removes a file; says whether it was there. One that can't be removed is left to the next who looks. */
export function removeState(path: string): boolean {
  try {
    unlinkSync(path);
    return true;
  } catch (error) {
    // Already gone, or the folder is read-only: the kernel is the truth, not this file.
    if (!['EISDIR', 'EPERM'].includes(systemCode(error))) return false;
    return removeOdd(path);
  }
}

/** Removes what should not be in the state folder, whatever it is; says whether it is gone. */
export function removeOdd(path: string): boolean {
  try {
    rmSync(path, { recursive: true, force: true });
    return true;
  } catch {
    return false;
  }
}
