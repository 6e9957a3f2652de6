// The same from every iptables: the releases that scripts/iptables-versions.sh puts side by side, each in both
// variants, one line of the test output a cell. They differ in what they print, how they fail and when they wait;
// what the plugin does must not.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { fileURLToPath } from 'node:url';
import { afterEach, describe, expect, test } from 'vitest';
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
  type Outcome,
  type PortMapping,
  type Variant,
  variants,
} from '../lab.ts';
import type { Transport } from '../station.ts';

const project = (path: string): string => fileURLToPath(new URL(`../../${path}`, import.meta.url));

// Prints `bookworm: iptables v1.8.9 (nf_tables)`, a line each suite and variant; fetches what is not there yet.
const unpacked = execFileSync(project('scripts/iptables-versions.sh'), {
  encoding: 'utf8',
  timeout: 240_000,
});
const versions = [...new Set([...unpacked.matchAll(/ v([0-9.]+) /g)].map(([, version = '']) => version))];
const cells = versions.flatMap((version) => variants.map((variant) => ({ version, variant })));

/** As much of the tools' own language as a network's name and a container's ID may hold. */
const hostileNetwork = '0--comment.COMMIT_-j.CNI-HOSTPORT-DNAT--dport.1';
const hostileId = '0.-D_CNI-HOSTPORT-DNAT.-A--PREROUTING-j.ACCEPT-';
/** The two of them make a comment that no kernel keeps whole. */
const longNetwork = `net.${'x-_.'.repeat(40)}`;
const longId = `id.${'y-_.'.repeat(40)}`;

const tcpPorts = Array.from({ length: 20 }, (_, index) => 8_000 + index);
const manyPorts: PortMapping[] = [
  ...tcpPorts.map((hostPort) => ({ hostPort, containerPort: 80, protocol: 'tcp' })),
  { hostPort: 8_000, containerPort: 80, protocol: 'udp' },
];

const chainOf = (network: string, id: string): string =>
  `CNI-DN-${createHash('sha512')
    .update(network + id)
    .digest('hex')
    .slice(0, 21)}`;

/** The same answer over each transport and family. */
const everywhere = (name: string | undefined) => ({
  'tcp v4': name,
  'udp v4': name,
  'tcp v6': name,
  'udp v6': name,
});

/** The whole nat table with one sandbox in it: port 9000 of tcp and udp to port 80. */
function tableOf(family: Family, network: string, container: Container): string {
  const chain = chainOf(network, container.id);
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
const foreignTables: readonly {
  readonly where: string;
  readonly chains: (protocol: string) => string;
  readonly options: Netconf;
}[] = [
  {
    where: 'a chain of their own',
    chains: () => 'chain vpn { dnat to tcp dport map @vpnports; }',
    options: {},
  },
  {
    where: 'the built-in chains',
    chains: (protocol) => `
      chain PREROUTING { type nat hook prerouting priority dstnat; dnat to tcp dport map @vpnports; }
      chain OUTPUT { type nat hook output priority -100; dnat to tcp dport map @vpnports; }
      chain POSTROUTING { type nat hook postrouting priority srcnat; ${protocol} saddr @vpnhosts masquerade; }`,
    options: {},
  },
  {
    where: "the built-in chains, with a mark of the network's own",
    chains: (protocol) =>
      `chain POSTROUTING { type nat hook postrouting priority srcnat; ${protocol} saddr @vpnhosts masquerade; }`,
    options: { markMasqBit: 20 },
  },
];

describe.each(cells)('iptables $version, $variant', ({ version, variant }) => {
  const folder = project(`.cache/iptables/${version}`);
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

  test('one sandbox comes, changes and goes beside another', async () => {
    const lab = await open();
    await expectVersion(lab, version, variant);
    const [c1, c2] = [await lab.addContainer('c1'), await lab.addContainer('c2')];
    const first = { ...c1, id: hostileId };
    for (const container of [c1, c2])
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
            timeout: 300,
          });
          return [`${protocol} ${family}`, answer?.name] as const;
        }),
      );
      return Object.fromEntries(await Promise.all(asked));
    };

    const second = netconf(c2, [
      { hostPort: 9_000, containerPort: 80, protocol: 'tcp' },
      { hostPort: 9_000, containerPort: 80, protocol: 'udp' },
    ]);
    await lab.expectPlugin('ADD', second, c2, call);
    for (const family of families) expect(await lab.rules(family), family).toBe(tableOf(family, 'lab', c2));

    const conf = (portMappings: readonly PortMapping[], options: Netconf = {}) =>
      netconf(first, portMappings, { name: hostileNetwork, ...options });
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
    await lab.expectPlugin('CHECK', second, c2, call);

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
    for (const family of families) expect(await lab.rules(family), family).toBe(tableOf(family, 'lab', c2));
    await lab.expectPlugin('DEL', conf(fewer), first, call);
    await lab.expectPlugin('DEL', second, c2, call);
    const left = await lab.allRules();
    expect(left).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT/);
    expect(await answers(9_000), left).toEqual(everywhere(undefined));
  });

  test('a comment longer than the kernel keeps is found again', async () => {
    const lab = await open();
    const c1 = await lab.addContainer('c1');
    const target = { ...c1, id: longId };
    const conf = netconf(c1, manyPorts, { name: longNetwork });
    await lab.expectPlugin('ADD', conf, target, call);
    const added = await lab.allRules();
    await lab.expectPlugin('CHECK', conf, target, call);
    await lab.expectPlugin('ADD', conf, target, call);
    expect(await lab.allRules()).toBe(added);
    await lab.expectPlugin('DEL', conf, target, call);
    expect(await lab.allRules()).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT/);
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
        const outcome = await lab.plugin('ADD', conf({ timeoutSeconds: 2 }), c1, call);
        expect(performance.now() - started).toBeLessThan(4_000);
        expect(errorOf(outcome)).toMatchObject({ code: 11, msg: expect.stringContaining('xtables lock') });
        expect(await lab.allRules()).toBe(before);
      } finally {
        holder.kill('SIGKILL');
      }
      await lab.expectPlugin('ADD', conf(), c1, call);
      await lab.expectPlugin('CHECK', conf(), c1, call);
    });

  if (variant === 'nft')
    test.each(foreignTables)('native nft objects in $where hide nothing', async ({ chains, options }) => {
      const lab = await open();
      const c1 = await lab.addContainer('c1');
      for (const family of families)
        await lab.serve('c1', { protocol: 'tcp', address: c1[family], port: 80 });
      for (const family of families) await lab.sh('nft -f -', { input: foreignTable(family, chains) });
      const tables = () => lab.sh('nft -s list table ip nat; nft -s list table ip6 nat');
      const expectOnce = async (when: string): Promise<void> => {
        const text = await tables();
        for (const part of text.split(/^(?=table )/m).filter((table) => table.startsWith('table '))) {
          expect(part.match(/jump CNI-HOSTPORT-DNAT$/gm), `${when}: ${text}`).toHaveLength(2);
          expect(part.match(/jump CNI-HOSTPORT-MASQ/gm), `${when}: ${text}`).toHaveLength(1);
        }
      };
      const before = await tables();
      const conf = netconf(c1, manyPorts, options);
      await lab.expectPlugin('ADD', conf, c1, call);
      await expectOnce('after ADD');
      for (const family of families)
        expect(
          await lab.probe('client', { protocol: 'tcp', address: addresses.node[family], port: 8_000 }),
          `${family}\n${await tables()}`,
        ).toMatchObject({ name: 'c1' });
      await lab.expectPlugin('CHECK', conf, c1, call);
      await lab.expectPlugin('ADD', conf, c1, call);
      await expectOnce('after the second ADD');
      await lab.expectPlugin('DEL', conf, c1, call);
      const after = await tables();
      expect(after).not.toContain('CNI-DN-');
      for (const line of before.split('\n').filter((text) => text.includes('vpn')))
        expect(after, 'the foreign rules').toContain(line);
    });
});

function foreignTable(family: Family, chains: (protocol: string) => string): string {
  const protocol = family === 'v4' ? 'ip' : 'ip6';
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

/** The one JSON error that a failed call prints. */
function errorOf({ exitCode, stdout, stderr }: Outcome): { code: number; msg: string } {
  expect(exitCode, `${stdout}${stderr}`).toBe(1);
  return JSON.parse(stdout);
}
