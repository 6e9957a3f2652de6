// The language of iptables-save and iptables-restore: what counts as read, and what a transaction stands or falls by.
import { describe, expect, test } from 'vitest';
import { dispatchChain } from '../../src/chain.ts';
import {
  planTransaction,
  renderListing,
  renderTransaction,
  rulesetReader,
  targetOf,
} from '../../src/restore.ts';
import { type Call, emptyNode, observe, perform, plan, targetOf as targetOfCall } from './node.ts';
import { emptyTable, restore, save } from './ruleset.ts';

const add = (containerId: string): Call => ({
  verb: 'ADD',
  containerId,
  ifname: 'eth0',
  netconf: {
    cniVersion: '1.0.0',
    name: 'podnet',
    runtimeConfig: { portMappings: [{ hostPort: 8080, containerPort: 80 }] },
    prevResult: { ips: [{ address: '10.1.0.5/16' }] },
  },
});
const textOf = (call: Call, table = emptyTable) => {
  const target = targetOfCall(call, 'missing');
  return renderTransaction(plan('ipv4', table, target === undefined ? [] : [target]) ?? []);
};

const read = (text: string, asked: readonly string[] = []) => {
  const reader = rulesetReader(new Set(asked));
  for (const line of text.split('\n')) reader.read(line);
  return { complete: reader.isComplete(), ...reader.ruleset(asked) };
};

describe('a read', () => {
  test('is complete with the header of the table and its COMMIT', () => {
    expect(read(save(emptyTable)).complete).toBe(true);
    expect(read('*nat\n:PREROUTING ACCEPT [5:6]\nCOMMIT\n').complete).toBe(true);
  });

  test.each([
    ['nothing', ''],
    [
      'the word that the table is incompatible (report R27)',
      "# Table `nat' is incompatible, use 'nft' tool.\n",
    ],
    ['a table that was cut off', '*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j X\n'],
    ['the end of a table without its beginning', ':PREROUTING ACCEPT [0:0]\nCOMMIT\n'],
    ['another table', '*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n'],
  ])('is not complete with %s', (_, text) => {
    expect(read(text).complete).toBe(false);
  });

  test('keeps the built-in chains, the plugin’s, and what was asked for, and no other', () => {
    const text =
      '*nat\n:OUTPUT ACCEPT [0:0]\n:KUBE-SVC - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:CNI-DN-x - [0:0]\n-A OUTPUT -j KUBE-SVC\n-A KUBE-SVC -j RETURN\n-A CNI-DN-x -j RETURN\nCOMMIT\n';
    const { chains, absent } = read(text, ['KUBE-MARK-MASQ', 'GONE']);
    expect(Object.fromEntries(chains)).toEqual({
      OUTPUT: ['-j KUBE-SVC'],
      'KUBE-MARK-MASQ': [],
      'CNI-DN-x': ['-j RETURN'],
    });
    expect([...absent]).toEqual(['GONE']);
  });

  test('takes a rule without a match or a target', () => {
    expect(read('-N CNI-DN-x\n-A CNI-DN-x').chains.get('CNI-DN-x')).toEqual(['']);
  });

  test('asks for chains with a transaction that changes nothing', () => {
    expect(renderListing(['PREROUTING', dispatchChain])).toBe(
      `*nat\n-S PREROUTING\n-S ${dispatchChain}\nCOMMIT\n`,
    );
  });
});

test.each([
  ['-j X', 'X'],
  ['-p tcp -j CNI-DN-x', 'CNI-DN-x'],
  ['-p tcp -j DNAT --to-destination 10.1.0.5:80', 'DNAT'],
  [String.raw`-m comment --comment "a -j B \" -j C " -j D`, 'D'],
  [String.raw`-m comment --comment "ends in a backslash \\" -j D`, 'D'],
  ['-m comment --comment "-j B"', ''],
  ['-m comment --comment x-j -p tcp', ''],
  ['', ''],
])('the rule %j jumps to %j', (rule, target) => {
  expect(targetOf(rule)).toBe(target);
});

describe('a transaction is refused as a whole when the table has changed since it was planned', () => {
  test('because another call has made the dispatch chain', () => {
    const { tables } = perform(emptyNode, [add('web-1')]);
    expect(() => restore(tables.ipv4, textOf(add('db-1')))).toThrow('the chain exists: -N CNI-HOSTPORT-DNAT');
  });

  test('because a line that it deletes has gone', () => {
    const { tables } = perform(emptyNode, [add('web-1')]);
    const del = textOf({ ...add('web-1'), verb: 'DEL' }, tables.ipv4);
    const gone = restore(tables.ipv4, del);
    expect(() => restore(gone, del)).toThrow('no such rule: -D CNI-HOSTPORT-DNAT');
  });

  test('because someone else has come to lead to a chain that it removes', () => {
    const { tables } = perform(emptyNode, [add('web-1')]);
    const del = textOf({ ...add('web-1'), verb: 'DEL' }, tables.ipv4);
    const chain = [...tables.ipv4.keys()].find((name) => name.startsWith('CNI-DN-'));
    const used = restore(tables.ipv4, `*nat\n-A OUTPUT -p tcp -j ${chain}\nCOMMIT\n`);
    expect(() => restore(used, del)).toThrow('the chain is in use');
  });
});

test('a chain that was not looked at is neither taken for absent nor for empty', () => {
  const unknown = { chains: new Map(), absent: new Set<string>() };
  const absent = { chains: new Map(), absent: new Set(['CNI-DN-x']) };
  expect(renderTransaction(planTransaction(unknown, [{ chain: 'CNI-DN-x' }]))).toContain('-X CNI-DN-x');
  expect(planTransaction(absent, [{ chain: 'CNI-DN-x' }])).toEqual([]);
});

test('what was there is not made again, and other jumps do not count for it', () => {
  const text =
    '*nat\n:CNI-HOSTPORT-DNAT - [0:0]\n-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT\n-A OUTPUT ! -d 127.0.0.0/8 -j CNI-HOSTPORT-DNAT\nCOMMIT\n';
  const table = restore(emptyTable, text);
  const after = restore(table, textOf(add('web-1'), table));
  expect(after.get('PREROUTING')).toHaveLength(1);
  expect(after.get('OUTPUT')).toEqual([
    '! -d 127.0.0.0/8 -j CNI-HOSTPORT-DNAT',
    '-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT',
  ]);
  expect(observe(after, []).chains.get(dispatchChain)).toHaveLength(1);
});
