// Runs programs that behave in all the ways a program can, with the runtime this file is run by, and prints what the
// plugin came to know of each: the same in both runtimes, which test/kernel/runtime.test.ts asks for.
import { runtime } from '#runtime';
import { graceBudget } from '../src/budget.ts';
import { processId } from '../src/process.ts';
import { type Outcome, runProgram } from '../src/program.ts';

type Options = { input?: string; isRead?: boolean; milliseconds?: number; onStart?: (pid: number) => void };
type Seen = { exitCode?: number | undefined; failure?: string | undefined; stderr: string; lines: string[] };

async function see(argv: readonly string[], options: Options = {}): Promise<Seen> {
  const { input, isRead = true, milliseconds = 10_000 } = options;
  const lines: string[] = [];
  const [program = '', ...rest] = argv;
  const outcome: Outcome = await runProgram(program, rest, {
    budget: graceBudget(milliseconds),
    ...(input === undefined ? {} : { input }),
    ...(options.onStart === undefined ? {} : { onStart: options.onStart }),
    ...(isRead ? { onLine: (line: string) => lines.push(line) } : {}),
  });
  const { exitCode, failure, stderr } = outcome;
  return { exitCode, failure, stderr, lines };
}

const isRunning = (pid: number): boolean => processId(pid) !== undefined;
const shell = (script: string, options?: Options) => see(['/bin/sh', '-c', script], options);
const megabyte = 'rule\n'.repeat(200_000);

const started: number[] = [];
const stubborn = await shell("trap '' TERM; while :; do sleep 0.1; done", {
  milliseconds: 200,
  onStart: (pid) => started.push(pid),
});
const endless = performance.now();
const printsOn = await shell('while :; do echo rule; done', { milliseconds: 500 });
const endlessMs = performance.now() - endless;
const held = performance.now();
const heldPipes = await shell('sleep 9 & exit 3', { milliseconds: 500 });
const heldMs = performance.now() - held;

process.stdout.write(
  JSON.stringify({
    runtime: process.versions['bun'] === undefined ? 'node' : 'bun',
    hash: runtime.sha512('nët\0'),
    prints: await shell('echo one; printf two; echo three >&2; exit 4'),
    unread: await shell('echo one; exit 0', { isRead: false }),
    bytes: await shell("printf '\\303\\050\\377\\n'"),
    echo: (await see(['/bin/cat'], { input: megabyte })).lines.length,
    bytesIn: await see(['/usr/bin/od', '-An', '-tx1'], { input: 'a\u00e9\u00ff' }),
    deaf: await shell('exit 7', { input: megabyte }),
    noInput: await see(['/bin/cat']),
    language: await shell('echo $LC_ALL'),
    missing: await see(['/nowhere/program']),
    folder: await see(['/tmp']),
    text: await see(['/etc/passwd']),
    killed: await shell('kill -KILL $$'),
    hangs: await shell('exec sleep 30', { milliseconds: 200 }),
    stubborn: { ...stubborn, isLeft: started.some((pid) => isRunning(pid)) },
    complains: (await shell('yes complaint | head -c 300000 >&2; exit 5')).stderr.length,
    ends: {
      printsOn: printsOn.failure,
      endlessMs,
      heldPipes: heldPipes.failure ?? heldPipes.exitCode,
      heldMs,
    },
  }),
);
process.exit(0);
