// What the plugin asks of the runtime that it is built on. Each runtime's own way is a file beside this one, and the build
// takes one of them by the "imports" of package.json: Node's ways, taken under Bun, load half of Node's streams first
// and make a call a third longer.
import { existsSync } from 'node:fs';

/** What a program gets from its caller, and who hears of it. Each program leads a process group of its own. */
export interface Execution {
  /** Ends the program, and all of its process group, when it is aborted: SIGTERM, and SIGKILL `graceMs` later. */
  readonly signal: AbortSignal;
  readonly graceMs: number;
  /** Whether the program gets a stdin; else an empty one. */
  readonly hasInput: boolean;
  /** Takes stdout as it comes, one byte a character, and says whether to go on; undefined: nobody reads it. */
  readonly onText: ((text: string) => boolean) | undefined;
  /** Added to this process's environment. */
  readonly env: Readonly<Record<string, string>>;
  /** Gets the program's number and stdin once it is started: nothing else writes to that. */
  readonly onStart: (pid: number, stdin: Stdin | undefined) => void;
}

/** A program's stdin, one byte a character. What a program that has ended does not read is lost; its ending tells why. */
export interface Stdin {
  readonly write: (text: string) => void;
  readonly end: () => void;
}

/** How a program ended: with an exit code, by a signal, or not even started because of `error`. */
export interface Ending {
  readonly exitCode?: number | undefined;
  readonly signal?: string | undefined;
  readonly error?: string | undefined;
  /** The first part of what the program said, one byte a character. */
  readonly stderr: string;
}

/** How much of a program's stderr is kept: a program may complain without end. */
export const stderrLimit = 64 * 1024;

export interface Runtime {
  /** The SHA-512 of a text in UTF-8, in lower-case hexadecimal digits. */
  readonly sha512: (text: string) => string;
  /** Runs a program to its end, which is when all it printed was read too. Never rejects for what the program does. */
  readonly execute: (program: string, argv: readonly string[], execution: Execution) => Promise<Ending>;
}

/** Ends a program that still runs and all that it has started: a script ends, what it runs does not. */
export function endGroup(leader: number, graceMs: number): void {
  signalGroup(leader, 'SIGTERM');
  setTimeout(() => signalGroup(leader, 'SIGKILL'), graceMs).unref();
}

/** Ends at once what a program has left behind that was to be ended and is gone. */
export function endOrphans(leader: number): void {
  // Its number may be another's by now, though never while anything of its group is left.
  if (!existsSync(`/proc/${leader}`)) signalGroup(leader, 'SIGKILL');
}

function signalGroup(leader: number, signal: NodeJS.Signals): void {
  try {
    process.kill(-leader, signal);
  } catch {
    // There is nothing left of it.
  }
}
