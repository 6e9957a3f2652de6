// The golden cases: one call each, and what it must come to. A folder of cases/ holds
//
//   conf.json                     the call; earlier ADDs of the same sandbox under `recorded`, of dead owners under `dead`
//   before.v4.save, .v6.save      the table as iptables-save printed it; without the file, it is empty
//   plan.v4.restore, .v6.restore  the transaction; without the file, there is nothing to do in this family
//   error.json                    how the call is refused
//
// To add a case, write its conf.json and run the pure tests: they write the rest, fail once, and pass when that was
// read and kept. A change to a golden file needs a reason in its commit.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import * as z from 'zod/mini';
import type { Family } from '../../src/address.ts';
import type { Transaction } from '../../src/restore.ts';
import type { Target } from '../../src/target.ts';
import { eviction, plan, recordOf, targetOf } from './node.ts';
import { emptyTable, type NatTable, restore } from './ruleset.ts';

const callSchema = z.object({
  verb: z.enum(['ADD', 'DEL']),
  containerId: z.string(),
  ifname: z.string(),
  netconf: z.record(z.string(), z.unknown()),
});
const caseSchema = z.extend(callSchema, {
  title: z.string(),
  recorded: z._default(z.array(callSchema), []),
  dead: z._default(z.array(callSchema), []),
});

/** One golden case. */
export type Case = {
  readonly title: string;
  /** The golden files that were there when the tests began. */
  readonly golden: readonly string[];
  readonly path: (file: string) => string;
  readonly tableBefore: (family: Family) => NatTable;
  /** What the call comes to on a table. Throws how it is refused. */
  readonly transaction: (family: Family, table: NatTable) => Transaction;
};

const folder = new URL('cases/', import.meta.url);

export const caseNames: readonly string[] = readdirSync(folder);
export const shortNames = { ipv4: 'v4', ipv6: 'v6' } as const satisfies Record<Family, string>;

export function openCase(name: string): Case {
  const path = (file: string) => fileURLToPath(new URL(`${name}/${file}`, folder));
  const conf = z.parse(caseSchema, JSON.parse(readFileSync(path('conf.json'), 'utf8')));
  const targets = (): Target[] => {
    const own = targetOf(conf, recordOf(conf.recorded));
    const evicted = conf.dead.flatMap((call) => {
      const record = recordOf([call]);
      return record === 'missing' ? [] : [eviction(record)];
    });
    return [...(own === undefined ? [] : [own]), ...evicted];
  };
  return {
    title: conf.title,
    golden: readdirSync(path('.'))
      .filter((file) => /^(?:plan|error)\./.test(file))
      .toSorted(),
    path,
    tableBefore: (family) => {
      const file = path(`before.${shortNames[family]}.save`);
      return existsSync(file) ? restore(emptyTable, readFileSync(file, 'utf8')) : emptyTable;
    },
    transaction: (family, table) => plan(family, table, targets()) ?? [],
  };
}
