// Golden transactions. A folder of cases/ holds one call and what it must come to:
//
//   conf.json                     the call; earlier ADDs of the same sandbox under `recorded`, of dead owners under `dead`
//   before.v4.save, .v6.save      the table as iptables-save printed it; without the file, it is empty
//   plan.v4.restore, .v6.restore  the transaction; without the file, there is nothing to do in this family
//   error.json                    how the call is refused
//
// To add a case, write its conf.json and run the test: it writes the rest, fails once, and passes when that was read
// and kept. A change to a golden file needs a reason in its commit.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import * as z from 'zod/mini';
import { families, type Family } from '../../src/address.ts';
import { cniCodes, PortmapError } from '../../src/errors.ts';
import { renderTransaction } from '../../src/restore.ts';
import { eviction, plan, recordOf, targetOf } from './node.ts';
import { emptyTable, type NatTable, restore, save } from './ruleset.ts';

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
type Case = z.infer<typeof caseSchema>;

const folder = new URL('cases/', import.meta.url);
const names = readdirSync(folder);
const shortNames = { ipv4: 'v4', ipv6: 'v6' } as const satisfies Record<Family, string>;

test('there are cases', () => {
  expect(names.length).toBeGreaterThanOrEqual(50);
});

describe.each(names)('%s', (name) => {
  const place = new URL(`${name}/`, folder);
  const conf = z.parse(caseSchema, JSON.parse(readFileSync(new URL('conf.json', place), 'utf8')));
  const kept = readdirSync(place)
    .filter((file) => /^(?:plan|error)\./.test(file))
    .toSorted();

  test(conf.title, async () => {
    const outputs = outcome(place, conf);
    for (const [file, text] of outputs)
      await expect(text, `${name}/${file}`).toMatchFileSnapshot(new URL(file, place).pathname);
    expect(kept, 'files of the case; what was missing is written now').toEqual(
      [...outputs.keys()].toSorted(),
    );
  });

  test('iptables would take the transaction, and a repeated call changes nothing', () => {
    if (kept.includes('error.json')) return expect(() => targets(conf)).toThrow(PortmapError);
    for (const family of families) {
      const before = tableBefore(place, family);
      const once = restore(before, renderTransaction(plan(family, before, targets(conf)) ?? []));
      const twice = restore(once, renderTransaction(plan(family, once, targets(conf)) ?? []));
      expect(save(twice)).toBe(save(once));
    }
  });
});

function outcome(place: URL, conf: Case): Map<string, string> {
  const outputs = new Map<string, string>();
  try {
    for (const family of families) {
      const transaction = plan(family, tableBefore(place, family), targets(conf)) ?? [];
      if (transaction.length > 0)
        outputs.set(`plan.${shortNames[family]}.restore`, renderTransaction(transaction));
    }
  } catch (error) {
    if (!(error instanceof PortmapError)) throw error;
    const { code, message, details } = error;
    const body = { code, cniCode: cniCodes[code], message, details };
    return new Map([['error.json', `${JSON.stringify(body, null, 2)}\n`]]);
  }
  return outputs;
}

function targets(conf: Case) {
  const own = targetOf(conf, recordOf(conf.recorded));
  const evicted = conf.dead.flatMap((call) => {
    const record = recordOf([call]);
    return record === 'missing' ? [] : [eviction(record)];
  });
  return [...(own === undefined ? [] : [own]), ...evicted];
}

function tableBefore(place: URL, family: Family): NatTable {
  const file = new URL(`before.${shortNames[family]}.save`, place);
  return existsSync(file) ? restore(emptyTable, readFileSync(file, 'utf8')) : emptyTable;
}
