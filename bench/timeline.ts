// Where the time of one ADD goes, seen from outside by strace: when the runtime in the executable is up and reads its
// input, when each file of the state folder is touched, when each child program starts and ends, when the result is
// written. strace stops only at the few system calls named here, so it adds little; how little is said beside it.
import { spawnSync } from 'node:child_process';
import { basename } from 'node:path';
import { readFileSync } from 'node:fs';
import { median, type Findings } from './measure.ts';
import { loadServiceRules, openNode } from './node.ts';
import { call, environment, netconf, sandbox, type Options, type Sandbox } from './plugin.ts';

type Event = { readonly at: number; readonly what: string };

const traced = 'execve,exit_group,read,write,mkdir,rmdir,rename,link,unlink,flock';

function traceAdd(plugin: string, target: Sandbox): Event[] {
  const trace = '/run/timeline.trace';
  const outcome = spawnSync(
    'strace',
    ['-f', '--seccomp-bpf', '-qq', '-ttt', '-y', '-s', '80', '-e', `trace=${traced}`, '-o', trace, plugin],
    { input: netconf(target), env: environment('ADD', target), encoding: 'utf8' },
  );
  if (outcome.status !== 0) throw new Error(`traced ADD: ${outcome.stdout}${outcome.stderr}`);
  return readTrace(readFileSync(trace, 'utf8'));
}

/** The events worth telling, in milliseconds from the start of the plugin. */
function readTrace(text: string): Event[] {
  const events: Event[] = [];
  const programs = new Map<string, string>();
  const seen = new Set<string>();
  let start: number | undefined;
  for (const line of text.split('\n')) {
    const match = /^(\d+) +([\d.]+) (.*)$/.exec(line);
    if (match === null) continue;
    const [, pid = '', time = '', what = ''] = match;
    start ??= Number(time);
    const at = (Number(time) - start) * 1_000;
    const tell = (words: string, once = false): void => {
      if (once && seen.has(words)) return;
      seen.add(words);
      events.push({ at, what: words });
    };
    const program = programs.get(pid);
    const started = /^execve\("([^"]+)"/.exec(what)?.[1];
    const file = /^(?:mkdir|rmdir|rename|link|unlink)\("([^"]+)"/.exec(what)?.[1];
    if (started !== undefined) {
      // A search along PATH tries names that do not exist.
      if (what.includes('= -1')) continue;
      if (programs.size === 0) tell('the executable starts');
      else tell(`${basename(started)} starts`);
      programs.set(pid, programs.size === 0 ? 'the plugin' : basename(started));
    } else if (program !== undefined && program !== 'the plugin') {
      if (/^flock\(.*xtables\.lock>, LOCK_EX/.test(what)) tell(`${program} takes the xtables lock`);
      if (what.startsWith('exit_group')) tell(`${program} ends`);
    } else if (what.startsWith('read(0')) tell('the runtime is up and reads stdin', true);
    else if (what.startsWith('write(1')) tell('the result is written', true);
    else if (what.startsWith('exit_group')) tell('the plugin ends', true);
    else if (file !== undefined && file.startsWith('/run/')) {
      // Names in the state folder are hashes; their beginning and end are enough to follow.
      const name = file.replace(/^\/run\//, '').replace(/[0-9a-f]{16,}/g, (hash) => `${hash.slice(0, 4)}…`);
      tell(`${what.slice(0, what.indexOf('('))} ${name}`);
    }
  }
  return events;
}

function describe(title: string, events: readonly Event[], untraced: number): string {
  const lines = events.map(({ at, what }, index) => {
    const next = events[index + 1];
    const until = next === undefined ? '' : (next.at - at).toFixed(1);
    return `| ${at.toFixed(1)} | ${until} | ${what} |`;
  });
  return [
    `**${title}**: ${untraced.toFixed(1)} ms without strace, from before its start to after its end.`,
    '',
    '| at ms | until the next | |',
    '|---:|---:|---|',
    ...lines,
  ].join('\n');
}

/** One ADD of one IPv4 mapping, and of a dual-stack one, alone and beside 40,000 rules. */
export function timeline({ variant, quick, ours }: Options): Findings {
  openNode(variant, 1);
  const single = sandbox(0);
  const double = sandbox(0, { families: ['v4', 'v6'] });
  const rounds = quick ? 3 : 9;
  const tell = (title: string, target: Sandbox): string => {
    const untraced: number[] = [];
    const runs: Event[][] = [];
    for (let round = 0; round < rounds; round += 1) {
      untraced.push(call(ours, 'ADD', target));
      call(ours, 'DEL', target);
      runs.push(traceAdd(ours, target));
      call(ours, 'DEL', target);
    }
    // The run in the middle of all by its length stands for them.
    const sorted = runs.toSorted((a, b) => (a.at(-1)?.at ?? 0) - (b.at(-1)?.at ?? 0));
    return describe(title, sorted[Math.floor(sorted.length / 2)] ?? [], median(untraced));
  };
  // The first ADD on a node also makes the shared chains; the timeline is of every later one.
  call(ours, 'ADD', double);
  call(ours, 'DEL', double);
  const text = [
    tell(`ADD, ${variant}, one mapping, no other rules`, single),
    tell(`ADD, ${variant}, one mapping, dual stack, no other rules`, double),
  ];
  loadServiceRules(40_000);
  text.push(tell(`ADD, ${variant}, one mapping, 40,000 rules`, single));
  return { rows: [], text };
}
