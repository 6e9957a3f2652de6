// What packets do: who reaches a mapped port, whom the container sees asking, and what closes it again. Every case
// adds a sandbox of its own on ports of its own, asks, deletes, and judges only then, so a failed case leaves
// nothing to the next.
import { beforeAll, beforeEach, describe, expect, test } from 'vitest';
import {
  addresses,
  type Container,
  families,
  type LabNode,
  netconf,
  type Netconf,
  type PortMapping,
  type Request,
} from '../lab.ts';
import { describeVariants } from '../nodes.ts';
import { sendSctp } from '../sctp.ts';
import type { Answer, Transport } from '../station.ts';

const transports: readonly Transport[] = ['tcp', 'udp'];
const extra = { v4: '198.51.100.11', v6: '2001:db8:3::11' } as const;

/** Both transports, host port to container port 80. */
const both = (hostPort: number, hostIP?: string): PortMapping[] =>
  transports.map((protocol) => ({
    hostPort,
    containerPort: 80,
    protocol,
    ...(hostIP === undefined ? {} : { hostIP }),
  }));

/** What each request was answered, by `protocol address`. */
type Seen = Record<string, Answer | null>;

const requests = (port: number, at: readonly string[], timeout = 1_000): Request[] =>
  transports.flatMap((protocol) => at.map((address) => ({ protocol, address, port, timeout })));
const peers = (seen: Seen): Record<string, string | undefined> =>
  Object.fromEntries(Object.entries(seen).map(([request, answer]) => [request, answer?.peer]));
const names = (seen: Seen): Record<string, string | undefined> =>
  Object.fromEntries(Object.entries(seen).map(([request, answer]) => [request, answer?.name]));
const all = <T>(seen: Seen, value: T): Record<string, T> =>
  Object.fromEntries(Object.keys(seen).map((request) => [request, value]));

const udp = (hostPort: number, hostIP?: string): PortMapping[] =>
  both(hostPort, hostIP).filter(({ protocol }) => protocol === 'udp');

/** The tracked UDP flows to a port, as conntrack prints them. */
const flows = async (node: LabNode, port: number): Promise<string> =>
  (await node.sh('conntrack -L -p udp 2>/dev/null; conntrack -L -f ipv6 -p udp 2>/dev/null'))
    .split('\n')
    .filter((line) => line.includes(`dport=${port} `))
    .join('\n');

/** Where the kernel keeps an interface's route_localnet. */
const routeLocalnet = (name: string): string => `/proc/sys/net/ipv4/conf/${name}/route_localnet`;

let lastSandbox = 0;
/** The same container as another sandbox, so that cases share no chain. */
const sandboxOf = (container: Container): Container => ({
  ...container,
  id: `sandbox-${(lastSandbox += 1)}`,
});

describeVariants({ serving: transports, isKept: true }, ({ node, c1, c2 }) => {
  beforeAll(async () => {
    await node.sh(`ip addr add ${extra.v4}/24 dev ext0; ip addr add ${extra.v6}/64 dev ext0 nodad`);
  });

  /** ADD, the body, DEL; the rules that stood during the body come back for the messages. */
  async function mapped<T>(
    container: Container,
    mappings: readonly PortMapping[],
    options: Netconf,
    body: () => Promise<T>,
  ): Promise<T & { rules: string; stderr: string }> {
    const sandbox = sandboxOf(container);
    const conf = netconf(sandbox, mappings, options);
    const { stderr } = await node.expectPlugin('ADD', conf, sandbox);
    try {
      const rules = await node.allRules();
      return { ...(await body()), rules, stderr };
    } finally {
      await node.expectPlugin('DEL', conf, sandbox);
    }
  }

  const ask = async (from: string | undefined, wanted: readonly Request[]): Promise<Seen> => {
    const seen: Seen = {};
    for (const request of wanted)
      seen[`${request.protocol} ${request.address}`] = await node.probe(from, request);
    return seen;
  };
  const { node: nodeAddress, client, bridge, loopback } = addresses;
  const askers = [
    { from: 'client', who: 'another host', at: Object.values(nodeAddress), peer: client },
    {
      from: undefined,
      who: 'the node at its own address',
      at: Object.values(nodeAddress),
      peer: nodeAddress,
    },
    { from: undefined, who: 'the node at 127.0.0.1', at: [loopback.v4], peer: bridge },
    { from: 'c1', who: 'the container itself', at: Object.values(nodeAddress), peer: bridge },
    { from: 'c2', who: 'a neighbour on the bridge', at: Object.values(nodeAddress), peer: bridge },
  ];

  test.each(askers)('$who reaches the container, and no longer after DEL', async ({ from, at, peer }) => {
    const wanted = requests(8080, at);
    const { seen, rules } = await mapped(c1, both(8080), {}, async () => ({ seen: await ask(from, wanted) }));
    const closed = await ask(from, wanted);

    expect(names(seen), rules).toEqual(all(seen, 'c1'));
    for (const [request, answer] of Object.entries(seen))
      expect(answer?.peer, `${request}\n${rules}`).toBe(request.includes(':') ? peer.v6 : peer.v4);
    expect(names(closed), await node.allRules()).toEqual(all(seen, undefined));
  });

  test('a mapping in the oldest and in the newest shape of the netconf carries packets', async () => {
    for (const cniVersion of ['0.1.0', '0.4.0', '1.1.0'] as const) {
      const { seen, rules } = await mapped(c1, both(8081), { cniVersion }, async () => ({
        seen: await ask('client', requests(8081, Object.values(nodeAddress))),
      }));
      expect(names(seen), `${cniVersion}\n${rules}`).toEqual(all(seen, 'c1'));
    }
  });

  test('tcp and udp of one number lead to different ports, and twenty ports to the right ones', async () => {
    const numbers = Array.from({ length: 20 }, (_, index) => 9000 + index);
    await node.serve('c1', { protocol: 'tcp', address: c1.v4, port: 53, name: 'tcp 53' });
    await node.serve('c1', { protocol: 'udp', address: c1.v4, port: 5353, name: 'udp 5353' });
    for (const port of numbers)
      await node.serve('c2', { protocol: 'tcp', address: c2.v4, port, name: `tcp ${port}` });
    const domain = await mapped(
      c1,
      [
        { hostPort: 8053, containerPort: 53, protocol: 'tcp' },
        { hostPort: 8053, containerPort: 5353, protocol: 'udp' },
      ],
      {},
      async () => ({ seen: await ask('client', requests(8053, [nodeAddress.v4])) }),
    );
    const many = await mapped(
      c2,
      numbers.map((port) => ({ hostPort: port + 10_000, containerPort: port, protocol: 'tcp' })),
      {},
      async () => ({
        seen: await Promise.all(
          numbers.map((port) =>
            node.probe('client', { protocol: 'tcp', address: nodeAddress.v4, port: port + 10_000 }),
          ),
        ),
      }),
    );

    expect(names(domain.seen), domain.rules).toEqual({
      [`tcp ${nodeAddress.v4}`]: 'tcp 53',
      [`udp ${nodeAddress.v4}`]: 'udp 5353',
    });
    expect(
      many.seen.map((answer) => answer?.name),
      many.rules,
    ).toEqual(numbers.map((port) => `tcp ${port}`));
  });

  test('masqAll hides the address of the client', async () => {
    const { seen, rules } = await mapped(c1, both(8082), { masqAll: true }, async () => ({
      seen: await ask('client', requests(8082, Object.values(nodeAddress))),
    }));
    for (const [request, answer] of Object.entries(seen))
      expect(answer?.peer, `${request}\n${rules}`).toBe(request.includes(':') ? bridge.v6 : bridge.v4);
  });

  test('a mark bit of its own masquerades as the default one does', async () => {
    const { hairpin, outside, rules } = await mapped(c1, both(8083), { markMasqBit: 9 }, async () => ({
      hairpin: await ask('c1', requests(8083, Object.values(nodeAddress))),
      outside: await ask('client', requests(8083, Object.values(nodeAddress))),
    }));
    expect(peers(hairpin), rules).toEqual({
      [`tcp ${nodeAddress.v4}`]: bridge.v4,
      [`udp ${nodeAddress.v4}`]: bridge.v4,
      [`tcp ${nodeAddress.v6}`]: bridge.v6,
      [`udp ${nodeAddress.v6}`]: bridge.v6,
    });
    expect(peers(outside), rules).toEqual({
      [`tcp ${nodeAddress.v4}`]: client.v4,
      [`udp ${nodeAddress.v4}`]: client.v4,
      [`tcp ${nodeAddress.v6}`]: client.v6,
      [`udp ${nodeAddress.v6}`]: client.v6,
    });
  });

  test('a chain of the cluster takes the place of the mark chain', async () => {
    // What kube-proxy keeps on every node.
    for (const tool of ['iptables', 'ip6tables'])
      await node.sh(`${tool} -t nat -N KUBE-MARK-MASQ
        ${tool} -t nat -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
        ${tool} -t nat -A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE`);
    const { seen, rules } = await mapped(
      c1,
      both(8084),
      { externalSetMarkChain: 'KUBE-MARK-MASQ' },
      async () => ({ seen: await ask('c1', requests(8084, Object.values(nodeAddress))) }),
    );
    expect(names(seen), rules).toEqual(all(seen, 'c1'));
    expect(rules).toContain('-j KUBE-MARK-MASQ');
  });

  test('without snat the client is served and nothing is masqueraded', async () => {
    const { outside, own, itself, rules } = await mapped(c1, both(8085), { snat: false }, async () => ({
      outside: await ask('client', requests(8085, Object.values(nodeAddress))),
      own: await ask(undefined, requests(8085, Object.values(nodeAddress))),
      itself: await ask('c1', requests(8085, Object.values(nodeAddress), 200)),
    }));
    expect(names(outside), rules).toEqual(all(outside, 'c1'));
    for (const [request, answer] of Object.entries(outside))
      expect(answer?.peer, `${request}\n${rules}`).toBe(request.includes(':') ? client.v6 : client.v4);
    expect(names(own), rules).toEqual(all(own, 'c1'));
    expect(names(itself), rules).toEqual(all(itself, undefined));
  });

  test.each([
    { hostIP: nodeAddress.v4, open: [nodeAddress.v4] },
    { hostIP: nodeAddress.v6, open: [nodeAddress.v6] },
    { hostIP: '::ffff:198.51.100.11', open: [extra.v4] },
    { hostIP: '0.0.0.0', open: [nodeAddress.v4, extra.v4] },
    { hostIP: '::', open: [nodeAddress.v6, extra.v6] },
    { hostIP: '', open: [nodeAddress.v4, extra.v4, nodeAddress.v6, extra.v6] },
    { hostIP: '127.0.0.1', open: [] },
  ])('with hostIP "$hostIP" a client finds the port open at $open only', async ({ hostIP, open }) => {
    const everywhere = [nodeAddress.v4, extra.v4, nodeAddress.v6, extra.v6];
    const { seen, rules } = await mapped(c1, both(8086, hostIP), {}, async () => ({
      seen: await ask('client', requests(8086, everywhere)),
    }));
    const reached = Object.entries(seen)
      .filter(([, answer]) => answer?.name === 'c1')
      .map(([request]) => request);
    expect(reached, rules).toEqual(transports.flatMap((protocol) => open.map((at) => `${protocol} ${at}`)));
  });

  test('with hostIP 127.0.0.1 the node itself is served at that address', async () => {
    const { seen, rules } = await mapped(c1, both(8087, '127.0.0.1'), {}, async () => ({
      seen: await ask(undefined, requests(8087, [loopback.v4, nodeAddress.v4])),
    }));
    expect(names(seen), rules).toEqual({
      'tcp 127.0.0.1': 'c1',
      'udp 127.0.0.1': 'c1',
      [`tcp ${nodeAddress.v4}`]: undefined,
      [`udp ${nodeAddress.v4}`]: undefined,
    });
  });

  test('two containers share a port number at two addresses of the node', async () => {
    const { seen, rules } = await mapped(c1, both(8088, nodeAddress.v4), {}, () =>
      mapped(c2, both(8088, extra.v4), {}, async () => ({
        seen: await ask('client', requests(8088, [nodeAddress.v4, extra.v4])),
      })),
    );
    expect(names(seen), rules).toEqual({
      [`tcp ${nodeAddress.v4}`]: 'c1',
      [`udp ${nodeAddress.v4}`]: 'c1',
      [`tcp ${extra.v4}`]: 'c2',
      [`udp ${extra.v4}`]: 'c2',
    });
  });

  test('a condition on one family keeps its packets out and leaves the other family alone', async () => {
    const options = { conditionsV4: ['!', '-s', `${client.v4}/32`], conditionsV6: ['-s', '2001:db8:3::/64'] };
    const { outside, own, rules } = await mapped(c1, both(8089), options, async () => ({
      outside: await ask('client', requests(8089, Object.values(nodeAddress))),
      own: await ask(undefined, requests(8089, Object.values(nodeAddress))),
    }));
    expect(names(outside), rules).toEqual({
      [`tcp ${nodeAddress.v4}`]: undefined,
      [`udp ${nodeAddress.v4}`]: undefined,
      [`tcp ${nodeAddress.v6}`]: 'c1',
      [`udp ${nodeAddress.v6}`]: 'c1',
    });
    expect(names(own), rules).toEqual(all(own, 'c1'));
  });

  test.each(families)(
    'an sctp packet of a client reaches the container on its port, over %s',
    async (family) => {
      const mapping = { hostPort: 9999, containerPort: 9998, protocol: 'sctp' };
      const to = { family, address: nodeAddress[family], port: 9999 };
      const { arrived, rules } = await mapped(c1, [mapping], {}, async () => ({
        arrived: await sendSctp(node, 'client', to, 'c1'),
      }));
      const text = rules.split('IPv6:')[family === 'v4' ? 0 : 1] ?? '';
      expect(arrived, rules).toEqual({ from: 4000, to: 9998 });
      expect(text).toMatch(/-A CNI-HOSTPORT-DNAT -p sctp .*--dports 9999 -j CNI-DN-/);
      expect(text).toMatch(/-p sctp -m sctp --dport 9999 -j DNAT --to-destination \S+:9998$/m);
      expect(await sendSctp(node, 'client', to, 'c1'), 'after DEL').toBeNull();
    },
  );

  describe('route_localnet', () => {
    const interfaces = ['cni0', 'ext0'] as const;
    beforeEach(async () => {
      await node.sh(interfaces.map((name) => `echo 0 > ${routeLocalnet(name)}`).join('\n'));
    });
    const settings = async (): Promise<Record<string, string>> => {
      const lines = (await node.sh(`cat ${interfaces.map(routeLocalnet).join(' ')}`)).split('\n');
      return Object.fromEntries(interfaces.map((name, index) => [name, lines[index] ?? '']));
    };

    test.each([
      { when: 'no hostIP', mapping: both(8090), options: {}, on: '1' },
      { when: 'hostIP 0.0.0.0', mapping: both(8090, '0.0.0.0'), options: {}, on: '1' },
      { when: 'hostIP 127.0.0.1', mapping: both(8090, '127.0.0.1'), options: {}, on: '1' },
      { when: 'hostIP 127.8.9.10', mapping: both(8090, '127.8.9.10'), options: {}, on: '1' },
      { when: 'another hostIP', mapping: both(8090, nodeAddress.v4), options: {}, on: '0' },
      { when: 'a hostIP of IPv6 only', mapping: both(8090, '::'), options: {}, on: '0' },
      { when: 'snat off', mapping: both(8090), options: { snat: false }, on: '0' },
    ])('is $on on the bridge with $when', async ({ mapping, options, on }) => {
      const { set, rules } = await mapped(c1, mapping, options, async () => ({ set: await settings() }));
      expect(set, rules).toEqual({ cni0: on, ext0: '0' });
    });

    test('stays off, with a warning, where the container is reached through the default route', async () => {
      const onLan = { ...c1, v4: '198.51.100.77' };
      const { set, stderr, rules } = await mapped(onLan, both(8091), {}, async () => ({
        set: await settings(),
      }));
      expect(set, rules).toEqual({ cni0: '0', ext0: '0' });
      expect(stderr).toContain('ext0');
    });
  });

  describe('a UDP flow', () => {
    const sourcePort = 40_000;
    const send = (port: number, address: string): Promise<Answer | null> =>
      node.probe('client', { protocol: 'udp', address, port, sourcePort, timeout: 2_000 });
    beforeAll(async () => {
      // The kernel tracks flows only where some rule needs it, as on any node.
      for (const tool of ['iptables', 'ip6tables'])
        await node.sh(`${tool} -t nat -A POSTROUTING -p udp -m udp --sport 7 -j ACCEPT`);
    });

    test.each(families)('that began before ADD reaches the container (R05, %s)', async (family) => {
      const port = family === 'v4' ? 5301 : 5302;
      const before = await send(port, nodeAddress[family]);
      const stale = await flows(node, port);
      const { during, rules } = await mapped(c1, udp(port), {}, async () => ({
        during: await send(port, nodeAddress[family]),
      }));
      expect(before).toBeNull();
      expect(stale, 'the flow must be tracked for the case to mean anything').toContain(
        `sport=${sourcePort}`,
      );
      expect(during?.name, `${stale}\n${rules}`).toBe('c1');
    });

    test.each(families)('of a deleted sandbox goes to the next one on its port (R05, %s)', async (family) => {
      const port = family === 'v4' ? 5303 : 5304;
      const ask1 = async () => ({ answer: await send(port, nodeAddress[family]) });
      const first = await mapped(c1, udp(port), {}, ask1);
      const second = await mapped(c2, udp(port), {}, ask1);
      expect(first.answer?.name, first.rules).toBe('c1');
      expect(second.answer?.name, second.rules).toBe('c2');
    });

    test.each(families)('goes to a listener of the node itself after DEL (R06, %s)', async (family) => {
      const port = family === 'v4' ? 5305 : 5306;
      const { answer, tracked } = await mapped(c1, udp(port), {}, async () => ({
        answer: await send(port, nodeAddress[family]),
        tracked: await flows(node, port),
      }));
      const left = await flows(node, port);
      const stop = await node.serve(undefined, { protocol: 'udp', address: nodeAddress[family], port });
      const after = await send(port, nodeAddress[family]);
      await stop();
      expect(answer?.name).toBe('c1');
      expect(tracked).toContain(`src=${c1[family]}`);
      expect(left).not.toContain(`src=${c1[family]}`);
      expect(after?.name, left).toBe('node');
    });

    test('is ended by a DEL that names no mappings (R06)', async () => {
      const port = 5307;
      const sandbox = sandboxOf(c1);
      await node.expectPlugin('ADD', netconf(sandbox, udp(port)), sandbox);
      const answer = await send(port, nodeAddress.v4);
      await node.expectPlugin('DEL', { cniVersion: '1.0.0', name: 'lab', type: 'portmap' }, sandbox);
      const left = await flows(node, port);
      expect(answer?.name).toBe('c1');
      expect(left).toBe('');
    });

    test('that only passes through, or belongs to another address of the node, lives on (R10)', async () => {
      const port = 5308;
      const far = '203.0.113.2';
      await node.sh(`ip netns exec c2 ip addr add ${far}/32 dev eth0; ip route add ${far} via ${c2.v4}`);
      const stop = await node.serve('c2', { protocol: 'udp', address: far, port });
      const other = sandboxOf(c2);
      const otherConf = netconf(other, udp(port, extra.v4));
      await node.expectPlugin('ADD', otherConf, other);
      const routed = await send(port, far);
      const neighbour = await send(port, extra.v4);
      const own = await send(port, nodeAddress.v4);
      const before = await flows(node, port);
      const { after } = await mapped(c1, udp(port, nodeAddress.v4), {}, async () => ({
        after: await flows(node, port),
      }));
      const end = await flows(node, port);
      await node.expectPlugin('DEL', otherConf, other);
      await stop();

      expect([routed?.name, neighbour?.name, own]).toEqual(['c2', 'c2', null]);
      for (const flow of [before, after, end]) {
        expect(flow).toContain(`dst=${far} `);
        expect(flow).toContain(`dst=${extra.v4} `);
      }
      expect(before).toContain(`dst=${nodeAddress.v4} `);
      expect(after).not.toContain(`dst=${nodeAddress.v4} `);
    });
  });
});
