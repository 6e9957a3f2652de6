// Field reports, part H: what a runtime may send, how much of it, and under which names. Each test is named after its
// report; REPORTS.md lists them all.
import { readFile } from 'node:fs/promises';
import { expect, test } from 'vitest';
import { bareConf, chainRules, count, errorOf, port, sandboxChain } from '../footprint.ts';
import { addresses, families, netconf, type Netconf, type PortMapping, type Verb } from '../lab.ts';
import { describeVariants } from '../nodes.ts';
import { sendSctp } from '../sctp.ts';

describeVariants({}, ({ node, c1 }) => {
  test('R46: a protocol in capitals, an empty one and none at all are taken, and equal ports become one', async () => {
    const mappings: Netconf[] = [
      { hostPort: 8080, containerPort: 80, protocol: 'TCP' },
      { hostPort: 8080, containerPort: 80, protocol: 'tcp' },
      { hostPort: 8081, containerPort: 80, protocol: '' },
      { hostPort: 8082, containerPort: 80 },
      { hostPort: 8083, containerPort: 80, protocol: null },
      { hostPort: 5300, containerPort: 53, protocol: 'Udp' },
    ];
    const conf = { ...netconf(c1, []), runtimeConfig: { portMappings: mappings } };
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('CHECK', conf, c1);
    for (const family of families) {
      const dispatch = await chainRules(node, family, 'CNI-HOSTPORT-DNAT');
      expect(dispatch.map((rule) => /-p (\S+) .*--dports (\S+)/.exec(rule)?.slice(1))).toEqual([
        ['tcp', '8080,8081,8082,8083'],
        ['udp', '5300'],
      ]);
    }
  });

  test('R47: a refused port leaves the mappings before it out as well, and names entry and field', async () => {
    const rules = await node.allRules();
    const mappings = [port(8080), port(8081), { hostPort: 70_000, containerPort: 80 }];
    const error = errorOf(await node.plugin('ADD', netconf(c1, mappings), c1));
    expect(error.code).toBe(7);
    expect(error.msg).toContain('runtimeConfig.portMappings[2].hostPort: 70000');
    expect(await node.allRules()).toBe(rules);
  });

  test('R48: SCTP in capitals, with equal ports, reaches the container from a client and from the node', async () => {
    const conf = netconf(c1, [{ hostPort: 9999, containerPort: 9999, protocol: 'SCTP' }]);
    await node.expectPlugin('ADD', conf, c1);
    const to = { family: 'v4', port: 9999 } as const;
    const outside = await sendSctp(node, 'client', { ...to, address: addresses.node.v4 }, 'c1');
    await node.expectPlugin('CHECK', conf, c1);
    expect(outside, await node.rules('v4')).toEqual({ from: 4000, to: 9999 });
  });

  test('R49: sixteen and more ports of one protocol are split into lists of at most fifteen, and none is lost', async () => {
    const numbers = Array.from({ length: 47 }, (_, index) => 9000 + index);
    const conf = netconf(
      c1,
      numbers.map((number) => port(number)),
    );
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('CHECK', conf, c1);
    for (const family of families) {
      const lists = (await chainRules(node, family, 'CNI-HOSTPORT-DNAT')).map((rule) =>
        (/--dports (\S+)/.exec(rule)?.[1] ?? '').split(','),
      );
      expect(lists.map((list) => list.length)).toEqual([15, 15, 15, 2]);
      expect(lists.flat().map(Number)).toEqual(numbers);
    }
  });

  test('R49: five thousand mappings come and go in one call each', async () => {
    const mappings: PortMapping[] = Array.from({ length: 5_000 }, (_, index) => port(10_000 + index));
    const conf = netconf(c1, mappings);
    await node.expectPlugin('ADD', conf, c1);
    const rules = await node.rules('v6');
    await node.expectPlugin('DEL', bareConf, c1);
    expect(count(rules, /-j DNAT/g)).toBe(5_000);
    expect(await node.allRules()).not.toContain('CNI-DN-');
  });

  test('R50: beside five hundred sandboxes a call runs no more programs than on an empty node', async () => {
    const conf = netconf(c1, [port(8080), port(5300, 'udp')]);
    const programs = async (verb: Verb): Promise<string[]> => {
      const under = ['/usr/bin/strace', '-f', '-qq', '-e', 'trace=execve', '-o', '/run/trace'];
      await node.expectPlugin(verb, conf, c1, { under });
      const text = await readFile(`${node.root}/run/trace`, 'utf8');
      // Both families are at work at once.
      return [...text.matchAll(/execve\("(?:[^"]*\/)?([^"/]+)".*(?: = 0|<unfinished \.\.\.>)$/gm)]
        .map(([, name = '']) => name)
        .toSorted();
    };
    // A sandbox that came first has made the shared chains.
    await node.expectPlugin('ADD', netconf(c1, [port(7070)]), c1, { containerId: 'first' });
    const alone = [await programs('ADD'), await programs('CHECK'), await programs('DEL')];
    const many = Array.from({ length: 500 }, (_, index) => sandboxChain('lab', `crowd-${index}`));
    const table = [
      '*nat',
      ...many.map((chain) => `:${chain} - [0:0]`),
      ...many.map(
        (chain, index) =>
          `-A ${chain} -p tcp -m tcp --dport ${index + 20_000} -j DNAT --to-destination 10.1.1.1:80`,
      ),
      ...many.map(
        (chain, index) => `-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports ${index + 20_000} -j ${chain}`,
      ),
      'COMMIT',
    ];
    await node.sh('iptables-restore --noflush', { input: `${table.join('\n')}\n` });
    const crowded = [await programs('ADD'), await programs('CHECK'), await programs('DEL')];
    expect(crowded).toEqual(alone);
    expect(count(await node.rules('v4'), /-j DNAT/g)).toBe(501);
  });

  test('R51: a container ID with a slash and a network name with a space are refused by name', async () => {
    const id = errorOf(await node.plugin('ADD', netconf(c1, [port(8080)]), c1, { containerId: 'a/b' }));
    const name = errorOf(await node.plugin('ADD', netconf(c1, [port(8080)], { name: 'my net' }), c1));
    expect(id).toMatchObject({ code: 4, msg: expect.stringContaining('"a/b"') });
    expect(name).toMatchObject({ code: 7, msg: expect.stringContaining('"my net"') });
  });

  test.each([
    { title: '120 and 120 characters', name: 'n'.repeat(120), id: 'i'.repeat(120) },
    { title: 'a name of 245 characters', name: 'n'.repeat(245), id: 'short' },
    { title: 'dots, dashes and underscores', name: 'a.b_c-d', id: '0._-' },
  ])(
    'R51 and L11: $title: the comment fits, and CHECK, list, GC and DEL do not depend on it',
    async ({ name, id }) => {
      const conf = netconf(c1, [port(8080)], { name, cniVersion: '1.1.0' });
      const target = { ...c1, id };
      await node.expectPlugin('ADD', conf, target);
      const [rule = ''] = await chainRules(node, 'v4', 'CNI-HOSTPORT-DNAT');
      const comment = (/--comment "((?:[^"\\]|\\.)*)"/.exec(rule)?.[1] ?? '').replaceAll(/\\(.)/g, '$1');
      await node.expectPlugin('CHECK', conf, target);
      const gc = { ...bareConf, name, cniVersion: '1.1.0' };
      const kept = { ...gc, 'cni.dev/valid-attachments': [{ containerID: id, ifname: 'eth0' }] };
      await node.expectPlugin('GC', kept, target);
      await node.expectPlugin('CHECK', conf, target);
      await node.expectPlugin('GC', { ...gc, 'cni.dev/valid-attachments': [] }, target);
      const collected = await node.allRules();
      await node.expectPlugin('ADD', conf, target);
      await node.expectPlugin('DEL', bareConf, target, { containerId: id });
      const untouched = await node.allRules();
      await node.expectPlugin('DEL', { ...bareConf, name }, target);
      expect(comment.startsWith(`dnat name: "${name.slice(0, 100)}`), comment).toBe(true);
      expect(Buffer.byteLength(comment), comment).toBeLessThanOrEqual(255);
      expect(collected).not.toContain('CNI-DN-');
      expect(untouched).toContain(sandboxChain(name, id));
      expect(await node.allRules()).not.toContain('CNI-DN-');
    },
  );
});
