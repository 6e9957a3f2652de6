// The golden transactions of the pure layer, given to the real iptables: it must make of each what the table in memory
// makes of it, so that what the pure layer proves there holds in the kernel, and take each back as it says.
import { expect, test } from 'vitest';
import { families } from '../../src/address.ts';
import { invertTransaction, renderTransaction } from '../../src/restore.ts';
import { openMachine, type Variant, variants } from '../lab.ts';
import { caseNames, openCase } from '../pure/case.ts';
import { restore, save, tokenize } from '../pure/ruleset.ts';

type Step = {
  readonly name: string;
  readonly prefix: 'iptables' | 'ip6tables';
  /** The table before, the transaction, and its inverse, each as text for iptables-restore. */
  readonly before: string;
  readonly change: string;
  readonly undo: string;
  readonly after: string;
};

const steps = caseNames.flatMap((name): Step[] => {
  const one = openCase(name);
  if (one.golden.includes('error.json')) return [];
  return families.flatMap((family) => {
    const table = one.tableBefore(family);
    const transaction = one.transaction(family, table);
    if (transaction.length === 0) return [];
    const change = renderTransaction(transaction);
    const undo = renderTransaction(invertTransaction(transaction));
    const after = save(restore(table, change));
    const prefix = family === 'ipv4' ? 'iptables' : 'ip6tables';
    return [{ name: `${name} ${family}`, prefix, before: save(table), change, undo, after }];
  });
});

test.each(variants)('iptables-%s does to the table what was planned, and undoes it', async (variant) => {
  const machine = await openMachine({ variant });
  try {
    // One shell for all: a process from here for each of some hundred steps would take longer than the steps.
    const input = steps.map((step) => script(step, variant)).join('');
    const { stdout, stderr } = await machine.run(['sh', '-s'], { input, timeout: 50_000 });
    const tables = stdout.split('=== ').slice(1).map(words);
    expect(stderr).toBe('');
    expect(tables).toEqual(
      steps.flatMap(({ name, before, after }) => [
        words(`${name}, after\n${after}`),
        words(`${name}, undone\n${before}`),
      ]),
    );
  } finally {
    await machine.close();
  }
});

function script({ name, prefix, before, change, undo }: Step, variant: Variant): string {
  const wait = variant === 'legacy' ? ' -w 2' : '';
  const load = (flags: string, text: string) => `$t-restore${flags}${wait} <<'EOF'\n${text}EOF\n`;
  const show = (when: string) => `echo '=== ${name}, ${when}'; $t-save -t nat\n`;
  return [
    `t=$(dirname "$(command -v iptables)")/${prefix}\n`,
    load('', before),
    load(' --noflush', change),
    show('after'),
    load(' --noflush', undo),
    show('undone'),
  ].join('');
}

// A saved table, line by line. iptables puts the words of a condition where it likes, and counts packets.
function words(text: string): string[] {
  const [title = '', ...lines] = text.split('\n').filter((line) => line !== '' && !line.startsWith('#'));
  return [
    title,
    ...lines.map((line) =>
      tokenize(line.replace(/\[\d+:\d+\]/, '[0:0]'))
        .toSorted()
        .join(' '),
    ),
  ];
}
