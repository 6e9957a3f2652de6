// The report: measurements as Markdown tables. Pure; nothing here measures or decides.
import * as z from 'zod';
import { findings, type Row } from './measure.ts';

/** A stage as it was run: what it found, and where and when. */
export const measured = z.object({
  stage: z.enum(['single', 'dual', 'mappings', 'idle', 'storm', 'parallel', 'memory', 'timeline']),
  variant: z.enum(['nft', 'legacy']),
  date: z.string(),
  commit: z.string(),
  upstream: z.string(),
  machine: z.string(),
  findings,
});
export type Measured = z.infer<typeof measured>;

const titles = {
  single: 'One call, IPv4, one mapping',
  dual: 'One call, dual stack, one mapping in each family',
  mappings: 'One call, IPv4, many mappings',
  idle: 'Calls without mappings',
  storm: 'A storm: every sandbox of the node at once',
  parallel: 'Many DELs of one sandbox',
  memory: 'Waiting for the xtables lock',
  timeline: 'Where the time of an ADD goes',
} as const satisfies Record<Measured['stage'], string>;

/** Three digits, and no more than there are. */
const figure = (value: number): string =>
  value >= 100 ? Math.round(value).toLocaleString('en') : Number(value.toPrecision(3)).toString();

const quotient = ({ other, ours }: Row): string =>
  other === undefined || other === 0 || ours === 0 ? '' : `${figure(other / ours)}x`;

function goal({ target, ours, other, unit }: Row): string {
  if (target === undefined) return '';
  const { kind, value } = target;
  const [words, met] =
    kind === 'times'
      ? [`at least ${figure(value)}x`, other !== undefined && other / ours >= value]
      : kind === 'below'
        ? [`under ${figure(value)} ${unit}`, ours < value]
        : [`at most ${figure(value)}`, ours <= value];
  return `${words}: ${met ? 'met' : '**missed**'}`;
}

const line = (variant: string, row: Row): string =>
  `| ${[
    row.work,
    variant,
    row.other === undefined ? '' : `${figure(row.other)} (${row.beside ?? ''})`,
    `${figure(row.ours)} ${row.unit}`,
    quotient(row),
    goal(row),
  ].join(' | ')} |`;

/** The whole report. Measurements of one stage stand together, each stage says when it was run if they differ. */
export function renderReport(all: readonly Measured[]): string {
  const runs = new Set(
    all.map(({ date, commit, upstream, machine }) => [date, commit, upstream, machine].join('|')),
  );
  const provenance = ({ date, commit, upstream, machine }: Measured): string =>
    `${date}, portmap at ${commit}, upstream ${upstream}, ${machine}`;
  const first = all[0];
  const parts = [
    '# Measurements',
    '',
    'Made by `npm run bench` (bench/run.ts): the executable beside the real upstream plugin, in pairs, in network namespaces',
    'of their own. Figures are medians of whole calls, from before the start of the process to its end. "Faster" is',
    'the quotient of the two.',
    ...(first !== undefined && runs.size === 1 ? ['', `${provenance(first)}.`] : []),
  ];
  for (const [stage, title] of Object.entries(titles)) {
    const results = all.filter((result) => result.stage === stage);
    if (results.length === 0) continue;
    parts.push('', `## ${title}`, '');
    const told = new Set(results.map(provenance));
    if (runs.size > 1) parts.push(...[...told].map((words) => `${words}.`), '');
    const rows = results.flatMap((result) => result.findings.rows.map((row) => line(result.variant, row)));
    if (rows.length > 0)
      parts.push(
        '| work | iptables | beside | ours | faster | target |',
        '|---|---|---:|---:|---:|---|',
        ...rows,
      );
    parts.push(...results.flatMap((result) => result.findings.text).flatMap((text) => [text, '']));
  }
  return `${parts.join('\n').trimEnd()}\n`;
}
