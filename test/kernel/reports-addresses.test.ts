// Field reports, parts F and G: whom the container sees asking, and which addresses of the node lead to it. Each test
// is named after its report; REPORTS.md lists them all.
import { expect, test } from 'vitest';
import { bareConf, count, errorOf, fewerOnLegacy, port, sandboxChain, stateFiles } from '../footprint.ts';
import { addresses, families, type Family, netconf, type Netconf } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const own = (family: Family) => addresses.node[family];

describeVariants({ serving: ['tcp'] }, ({ variant, node, c1 }) => {
  const ask = (from: string | undefined, address: string, timeout = 1_000) =>
    node.probe(from, { protocol: 'tcp', address, port: 8080, timeout });

  test('R33: masqAll without snat has no effect, and a warning says so', async () => {
    const conf = netconf(c1, [port(8080)], { masqAll: true, snat: false });
    const { stderr } = await node.expectPlugin('ADD', conf, c1);
    const answer = await ask('client', own('v4'));
    expect(stderr).toContain('masqAll');
    expect(answer?.peer, await node.allRules()).toBe(addresses.client.v4);
  });

  test.each([
    { title: 'a host prefix', v4: 32, v6: 128, seen: addresses.client },
    { title: 'its network', v4: 16, v6: 64, seen: addresses.client },
    // By design: the prefix is what counts as the sandbox's own network, and hairpin packets come from there.
    { title: 'a prefix that holds the client', v4: 0, v6: 0, seen: addresses.bridge },
  ])('R36: with $title in prevResult the container sees $seen.v4 asking', async ({ v4, v6, seen }) => {
    const ips = [{ address: `${c1.v4}/${v4}` }, { address: `${c1.v6}/${v6}` }];
    const conf = { ...netconf(c1, [port(8080)]), prevResult: { cniVersion: '1.0.0', ips } };
    await node.expectPlugin('ADD', conf, c1);
    const rules = await node.allRules();
    for (const family of families) {
      expect((await ask('client', own(family)))?.peer, rules).toBe(seen[family]);
      expect((await ask('c1', own(family)))?.name, rules).toBe('c1');
    }
    await node.expectPlugin('CHECK', conf, c1);
  });

  test("R37: another program's mark chain is never made, and its loss does not keep a sandbox from DEL", async () => {
    const conf = netconf(c1, [port(8080)], { externalSetMarkChain: 'KUBE-MARK-MASQ' });
    const rules = await node.allRules();
    const error = errorOf(await node.plugin('ADD', conf, c1));
    expect(error).toMatchObject({ code: 7, msg: expect.stringContaining('KUBE-MARK-MASQ') });
    expect(error.details).toContain('remove externalSetMarkChain');
    expect(await node.allRules()).toBe(rules);
    await node.sh('for t in iptables ip6tables; do $t -t nat -N KUBE-MARK-MASQ; done');
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('CHECK', conf, c1);
    await node.sh('for t in iptables ip6tables; do $t -t nat -F; $t -t nat -X KUBE-MARK-MASQ; done');
    const check = errorOf(await node.plugin('CHECK', conf, c1));
    await node.expectPlugin('DEL', bareConf, c1);
    const left = await node.allRules();
    expect(check.msg).toContain('KUBE-MARK-MASQ');
    expect(left).not.toContain('KUBE-MARK-MASQ');
    expect(left).not.toContain('CNI-DN-');
  });

  test.each([
    { title: 'a comma list', conditions: ['-d', '198.51.100.1,127.0.0.1'], lines: 2 },
    { title: 'a negation', conditions: ['!', '-d', '192.0.2.0/24'], lines: 1 },
    { title: 'an empty list', conditions: [], lines: 1 },
    {
      title: 'a word with spaces and quotes',
      conditions: ['-m', 'comment', '--comment', 'say "hi" \\ -j ACCEPT'],
      lines: 1,
    },
  ])('R39: $title in conditionsV4 works, and CHECK and DEL agree', async ({ conditions, lines }) => {
    const conf = netconf(c1, [port(8080)], { conditionsV4: conditions });
    await node.expectPlugin('ADD', conf, c1);
    const rules = await node.rules('v4');
    const answer = await ask('client', own('v4'));
    await node.expectPlugin('CHECK', conf, c1);
    await node.expectPlugin('ADD', conf, c1);
    const again = await node.rules('v4');
    await node.expectPlugin('DEL', conf, c1);
    expect(count(rules, /^-A CNI-HOSTPORT-DNAT /gm), rules).toBe(lines);
    expect(answer?.name, rules).toBe('c1');
    expect(again).toBe(rules);
    expect(await node.allRules()).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT|ACCEPT$(?<!dport 7 -j ACCEPT)/m);
  });

  if (variant === 'nft')
    test.each([
      { title: 'a whole rule in one word', conditions: ['-d 198.51.100.1'] },
      { title: 'an empty word', conditions: [''] },
      { title: 'the syntax of nft', conditions: ['ip', 'daddr', '198.51.100.1'] },
      { title: 'a target of its own', conditions: ['-j', 'ACCEPT'] },
    ])(
      'R39: $title in a condition is refused by name, and DEL does not look at it',
      async ({ conditions }) => {
        const rules = await node.allRules();
        for (const field of ['conditionsV4', 'conditionsV6']) {
          const conf = netconf(c1, [port(8080)], { [field]: conditions });
          const error = errorOf(await node.plugin('ADD', conf, c1));
          expect(error.code, error.msg).toBe(7);
          expect(error.msg).toContain(field);
          expect(await node.allRules()).toBe(rules);
          await node.expectPlugin('DEL', conf, c1);
        }
      },
    );

  test('R40: a host address of one family leaves the other family out', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080, 'tcp', own('v4'))]), c1);
    const [v4, v6] = [await node.rules('v4'), await node.rules('v6')];
    expect((await ask('client', own('v4')))?.name, v4).toBe('c1');
    expect(v6).not.toContain('CNI-DN-');
    expect(v6).not.toContain('8080');
  });

  test.each(
    fewerOnLegacy(variant, [
      { only: 'v4', hostIP: '::' },
      { only: 'v4', hostIP: '2001:db8:3::1' },
      { only: 'v6', hostIP: '0.0.0.0' },
      { only: 'v6', hostIP: '198.51.100.1' },
    ] as const),
  )('R40: $hostIP on a sandbox with $only alone is a warning and no rule', async ({ only, hostIP }) => {
    const container = { netns: c1.netns, [only]: c1[only] };
    const alone = await node.expectPlugin('ADD', netconf(container, [port(8080, 'tcp', hostIP)]), c1);
    const nothing = await node.allRules();
    const beside = await node.expectPlugin(
      'ADD',
      netconf(container, [port(8080, 'tcp', hostIP), port(8081)]),
      c1,
    );
    const rules = await node.allRules();
    for (const { stderr } of [alone, beside]) {
      expect(stderr).toContain('8080');
      expect(stderr).toContain('not mapped');
    }
    expect(nothing).not.toContain('CNI-DN-');
    expect(rules).toContain(sandboxChain('lab', c1.id));
    expect(rules).toContain('--dports 8081 ');
    expect(rules).not.toContain('8080');
  });

  test.each(
    fewerOnLegacy(variant, [
      { hostIP: '0.0.0.0', family: 'v4' },
      { hostIP: '::', family: 'v6' },
      { hostIP: '0:0:0:0:0:0:0:0', family: 'v6' },
      { hostIP: '::ffff:0.0.0.0', family: 'v4' },
    ] as const),
  )(
    'R41: hostIP $hostIP is every address of its family, and opens the other family never',
    async ({ hostIP, family }) => {
      const other: Family = family === 'v4' ? 'v6' : 'v4';
      const both = netconf(c1, [port(8080, 'tcp', hostIP)]);
      const single = netconf({ netns: c1.netns, [family]: c1[family] }, [port(8080, 'tcp', hostIP)]);
      await node.expectPlugin('ADD', both, c1);
      const rules = { v4: await node.rules('v4'), v6: await node.rules('v6') };
      await node.expectPlugin('ADD', single, c1);
      expect(await node.rules(family)).toBe(rules[family]);
      expect((await ask('client', own(family)))?.name, rules[family]).toBe('c1');
      expect(rules[family]).not.toMatch(/^-A CNI-\S+ (.* )?-d /m);
      expect(rules[other]).not.toContain('CNI-DN-');
    },
  );

  test('R42: no name is ever looked up: localhost and an unknown name are refused at once', async () => {
    for (const hostIP of ['localhost', 'example.invalid']) {
      const start = performance.now();
      const error = errorOf(await node.plugin('ADD', netconf(c1, [port(8080, 'tcp', hostIP)]), c1));
      expect(performance.now() - start).toBeLessThan(1_000);
      expect(error).toMatchObject({
        code: 7,
        msg: expect.stringContaining(`portMappings[0].hostIP: "${hostIP}"`),
      });
    }
  });

  test('R42: a host address that the node does not have, or a namespace that is not there, is a warning', async () => {
    const foreign = await node.expectPlugin('ADD', netconf(c1, [port(8080, 'tcp', '203.0.113.99')]), c1);
    const here = await node.expectPlugin('ADD', netconf(c1, [port(8080, 'tcp', addresses.node.v4)]), c1);
    const nowhere = await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1, {
      netns: '/run/netns/none',
    });
    expect(foreign.stderr).toContain('hostIP: 203.0.113.99 is no address of this node');
    expect(here.stderr).toBe('');
    expect(nowhere.stderr).toContain('CNI_NETNS: /run/netns/none does not exist');
  });

  test('R43: a mapping of ::1 is a warning; the other addresses of the node work beside it', async () => {
    const alone = await node.expectPlugin('ADD', netconf(c1, [port(8080, 'tcp', '::1')]), c1);
    const captured = await node.rules('v6');
    const start = performance.now();
    const refused = await ask(undefined, '::1');
    const took = performance.now() - start;
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    expect(alone.stderr).toContain('::1');
    expect(refused).toBeNull();
    expect(took, `refused, not left to hang\n${captured}`).toBeLessThan(900);
    expect((await ask(undefined, own('v6')))?.name).toBe('c1');
  });

  test('R44: a node without IPv6 serves a sandbox of IPv4, and its DEL needs no ip6tables', async () => {
    // As booted with ipv6.disable=1, where ip6tables has no table to speak to.
    for (const tool of ['ip6tables', 'ip6tables-restore', 'ip6tables-save'])
      await node.wrapTool(
        tool,
        `echo called >> /run/v6-calls
         echo "${tool} v1.8.9: can't initialize ip6tables table \\\`nat': Table does not exist" >&2; exit 3`,
      );
    const conf: Netconf = netconf({ netns: c1.netns, v4: c1.v4 }, [port(8080)], { cniVersion: '1.1.0' });
    const outcomes = [];
    for (const verb of ['ADD', 'CHECK', 'DEL'] as const) outcomes.push(await node.plugin(verb, conf, c1));
    const calls = await node.sh('cat /run/v6-calls 2>/dev/null || true');
    const status = await node.plugin('STATUS', conf, c1);
    await node.expectPlugin('ADD', conf, c1);
    await node.sh('rm -r /run/portmap');
    const unknown = await node.plugin('DEL', conf, c1);
    for (const tool of ['ip6tables', 'ip6tables-restore', 'ip6tables-save']) await node.unwrapTool(tool);
    expect(outcomes.map(({ exitCode, stdout }) => (exitCode === 0 ? 0 : stdout))).toEqual([0, 0, 0]);
    expect(calls).toBe('');
    expect(status).toMatchObject({ exitCode: 0 });
    expect(unknown).toMatchObject({ exitCode: 0, stdout: '' });
    expect(await node.allRules()).not.toContain('CNI-DN-');
    expect(await stateFiles(node)).toEqual([]);
  });
});
