// Field reports, part D: mapped ports take what is meant for the node, and from whom they may, and nothing else. Each
// test is named after its report; REPORTS.md lists them all.
import { beforeAll, describe, expect, test } from 'vitest';
import { port } from '../footprint.ts';
import { addresses, netconf, type Netconf } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const far = '203.0.113.2';

const match = (set: string): Netconf => ({ conditionsV4: ['-m', 'set', '--match-set', set, 'src'] });

describeVariants({ serving: ['tcp'] }, ({ node, c1, c2 }) => {
  beforeAll(async () => {
    // An address beyond the node, that clients reach through it.
    await node.sh(`ip netns exec c2 ip addr add ${far}/32 dev eth0; ip route add ${far} via ${c2.v4}`);
    await node.serve('c2', { protocol: 'tcp', address: far, port: 8080 });
  });

  const ask = async (from: string | undefined, address: string) =>
    (await node.probe(from, { protocol: 'tcp', address, port: 8080, timeout: 1_000 }))?.name;
  /** A request that must get no answer costs its whole time. */
  const isShut = async (from: string | undefined, address: string) =>
    (await node.probe(from, { protocol: 'tcp', address, port: 8080, timeout: 300 })) === null;

  test.each([
    { title: 'a mapping of all host addresses', mapping: port(8080), own: 'c1' },
    { title: 'a host address that is not of this node', mapping: port(8080, 'tcp', far), own: undefined },
  ])('R21: traffic that only passes through is left alone ($title)', async ({ mapping, own }) => {
    await node.expectPlugin('ADD', netconf(c1, [mapping]), c1);
    const rules = await node.rules('v4');
    expect(await ask('client', far), rules).toBe('c2');
    expect(await ask(undefined, far), rules).toBe('c2');
    expect(await ask('client', addresses.node.v4), rules).toBe(own);
  });

  test('R22: where loopback is not wanted, no neighbour reaches a service bound to 127.0.0.1', async () => {
    const stop = await node.serve(undefined, { protocol: 'tcp', address: '127.0.0.1', port: 8080 });
    await node.sh('echo 0 > /proc/sys/net/ipv4/conf/cni0/route_localnet');
    await node.sh('ip netns exec c2 ip route add 127.0.0.1/32 via 10.1.0.1 table 99 2>/dev/null || true');
    await node.expectPlugin('ADD', netconf(c1, [port(8070, 'tcp', addresses.node.v4)]), c1);
    const set = await node.sh(
      'cat /proc/sys/net/ipv4/conf/cni0/route_localnet /proc/sys/net/ipv4/conf/ext0/route_localnet',
    );
    const own = await ask(undefined, '127.0.0.1');
    await stop();
    expect(set).toBe('0\n0\n');
    expect(own).toBe('node');
  });

  describe('R23: a condition keeps clients out', () => {
    beforeAll(async () => {
      await node.sh('ipset create work hash:ip; ipset create none hash:ip');
      await node.sh(`ipset add work ${addresses.client.v4}`);
    });

    test('R23: of an ipset that the client is in, and of one it is not in', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)], match('work')), c1);
      const rules = await node.rules('v4');
      const within = await ask('client', addresses.node.v4);
      await node.expectPlugin('CHECK', netconf(c1, [port(8080)], match('work')), c1);
      await node.expectPlugin('ADD', netconf(c1, [port(8080)], match('none')), c1);
      const outside = await isShut('client', addresses.node.v4);
      expect(within, rules).toBe('c1');
      expect(outside, await node.rules('v4')).toBe(true);
    });

    test('R23: of an interface: what comes in by it is served, what the node sends itself is not', async () => {
      const conf = netconf(c1, [port(8080)], { conditionsV4: ['-i', 'ext0'] });
      await node.expectPlugin('ADD', conf, c1);
      const rules = await node.rules('v4');
      expect(await ask('client', addresses.node.v4), rules).toBe('c1');
      expect(await isShut('c2', addresses.node.v4), rules).toBe(true);
      expect(await isShut(undefined, addresses.node.v4), rules).toBe(true);
      await node.expectPlugin('CHECK', conf, c1);
    });
  });
});
