// The entry: a CNI call when CNI_COMMAND is set, else a command for people. The only place that reads stdin, writes
// to stdout and ends the process.
import { closeSync, constants, fstatSync, openSync, read, readSync, writeSync } from 'node:fs';
import { PortmapError, toPortmapError } from '../src/errors.ts';
import { defaultTimeoutSeconds } from '../src/network.ts';
import { once } from '../src/once.ts';
import { answer, renderError } from '../src/plugin.ts';
import type { Budget } from '../src/budget.ts';
import { aboutText } from '../src/version.ts';

const maxInputBytes = 64 * 1024 * 1024;
const chunkBytes = 64 * 1024;
const inputWaitMs = 30_000;
const stdin = 0;
const stdout = 1;
const stderr = 2;

process.on('uncaughtException', fail);
process.on('unhandledRejection', fail);
await main();

async function main(): Promise<void> {
  const { budget, limit } = startBudget();
  const readInput = once(() => readStdin(budget));
  if ((process.env['CNI_COMMAND'] ?? '') !== '') {
    const call = { environment: process.env, readInput, limit, budget, warn };
    const reply = await answer(call);
    if (print(stdout, reply.output)) exit(reply.status);
    // An ADD of which nobody can read that it succeeded has failed, and leaves nothing.
    if (reply.status === 0 && process.env['CNI_COMMAND'] === 'ADD')
      await answer({ ...call, environment: { ...process.env, CNI_COMMAND: 'DEL' } });
    exit(1);
  }
  const argv = process.argv.slice(2);
  if (argv.length === 0) {
    print(stderr, aboutText());
    exit(0);
  }
  const { runCommand } = await import('../src/cli/command.ts');
  exit(
    await runCommand(argv, { budget, warn, fail: complain, readInput, print: (text) => print(stdout, text) }),
  );
}

function complain(text: string): void {
  print(stderr, `portmap: ${text}\n`);
}

function warn(text: string): void {
  print(stderr, `portmap: warning: ${text}\n`);
}

// The one clock of the call: its signal ends every wait, whether the time is up or the runtime says so.
function startBudget(): { budget: Budget; limit: (seconds: number) => void } {
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
  };
}

async function readStdin(budget: Budget): Promise<string> {
  const chunks: Buffer[] = [];
  let size = 0;
  const take = (chunk: Buffer) => {
    chunks.push(chunk);
    size += chunk.length;
    if (size > maxInputBytes)
      throw new PortmapError('IO', `stdin: more than ${maxInputBytes} bytes`, 'a netconf is a few kilobytes');
  };
  if (!readWhatIsThere(take))
    for (let chunk = await readChunk(budget); chunk.length > 0; chunk = await readChunk(budget)) take(chunk);
  return Buffer.concat(chunks).toString('utf8');
}

// Mostly the runtime has written all of it by now, and closed the pipe: reading that through the pool of threads takes a
// millisecond. Says whether the end was reached.
function readWhatIsThere(take: (chunk: Buffer) => void): boolean {
  let pipe: number | undefined;
  try {
    if (!fstatSync(stdin).isFIFO()) return false;
    // Opened anew, so that not to wait is this process's matter alone.
    pipe = openSync(`/proc/self/fd/${stdin}`, constants.O_RDONLY | constants.O_NONBLOCK);
    for (;;) {
      const buffer = Buffer.allocUnsafe(chunkBytes);
      const count = readSync(pipe, buffer);
      if (count === 0) return true;
      take(buffer.subarray(0, count));
    }
  } catch (error) {
    if (error instanceof PortmapError) throw error;
    // There is more to come.
    return false;
  } finally {
    if (pipe !== undefined) closeSync(pipe);
  }
}

function readChunk(budget: Budget): Promise<Buffer> {
  const buffer = Buffer.allocUnsafe(chunkBytes);
  return new Promise((resolve, reject) => {
    const refuse = (message: string) =>
      reject(new PortmapError('IO', message, 'the runtime passes the netconf on stdin and closes it'));
    const timer = setTimeout(() => refuse(`stdin: not closed after ${inputWaitMs / 1000} s`), inputWaitMs);
    const stop = () => {
      clearTimeout(timer);
      reject(toPortmapError(budget.signal.reason));
    };
    budget.signal.addEventListener('abort', stop, { once: true });
    read(stdin, buffer, 0, buffer.length, null, (error, count) => {
      clearTimeout(timer);
      budget.signal.removeEventListener('abort', stop);
      if (error !== null) refuse(`stdin: can't be read: ${error.message}`);
      else resolve(buffer.subarray(0, count));
    });
  });
}

// Writes all of a text, also to a pipe that is full; says whether that was possible.
function print(file: number, text: string): boolean {
  const bytes = Buffer.from(text);
  for (let at = 0; at < bytes.length;) {
    try {
      at += writeSync(file, bytes, at);
    } catch (error) {
      if (error instanceof Error && 'code' in error && error.code === 'EAGAIN') continue;
      if (file !== stderr)
        print(
          stderr,
          `portmap: can't write the result: ${error instanceof Error ? error.message : String(error)}\n`,
        );
      return false;
    }
  }
  return true;
}

// A stack trace with an empty stdout is the worst answer a runtime can get.
function fail(reason: unknown): never {
  print(stdout, renderError(toPortmapError(reason), '1.1.0'));
  exit(1);
}

// A program that does not end, or a stdin that is never closed, must not keep the process.
function exit(status: number): never {
  process.exit(status);
}
