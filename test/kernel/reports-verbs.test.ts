// Field reports, part C: CHECK that says what is, GC that cleans exactly its own, STATUS that costs nothing. Each test
// is named after its report; REPORTS.md lists them all.
import { describe, expect, test } from 'vitest';
import {
  bareConf,
  errorOf,
  fewerOnLegacy,
  forBoth,
  hidePrograms,
  holdXtablesLock,
  port,
  sandboxChain,
  stateFiles,
} from '../footprint.ts';
import {
  addresses,
  type Container,
  type LabNode,
  netconf,
  portmapBin,
  type Netconf,
  type PortMapping,
  prevResult,
  upstreamBin,
} from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const live = (container: { id: string }, ifname = 'eth0') => ({ containerID: container.id, ifname });

const twice = (...names: string[]): string[] => [...names, ...names].toSorted();

const attachedAs = (container: Container, ifname: string): Netconf => ({
  ...prevResult(container),
  interfaces: [{ name: 'cni0' }, { name: 'veth0' }, { name: ifname, sandbox: container.netns }],
});

const chains = async (node: LabNode): Promise<string[]> => {
  const found = [...(await node.allRules()).matchAll(/^:(CNI-DN-\S+)/gm)].map(([, name = '']) => name);
  return found.toSorted();
};

const status = (node: LabNode) =>
  node.plugin('STATUS', { ...bareConf, cniVersion: '1.1.0' }, { id: '', netns: '' }, { ifname: '' });

describeVariants({}, ({ variant, node, c1, c2 }) => {
  const chain = () => sandboxChain('lab', c1.id);

  const damages: { title: string; script: () => string; named: () => string }[] = [
    { title: 'PREROUTING is flushed', script: () => forBoth('$t -F PREROUTING'), named: () => 'PREROUTING' },
    { title: 'OUTPUT is flushed', script: () => forBoth('$t -F OUTPUT'), named: () => 'OUTPUT' },
    {
      title: 'POSTROUTING is flushed in IPv6',
      script: () => 'ip6tables -t nat -F POSTROUTING',
      named: () => 'ipv6: POSTROUTING',
    },
    {
      title: 'the masquerade chain is empty',
      script: () => forBoth('$t -F CNI-HOSTPORT-MASQ'),
      named: () => 'CNI-HOSTPORT-MASQ',
    },
    {
      title: 'the mark chain is empty',
      script: () => forBoth('$t -F CNI-HOSTPORT-SETMARK'),
      named: () => 'CNI-HOSTPORT-SETMARK',
    },
    {
      title: 'the mark chain sets another bit',
      script: () =>
        forBoth('$t -F CNI-HOSTPORT-SETMARK; $t -A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x4/0x4'),
      named: () => 'CNI-HOSTPORT-SETMARK',
    },
    {
      title: 'somebody else takes the port first',
      script: () =>
        'iptables -t nat -I CNI-HOSTPORT-DNAT -p tcp --dport 8080 -j DNAT --to-destination 10.1.0.9:80',
      named: () => '8080',
    },
    {
      title: 'somebody else takes a range of ports first',
      script: () => 'iptables -t nat -I CNI-HOSTPORT-DNAT -p tcp --dport 8000:9000 -j RETURN',
      named: () => '8000:9000',
    },
    {
      title: 'the dispatch chain is empty',
      script: () => forBoth('$t -F CNI-HOSTPORT-DNAT'),
      named: () => '8080/tcp',
    },
    {
      title: "the sandbox's chain is empty",
      script: () => `ip6tables -t nat -F ${chain()}`,
      named: () => chain(),
    },
    {
      title: 'the old address is in front',
      script: () =>
        `iptables -t nat -I ${chain()} -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.77:80`,
      named: () => '10.1.0.77',
    },
    {
      title: 'the rules of the chain are in another order',
      script: () =>
        `iptables -t nat -S ${chain()} 1 > /run/first; iptables -t nat -D ${chain()} 1; iptables -t nat $(cat /run/first)`,
      named: () => 'order',
    },
    {
      title: "one of the sandbox's ports is dispatched no more",
      script: () =>
        `iptables -t nat -S CNI-HOSTPORT-DNAT | grep -- '-p udp' | sed -e '1i *nat' -e 's/^-A/-D/' -e '$a COMMIT' | iptables-restore --noflush`,
      named: () => '5300/udp',
    },
    {
      title: 'a masquerade of the bridge plugin comes first',
      script: () =>
        `iptables -t nat -N CNI-0123456789abcdef01234567; iptables -t nat -I POSTROUTING -s 10.1.0.2/32 -j CNI-0123456789abcdef01234567`,
      named: () => 'POSTROUTING',
    },
  ];

  test.each(damages)('R18: CHECK fails and names the piece when $title', async ({ script, named }) => {
    const conf = netconf(c1, [port(8080), port(5300, 'udp')]);
    await node.expectPlugin('ADD', conf, c1);
    await node.sh(script());
    const rules = await node.allRules();
    const files = await stateFiles(node);
    const error = errorOf(await node.plugin('CHECK', conf, c1));
    const after = await node.allRules();
    expect(error.code, error.msg).toBeGreaterThanOrEqual(100);
    expect(error.msg, rules).toContain(named());
    expect(after, 'CHECK is read-only').toBe(rules);
    expect(await stateFiles(node)).toEqual(files);
  });

  test('R18: CHECK fails when the container has another address, port or protocol than was added', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const others = [
      netconf({ ...c1, v4: '10.1.0.77' }, [port(8080)]),
      netconf(c1, [port(8081)]),
      netconf(c1, [port(8080, 'udp')]),
      netconf(c1, [{ hostPort: 8080, containerPort: 81 }]),
      netconf(c1, [port(8080, 'tcp', addresses.node.v4)]),
    ];
    for (const conf of others) {
      const error = errorOf(await node.plugin('CHECK', conf, c1));
      expect(error.code, JSON.stringify(conf)).toBeGreaterThanOrEqual(100);
    }
  });

  type Correct = {
    readonly title: string;
    readonly mappings: readonly PortMapping[];
    readonly options?: Netconf;
    readonly family?: 'v4' | 'v6';
  };
  const { node: own } = addresses;
  const correct: Correct[] = [
    { title: 'IPv4 only', mappings: [port(8080)], family: 'v4' },
    { title: 'IPv6 only', mappings: [port(8080)], family: 'v6' },
    {
      title: 'a host address of the family the sandbox does not have',
      mappings: [port(8080, 'tcp', '::'), port(8081)],
      family: 'v4',
    },
    {
      title: 'no mapping that the sandbox has a family for',
      mappings: [port(8080, 'tcp', own.v6)],
      family: 'v4',
    },
    { title: 'a protocol in capitals', mappings: [port(8080, 'TCP'), port(5300, 'Udp'), port(9999, 'SCTP')] },
    { title: 'an address with host bits', mappings: [port(8080, 'tcp', own.v6), port(8080, 'tcp', own.v4)] },
    {
      title: 'a comma list in a condition',
      mappings: [port(8080)],
      options: { conditionsV4: ['-d', `${own.v4},127.0.0.1`] },
    },
    {
      title: 'a negated condition',
      mappings: [port(8080)],
      options: { conditionsV4: ['!', '-s', '192.0.2.9/24'], conditionsV6: ['!', '-d', '2001:DB8:9::/48'] },
    },
    {
      title: 'a condition with its long name',
      mappings: [port(8080)],
      options: { conditionsV4: ['--source', '0.0.0.0/0', '--destination', '198.51.100.1/255.255.255.255'] },
    },
    {
      title: 'a condition with a match of its own',
      mappings: [port(8080)],
      options: {
        conditionsV4: ['-m', 'addrtype', '!', '--src-type', 'LOCAL'],
        conditionsV6: ['-i', 'ext0'],
      },
    },
    { title: 'snat off', mappings: [port(8080)], options: { snat: false } },
    { title: 'masqAll', mappings: [port(8080)], options: { masqAll: true } },
    { title: 'another mark bit', mappings: [port(8080)], options: { markMasqBit: 3 } },
    { title: 'forty ports', mappings: Array.from({ length: 40 }, (_, index) => port(9000 + index)) },
    { title: 'one port twice', mappings: [port(8080), port(8080)] },
  ];
  test.each(fewerOnLegacy(variant, correct, 6))(
    'R19: CHECK passes with $title',
    async ({ mappings, options, family }) => {
      const container = family === undefined ? c1 : { netns: c1.netns, [family]: c1[family] };
      const conf = netconf(container, mappings, options);
      await node.expectPlugin('ADD', conf, c1);
      await node.expectPlugin('CHECK', conf, c1);
      // Without what the plugin itself remembers.
      await node.sh('rm -rf /run/portmap');
      await node.expectPlugin('CHECK', conf, c1);
    },
  );

  describe('GC', () => {
    type Valid = readonly { readonly containerID: string; readonly ifname: string }[] | null | undefined;
    const key = 'cni.dev/valid-attachments';
    const gc = (valid: Valid, options: Netconf = {}) =>
      node.plugin(
        'GC',
        { ...bareConf, cniVersion: '1.1.0', [key]: valid, ...options },
        { id: '', netns: '' },
        { ifname: '' },
      );

    test.each([
      { title: 'by their records', forget: false },
      { title: 'by what the kernel holds', forget: true },
    ])('R20: removes the attachments of the network that are not listed ($title)', async ({ forget }) => {
      for (const [index, target] of [c1, c2, { ...c1, id: 'third' }].entries())
        await node.expectPlugin(
          'ADD',
          netconf(target, [port(8080 + index), port(5300 + index, 'udp')]),
          target,
        );
      await node.expectPlugin('ADD', netconf(c1, [port(8090)], { name: 'other' }), c1);
      if (forget) await node.sh('rm -r /run/portmap');
      const outcome = await gc([live(c2)]);
      expect(outcome).toEqual({ exitCode: 0, stdout: '', stderr: '' });
      expect(await chains(node)).toEqual(twice(sandboxChain('lab', c2.id), sandboxChain('other', c1.id)));
      await node.expectPlugin('CHECK', netconf(c2, [port(8081), port(5301, 'udp')]), c2);
      await node.expectPlugin('CHECK', netconf(c1, [port(8090)], { name: 'other' }), c1);
      if (!forget) expect(await stateFiles(node)).toHaveLength(2);
    });

    test("R20: removes upstream's leftovers of this network, and no other's", async () => {
      const confs = { lab: netconf(c1, [port(8080)]), other: netconf(c2, [port(8081)], { name: 'lab2' }) };
      await node.expectPlugin('ADD', confs.lab, c1, { bin: upstreamBin });
      await node.expectPlugin('ADD', confs.other, c2, { bin: upstreamBin });
      const outcome = await gc([]);
      expect(outcome).toEqual({ exitCode: 0, stdout: '', stderr: '' });
      expect(await chains(node)).toEqual(twice(sandboxChain('lab2', c2.id)));
    });

    test('R20: one attachment of a container goes and the other stays', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const second = { ...netconf(c1, [port(8081)]), prevResult: attachedAs(c1, 'net1') };
      await node.expectPlugin('ADD', second, c1, { ifname: 'net1' });
      expect(await gc([live(c1)])).toMatchObject({ exitCode: 0 });
      const rules = await node.allRules();
      expect(rules).not.toMatch(/--dports? [\d,]*8081/);
      await node.expectPlugin('CHECK', netconf(c1, [port(8080)]), c1);
    });

    test.each([
      { title: 'no list', options: {} },
      { title: 'a list that is text', options: { [key]: 'none' } },
      { title: 'an entry that is text', options: { [key]: ['c1'] } },
    ])('R20: with $title nothing is deleted, code 7', async ({ options }) => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const rules = await node.allRules();
      const error = errorOf(await gc(undefined, options));
      expect(error.code).toBe(7);
      expect(error.msg).toContain(key);
      expect(await node.allRules()).toBe(rules);
    });

    test.each([
      { title: 'a null list', options: { [key]: null } },
      { title: 'a null list under its old name', options: { 'cni.dev/attachments': null } },
      { title: 'an empty list', options: { [key]: [] } },
    ])('R20: $title means that nothing is alive', async ({ options }) => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      expect(await gc(undefined, options)).toMatchObject({ exitCode: 0 });
      expect(await chains(node)).toEqual([]);
      expect(await stateFiles(node)).toEqual([]);
    });

    test('R20: the list under its old name is read too', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      await node.expectPlugin('ADD', netconf(c2, [port(8081)]), c2);
      expect(await gc(undefined, { 'cni.dev/attachments': [live(c1)] })).toMatchObject({ exitCode: 0 });
      expect(await chains(node)).toEqual(twice(sandboxChain('lab', c1.id)));
    });

    test('R20: with nothing to remove it changes nothing and waits for no lock', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const rules = await node.allRules();
      const release = variant === 'legacy' ? await holdXtablesLock(node) : () => {};
      const outcome = await gc([live(c1)], { timeoutSeconds: 3 });
      release();
      expect(outcome).toEqual({ exitCode: 0, stdout: '', stderr: '' });
      expect(await node.allRules()).toBe(rules);
    });

    test('R20: a family that refuses is an error to repeat, and the repeat finds the rest', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      await node.wrapTool(
        'ip6tables-restore',
        'text=$(cat); case $text in *-X*) exit 4 ;; esac; printf "%s\\n" "$text" | exec $REAL "$@"',
      );
      const failed = errorOf(await gc([], { timeoutSeconds: 3 }));
      await node.unwrapTool('ip6tables-restore');
      const repeated = await gc([]);
      expect(failed.code, failed.msg).toBe(11);
      expect(repeated).toMatchObject({ exitCode: 0 });
      expect(await chains(node)).toEqual([]);
      expect(await stateFiles(node)).toEqual([]);
    });

    test('R20: GC and STATUS are refused below cniVersion 1.1.0, and delete nothing', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const rules = await node.allRules();
      expect(errorOf(await gc([], { cniVersion: '1.0.0' })).code).toBe(1);
      expect(errorOf(await node.plugin('STATUS', bareConf, c1)).code).toBe(1);
      expect(await node.allRules()).toBe(rules);
    });
  });

  describe('STATUS', () => {
    test('R20: STATUS is good on a fresh node, with mappings, and while the lock is kept; it changes nothing', async () => {
      const fresh = await status(node);
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const rules = await node.allRules();
      const release = variant === 'legacy' ? await holdXtablesLock(node) : () => {};
      const start = performance.now();
      const busy = await status(node);
      const took = performance.now() - start;
      release();
      for (const outcome of [fresh, busy]) expect(outcome).toEqual({ exitCode: 0, stdout: '', stderr: '' });
      expect(took).toBeLessThan(1_500);
      expect(await node.allRules()).toBe(rules);
    });

    test('R13: STATUS is 51 after a firewall reload that left nothing, until the mappings of live containers are back', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      await node.sh(forBoth('$t -F; $t -X'));
      const error = errorOf(await status(node));
      expect(error.code, error.msg).toBe(51);
      expect(error.details).toContain('reapply');
      await node.sh(`${portmapBin} reapply`);
      expect(await status(node)).toMatchObject({ exitCode: 0, stdout: '' });
    });

    test('R20: STATUS is 50 without usable iptables', async () => {
      const putBack = await hidePrograms(node, 'ip*tables* xtables*');
      const outcome = await status(node);
      await putBack();
      expect(errorOf(outcome).code).toBe(50);
      expect(await status(node)).toMatchObject({ exitCode: 0 });
    });

    test.each(['iptables', 'ip6tables'])(
      'R20: STATUS is 51 for as long as the jumps of %s to mappings are gone',
      async (tool) => {
        await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
        await node.sh(`${tool} -t nat -F PREROUTING`);
        const outcomes = [await status(node), await status(node)];
        await node.expectPlugin('ADD', netconf(c2, [port(8081)]), c2);
        const repaired = await status(node);
        for (const outcome of outcomes) {
          const error = errorOf(outcome);
          expect(error.code, error.msg).toBe(51);
          expect(error.msg).toContain('PREROUTING');
        }
        expect(repaired).toMatchObject({ exitCode: 0 });
      },
    );

    test('R20: empty leftovers of the plugin make a node no worse', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      await node.expectPlugin('DEL', netconf(c1, [port(8080)]), c1);
      await node.sh(forBoth('$t -F PREROUTING'));
      expect(await status(node)).toMatchObject({ exitCode: 0 });
    });
  });
});
