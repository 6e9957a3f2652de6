// The entry: a CNI call when CNI_COMMAND is set, else a command for people. The only place that ends the process.
import { type Budget, graceBudget } from '../src/budget.ts';
import { PortmapError, toPortmapError } from '../src/errors.ts';
import { defaultTimeoutSeconds } from '../src/network.ts';
import { once } from '../src/once.ts';
import { answer, type Call, renderError } from '../src/plugin.ts';
import { readStdin, stderr, stdout, writeText } from '../src/stdio.ts';
import { aboutText } from '../src/version.ts';

// What an ADD takes to be undone, when the call may have no time left or was told to end.
const undoMs = 5000;
const endedUndoMs = 2000;
// How long a process stays for a stderr that nobody reads.
const unreadMs = 1000;

process.on('uncaughtException', fail);
process.on('unhandledRejection', fail);
await main();

async function main(): Promise<void> {
  const { budget, limit, close } = startBudget();
  const readInput = once(() => readStdin(budget));
  let said: Promise<unknown> | undefined;
  const say = (text: string) => {
    said = Promise.resolve(said).then(() => writeText(stderr, `portmap: ${text}\n`, budget));
  };
  const warn = (text: string) => say(`warning: ${text}`);
  const end = async (status: number) => {
    if (said !== undefined) await Promise.race([said, pause(unreadMs)]);
    // What was started beside what has failed may still run.
    close();
    exit(status);
  };
  if ((process.env['CNI_COMMAND'] ?? '') !== '') {
    const call = { environment: process.env, readInput, limit, budget, warn };
    await end(await serve(call, say));
  }
  const argv = process.argv.slice(2);
  if (argv.length === 0) {
    await writeText(stderr, aboutText(), budget);
    exit(0);
  }
  const { runCommand } = await import('../src/cli/command.ts');
  const print = async (text: string) => {
    const problem = await writeText(stdout, text, budget);
    if (problem !== undefined) throw new PortmapError('IO', `stdout: can't be written: ${problem}`);
  };
  await end(await runCommand(argv, { budget, warn, fail: say, readInput, print }));
}

// Answers a CNI call; returns the exit status.
async function serve(call: Call, say: (text: string) => void): Promise<number> {
  const reply = await answer(call);
  const problem = await writeText(stdout, reply.output, call.budget);
  if (problem === undefined) return reply.status;
  say(`can't write the result: ${problem}`);
  if (reply.status !== 0 || call.environment['CNI_COMMAND'] !== 'ADD') return 1;
  // An ADD of which nobody can read that it succeeded has failed, and leaves nothing.
  const undone = await answer({
    ...call,
    environment: { ...call.environment, CNI_COMMAND: 'DEL' },
    isUndo: true,
    limit: () => undefined,
    budget: graceBudget(call.budget.isTold() ? endedUndoMs : undoMs),
  });
  if (undone.status === 0) say('the mappings of this ADD were taken back');
  else
    say(
      `the mappings of this ADD are still there, DEL removes them: ${undone.output.replaceAll(/\s+/g, ' ')}`,
    );
  return 1;
}

function pause(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

// The one clock of the call: its signal ends every wait, whether the time is up or the runtime says so.
function startBudget(): { budget: Budget; limit: (seconds: number) => void; close: () => void } {
  const controller = new AbortController();
  const started = performance.now() - process.uptime() * 1000;
  const began = Math.max(started, 0);
  let end = began + defaultTimeoutSeconds * 1000;
  let timer: NodeJS.Timeout | undefined;
  const limit = (seconds: number) => {
    clearTimeout(timer);
    end = began + seconds * 1000;
    const over = () =>
      controller.abort(
        new PortmapError(
          'BUSY',
          `the time of this call is over (timeoutSeconds: ${seconds})`,
          'it is safe to repeat',
        ),
      );
    timer = setTimeout(over, Math.max(0, end - performance.now()));
    timer.unref();
  };
  limit(defaultTimeoutSeconds);
  let isTold = false;
  for (const signal of ['SIGTERM', 'SIGINT'] as const)
    process.on(signal, () => {
      isTold = true;
      controller.abort(new PortmapError('BUSY', `ended by ${signal}`, 'it is safe to repeat'));
    });
  return {
    budget: {
      signal: controller.signal,
      remaining: () => Math.max(0, end - performance.now()),
      isTold: () => isTold,
    },
    limit,
    close: () => controller.abort(new PortmapError('BUSY', 'the call is over')),
  };
}

// A stack trace with an empty stdout is the worst answer a runtime can get.
function fail(reason: unknown): void {
  const text = renderError(toPortmapError(reason), '1.1.0');
  void writeText(stdout, text, graceBudget(unreadMs)).finally(() => exit(1));
}

// A program that does not end, or a stdin that is never closed, must not keep the process.
function exit(status: number): never {
  process.exit(status);
}
