// One call at a time: tables of three sizes, dual stack, few and many mappings, and calls with nothing to do.
import { median, pairs, type Findings, type Row } from './measure.ts';
import { clearTables, loadServiceRules, openNode, sandboxChains, type Family } from './node.ts';
import { call, callProgram, sandbox, type Options, type Sandbox, type Sides } from './plugin.ts';

type Cycle = { readonly add: number; readonly del: number };

/** ADD and DEL of one sandbox, and a look that ADD did something and DEL undid it. */
function cycle(plugin: string, target: Sandbox, families: readonly Family[]): Cycle {
  const expect = (chains: number, verb: string): void => {
    for (const family of families)
      if (sandboxChains(family) !== chains) throw new Error(`${verb} by ${plugin} left the wrong chains`);
  };
  const add = call(plugin, 'ADD', target);
  expect(1, 'ADD');
  const del = call(plugin, 'DEL', target);
  expect(0, 'DEL');
  return { add, del };
}

function cycleRows(
  work: string,
  rounds: number,
  { ours, upstream }: Sides,
  target: Sandbox,
  targets: { readonly add?: Row['target']; readonly both?: Row['target'] },
): Row[] {
  const results = pairs(
    rounds,
    {
      ours: () => cycle(ours, target, target.families),
      other: () => cycle(upstream, target, target.families),
    },
    { warmUp: rounds > 1 },
  );
  const rowOf = (verbs: string, pick: (result: Cycle) => number, goal: Row['target']): Row => ({
    work: `${verbs}, ${work}`,
    unit: 'ms',
    beside: 'upstream',
    other: median(results.other.map(pick)),
    ours: median(results.ours.map(pick)),
    rounds: [rounds, rounds],
    ...(goal === undefined ? {} : { target: goal }),
  });
  return [
    rowOf('ADD', ({ add }) => add, targets.add),
    rowOf('DEL', ({ del }) => del, undefined),
    rowOf('ADD + DEL', ({ add, del }) => add + del, targets.both),
  ];
}

const times = (value: number): Row['target'] => ({ kind: 'times', value });

/** One IPv4 mapping beside no rules, 4,000 and 40,000. */
export function single({ variant, quick, ...sides }: Options): Findings {
  openNode(variant, 1);
  const target = sandbox(0);
  const goals = variant === 'nft' ? { 0: 1.5, 40_000: 2.5 } : { 0: 1, 40_000: 8 };
  return {
    rows: [
      ...cycleRows('no other rules', quick ? 5 : 21, sides, target, { both: times(goals[0]) }),
      ...[4_000, 40_000].flatMap((rules) => {
        clearTables();
        loadServiceRules(rules);
        const goal = rules === 40_000 ? { both: times(goals[40_000]) } : {};
        const rounds = quick ? 1 : rules === 4_000 ? 9 : 5;
        return cycleRows(`${rules.toLocaleString('en')} rules`, rounds, sides, target, goal);
      }),
    ],
    text: [],
  };
}

/** One mapping in both families. */
export function dual({ variant, quick, ...sides }: Options): Findings {
  openNode(variant, 1);
  const target = sandbox(0, { families: ['v4', 'v6'] });
  const both = times(variant === 'nft' ? 2.5 : 1.5);
  return {
    rows: cycleRows('dual stack, no other rules', quick ? 5 : 21, sides, target, { both }),
    text: [],
  };
}

/** Growing lists of mappings, IPv4. */
export function mappings({ variant, quick, ...sides }: Options): Findings {
  openNode(variant, 1);
  const rounds = quick ? { 15: 3, 100: 1, 1_000: 1 } : { 15: 9, 100: 3, 1_000: 1 };
  const rows = ([15, 100, 1_000] as const).flatMap((count) => {
    const goal: { add?: Row['target'] } = count === 1_000 ? { add: { kind: 'below', value: 1_000 } } : {};
    const target = sandbox(0, { mappings: count });
    return cycleRows(`${count.toLocaleString('en')} mappings`, rounds[count], sides, target, goal);
  });
  return { rows, text: [] };
}

/** Calls of a sandbox without mappings: most calls on a node are of this kind. */
export function idle({ variant, quick, ours, upstream, node }: Options): Findings {
  openNode(variant, 1);
  const target = sandbox(0, { mappings: 0 });
  const rounds = quick ? 9 : 41;
  const compare = (work: string, beside: string, other: () => number, goal?: Row['target']): Row => {
    const verb = work.startsWith('DEL') ? 'DEL' : 'ADD';
    const results = pairs(rounds, { ours: () => call(ours, verb, target), other });
    return {
      work,
      unit: 'ms',
      beside,
      other: median(results.other),
      ours: median(results.ours),
      rounds: [rounds, rounds],
      ...(goal === undefined ? {} : { target: goal }),
    };
  };
  return {
    rows: [
      compare('ADD, no mappings', 'upstream', () => call(upstream, 'ADD', target)),
      compare('DEL, no mappings', 'upstream', () => call(upstream, 'DEL', target)),
      compare('ADD, no mappings', '`node -e 0`', () => callProgram([node, '-e', '0']), times(1 / 0.8)),
      compare('ADD, no mappings', '`true`', () => callProgram(['true'])),
    ],
    text: [],
  };
}
