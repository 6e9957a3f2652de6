// Finds and runs other programs. It knows nothing of what they are for.
import { accessSync, constants, realpathSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { runtime } from '#runtime';
import type { Budget } from './budget.ts';
import type { Stdin } from './runtime/runtime.ts';

export type { Stdin } from './runtime/runtime.ts';

/** How a program ended. `failure` is set when it could not run or was killed, `isUnstarted` when it did not even begin. */
export interface Outcome {
  readonly isUnstarted?: boolean;
  readonly exitCode: number | undefined;
  readonly stderr: string;
  readonly failure?: string;
}

const timeWasUp = 'ended: the time was up';
const wasTold = 'ended: the call was told to end';

/** What became of a program whose turn came after the call's end. */
export const notStarted = 'not started: the call was ended';

const systemFolders = ['/usr/sbin', '/sbin', '/usr/local/sbin', '/usr/bin', '/bin'];
// What a program may still do when it was told to end: a script's child can hold its pipes for ever.
const graceMs = 300;
// What one takes to go that was killed, unless the kernel is in the middle of its work.
const killedMs = 200;

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
 * Runs a program to its end. Text is bytes, one a character, in both directions. `input` is the program's whole stdin,
 * or gets it to write to and to end. `onLine` gets stdout line by line as it comes, so that large output is never held;
 * `onStart` runs before the program gets any input: one killed before then sees it as empty. Never rejects for what the
 * program does; returns soon after the budget's signal is aborted, whatever still holds the program's pipes.
 */
export async function runProgram(
  program: string,
  argv: readonly string[],
  options: {
    budget: Budget;
    input?: string | ((stdin: Stdin, pid: number) => void);
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
    hasInput: input !== undefined,
    onText: lines?.take,
    // What is said is read, and in no other language.
    env: { ...env, LC_ALL: 'C' },
    onStart: (pid, stdin) => {
      onStart?.(pid);
      if (typeof input === 'function') {
        if (stdin !== undefined) input(stdin, pid);
      } else if (input !== undefined) {
        stdin?.write(input);
        stdin?.end();
      }
    },
  });
  const ending = await Promise.race([done, given(budget.signal)]);
  const cut = budget.isTold() ? wasTold : timeWasUp;
  if (ending === undefined || lines?.end() === 'cut short')
    return { exitCode: undefined, stderr: '', failure: cut };
  const { exitCode, signal, error, stderr } = ending;
  if (exitCode !== undefined) return { exitCode, stderr };
  if (error !== undefined)
    return { exitCode, stderr, failure: `could not be started: ${error}`, isUnstarted: true };
  return { exitCode, stderr, failure: budget.signal.aborted ? cut : `killed by ${signal}` };
}

// Resolves a while after the signal is aborted, for a program that does not go.
function given(signal: AbortSignal): Promise<undefined> {
  return new Promise((resolve) => {
    const later = () => setTimeout(() => resolve(undefined), graceMs + killedMs).unref();
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
      // Something of the program, itself gone, may have been ended in the middle of a line.
      if (isCut || budget.signal.aborted) return 'cut short';
      if (rest !== '') onLine(rest);
      return 'whole';
    },
  };
}
