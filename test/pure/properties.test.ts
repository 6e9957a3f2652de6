// Properties of the plan that hold for every request and every table: what a transaction does to a nat table in
// memory, and what it leaves alone.
import * as fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { families } from '../../src/address.ts';
import {
  dispatchChain,
  dispatchJump,
  mappingsOf,
  quote,
  sandboxHash,
  sandboxPrefix,
  sandboxRules,
} from '../../src/chain.ts';
import { invertTransaction, renderTransaction, targetOf as jumpOf } from '../../src/restore.ts';
import { add, calls, foreignTable, joined, twoAdds } from './arbitraries.ts';
import {
  type Call,
  emptyNode,
  type Node,
  observe,
  perform,
  plan,
  print,
  readConf,
  targetOf,
} from './node.ts';
import { emptyTable, type NatTable, restore, save, tokenize } from './ruleset.ts';

const node = fc
  .record({ ipv4: foreignTable('ipv4'), ipv6: foreignTable('ipv6') })
  .map((tables): Node => ({ tables, records: new Map() }));
const asDel = (call: Call): Call => ({ ...call, verb: 'DEL' });
const chainOf = (call: Call) =>
  `${sandboxPrefix}${sandboxHash(String(call.netconf['name']), call.containerId)}`;
const linesTo = (table: NatTable, chain: string) =>
  (table.get(dispatchChain) ?? []).filter((rule) => jumpOf(rule) === chain);
const rulesOf = (state: Node, call: Call) =>
  families.map((family) => ({
    chain: state.tables[family].get(chainOf(call)),
    lines: linesTo(state.tables[family], chainOf(call)),
  }));

// The table without what the plugin shares among sandboxes and never removes.
function withoutShared(state: Node): string[] {
  return families.map((family) =>
    save(state.tables[family])
      .split('\n')
      .filter((line) => !/CNI-HOSTPORT-(?:MASQ|SETMARK)|-j CNI-HOSTPORT-DNAT|^:CNI-HOSTPORT-DNAT /.test(line))
      .join('\n'),
  );
}

describe('the text of a transaction', () => {
  test('what ADD writes is read back, word for word, as what was wanted', () => {
    fc.assert(
      fc.property(add, node, (call, before) => {
        const after = perform(before, [call]);
        for (const family of families) {
          const { attachment } = readConf(call.netconf);
          const wanted = sandboxRules(family, String(call.netconf['name']), call.containerId, [attachment]);
          const seen = observe(after.tables[family], [dispatchChain, chainOf(call)]);
          expect(seen.chains.get(chainOf(call))).toEqual(wanted?.chain.rules);
          expect(linesTo(seen.chains, chainOf(call))).toEqual(wanted?.dispatch ?? []);
          for (const mark of wanted?.marks ?? []) expect(seen.chains.get(mark.name)).toEqual(mark.rules);
        }
      }),
    );
  });

  test('a table is read the same from a save and from a listing, and printed again as it was', () => {
    fc.assert(
      fc.property(add, node, (call, before) => {
        const { tables } = perform(before, [call]);
        for (const family of families) {
          const asked = [...tables[family].keys()].filter((chain) => chain !== 'INPUT');
          const saved = observe(tables[family], [...asked, 'GONE']);
          const listed = observe(tables[family], [...asked, 'GONE'], true);
          for (const chain of asked) expect(listed.chains.get(chain)).toEqual(saved.chains.get(chain));
          expect([saved.absent, listed.absent]).toEqual([new Set(['GONE']), new Set(['GONE'])]);
          expect(save(saved.chains)).toBe(save(tables[family]));
        }
      }),
    );
  });

  test('any word without a line break stays one token, quotes and backslashes and all', () => {
    fc.assert(
      fc.property(
        fc.array(fc.string({ unit: 'grapheme', minLength: 1 }), { minLength: 1, maxLength: 5 }),
        fc.array(
          fc.string({ unit: fc.constantFrom('"', '\\', ' ', "'", '#', '-', '\t', 'a'), minLength: 1 }),
        ),
        (free, hostile) => {
          const words = [...free, ...hostile].map((word) => word.replaceAll(/[\0\r\n]/g, '_'));
          const tokens = tokenize(words.map(quote).join(' '));
          expect(tokens.map((token) => Buffer.from(token, 'latin1').toString('utf8'))).toEqual(words);
        },
      ),
      { numRuns: 500 },
    );
  });

  test('no list of ports is longer than fifteen, and none loses a port or gains one', () => {
    fc.assert(
      fc.property(add, (call) => {
        const { attachment } = readConf(call.netconf);
        for (const family of families) {
          const rules = sandboxRules(family, 'net', 'id', [attachment]);
          const led = (rules?.dispatch ?? []).flatMap((line) => {
            const [, protocol = '', ports = ''] = /-p (\S+) .* --dports (\S+) /.exec(line) ?? [];
            expect(ports.split(',').length).toBeLessThanOrEqual(15);
            return ports.split(',').map((port) => `${port}/${protocol}`);
          });
          const meant = mappingsOf(family, attachment).map(
            ({ hostPort, protocol }) => `${hostPort}/${protocol}`,
          );
          expect(led.toSorted()).toEqual(meant.toSorted());
        }
      }),
    );
  });

  test('no chain has a name that iptables would refuse, and no line is longer than it reads', () => {
    fc.assert(
      fc.property(add, (call) => {
        const target = targetOf(call, 'missing');
        for (const family of families) {
          const text = renderTransaction(
            plan(family, emptyTable, target === undefined ? [] : [target]) ?? [],
          );
          for (const [, chain] of text.matchAll(/^(?::|-N )(\S+)/gm))
            expect(chain).toMatch(/^[A-Z][A-Za-z0-9-]{0,27}$/);
          for (const line of text.split('\n')) expect(line.length).toBeLessThan(10_239);
        }
      }),
    );
  });
});

describe('the effect of a transaction', () => {
  test('a repeated ADD changes nothing, and a repeated DEL has nothing to do', () => {
    fc.assert(
      fc.property(add, node, (call, before) => {
        const once = perform(before, [call]);
        expect(print(perform(once, [call]))).toEqual(print(once));
        const gone = perform(once, [asDel(call)]);
        const again = targetOf(asDel(call), 'missing');
        for (const family of families)
          expect(plan(family, gone.tables[family], again === undefined ? [] : [again])).toEqual([]);
      }),
    );
  });

  test('DEL takes back what ADD did and leaves every other line as it was', () => {
    fc.assert(
      fc.property(add, node, (call, before) => {
        const after = perform(perform(before, [call]), [asDel(call)]);
        expect(withoutShared(after)).toEqual(withoutShared(before));
        // Where the shared chains are there already, not a byte differs.
        expect(print(perform(perform(after, [call]), [asDel(call)]))).toEqual(print(after));
      }),
    );
  });

  test('ADD leaves the rules of every other sandbox and program as they were', () => {
    fc.assert(
      fc.property(twoAdds, node, ([one, other], before) => {
        const first = perform(before, [one]);
        const both = perform(first, [other]);
        expect(rulesOf(both, one)).toEqual(rulesOf(first, one));
        expect(withoutShared(perform(both, [asDel(other)]))).toEqual(withoutShared(first));
      }),
    );
  });

  test('an inverted transaction puts every byte of the table back', () => {
    fc.assert(
      fc.property(twoAdds, node, fc.boolean(), ([one, other], before, isDel) => {
        const full = perform(perform(before, [one]), [other]);
        const target = targetOf(
          isDel ? asDel(one) : { ...one, netconf: { ...other.netconf, name: one.netconf['name'] } },
          'missing',
        );
        for (const family of families)
          for (const table of [full.tables[family], before.tables[family]]) {
            const transaction = plan(family, table, target === undefined ? [] : [target]) ?? [];
            const after = restore(table, renderTransaction(transaction));
            const undone = restore(after, renderTransaction(invertTransaction(transaction)));
            expect(save(undone)).toBe(save(table));
          }
      }),
    );
  });

  test('it does not matter in which order two sandboxes come and go, or whether they come together', () => {
    fc.assert(
      fc.property(twoAdds, node, ([one, other], before) => {
        const forth = perform(perform(before, [one]), [other]);
        const back = perform(perform(before, [other]), [one]);
        const together = perform(before, [one, other]);
        for (const call of [one, other]) {
          expect(rulesOf(back, call)).toEqual(rulesOf(forth, call));
          expect(rulesOf(together, call)).toEqual(rulesOf(forth, call));
        }
        const gone = print(perform(perform(forth, [asDel(one)]), [asDel(other)]));
        expect(print(perform(perform(forth, [asDel(other)]), [asDel(one)]))).toEqual(gone);
        expect(print(perform(forth, [asDel(one), asDel(other)]))).toEqual(gone);
      }),
    );
  });

  test('an observation that leaves out chains nobody asked for leads to the same table', () => {
    fc.assert(
      fc.property(twoAdds, node, ([one, other], before) => {
        const full = perform(before, [one]);
        for (const batch of [[one], [other], [one, other], [asDel(one)], [asDel(one), other]])
          expect(print(perform(full, batch, true))).toEqual(print(perform(full, batch)));
      }),
      { numRuns: 40 },
    );
  });
});

describe('any sequence of calls', () => {
  test('the tables hold exactly what the live attachments need, newest first', () => {
    fc.assert(
      fc.property(calls, node, (sequence, before) => {
        let state = before;
        const live = new Map<string, Call[]>();
        for (const call of sequence) {
          state = perform(state, [call]);
          const others = (live.get(joined(call)) ?? []).filter(({ ifname }) => ifname !== call.ifname);
          live.set(joined(call), call.verb === 'ADD' ? [call, ...others] : others);
        }
        for (const family of families) {
          const table = state.tables[family];
          for (const [name, attached] of live) {
            const [newest] = attached;
            const wanted =
              newest === undefined
                ? undefined
                : sandboxRules(
                    family,
                    String(newest.netconf['name']),
                    newest.containerId,
                    attached.map(({ netconf, ifname }) => readConf(netconf, ifname).attachment),
                  );
            const chain = `${sandboxPrefix}${sandboxHash(name, '')}`;
            expect(table.get(chain), `${family}: ${save(table)}`).toEqual(wanted?.chain.rules);
            expect(linesTo(table, chain), `${family}: ${save(table)}`).toEqual(wanted?.dispatch ?? []);
            if (wanted === undefined) continue;
            for (const hook of ['PREROUTING', 'OUTPUT'])
              expect(table.get(hook)?.filter((rule) => rule === dispatchJump)).toHaveLength(1);
          }
          expect(linesTo(table, 'CNI-DN-0000000000000000000aa')).toEqual(
            linesTo(before.tables[family], 'CNI-DN-0000000000000000000aa'),
          );
        }
      }),
      { numRuns: 60 },
    );
  });

  test('of two sandboxes with one port the younger is asked first', () => {
    fc.assert(
      fc.property(twoAdds, ([older, younger]) => {
        const state = perform(perform(emptyNode, [older]), [younger]);
        for (const family of families) {
          const chains = (state.tables[family].get(dispatchChain) ?? []).map(jumpOf);
          const firstOfOlder = chains.indexOf(chainOf(older));
          if (firstOfOlder >= 0) expect(chains.lastIndexOf(chainOf(younger))).toBeLessThan(firstOfOlder);
        }
      }),
    );
  });
});
