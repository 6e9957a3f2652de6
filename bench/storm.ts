// Many calls at once: a node that comes back after a reboot. The calls are started by a shell, all before the first
// has ended, each with its own input file; what is measured is the time from the first start to the last end.
import { spawn, spawnSync } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { median, type Findings, type Row } from './measure.ts';
import { clearTables, loadServiceRules, openNode, path, sandboxChains } from './node.ts';
import { call, environment, netconf, sandbox, type Options, type Sandbox, type Verb } from './plugin.ts';

type Call = { readonly verb: Verb; readonly target: Sandbox };
type Storm = { readonly milliseconds: number; readonly failures: readonly string[] };

const folder = '/run/storm';

/** Writes the shell program of a storm; each call leaves its output, and its exit status if that is not 0. */
function writeStorm(plugin: string, calls: readonly Call[]): string {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder);
  const lines = calls.map(({ verb, target }, index) => {
    writeFileSync(`${folder}/${index}.json`, netconf(target));
    const variables = Object.entries(environment(verb, target)).map(([name, value]) => `${name}=${value}`);
    return `{ ${variables.join(' ')} ${plugin} <${index}.json >${index}.out 2>&1 || echo $? >${index}.failed; } &`;
  });
  writeFileSync(`${folder}/storm.sh`, ['cd /run/storm', ...lines, 'wait', ''].join('\n'));
  return `${folder}/storm.sh`;
}

function readFailures(): string[] {
  return readdirSync(folder)
    .filter((name) => name.endsWith('.failed'))
    .map((name) => readFileSync(`${folder}/${name.replace('.failed', '.out')}`, 'utf8').trim());
}

function runStorm(plugin: string, calls: readonly Call[], under: readonly string[] = []): Storm {
  const [file, ...args] = [...under, 'sh', writeStorm(plugin, calls)];
  const started = process.hrtime.bigint();
  spawnSync(file ?? 'sh', args, { env: { PATH: path }, stdio: 'ignore', timeout: 600_000 });
  const milliseconds = Number(process.hrtime.bigint() - started) / 1e6;
  return { milliseconds, failures: readFailures() };
}

/** A storm that must succeed and leave `chains` sandboxes: milliseconds for each call. */
function perSandbox(plugin: string, calls: readonly Call[], chains: number): number {
  const { milliseconds, failures } = runStorm(plugin, calls);
  if (failures.length > 0)
    throw new Error(`${failures.length} of ${calls.length} calls of ${plugin} failed: ${failures[0]}`);
  const left = sandboxChains('v4');
  if (left !== chains) throw new Error(`${plugin} left ${left} sandboxes instead of ${chains}`);
  return milliseconds / calls.length;
}

const adds = (numbers: readonly number[]): Call[] =>
  numbers.map((number) => ({ verb: 'ADD', target: sandbox(number) }));
const dels = (numbers: readonly number[]): Call[] =>
  numbers.map((number) => ({ verb: 'DEL', target: sandbox(number) }));
const range = (from: number, to: number): number[] =>
  Array.from({ length: to - from }, (_, index) => from + index);

type Wave = Readonly<Record<'add' | 'mixed' | 'del', number>>;

/** All at once: `count` ADDs, then half of them torn down while as many new ones come, then the rest torn down. */
function wave(plugin: string, count: number): Wave {
  const half = Math.floor(count / 2);
  const add = perSandbox(plugin, adds(range(0, count)), count);
  const change = dels(range(0, half)).flatMap((leaving, index) => [leaving, ...adds([count + index])]);
  const mixed = perSandbox(plugin, change, count);
  const del = perSandbox(plugin, dels(range(half, count + half)), 0);
  return { add, mixed, del };
}

/** 100 sandboxes at once beside 40,000 rules; upstream on fewer, because it takes minutes. */
export function storm({ variant, quick, ours, upstream }: Options): Findings {
  const count = 100;
  const upstreamCount = quick ? 4 : variant === 'legacy' ? 8 : 20;
  const rounds: [number, number] = quick ? [1, 1] : variant === 'legacy' ? [3, 1] : [3, 2];
  openNode(variant, count + count / 2);
  loadServiceRules(40_000);
  const our: Wave[] = [];
  const theirs: Wave[] = [];
  for (let round = 0; round < Math.max(...rounds); round += 1) {
    if (round < rounds[0]) our.push(wave(ours, count));
    if (round < rounds[1]) theirs.push(wave(upstream, upstreamCount));
  }
  const goals = variant === 'legacy' ? { add: 100, del: 50, mixed: undefined } : {};
  const rowOf = (name: string, verb: 'add' | 'mixed' | 'del'): Row => {
    const goal = goals[verb];
    return {
      work: `${name}, ${count} sandboxes at once (upstream: ${upstreamCount}), 40,000 rules, per sandbox`,
      unit: 'ms',
      beside: 'upstream',
      other: median(theirs.map((result) => result[verb])),
      ours: median(our.map((result) => result[verb])),
      rounds,
      ...(goal === undefined ? {} : { target: { kind: 'times', value: goal } }),
    };
  };
  const rows = [rowOf('ADD', 'add'), rowOf('DEL', 'del'), rowOf('ADD and DEL mixed', 'mixed')];
  if (variant === 'legacy')
    for (const [verb, calls] of [
      ['ADD', adds(range(0, count))],
      ['DEL', dels(range(0, count))],
    ] as const)
      rows.push({
        work: `xtables lock acquisitions, all ${count} sandboxes' ${verb} at once`,
        unit: 'times',
        ours: lockAcquisitions(ours, calls),
        rounds: [1, 0],
      });
  return { rows, text: [] };
}

/** How often a storm takes the xtables lock, seen by strace in a run that is not timed. */
function lockAcquisitions(plugin: string, calls: readonly Call[]): number {
  const trace = '/run/locks.trace';
  const strace = ['strace', '-f', '--seccomp-bpf', '-qq', '-y', '-e', 'trace=flock', '-o', trace];
  const { failures } = runStorm(plugin, calls, strace);
  if (failures.length > 0) throw new Error(`under strace: ${failures[0]}`);
  const lines = readFileSync(trace, 'utf8').split('\n');
  const tries = lines.filter((line) => line.includes('xtables.lock>, LOCK_EX') && !line.includes('= -1'));
  const missed = lines.filter((line) => line.includes('flock resumed') && line.includes('= -1'));
  return tries.length - missed.length;
}

/** One dual-stack sandbox torn down by 40 DELs at once, again and again. */
export function parallel({ variant, quick, ours, upstream }: Options): Findings {
  openNode(variant, 1);
  const target = sandbox(0, { families: ['v4', 'v6'] });
  const together = 40;
  const failuresOf = (plugin: string, rounds: number): number => {
    let failed = 0;
    for (let round = 0; round < rounds; round += 1) {
      call(plugin, 'ADD', target);
      const calls = Array.from({ length: together }, (): Call => ({ verb: 'DEL', target }));
      failed += runStorm(plugin, calls).failures.length;
      if (sandboxChains('v4') + sandboxChains('v6') > 0) {
        if (plugin === ours) throw new Error('parallel DELs left a chain');
        clearTables();
      }
    }
    return (failed * 1_000) / (rounds * together);
  };
  const rounds: [number, number] = quick ? [5, 3] : [25, 12];
  return {
    rows: [
      {
        work: `failed DELs, ${together} at once of one dual-stack sandbox`,
        unit: 'of 1,000',
        beside: 'upstream',
        other: failuresOf(upstream, rounds[1]),
        ours: failuresOf(ours, rounds[0]),
        rounds: [rounds[0] * together, rounds[1] * together],
        target: { kind: 'most', value: 0 },
      },
    ],
    text: [],
  };
}

type Held = { readonly each: number; readonly all: number; readonly cpu: number };

/** What 100 ADDs hold while somebody else holds the xtables lock, beside 40,000 rules. */
export async function memory({ quick, ours, upstream }: Options): Promise<Findings> {
  const count = 100;
  openNode('legacy', count);
  loadServiceRules(40_000);
  const settle = quick ? 3_000 : 6_000;
  const our = await whileLocked(ours, count, settle, true);
  const theirs = await whileLocked(upstream, count, settle, false);
  const rowOf = (work: string, unit: Row['unit'], pick: (held: Held) => number): Row => ({
    work,
    unit,
    beside: 'upstream',
    other: pick(theirs),
    ours: pick(our),
    rounds: [1, 1],
  });
  return {
    rows: [
      {
        ...rowOf('private memory of a waiting call, median of 100', 'MB', (held) => held.each),
        target: { kind: 'below', value: 12 },
      },
      rowOf('private memory of 100 waiting calls and their children', 'MB', (held) => held.all),
      rowOf('processor time of 100 waiting calls', 'ms CPU a second', (held) => held.cpu),
    ],
    text: [],
  };
}

async function whileLocked(plugin: string, count: number, settle: number, finish: boolean): Promise<Held> {
  const holder = spawn('flock', ['--no-fork', '/run/xtables.lock', 'sleep', '600'], { stdio: 'ignore' });
  for (let attempt = 0; !isLocked(); attempt += 1) {
    if (attempt > 100) throw new Error('the xtables lock could not be taken');
    await sleep(20);
  }
  const calls = adds(range(0, count));
  const shell = spawn('sh', [writeStorm(plugin, calls)], { env: { PATH: path }, stdio: 'ignore' });
  const ended = new Promise<void>((resolve) => shell.once('exit', () => resolve()));
  await sleep(settle);
  const before = waiting(plugin);
  await sleep(2_000);
  const after = waiting(plugin);
  if (finish) {
    holder.kill('SIGKILL');
    await ended;
    const failures = readFailures();
    if (failures.length > 0)
      throw new Error(`after the wait ${failures.length} calls failed: ${failures[0]}`);
    if (sandboxChains('v4') !== count) throw new Error('after the wait sandboxes are missing');
  } else {
    for (const pid of [shell.pid, ...after.pids]) if (pid !== undefined) endProcess(pid);
    holder.kill('SIGKILL');
  }
  return {
    each: median(after.calls),
    all: after.calls.concat(after.children).reduce((sum, megabytes) => sum + megabytes, 0),
    cpu: ((after.ticks - before.ticks) * 10) / 2,
  };
}

const isLocked = (): boolean =>
  existsSync('/run/xtables.lock') &&
  spawnSync('flock', ['--nonblock', '/run/xtables.lock', 'true']).status !== 0;

type Waiting = {
  readonly pids: readonly number[];
  /** Private megabytes of the plugin's processes, and of their children. */
  readonly calls: readonly number[];
  readonly children: readonly number[];
  /** Clock ticks, 100 a second, used so far. */
  readonly ticks: number;
};

function waiting(plugin: string): Waiting {
  const pids: number[] = [];
  const [calls, children]: [number[], number[]] = [[], []];
  let ticks = 0;
  for (const entry of readdirSync('/proc')) {
    if (!/^\d+$/.test(entry)) continue;
    try {
      const executable = readlinkSync(`/proc/${entry}/exe`);
      const isCall = executable === plugin;
      if (!isCall && !executable.includes('xtables')) continue;
      const rollup = readFileSync(`/proc/${entry}/smaps_rollup`, 'utf8');
      const kilobytes = [...rollup.matchAll(/^Private_(?:Clean|Dirty): +(\d+) kB/gm)].map((match) =>
        Number(match[1]),
      );
      const stat = readFileSync(`/proc/${entry}/stat`, 'utf8')
        .replace(/^.*\) /, '')
        .split(' ');
      (isCall ? calls : children).push(kilobytes.reduce((sum, value) => sum + value, 0) / 1024);
      pids.push(Number(entry));
      ticks += Number(stat[11]) + Number(stat[12]);
    } catch {
      // It ended while it was looked at.
    }
  }
  return { pids, calls, children, ticks };
}

function endProcess(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // It has ended.
  }
}
