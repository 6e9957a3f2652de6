// The process's stdin, stdout and stderr, whatever they are: none of them may keep the call longer than its time, or
// from hearing that it shall end.
import { closeSync, constants, fstatSync, openSync, read, readSync, write, writeSync } from 'node:fs';
import { type Budget, sleep } from './budget.ts';
import { PortmapError, systemCode, toPortmapError } from './errors.ts';

export const stdout = 1;
export const stderr = 2;

const stdin = 0;
const maxInputBytes = 64 * 1024 * 1024;
const chunkBytes = 64 * 1024;
const inputWaitMs = 30_000;
const lastWordMs = 500;
// How often a stream is asked again that is not to be waited for.
const againMs = 10;

/**
 * Reads stdin to its end.
 * @throws PortmapError IO when it can't be read, is too long or is not closed in time; the budget's reason when that
 * ends first.
 */
export async function readStdin(budget: Budget): Promise<string> {
  const chunks: Buffer[] = [];
  let size = 0;
  const pipe = openAnew(stdin, constants.O_RDONLY);
  try {
    for (;;) {
      const chunk = await readChunk(pipe, budget);
      if (chunk.length === 0) return Buffer.concat(chunks).toString('utf8');
      chunks.push(chunk);
      size += chunk.length;
      if (size > maxInputBytes)
        throw new PortmapError(
          'IO',
          `stdin: more than ${maxInputBytes} bytes`,
          'a netconf is a few kilobytes',
        );
    }
  } finally {
    if (pipe !== undefined) closeSync(pipe);
  }
}

// Mostly the runtime has written all of it by now, and closed the pipe. What is no pipe is read in another thread.
async function readChunk(pipe: number | undefined, budget: Budget): Promise<Buffer> {
  const buffer = Buffer.allocUnsafe(chunkBytes);
  const end = performance.now() + inputWaitMs;
  const begin = () =>
    pipe === undefined
      ? inThread((done) => read(stdin, buffer, 0, buffer.length, null, done))
      : tryRead(pipe, buffer);
  let reading = begin();
  for (let wait = 1; ; wait = Math.min(wait * 2, againMs)) {
    const count =
      reading instanceof Promise
        ? await Promise.race([reading, sleep(end - performance.now(), budget)])
        : reading;
    if (typeof count === 'number') return buffer.subarray(0, count);
    if (budget.signal.aborted) throw toPortmapError(budget.signal.reason);
    const isAgain = count instanceof Error && systemCode(count) === 'EAGAIN';
    if (count instanceof Error && !isAgain)
      throw new PortmapError('IO', `stdin: can't be read: ${count.message}`, stdinAdvice);
    if (performance.now() >= end)
      throw new PortmapError('IO', `stdin: not closed after ${inputWaitMs / 1000} s`, stdinAdvice);
    await sleep(wait, budget);
    if (isAgain) reading = begin();
  }
}

const stdinAdvice = 'the runtime passes the netconf on stdin and closes it';

function tryRead(file: number, buffer: Buffer): number | Error {
  try {
    return readSync(file, buffer);
  } catch (error) {
    return error instanceof Error ? error : new Error(String(error));
  }
}

/**
 * Writes all of a text to stdout or stderr, or as much as its reader takes until a moment after the call's end.
 * @returns why the text was not written whole; undefined when it was.
 */
export async function writeText(file: number, text: string, call: Budget): Promise<string | undefined> {
  if (text === '') return undefined;
  const bytes = Buffer.from(text);
  const over = afterEnd(call);
  let pipe: number | undefined;
  try {
    pipe = openAnew(file, constants.O_WRONLY);
    for (let at = 0; at < bytes.length;) {
      if (over.aborted) return 'nobody has read it in time';
      const rest = bytes.subarray(at);
      const count = pipe === undefined ? await writeSome(file, rest, over) : tryWrite(pipe, rest);
      at += count;
      if (count === 0) await pause(againMs);
    }
    return undefined;
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  } finally {
    if (pipe !== undefined) closeSync(pipe);
  }
}

// A pipe, opened once more: not to wait for its other end is then the matter of this process alone. Undefined: it is
// none, or its other end is closed.
function openAnew(file: number, access: number): number | undefined {
  try {
    if (!fstatSync(file).isFIFO()) return undefined;
    return openSync(`/proc/self/fd/${file}`, access | constants.O_NONBLOCK);
  } catch {
    return undefined;
  }
}

function tryWrite(file: number, bytes: Buffer): number {
  try {
    return writeSync(file, bytes);
  } catch (error) {
    if (systemCode(error) === 'EAGAIN') return 0;
    throw error;
  }
}

// Of all else only a socket keeps a writer waiting. There are two threads at least, and one may wait for stdin.
async function writeSome(file: number, bytes: Buffer, over: AbortSignal): Promise<number> {
  if (!fstatSync(file).isSocket()) return tryWrite(file, bytes);
  const count = await Promise.race([
    inThread((done) => write(file, bytes, 0, bytes.length, null, done)),
    aborted(over),
  ]);
  if (count instanceof Error && systemCode(count) !== 'EAGAIN') throw count;
  return typeof count === 'number' ? count : 0;
}

// What a system call in another thread has come to.
function inThread(
  start: (done: (error: Error | null, count: number) => void) => void,
): Promise<number | Error> {
  return new Promise((resolve) => start((error, count) => resolve(error ?? count)));
}

// What is written then is the call's last word.
function afterEnd({ signal }: Budget): AbortSignal {
  const controller = new AbortController();
  void aborted(signal).then(() => setTimeout(() => controller.abort(), lastWordMs).unref());
  return controller.signal;
}

function aborted(signal: AbortSignal): Promise<undefined> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve(undefined);
    else signal.addEventListener('abort', () => resolve(undefined), { once: true });
  });
}

function pause(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
