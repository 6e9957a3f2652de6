// What the plugin asks of the runtime that it is built on. Each runtime's own way is a file beside this one, and the build
// takes one of them by the "imports" of package.json: Node's ways, taken under Bun, load half of Node's streams first
// and make a call a third longer.

/** What a program gets from its caller, and who hears of it. */
export interface Execution {
  /** Ends the program when it is aborted: SIGTERM, and SIGKILL `graceMs` later. */
  readonly signal: AbortSignal;
  readonly graceMs: number;
  /** The program's stdin, one byte a character; undefined: an empty one. */
  readonly input: string | undefined;
  /** Takes stdout as it comes, one byte a character, and says whether to go on; undefined: nobody reads it. */
  readonly onText: ((text: string) => boolean) | undefined;
  /** Added to this process's environment. */
  readonly env: Readonly<Record<string, string>>;
  /** Runs before the program gets its input: one killed before then has read nothing. */
  readonly onStart: ((pid: number) => void) | undefined;
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
