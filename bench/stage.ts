// One stage of the benchmark, in one iptables variant. run.ts starts it in network, mount and process namespaces that
// are its own, so that no stage sees what another left; it prints its findings as JSON.
import * as z from 'zod';
import type { Findings } from './measure.ts';
import type { Options } from './plugin.ts';
import { dual, idle, mappings, single } from './single.ts';
import { memory, parallel, storm } from './storm.ts';
import { timeline } from './timeline.ts';

/** What there is to run, in the order of the report. */
export const stages = { single, dual, mappings, idle, storm, parallel, memory, timeline } satisfies Record<
  string,
  (options: Options) => Findings | Promise<Findings>
>;
export type StageName = keyof typeof stages;
export const stageNames = z.enum([
  'single',
  'dual',
  'mappings',
  'idle',
  'storm',
  'parallel',
  'memory',
  'timeline',
]);

const order = z.object({
  stage: stageNames,
  variant: z.enum(['nft', 'legacy']),
  quick: z.boolean(),
  ours: z.string(),
  upstream: z.string(),
  node: z.string(),
});
export type Order = z.infer<typeof order>;

if (import.meta.main) {
  const { stage, ...options } = order.parse(JSON.parse(process.argv[2] ?? ''));
  process.stdout.write(JSON.stringify(await stages[stage](options)));
}
