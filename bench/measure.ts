// What a measurement is, and how two programs are measured fairly: in pairs, the first to go changing from round to
// round, so that a busy moment of the machine hits both.
import * as z from 'zod';

/** One line of the result: what was done, by the other program and by ours. */
const row = z.object({
  work: z.string(),
  unit: z.enum(['ms', 'MB', 'of 1,000', 'times', 'ms CPU a second']),
  /** What stands beside ours, if it was measured. */
  beside: z.string().optional(),
  other: z.number().optional(),
  ours: z.number(),
  /** `times`: ours is to be this many times better; `below` and `most` are about our figure alone. */
  target: z.object({ kind: z.enum(['times', 'below', 'most']), value: z.number() }).optional(),
  /** How often each was measured, ours first. */
  rounds: z.tuple([z.number(), z.number()]),
});
export type Row = Readonly<z.infer<typeof row>>;

/** What a stage hands to the report: its rows, and Markdown for what rows cannot say. */
export const findings = z.object({ rows: z.array(row), text: z.array(z.string()) });
export type Findings = { readonly rows: readonly Row[]; readonly text: readonly string[] };

export function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  const low = sorted[Math.floor((sorted.length - 1) / 2)];
  const high = sorted[Math.ceil((sorted.length - 1) / 2)];
  if (low === undefined || high === undefined) throw new Error('the median of nothing');
  return (low + high) / 2;
}

export type Pairs<T> = { readonly ours: readonly T[]; readonly other: readonly T[] };

/** Runs both in each round. A first round that does not count warms the caches, unless it would take too long. */
export function pairs<T>(
  rounds: number,
  sides: { readonly ours: () => T; readonly other: () => T },
  { warmUp = true }: { readonly warmUp?: boolean } = {},
): Pairs<T> {
  if (warmUp) pairs(1, sides, { warmUp: false });
  const [ours, other]: [T[], T[]] = [[], []];
  for (let round = 0; round < rounds; round += 1) {
    if (round % 2 === 0) {
      other.push(sides.other());
      ours.push(sides.ours());
    } else {
      ours.push(sides.ours());
      other.push(sides.other());
    }
  }
  return { ours, other };
}
