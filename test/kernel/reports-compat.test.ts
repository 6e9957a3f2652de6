// Field reports, parts I and L: other programs that read, keep or precede these rules, and faults that came to light
// by reading the upstream plugin. Each test is named after its report; REPORTS.md lists them all.
import { describe, expect, test } from 'vitest';
import {
  answers,
  bareConf,
  chainRules,
  count,
  errorOf,
  expectNoSandbox,
  fewerOnLegacy,
  port,
  sandboxChain,
  stateFiles,
} from '../footprint.ts';
import {
  addresses,
  type Container,
  families,
  netconf,
  type Netconf,
  prevResult,
  upstreamBin,
} from '../lab.ts';
import { describeVariants } from '../nodes.ts';

/** A restore that fails where it is to delete a sandbox. */
const refuseDelete = `text=$(cat); case $text in *"-X CNI-DN-"*) exit 4 ;; esac; printf '%s\\n' "$text" | exec $REAL "$@"`;

const attached = (container: Container, ifname: string, hostPort: number): Netconf => ({
  ...netconf(container, [port(hostPort)]),
  prevResult: {
    ...prevResult(container),
    interfaces: [{ name: 'cni0' }, { name: 'veth0' }, { name: ifname, sandbox: container.netns }],
  },
});

describeVariants({ serving: ['tcp'] }, ({ variant, node, c1, c2 }) => {
  /** A request that must get no answer costs its whole time. */
  const askInVain = () =>
    node.probe('client', { protocol: 'tcp', address: addresses.node.v4, port: 8080, timeout: 300 });

  test.each(
    fewerOnLegacy(variant, [
      { title: '1 port', count: 1, hostIP: undefined },
      { title: '3 ports', count: 3, hostIP: undefined },
      { title: '20 consecutive ports', count: 20, hostIP: undefined },
      { title: '20 consecutive ports at one address', count: 20, hostIP: addresses.node.v4 },
    ]),
  )(
    'R52: programs that read the rules find exactly the mapped ports ($title)',
    async ({ count: length, hostIP }) => {
      const numbers = Array.from({ length }, (_, index) => 8_000 + index);
      const mappings = numbers.map((number) => port(number, 'tcp', hostIP));
      await node.expectPlugin('ADD', netconf({ netns: c1.netns, v4: c1.v4 }, mappings), c1);
      const listed = await node.sh('iptables -t nat -S');
      // One reads the lists of single ports in the dispatch chain, another the rule of each port; both read decimal
      // numbers and would take a range for its first port.
      const dispatched = [
        ...listed.matchAll(/^-A CNI-HOSTPORT-DNAT .*--dports ((?:\d+,)*\d+) -j CNI-DN-\S+$/gm),
      ]
        .flatMap(([, ports = '']) => ports.split(','))
        .map(Number);
      const forwarded = [
        ...listed.matchAll(
          /^-A CNI-DN-[0-9a-f]+ (?:-d ((?:\d{1,3}\.){3}\d{1,3})\/32 )?-p tcp -m tcp --dport (\d+) -j DNAT --to-destination \S+$/gm,
        ),
      ];
      expect(dispatched, listed).toEqual(numbers);
      expect(
        forwarded.map(([, , number]) => Number(number)),
        listed,
      ).toEqual(numbers);
      expect(new Set(forwarded.map(([, address]) => address))).toEqual(new Set([hostIP]));
    },
  );

  test('R53: upstream rules go by chain name, with no record and whatever the netconf has become', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080), port(5300, 'udp')]), c1, { bin: upstreamBin });
    await node.expectPlugin('DEL', { ...netconf(c1, [port(9999)]), prevResult: undefined }, c1);
    await expectNoSandbox(node);
  });

  if (variant === 'nft')
    test("R53 and R58: DEL takes the sandbox's rules out of the table of upstream's nftables backend", async () => {
      // As upstream 1.9 leaves them: rules of a sandbox carry its container ID as their comment.
      const table = (protocol: string, address: (container: Container) => string) => `
        table ${protocol} cni_hostport {
          chain hostports {
            tcp dport 8080 dnat to ${address(c1)}:80 comment "${c1.id}"
            tcp dport 8081 dnat to ${address(c2)}:80 comment "${c2.id}"
          }
          chain hostports_all { jump hostports; }
          chain prerouting { type nat hook prerouting priority dstnat; fib daddr type local jump hostports_all; }
          chain masquerading {
            type nat hook postrouting priority srcnat;
            ${protocol} saddr ${address(c1).replaceAll(/[[\]]/g, '')} masquerade comment "${c1.id}"
          }
        }`;
      await node.sh('nft -f -', {
        input: table('ip', ({ v4 }) => v4) + table('ip6', ({ v6 }) => `[${v6}]`),
      });
      const outcome = await node.plugin('DEL', netconf(c1, [port(8080)], { backend: 'nftables' }), c1);
      const left = await node.sh('nft list ruleset');
      await node.sh('nft delete table ip cni_hostport; nft delete table ip6 cni_hostport');
      expect(outcome).toMatchObject({ exitCode: 0, stdout: '' });
      expect(left).not.toContain(c1.id);
      expect(count(left, new RegExp(c2.id, 'g')), left).toBe(2);
    });

  test('R56: a firewall that drops what is forwarded is left as it is; the mapping itself counts the packet', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    await node.sh('iptables -P FORWARD DROP');
    const filter = await node.sh('iptables-save -t filter | grep ^-A || true');
    const answer = await askInVain();
    const counted = await node.sh(`iptables -t nat -L ${sandboxChain('lab', c1.id)} -v -n -x | grep DNAT`);
    await node.sh('iptables -P FORWARD ACCEPT');
    expect(answer).toBeNull();
    expect(filter).toBe('');
    expect(Number(/^\s*(\d+)/.exec(counted)?.[1]), counted).toBeGreaterThan(0);
  });

  test('R59: departs: the shared chains and jumps stay after the last sandbox, and nothing else', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('DEL', conf, c1);
    await expectNoSandbox(node);
    for (const family of families) {
      const rules = await node.rules(family);
      expect([...rules.matchAll(/^:(CNI-\S+)/gm)].map(([, name]) => name)).toEqual([
        'CNI-HOSTPORT-DNAT',
        'CNI-HOSTPORT-MASQ',
        'CNI-HOSTPORT-SETMARK',
      ]);
      expect(count(rules, /^-A (PREROUTING|OUTPUT|POSTROUTING) .*-j CNI-HOSTPORT-/gm), rules).toBe(3);
    }
  });

  test.each(['iptables-restore', 'ip6tables-restore'])(
    'L01: DEL fails with code 11 when %s can not clean, keeps the record, and its repeat cleans',
    async (tool) => {
      const conf = netconf(c1, [port(8080)], { timeoutSeconds: 3 });
      await node.expectPlugin('ADD', conf, c1);
      const rules = await node.allRules();
      await node.wrapTool(tool, refuseDelete);
      const failed = await node.plugin('DEL', conf, c1);
      await node.unwrapTool(tool);
      const after = await node.allRules();
      const files = await stateFiles(node);
      await node.expectPlugin('DEL', bareConf, c1);
      expect(errorOf(failed).code).toBe(11);
      expect(errorOf(failed).msg).not.toMatch(/not found|no such file/i);
      expect(after).toBe(rules);
      expect(files).toHaveLength(1);
      await expectNoSandbox(node);
    },
  );

  test('L01: a read that fails on DEL is no proof that nothing is there', async () => {
    const conf = netconf(c1, [port(8080)], { timeoutSeconds: 3 });
    await node.expectPlugin('ADD', conf, c1);
    await node.sh('rm -r /run/portmap');
    const tools = variant === 'nft' ? ['iptables-restore'] : ['iptables-save'];
    for (const tool of tools) await node.wrapTool(tool, 'exit 4');
    const failed = await node.plugin('DEL', conf, c1);
    for (const tool of tools) await node.unwrapTool(tool);
    expect(errorOf(failed).code).toBe(11);
    await node.expectPlugin('DEL', conf, c1);
    await expectNoSandbox(node);
  });

  test('L03: a refusal found only by the kernel leaves the tables byte for byte', async () => {
    const rules = await node.allRules();
    const error = errorOf(
      await node.plugin('ADD', netconf(c1, [port(8080)], { conditionsV6: ['-m', 'no_such_match'] }), c1),
    );
    expect(error.msg).toContain('no_such_match');
    expect(await node.allRules()).toBe(rules);
    expect(await stateFiles(node)).toEqual([]);
  });

  test('L05: a container on two networks loses only the mappings of the one it leaves', async () => {
    const confs = {
      one: netconf(c1, [port(8080)], { name: 'one' }),
      two: netconf(c1, [port(8081)], { name: 'two' }),
    };
    await node.expectPlugin('ADD', confs.one, c1);
    await node.expectPlugin('ADD', confs.two, c1);
    await node.expectPlugin('DEL', confs.one, c1);
    const rules = await node.allRules();
    expect(await answers(node, 8081), rules).toEqual(['c1', 'c1']);
    expect(rules).not.toContain(sandboxChain('one', c1.id));
    await node.expectPlugin('CHECK', confs.two, c1);
    await node.expectPlugin('DEL', confs.two, c1);
    await expectNoSandbox(node);
  });

  describe('L06: two attachments of one container to one network', () => {
    test.each([
      { first: 'eth0', second: 'net1' },
      { first: 'net1', second: 'eth0' },
    ])(
      'L06: live together, and the one that is left lives on ($first goes first)',
      async ({ first, second }) => {
        // The second one has an address of its own: that of the neighbour.
        const confs: Record<string, Netconf> = {
          eth0: attached(c1, 'eth0', 8080),
          net1: attached({ ...c2, netns: c1.netns }, 'net1', 8081),
        };
        const servers: Record<string, string> = { eth0: 'c1', net1: 'c2' };
        const ports: Record<string, number> = { eth0: 8080, net1: 8081 };
        for (const ifname of ['eth0', 'net1'])
          await node.expectPlugin('ADD', confs[ifname] ?? '', c1, { ifname });
        for (const ifname of ['eth0', 'net1']) {
          expect(await answers(node, ports[ifname] ?? 0)).toEqual([servers[ifname], servers[ifname]]);
          await node.expectPlugin('CHECK', confs[ifname] ?? '', c1, { ifname });
        }
        await node.expectPlugin('DEL', confs[first] ?? '', c1, { ifname: first });
        const rules = await node.allRules();
        expect(await answers(node, ports[second] ?? 0), rules).toEqual([servers[second], servers[second]]);
        expect(rules).not.toMatch(new RegExp(`--dports? [\\d,]*${ports[first]}`));
        await node.expectPlugin('CHECK', confs[second] ?? '', c1, { ifname: second });
        expect(
          errorOf(await node.plugin('CHECK', confs[first] ?? '', c1, { ifname: first })).code,
        ).toBeGreaterThan(99);
        // A repeat touches nothing of the one that is left.
        await node.expectPlugin('DEL', confs[first] ?? '', c1, { ifname: first });
        expect(await node.allRules()).toBe(rules);
        await node.expectPlugin('DEL', bareConf, c1, { ifname: second });
        await expectNoSandbox(node);
      },
    );

    test('L06: that want one host port: the newest gets it, the other is named, and onConflict "fail" refuses', async () => {
      const neighbour = { ...c2, netns: c1.netns };
      await node.expectPlugin('ADD', attached(c1, 'eth0', 8080), c1);
      const rules = await node.allRules();
      const strict = { ...attached(neighbour, 'net1', 8080), onConflict: 'fail' };
      const refused = errorOf(await node.plugin('ADD', strict, c1, { ifname: 'net1' }));
      expect(refused.code, refused.msg).toBe(100);
      expect(refused.msg).toContain('eth0');
      expect(await node.allRules()).toBe(rules);
      const second = attached(neighbour, 'net1', 8080);
      const { stderr } = await node.expectPlugin('ADD', second, c1, { ifname: 'net1' });
      expect(stderr).toContain('eth0');
      expect(await answers(node, 8080), await node.allRules()).toEqual(['c2', 'c2']);
      await node.expectPlugin('CHECK', second, c1, { ifname: 'net1' });
      const shadowed = errorOf(await node.plugin('CHECK', attached(c1, 'eth0', 8080), c1));
      expect(shadowed.code, shadowed.msg).toBeGreaterThanOrEqual(100);
      await node.expectPlugin('DEL', second, c1, { ifname: 'net1' });
      expect(await answers(node, 8080)).toEqual(['c1', 'c1']);
      await node.expectPlugin('CHECK', attached(c1, 'eth0', 8080), c1);
    });

    test('L06: a second ADD of one replaces its own mappings only', async () => {
      await node.expectPlugin('ADD', attached(c1, 'eth0', 8080), c1);
      await node.expectPlugin('ADD', attached(c1, 'net1', 8081), c1, { ifname: 'net1' });
      await node.expectPlugin('ADD', attached(c1, 'eth0', 8090), c1);
      const rules = await node.rules('v4');
      expect(rules).not.toContain('8080');
      expect(count(rules, /-j DNAT/g), rules).toBe(2);
      await node.expectPlugin('CHECK', attached(c1, 'eth0', 8090), c1);
      await node.expectPlugin('CHECK', attached(c1, 'net1', 8081), c1, { ifname: 'net1' });
    });

    test('L06: come back together after a reload, by the ADD of either', async () => {
      await node.expectPlugin('ADD', attached(c1, 'eth0', 8080), c1);
      await node.expectPlugin('ADD', attached(c1, 'net1', 8081), c1, { ifname: 'net1' });
      const rules = await node.rules('v4');
      await node.sh('for t in iptables ip6tables; do $t -t nat -F; $t -t nat -X; done');
      await node.expectPlugin('ADD', attached(c1, 'net1', 8081), c1, { ifname: 'net1' });
      const found = await chainRules(node, 'v4', sandboxChain('lab', c1.id));
      expect(found.toSorted(), rules).toHaveLength(count(rules, /^-A CNI-DN-/gm));
      await node.expectPlugin('CHECK', attached(c1, 'eth0', 8080), c1);
    });
  });

  test('L06: two sandboxes whose names run into one chain: the second is refused, and its DEL leaves the first', async () => {
    const first = netconf(c1, [port(8080)], { name: 'ab' });
    const second = netconf(c2, [port(8081)], { name: 'abc' });
    await node.expectPlugin('ADD', first, c1, { containerId: 'c1' });
    const rules = await node.allRules();
    const error = errorOf(await node.plugin('ADD', second, c2, { containerId: '1' }));
    expect(error.code).toBeGreaterThanOrEqual(100);
    expect(error.msg).toContain('network ab');
    await node.expectPlugin('DEL', second, c2, { containerId: '1' });
    const gc = { ...bareConf, name: 'abc', cniVersion: '1.1.0', 'cni.dev/valid-attachments': [] };
    await node.expectPlugin('GC', gc, c2);
    expect(await node.allRules()).toBe(rules);
    await node.expectPlugin('DEL', first, c1, { containerId: 'c1' });
    await expectNoSandbox(node);
  });

  test("L06: without a record the comment tells whose chain it is, and a stranger's DEL leaves it", async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)], { name: 'ab' }), c1, {
      containerId: 'c1',
      bin: upstreamBin,
    });
    const rules = await node.allRules();
    const second = netconf(c2, [port(8081)], { name: 'abc' });
    await node.expectPlugin('DEL', second, c2, { containerId: '1' });
    expect(await node.allRules()).toBe(rules);
  });

  test("L07: each network's conditions stay its own when another network's sandbox comes and goes", async () => {
    const closed = netconf(c1, [port(8080)], { name: 'closed', conditionsV4: ['-s', '192.0.2.0/24'] });
    const open = netconf(c2, [port(8081)], { name: 'open' });
    await node.expectPlugin('ADD', closed, c1);
    await node.expectPlugin('ADD', open, c2);
    const rules = await node.rules('v4');
    const shut = await askInVain();
    expect(shut, rules).toBeNull();
    expect(await answers(node, 8081), rules).toEqual(['c2', 'c2']);
    await node.expectPlugin('DEL', open, c2);
    await node.expectPlugin('CHECK', closed, c1);
  });

  test("L07: each network's mark bit stays its own when another network's sandbox comes and goes", async () => {
    const marked = netconf(c1, [port(8080)], { name: 'marked', markMasqBit: 9 });
    const plain = netconf(c2, [port(8081)], { name: 'plain' });
    await node.expectPlugin('ADD', marked, c1);
    await node.expectPlugin('ADD', plain, c2);
    await node.expectPlugin('ADD', { ...marked, markMasqBit: 10 }, c1);
    await node.expectPlugin('CHECK', plain, c2);
    expect(await chainRules(node, 'v4', 'CNI-HOSTPORT-SETMARK')).toHaveLength(1);
    await node.expectPlugin('DEL', plain, c2);
    await node.expectPlugin('CHECK', { ...marked, markMasqBit: 10 }, c1);
  });

  test('L09: a route_localnet that can not be set is a warning, and the mapping works', async () => {
    await node.sh(`echo 0 > /proc/sys/net/ipv4/conf/cni0/route_localnet
      mount --bind /proc/sys/net/ipv4/conf /proc/sys/net/ipv4/conf
      mount -o remount,bind,ro /proc/sys/net/ipv4/conf`);
    const outcome = await node.plugin('ADD', netconf(c1, [port(8080)]), c1);
    await node.sh('umount /proc/sys/net/ipv4/conf');
    expect(outcome).toMatchObject({ exitCode: 0 });
    expect(outcome.stderr).toContain('route_localnet');
    expect(await answers(node, 8080)).toEqual(['c1', 'c1']);
  });

  test('L10: invalid mappings on CHECK are refused by name', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const error = errorOf(await node.plugin('CHECK', netconf(c1, [port(0)]), c1));
    expect(error).toMatchObject({ code: 7, msg: expect.stringContaining('portMappings[0].hostPort: 0') });
  });
});
