// A node without a kernel: the two nat tables and the records that calls leave behind, brought from one state to the
// next by the plugin's own pure functions, as the commit queue does it: target, observation, plan, text.
import { families, type Family } from '../../src/address.ts';
import { dispatchChain } from '../../src/chain.ts';
import { type NetConf, readNetConf } from '../../src/netconf.ts';
import { readJson, readName, readVersion } from '../../src/network.ts';
import type { Request } from '../../src/queue.ts';
import type { SandboxRecord } from '../../src/record.ts';
import {
  planTransaction,
  renderTransaction,
  type Ruleset,
  rulesetReader,
  type Transaction,
} from '../../src/restore.ts';
import {
  tableKey,
  tablesOfTarget,
  type Target,
  targetOfRecord,
  targetOfRequest,
  wantedOf,
} from '../../src/target.ts';
import { emptyTable, list, type NatTable, restore, save } from './ruleset.ts';

/** A netconf as a runtime writes it. */
export type Netconf = Readonly<Record<string, unknown>>;

/** One call of the plugin. */
export type Call = {
  readonly verb: 'ADD' | 'DEL';
  readonly containerId: string;
  readonly ifname: string;
  readonly netconf: Netconf;
};

/** What a node holds. */
export type Node = {
  readonly tables: Readonly<Record<Family, NatTable>>;
  readonly records: ReadonlyMap<string, SandboxRecord>;
};

export const emptyNode: Node = { tables: { ipv4: emptyTable, ipv6: emptyTable }, records: new Map() };

/** Reads a netconf as ADD and CHECK do it. */
export function readConf(netconf: Netconf, ifname = 'eth0'): NetConf {
  const raw = readJson(JSON.stringify(netconf));
  return readNetConf({ name: readName(raw), cniVersion: readVersion(raw), raw }, ifname);
}

/** What a call wants of the nft tables, given the record of its sandbox. */
export function targetOf(call: Call, record: SandboxRecord | 'missing' | 'unknown'): Target | undefined {
  const { verb, containerId, ifname, netconf } = call;
  const network = readName(readJson(JSON.stringify(netconf)));
  const change: Request['change'] =
    verb === 'DEL'
      ? { verb, ifname }
      : {
          verb,
          attachment: {
            ifname,
            netns: `/run/netns/${containerId}`,
            config: readConf(netconf, ifname).attachment,
          },
          onConflict: 'warn',
        };
  return targetOfRequest({ network, containerId, token: 'test', order: 0, change }, record, 'nft');
}

/** The record that ADDs of one sandbox leave, one after the other. */
export function recordOf(calls: readonly Call[]): SandboxRecord | 'missing' {
  return calls.reduce<SandboxRecord | 'missing'>(
    (record, call) => targetOf(call, record)?.after ?? 'missing',
    'missing',
  );
}

/** The target that removes another sandbox, as it is done with a dead owner of a wanted port. */
export function eviction(record: SandboxRecord): Target {
  return targetOfRecord(record, false, record.variant);
}

/** What of a save the plugin keeps; with `only`, what a listing of the built-in chains and those chains gives it. */
export function observe(table: NatTable, asked: readonly string[], only = false): Ruleset {
  const reader = rulesetReader(new Set(asked));
  const chains = ['PREROUTING', 'OUTPUT', 'POSTROUTING', ...asked];
  const lines = only ? chains.flatMap((chain) => list(table, chain)) : save(table).split('\n');
  for (const line of lines) reader.read(line);
  return reader.ruleset(asked);
}

/** The transaction that targets come to in one family; undefined when they do not touch its table. */
export function plan(
  family: Family,
  table: NatTable,
  targets: readonly Target[],
  only = false,
): Transaction | undefined {
  const place = { variant: 'nft', family } as const;
  const wanted = targets
    .filter((target) => tablesOfTarget(target).some((other) => tableKey(other) === tableKey(place)))
    .map((target) => wantedOf(target, place));
  if (wanted.length === 0) return undefined;
  const own = targets.length === 1 ? wanted.map(({ chain }) => chain) : [];
  const rules = wanted.flatMap((one) => one.rules ?? []);
  const shared = rules.flatMap(({ marks, external }) => [...marks.map(({ name }) => name), ...external]);
  const asked = [dispatchChain, ...shared, ...own];
  return planTransaction(observe(table, [...new Set(asked)], only), wanted);
}

/** The node after calls of different sandboxes that are committed together. */
export function perform(node: Node, calls: readonly Call[], only = false): Node {
  const targets = calls.flatMap((call) => {
    const before = [...node.records.values()].find(
      (record) => record.containerId === call.containerId && record.network === call.netconf['name'],
    );
    return targetOf(call, before ?? 'missing') ?? [];
  });
  const records = new Map(node.records);
  for (const { hash, after } of targets)
    if (after === undefined) records.delete(hash);
    else records.set(hash, after);
  const tables = { ...node.tables };
  for (const family of families) {
    const transaction = plan(family, node.tables[family], targets, only) ?? [];
    if (transaction.length > 0) tables[family] = restore(node.tables[family], renderTransaction(transaction));
  }
  return { tables, records };
}

/** Both tables as text, to compare byte for byte. */
export function print(node: Node): Record<Family, string> {
  return { ipv4: save(node.tables.ipv4), ipv6: save(node.tables.ipv6) };
}
