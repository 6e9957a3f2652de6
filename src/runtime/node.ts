// Node's ways.
import type { Readable } from 'node:stream';
import { endGroup, endOrphans, type Runtime, stderrLimit } from './runtime.ts';

export const runtime: Runtime = {
  sha512: (text) => {
    // Loaded here because a call without mappings needs no hash.
    const { createHash } = process.getBuiltinModule('node:crypto');
    return createHash('sha512').update(text).digest('hex');
  },
  execute: async (program, argv, { signal, graceMs, hasInput, onText, onStart, env }) => {
    const { execa } = await import('execa');
    const start = () =>
      execa(program, argv, {
        reject: false,
        stdin: hasInput ? 'pipe' : 'ignore',
        stdout: onText === undefined ? 'ignore' : 'pipe',
        stderr: 'pipe',
        encoding: 'latin1',
        stripFinalNewline: false,
        buffer: { stdout: false, stderr: true },
        maxBuffer: stderrLimit,
        detached: true,
        cleanup: false,
        env,
      });
    let subprocess: ReturnType<typeof start>;
    try {
      subprocess = start();
    } catch (error) {
      // Without descriptors left for its pipes there is no process to speak of.
      return { error: error instanceof Error ? error.message : String(error), stderr: '' };
    }
    const { pid } = subprocess;
    const end = () => pid !== undefined && endGroup(pid, graceMs);
    if (signal.aborted) end();
    else signal.addEventListener('abort', end, { once: true });
    const { stdin } = subprocess;
    // A program that ends without reading its input breaks the pipe; its exit status tells why.
    stdin?.on('error', () => undefined);
    if (pid !== undefined)
      onStart(
        pid,
        stdin === null
          ? undefined
          : { write: (text) => stdin.write(Buffer.from(text, 'latin1')), end: () => stdin.end() },
      );
    const isRead =
      onText === undefined || subprocess.stdout === null ? undefined : read(subprocess.stdout, onText);
    // The program may be gone before the last of its output has come through.
    const [result] = await Promise.all([subprocess, isRead]);
    signal.removeEventListener('abort', end);
    if (signal.aborted && pid !== undefined) endOrphans(pid);
    const stderr = typeof result.stderr === 'string' ? result.stderr : '';
    if (result.exitCode !== undefined) return { exitCode: result.exitCode, stderr };
    if (result.signal !== undefined) return { signal: result.signal, stderr };
    return { error: result.originalMessage ?? 'could not be run', stderr };
  },
};

// Resolves when all of the output was read, or no more of it will be.
function read(stream: Readable, onText: (text: string) => boolean): Promise<void> {
  stream.setEncoding('latin1');
  stream.on('data', (chunk: string) => {
    if (!onText(chunk)) stream.destroy();
  });
  return new Promise((resolve) => {
    for (const end of ['end', 'close', 'error']) stream.once(end, () => resolve());
  });
}
