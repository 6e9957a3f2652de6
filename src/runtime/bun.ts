// Bun's own ways: nothing of Node's is loaded for them.
import { CryptoHasher, type FileSink, spawn } from 'bun';
import { endGroup, endOrphans, type Execution, type Runtime, stderrLimit, type Stdin } from './runtime.ts';

export const runtime: Runtime = {
  sha512: (text) => new CryptoHasher('sha512').update(text).digest('hex'),
  execute: async (program, argv, execution) => {
    const { signal, graceMs, onText, onStart } = execution;
    const started = start(program, argv, execution);
    if (typeof started === 'string') return { error: started, stderr: '' };
    const end = () => endGroup(started.pid, graceMs);
    if (signal.aborted) end();
    else signal.addEventListener('abort', end, { once: true });
    onStart(started.pid, started.stdin && stdinOf(started.stdin));
    let stderr = '';
    await Promise.all([
      started.exited,
      started.stdout === undefined ? undefined : read(started.stdout, onText ?? (() => false)),
      read(started.stderr, (text) => {
        stderr = (stderr + text).slice(0, stderrLimit);
        return true;
      }),
    ]);
    signal.removeEventListener('abort', end);
    if (signal.aborted) endOrphans(started.pid);
    return started.exitCode === null
      ? { signal: String(started.signalCode), stderr }
      : { exitCode: started.exitCode, stderr };
  },
};

// What could not be started, mostly for want of memory, processes or file descriptors, throws.
function start(program: string, argv: readonly string[], { hasInput, onText, env }: Execution) {
  try {
    return spawn([program, ...argv], {
      // A pipe that nothing goes through takes a millisecond to make.
      stdin: hasInput ? 'pipe' : 'ignore',
      stdout: onText === undefined ? 'ignore' : 'pipe',
      stderr: 'pipe',
      detached: true,
      env: { ...process.env, ...env },
    });
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

// One thing after the other. A program that ends without reading its input breaks the pipe.
function stdinOf(sink: FileSink): Stdin {
  let last: Promise<unknown> = Promise.resolve();
  const then = (step: () => unknown) => {
    last = last.then(step).catch(() => undefined);
  };
  return {
    write: (text) =>
      then(async () => {
        await sink.write(Buffer.from(text, 'latin1'));
        await sink.flush();
      }),
    end: () => then(() => sink.end()),
  };
}

async function read(stream: ReadableStream<Uint8Array>, onText: (text: string) => boolean): Promise<void> {
  try {
    for await (const chunk of stream) if (!onText(Buffer.from(chunk).toString('latin1'))) return;
  } catch {
    // What could not be read is missed by whoever looks for its end.
  }
}
