// The same from every iptables: the releases that scripts/iptables-versions.sh puts side by side, each in both
// variants, one line of the test output a cell. They differ in what they print, how they fail and when they wait;
// what the plugin does must not.
import { afterEach, describe, expect, test } from 'vitest';
import { errorOf, holdXtablesLock, sandboxChain } from '../footprint.ts';
import {
  addresses,
  type CallOptions,
  type Container,
  families,
  type Family,
  type LabNode,
  netconf,
  type Netconf,
  openNode,
  type PortMapping,
  type Variant,
} from '../lab.ts';
import { cells, folderOf } from '../versions.ts';
import type { Transport } from '../station.ts';

/** As much of the tools' own language as a network's name and a container's ID may hold. */
const hostileNetwork = '0--comment.COMMIT_-j.CNI-HOSTPORT-DNAT--dport.1';
const hostileId = '0.-D_CNI-HOSTPORT-DNAT.-A--PREROUTING-j.ACCEPT-';
/** The two of them make a comment of which the kernel keeps only a part. */
const longNetwork = `net.${'x-_.'.repeat(40)}`;
const longId = `id.${'y-_.'.repeat(40)}`;

const tcpPorts = Array.from({ length: 20 }, (_, index) => 8_000 + index);
const manyPorts: PortMapping[] = [
  ...tcpPorts.map((hostPort) => ({ hostPort, containerPort: 80, protocol: 'tcp' })),
  { hostPort: 8_000, containerPort: 80, protocol: 'udp' },
];

/** The same answer over each transport and family. */
const everywhere = (name: string | undefined) => ({
  'tcp v4': name,
  'udp v4': name,
  'tcp v6': name,
  'udp v6': name,
});

/** The whole nat table with one sandbox in it: port 9000 of tcp and udp to port 80. */
function tableOf(family: Family, network: string, container: Container): string {
  const chain = sandboxChain(network, container.id);
  const address = family === 'v4' ? container.v4 : `[${container.v6}]`;
  const sources = family === 'v4' ? ['10.1.0.0/16', '127.0.0.1/32'] : ['2001:db8:1::/64'];
  const comment = `"dnat name: \\"${network}\\" id: \\"${container.id}\\""`;
  const transports: Transport[] = ['tcp', 'udp'];
  return [
    '*nat',
    ':PREROUTING ACCEPT [0:0]',
    ':INPUT ACCEPT [0:0]',
    ':OUTPUT ACCEPT [0:0]',
    ':POSTROUTING ACCEPT [0:0]',
    `:${chain} - [0:0]`,
    ':CNI-HOSTPORT-DNAT - [0:0]',
    ':CNI-HOSTPORT-MASQ - [0:0]',
    ':CNI-HOSTPORT-SETMARK - [0:0]',
    '-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT',
    '-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT',
    '-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ',
    ...transports.flatMap((protocol) => {
      const match = `-p ${protocol} -m ${protocol} --dport 9000`;
      return [
        ...sources.map((source) => `-A ${chain} -s ${source} ${match} -j CNI-HOSTPORT-SETMARK`),
        `-A ${chain} ${match} -j DNAT --to-destination ${address}:80`,
      ];
    }),
    ...transports.map(
      (protocol) =>
        `-A CNI-HOSTPORT-DNAT -p ${protocol} -m comment --comment ${comment} -m multiport --dports 9000 -j ${chain}`,
    ),
    '-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE',
    '-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000',
    'COMMIT',
    '',
  ].join('\n');
}

/**
 * Tables that iptables-nft can't list as a whole (report R27): a program that speaks native nft has put a map beside
 * the rules, or into the very hooks that the plugin needs. `protocol` is ip or ip6.
 */
const foreignTables: readonly { readonly where: string; readonly chains: (protocol: string) => string }[] = [
  { where: 'a chain of their own', chains: () => 'chain vpn { dnat to tcp dport map @vpnports; }' },
  {
    where: 'the built-in chains',
    chains: (protocol) => `
      chain PREROUTING { type nat hook prerouting priority dstnat; dnat to tcp dport map @vpnports; }
      chain OUTPUT { type nat hook output priority -100; dnat to tcp dport map @vpnports; }
      chain POSTROUTING { type nat hook postrouting priority srcnat; ${protocol} saddr @vpnhosts masquerade; }`,
  },
];

describe.each(cells)('iptables $version, $variant', ({ version, variant }) => {
  const folder = folderOf(version);
  let node: LabNode | undefined;
  afterEach(async () => {
    await node?.close();
    node = undefined;
  });

  const open = async (): Promise<LabNode> => {
    node = await openNode({ variant, tools: `${folder}/bin` });
    return node;
  };
  // The explicit names, iptables-legacy-restore for one, are of this version as well.
  const call: CallOptions = {
    env: { PATH: `${folder}/${variant}:/usr/sbin:/usr/bin:/sbin:/bin` },
  };

  if (variant === 'legacy')
    test('a text without COMMIT, which the table is read with, changes nothing and needs no lock', async () => {
      const lab = await open();
      const release = await holdXtablesLock(lab);
      const before = await lab.rules('v4');
      const outcome = await lab.run(['iptables-restore', '--noflush', '-w', '1'], {
        input: '*nat\n:CNI-DN-x - [0:0]\n-A OUTPUT -p tcp -j ACCEPT\n-S OUTPUT\n',
        env: { PATH: `${lab.toolFolder}:/usr/bin:/bin`, XTABLES_LOCKFILE: '/proc/self/stat' },
      });
      release();
      expect(outcome.stdout).toBe('-P OUTPUT ACCEPT\n-A OUTPUT -p tcp -j ACCEPT\n');
      expect(outcome.stderr).toContain('COMMIT expected');
      expect(await lab.rules('v4')).toBe(before);
    });

  test('one sandbox comes, changes and goes beside another', async () => {
    const lab = await open();
    await expectVersion(lab, version, variant);
    const first = { ...(await lab.addContainer('c1')), id: longId };
    const second = { ...(await lab.addContainer('c2')), id: hostileId };
    for (const container of [first, second])
      for (const family of families)
        for (const protocol of ['tcp', 'udp'] as const)
          await lab.serve(container.name, { protocol, address: container[family], port: 80 });
    /** Who answers on a host port, over each transport and family; from the client. */
    const answers = async (port: number): Promise<Record<string, string | undefined>> => {
      const asked = families.flatMap((family) =>
        (['tcp', 'udp'] as const).map(async (protocol) => {
          const answer = await lab.probe('client', {
            protocol,
            address: addresses.node[family],
            port,
            timeout: 2_000,
          });
          return [`${protocol} ${family}`, answer?.name] as const;
        }),
      );
      return Object.fromEntries(await Promise.all(asked));
    };

    const beside = netconf(
      second,
      [
        { hostPort: 9_000, containerPort: 80, protocol: 'tcp' },
        { hostPort: 9_000, containerPort: 80, protocol: 'udp' },
      ],
      { name: hostileNetwork },
    );
    await lab.expectPlugin('ADD', beside, second, call);
    for (const family of families)
      expect(await lab.rules(family), family).toBe(tableOf(family, hostileNetwork, second));

    const conf = (portMappings: readonly PortMapping[]) =>
      netconf(first, portMappings, { name: longNetwork });
    await lab.expectPlugin('ADD', conf(manyPorts), first, call);
    const added = await lab.allRules();
    expect(await answers(8_000), added).toEqual(everywhere('c1'));
    expect(await answers(8_019), added).toEqual({
      ...everywhere('c1'),
      'udp v4': undefined,
      'udp v6': undefined,
    });
    expect(await answers(9_000), added).toEqual(everywhere('c2'));
    await lab.expectPlugin('CHECK', conf(manyPorts), first, call);
    await lab.expectPlugin('CHECK', beside, second, call);

    await lab.expectPlugin('ADD', conf(manyPorts), first, call);
    expect(await lab.allRules()).toBe(added);

    const fewer = manyPorts.filter(({ hostPort }) => hostPort === 8_000);
    await lab.expectPlugin('ADD', conf(fewer), first, call);
    const replaced = await lab.allRules();
    expect(await answers(8_000), replaced).toEqual(everywhere('c1'));
    expect(await answers(8_019), replaced).toEqual(everywhere(undefined));
    expect(await lab.plugin('CHECK', conf(manyPorts), first, call), replaced).toMatchObject({ exitCode: 1 });
    await lab.expectPlugin('CHECK', conf(fewer), first, call);

    await lab.expectPlugin('DEL', conf(fewer), first, call);
    for (const family of families)
      expect(await lab.rules(family), family).toBe(tableOf(family, hostileNetwork, second));
    await lab.expectPlugin('DEL', conf(fewer), first, call);
    await lab.expectPlugin('DEL', beside, second, call);
    const left = await lab.allRules();
    expect(left).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT/);
    expect(await answers(9_000), left).toEqual(everywhere(undefined));
  });

  test('what iptables refuses is one error, and the tables are as before', async () => {
    const lab = await open();
    const [c1, c2] = [await lab.addContainer('c1'), await lab.addContainer('c2')];
    await lab.expectPlugin('ADD', netconf(c2, manyPorts), c2, call);
    const before = await lab.allRules();
    const ports = [{ hostPort: 9_000, containerPort: 80, protocol: 'tcp' }];
    const refused = async (options: Netconf): Promise<string> => {
      const outcome = await lab.plugin('ADD', netconf(c1, ports, options), c1, call);
      expect(outcome, JSON.stringify(options)).toMatchObject({ exitCode: 1 });
      expect(await lab.allRules(), JSON.stringify(options)).toBe(before);
      return errorOf(outcome).msg;
    };
    expect(await refused({ conditionsV6: ['-m', 'nosuchmatch'] })).toContain('nosuchmatch');
    expect(await refused({ conditionsV4: ['--nosuchoption'] })).toContain('nosuchoption');
    expect(await refused({ conditionsV4: ['-s', '10.0.0.400'] })).toContain('10.0.0.400');
    expect(await refused({ externalSetMarkChain: 'NO-SUCH-CHAIN' })).toContain('NO-SUCH-CHAIN');
    await lab.expectPlugin('ADD', netconf(c1, ports), c1, call);
  });

  if (variant === 'legacy')
    test('a lock that is not given back ends the call in time', async () => {
      const lab = await open();
      const c1 = await lab.addContainer('c1');
      const conf = (options: Netconf = {}) => netconf(c1, manyPorts, options);
      const before = await lab.allRules();
      const holder = lab.start(['flock', '--no-fork', '/run/xtables.lock', 'sleep', '30']);
      try {
        await lab.sh(
          'for try in $(seq 50); do flock -n /run/xtables.lock true || exit 0; sleep 0.02; done; exit 1',
        );
        const started = performance.now();
        const outcome = await lab.plugin('ADD', conf({ timeoutSeconds: 1 }), c1, call);
        expect(performance.now() - started).toBeLessThan(3_000);
        expect(errorOf(outcome)).toMatchObject({ code: 11, msg: expect.stringContaining('xtables lock') });
        expect(await lab.allRules()).toBe(before);
      } finally {
        holder.kill('SIGKILL');
      }
      await lab.expectPlugin('ADD', conf(), c1, call);
      await lab.expectPlugin('CHECK', conf(), c1, call);
    });

  if (variant === 'nft')
    test.each(foreignTables)('native nft objects in $where hide nothing', async ({ chains }) => {
      const lab = await open();
      const [c1, c2] = [await lab.addContainer('c1'), await lab.addContainer('c2')];
      const sandboxes = [
        { container: c1, conf: netconf(c1, manyPorts) },
        {
          container: c2,
          conf: netconf(c2, [{ hostPort: 9_000, containerPort: 80 }], { name: 'marked', markMasqBit: 20 }),
        },
      ];
      for (const family of families) {
        await lab.sh('nft -f -', { input: foreignTable(family, chains) });
        await lab.serve('c1', { protocol: 'tcp', address: c1[family], port: 80 });
      }
      const list = (family: Family) => lab.sh(`nft -s list table ${protocolOf(family)} nat`);
      const before = { v4: await list('v4'), v6: await list('v6') };
      const jumps = {
        'jump CNI-HOSTPORT-DNAT$': 2,
        'jump CNI-HOSTPORT-MASQ( |$)': 1,
        'jump CNI-HOSTPORT-MASQ-20( |$)': 1,
      };

      for (const time of ['first', 'second']) {
        for (const { conf, container } of sandboxes) await lab.expectPlugin('ADD', conf, container, call);
        for (const { conf, container } of sandboxes) await lab.expectPlugin('CHECK', conf, container, call);
        for (const family of families) {
          const text = await list(family);
          for (const [jump, count] of Object.entries(jumps))
            expect(text.match(new RegExp(jump, 'gm')), `${jump} after the ${time} ADD: ${text}`).toHaveLength(
              count,
            );
          const address = addresses.node[family];
          expect(await lab.probe('client', { protocol: 'tcp', address, port: 8_000 }), text).toMatchObject({
            name: 'c1',
          });
        }
      }
      for (const { conf, container } of sandboxes) await lab.expectPlugin('DEL', conf, container, call);
      for (const family of families) {
        const after = await list(family);
        expect(after).not.toContain('CNI-DN-');
        for (const line of before[family].split('\n').filter((text) => text.includes('vpn')))
          expect(after, 'the foreign rules').toContain(line);
      }
    });
});

const protocolOf = (family: Family): string => (family === 'v4' ? 'ip' : 'ip6');

function foreignTable(family: Family, chains: (protocol: string) => string): string {
  const protocol = protocolOf(family);
  return `table ${protocol} nat {
    map vpnports { type inet_service : ip${family}_addr; }
    set vpnhosts { type ip${family}_addr; }
    ${chains(protocol)}
  }`;
}

async function expectVersion(lab: LabNode, version: string, variant: Variant): Promise<void> {
  const named = `iptables v${version} (${variant === 'nft' ? 'nf_tables' : 'legacy'})\n`;
  expect(await lab.sh('iptables --version')).toBe(named);
}
