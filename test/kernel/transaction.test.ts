// What a call costs the node: which programs it runs and how often it takes the xtables lock, seen from outside with
// strace. A call's changes to a family are one transaction, so the counts may not depend on how much it changes.
import { readFile } from 'node:fs/promises';
import { beforeAll, beforeEach, expect, test } from 'vitest';
import { addresses, netconf, type Netconf, type PortMapping, type Verb } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

/** One mapping of each protocol that has something special, or `count` of them. */
const mappings = (count: number): PortMapping[] =>
  Array.from({ length: count }, (_, index) => ({
    hostPort: 20_000 + index,
    containerPort: 1_000 + index,
    protocol: ['tcp', 'udp', 'sctp'][index % 3] ?? 'tcp',
  }));

type Trace = {
  /** The programs that were started, by name, in order; the plugin itself is not among them. */
  readonly programs: readonly string[];
  /** How often the xtables lock was asked for, and how often it was got. */
  readonly asked: number;
  readonly taken: number;
  readonly text: string;
};

function readTrace(text: string): Trace {
  const unfinished = new Map<string, string>();
  const calls = text.split('\n').flatMap((line) => {
    const [, pid = '', call = ''] = /^(\d+) +(.*)$/.exec(line) ?? [];
    if (call.endsWith('<unfinished ...>')) {
      unfinished.set(pid, call.replace(/<unfinished \.\.\.>$/, ''));
      return [];
    }
    const rest = /^<\.\.\. \w+ resumed>(.*)$/.exec(call)?.[1];
    return [rest === undefined ? call : `${unfinished.get(pid) ?? ''}${rest}`];
  });
  const locks = calls.filter((call) => /^flock\(\d+<[^>]*xtables[^>]*>, LOCK_EX/.test(call));
  return {
    programs: calls
      .flatMap((call) => /^execve\("(?:[^"]*\/)?([^"/]+)".* = 0$/.exec(call)?.[1] ?? [])
      .slice(1),
    asked: locks.length,
    taken: locks.filter((call) => call.endsWith(' = 0')).length,
    text,
  };
}

describeVariants({ isKept: true }, ({ variant, node, c1, c2 }) => {
  beforeAll(async () => {
    // A node that has had its first sandbox, so that every case finds the shared chains.
    const conf = netconf(c2, mappings(2));
    await node.expectPlugin('ADD', conf, c2);
    await node.expectPlugin('DEL', conf, c2);
  });
  beforeEach(async () => {
    await node.expectPlugin('DEL', netconf(c1, mappings(1)), c1);
  });

  const trace = async (verb: Verb, conf: Netconf, target = c1): Promise<Trace> => {
    const file = '/run/trace';
    await node.expectPlugin(verb, conf, target, {
      under: ['/usr/bin/strace', '-f', '-y', '-qq', '-s', '256', '-e', 'trace=execve,flock', '-o', file],
    });
    return readTrace(await readFile(`${node.root}${file}`, 'utf8'));
  };
  const onlyV4 = (conf: Netconf): Netconf => ({
    ...conf,
    prevResult: {
      cniVersion: '1.0.0',
      ips: [{ address: `${c1.v4}/16`, gateway: addresses.bridge.v4 }],
    },
  });
  const counts = async (conf: Netconf): Promise<Record<string, number>> => {
    const add = await trace('ADD', conf);
    const check = await trace('CHECK', conf);
    const del = await trace('DEL', conf);
    return { add: add.programs.length, check: check.programs.length, del: del.programs.length };
  };
  const perFamily = variant === 'legacy' ? 1 : 0;

  test('ADD and DEL take the xtables lock once for each family they change', async () => {
    const conf = netconf(c1, mappings(40));
    const add = await trace('ADD', conf);
    const again = await trace('ADD', netconf(c1, mappings(20)));
    const del = await trace('DEL', conf);
    expect([add.asked, add.taken], add.text).toEqual([2 * perFamily, 2 * perFamily]);
    expect([again.asked, again.taken], again.text).toEqual([2 * perFamily, 2 * perFamily]);
    expect([del.asked, del.taken], del.text).toEqual([2 * perFamily, 2 * perFamily]);
  });

  test('a family that a sandbox does not use is left alone', async () => {
    const conf = onlyV4(netconf(c1, mappings(3)));
    const before = await node.rules('v6');
    const add = await trace('ADD', conf);
    const del = await trace('DEL', conf);
    expect([add.taken, del.taken], add.text + del.text).toEqual([perFamily, perFamily]);
    expect(add.programs.filter((program) => program.startsWith('ip6tables'))).toEqual([]);
    expect(await node.rules('v6')).toBe(before);
  });

  test('a DEL of what is gone, and a CHECK, take no lock and change nothing', async () => {
    const conf = netconf(c1, mappings(3));
    const gone = await trace('DEL', conf);
    await node.expectPlugin('ADD', conf, c1);
    const before = await node.allRules();
    const check = await trace('CHECK', conf);
    const same = await trace('CHECK', conf);
    for (const call of [gone, check, same]) expect(call.asked, call.text).toBe(0);
    expect(await node.allRules()).toBe(before);
  });

  test('without mappings no program is run: ADD, CHECK, and DEL of a sandbox that never had any', async () => {
    const conf = netconf(c1, []);
    for (const verb of ['ADD', 'CHECK', 'DEL'] as const) {
      const { programs, asked, text } = await trace(verb, conf);
      expect(programs, text).toEqual([]);
      expect(asked, text).toBe(0);
    }
    const bare = await trace('DEL', { cniVersion: '1.0.0', name: 'lab', type: 'portmap' });
    expect(bare.programs, bare.text).toEqual([]);
  });

  test('a family costs one run that reads and writes, and one look at the flows for each protocol without a handshake', async () => {
    const tcp = [{ hostPort: 8080, containerPort: 80, protocol: 'tcp' }];
    // One family alone can have the xtables lock while the plan is made.
    const both = variant === 'legacy' ? 3 : 2;
    expect(await counts(onlyV4(netconf(c1, tcp)))).toEqual({ add: 1, check: 1, del: 1 });
    expect(await counts(netconf(c1, tcp))).toEqual({ add: both, check: 2, del: both });
    // tcp, udp and sctp: two protocols with flows, in two families.
    expect(await counts(netconf(c1, mappings(3)))).toEqual({ add: both + 4, check: 2, del: both + 4 });
  });

  test('where iptables-restore is a script, which may want all of its input first, it reads and writes apart', async () => {
    for (const tool of ['iptables-restore', 'ip6tables-restore'])
      await node.wrapTool(tool, 'text=$(cat); printf "%s\\n" "$text" | $REAL "$@"');
    const add = await trace('ADD', netconf(c1, mappings(1)));
    const del = await trace('DEL', netconf(c1, mappings(1)));
    for (const tool of ['iptables-restore', 'ip6tables-restore']) await node.unwrapTool(tool);
    for (const { programs, text } of [add, del])
      expect(programs.filter((program) => program.endsWith('-restore')).length, text).toBeGreaterThanOrEqual(
        4,
      );
    expect(await node.allRules()).not.toContain('CNI-DN-');
  });

  test('a thousand mappings run the same programs as three, and are added within a second', async () => {
    const programs = async (verb: Verb, conf: Netconf): Promise<readonly string[]> => {
      await node.expectPlugin(verb === 'ADD' ? 'DEL' : 'ADD', conf, c1);
      // Those of the two families start side by side.
      return (await trace(verb, conf)).programs.toSorted();
    };
    const [few, many] = [netconf(c1, mappings(3)), netconf(c1, mappings(999))];
    for (const verb of ['ADD', 'CHECK', 'DEL'] as const) {
      const expected = await programs(verb, few);
      expect(await programs(verb, many), verb).toEqual(expected);
    }
    // CPU time, its own and its children's: what others do on the machine meanwhile must not decide.
    const { stderr } = await node.expectPlugin('ADD', many, c1, {
      under: ['/bin/bash', '-c', 'TIMEFORMAT="%U %S"; time "$0"'],
    });
    const [user = Number.NaN, system = Number.NaN] = (stderr.trim().split('\n').at(-1) ?? '')
      .split(' ')
      .map(Number);
    expect(user + system, stderr).toBeLessThan(1);
    expect((await node.rules('v6')).match(/-j DNAT/g)).toHaveLength(999);
  });

  test('the tables of the other variant are looked into but not brought into being', async () => {
    const look =
      variant === 'legacy' ? 'nft list ruleset' : 'cat /proc/net/ip_tables_names /proc/net/ip6_tables_names';
    const before = await node.sh(look);
    const conf = netconf(c1, mappings(3));
    for (const verb of ['ADD', 'CHECK', 'DEL', 'DEL'] as const) await node.expectPlugin(verb, conf, c1);
    expect(before).toBe('');
    expect(await node.sh(look)).toBe('');
  });
});
