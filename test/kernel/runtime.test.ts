// The two runtimes run programs in ways of their own (src/runtime/); what the plugin comes to know must be the same.
import { execa } from 'execa';
import { fileURLToPath } from 'node:url';
import { describe, expect, test } from 'vitest';
import { portmapBin } from '../lab.ts';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));
const root = here('../..');

// The runtime inside the executable is Bun, whole.
const runtimes = {
  bun: { argv: [portmapBin], env: { BUN_BE_BUN: '1' } },
  node: { argv: [here('../../node_modules/.bin/node'), '--no-warnings'], env: {} },
} as const;

const unstarted = (code: string) => ({
  failure: expect.stringMatching(new RegExp(`^could not be started: .*\\b${code}\\b`)),
  stderr: '',
  lines: [],
});

describe.each(['bun', 'node'] as const)('%s', (name) => {
  test('tells how programs end, what they print, and ends those that are over their time', async () => {
    const [file, ...args] = runtimes[name].argv;
    const { stdout } = await execa(file, [...args, 'test/programs.ts'], {
      cwd: root,
      env: runtimes[name].env,
    });
    const seen: unknown = JSON.parse(stdout);
    const ended = { exitCode: 0, stderr: '', lines: [] };
    const late = { failure: 'ended: the time was up', stderr: '', lines: [] };
    expect(seen).toEqual({
      runtime: name,
      // From sha512sum(1).
      hash: '18cd5078e91f5b4cc48fcd9948d60a6c999abb3643eb3fa814cab4f0f1b98b71cc7b5c44ffd21bb1f13d883b6cdb47c565774419d909370c5b1b328fbbc3f620',
      prints: { exitCode: 4, stderr: 'three\n', lines: ['one', 'two'] },
      unread: ended,
      // What is no UTF-8 comes through, each byte as a character.
      bytes: { ...ended, lines: ['\u00c3(\u00ff'] },
      bytesIn: { ...ended, lines: [' 61 e9 ff'] },
      echo: 200_000,
      deaf: { ...ended, exitCode: 7 },
      noInput: ended,
      language: { ...ended, lines: ['C'] },
      missing: unstarted('ENOENT'),
      folder: unstarted('EACCES'),
      text: unstarted('EACCES'),
      killed: { failure: 'killed by SIGKILL', stderr: '', lines: [] },
      hangs: late,
      stubborn: { ...late, isLeft: false },
      // The first 64 KiB are kept.
      complains: 65_536,
      ends: {
        printsOn: 'ended: the time was up',
        endlessMs: expect.closeTo(500, -4),
        heldPipes: 'ended: the time was up',
        heldMs: expect.closeTo(800, -4),
      },
    });
  });
});
