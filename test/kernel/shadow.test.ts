// CHECK beside the rules of others, on the real tables: what takes a mapping's packets is named, what does not is left
// alone, and the kernel's packets say which of the two it is.
import * as fc from 'fast-check';
import { expect, test } from 'vitest';
import { errorOf, port, sandboxChain } from '../footprint.ts';
import { addresses, netconf } from '../lab.ts';
import { describeVariants } from '../nodes.ts';
import { dockerTable, kubeProxyTable } from '../shapes.ts';

// PORTMAP_TEST_LONG=1 looks at ten times as many random tables.
const limitMs = (process.env['PORTMAP_TEST_LONG'] ?? '') === '' ? 6_000 : 60_000;

const nat = (...commands: string[]) => commands.map((command) => `iptables -t nat ${command}`).join('\n');
const load = (table: string) => `iptables-restore --noflush <<'END'\n${table}END`;
/** Who asks: the client, the node itself, or the container that is asked. */
type From = 'client' | 'node' | 'c1';
type State = { readonly title: string; readonly script: string; readonly from: From };
type Fault = State & { readonly finding: string };

const takes = (chain: string, rule: string) =>
  `ipv4: ${chain}: an earlier rule takes the traffic of 8080/tcp: ${rule}`;
const toNowhere = 'DNAT --to-destination 198.51.100.9';

// Its jumps are in place already, so whatever another program inserts stands in front of them.
const faults: Fault[] = [
  ...[
    '-p tcp -m tcp --dport 8080 -j REDIRECT --to-ports 1',
    `-p tcp -m tcp --dport 8000:9000 -j ${toNowhere}`,
    '-p tcp -m multiport --dports 80,8080 -j ACCEPT',
    '-p tcp -j RETURN',
    '! -p udp -j ACCEPT',
    '-m addrtype --dst-type LOCAL -j ACCEPT',
    '-d 198.51.100.0/24 -p tcp -j RETURN',
    `! -i docker0 -p tcp -m tcp --dport 8080 -j ${toNowhere}`,
  ].flatMap((rule): Fault[] => [
    {
      title: `PREROUTING has ${rule}`,
      script: nat(`-I PREROUTING ${rule}`),
      from: 'client',
      finding: takes('PREROUTING', rule),
    },
  ]),
  {
    title: 'OUTPUT lets tcp go',
    script: nat('-I OUTPUT -p tcp -j RETURN'),
    from: 'node',
    finding: takes('OUTPUT', '-p tcp -j RETURN'),
  },
  {
    title: 'a chain in front takes the port',
    script: nat('-N X', '-A X -p tcp --dport 8080 -j REDIRECT --to-ports 1', '-I PREROUTING -j X'),
    from: 'client',
    finding: takes('PREROUTING', 'X: -p tcp -m tcp --dport 8080 -j REDIRECT --to-ports 1'),
  },
  {
    title: 'a chain in front takes tcp, two jumps away',
    script: nat('-N X', '-N Y', '-A Y -p tcp -j ACCEPT', '-A X -p tcp -g Y', '-I PREROUTING -p tcp -j X'),
    from: 'client',
    finding: takes('PREROUTING', 'Y: -p tcp -j ACCEPT'),
  },
  {
    title: 'nothing comes back from a goto in PREROUTING',
    script: nat('-N X', '-I PREROUTING -g X'),
    from: 'client',
    finding: takes('PREROUTING', '-g X'),
  },
  {
    title: 'nothing comes back from a goto in the dispatch chain',
    script: nat('-N X', '-I CNI-HOSTPORT-DNAT -g X'),
    from: 'client',
    finding: takes('CNI-HOSTPORT-DNAT', '-g X'),
  },
  {
    title: 'a chain in the dispatch chain accepts',
    script: nat('-N X', '-A X -j ACCEPT', '-I CNI-HOSTPORT-DNAT -j X'),
    from: 'client',
    finding: takes('CNI-HOSTPORT-DNAT', 'X: -j ACCEPT'),
  },
  ...['! --dports 8080', '--dports 8081'].map((ports): Fault => ({
    title: `the line of the dispatch chain has ${ports}`,
    script: `iptables -t nat -S CNI-HOSTPORT-DNAT | sed -n -e '1i *nat' -e 's/^-A/-D/p' -e 's/--dports 8080/${ports}/; s/^-D/-A/p' -e '$a COMMIT' | iptables-restore --noflush`,
    from: 'client',
    finding: 'ipv4: CNI-HOSTPORT-DNAT: no rule leads 8080/tcp to CNI-DN-',
  })),
  {
    title: 'the line of the dispatch chain has the protocol negated',
    script: `iptables -t nat -F CNI-HOSTPORT-DNAT; iptables -t nat -A CNI-HOSTPORT-DNAT ! -p tcp -j ${sandboxChain('lab', 'c1-0123456789abcdef')}`,
    from: 'client',
    finding: 'ipv4: CNI-HOSTPORT-DNAT: no rule leads 8080/tcp to CNI-DN-',
  },
  ...['0x0/0xffffffff', '0x2000/0x0'].map((mark): Fault => ({
    title: `the mark is cleared by ${mark}`,
    script: nat(`-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark ${mark}`),
    from: 'c1',
    finding: `ipv4: CNI-HOSTPORT-SETMARK: a later rule clears the mark of 8080/tcp: -j MARK --set-xmark ${mark}`,
  })),
  {
    title: 'packets return before they have the mark',
    script: nat('-I CNI-HOSTPORT-SETMARK -j RETURN'),
    from: 'c1',
    finding: takes('CNI-HOSTPORT-SETMARK', '-j RETURN'),
  },
  ...['POSTROUTING', 'CNI-HOSTPORT-MASQ'].map((chain): Fault => ({
    title: `${chain} leaves the source of hairpin packets`,
    script: nat(`-I ${chain} -s 10.1.0.0/16 -d 10.1.0.0/16 -j ACCEPT`),
    from: 'c1',
    finding: takes(chain, '-s 10.1.0.0/16 -d 10.1.0.0/16 -j ACCEPT'),
  })),
];

const sound: State[] = [
  {
    title: 'rules for other ports, protocols, addresses and interfaces',
    script: nat(
      '-I PREROUTING -p tcp --dport 8081:9000 -j REDIRECT --to-ports 1',
      '-I PREROUTING -p tcp -m multiport --dports 80,443 -j ACCEPT',
      '-I PREROUTING -p udp -j ACCEPT',
      `-I PREROUTING -d 10.96.0.10 -p tcp --dport 8080 -j ${toNowhere}`,
      '-I PREROUTING -i docker0 -j ACCEPT',
      '-I PREROUTING -p tcp --dport 8080 -m mark --mark 0x1/0xff -j MARK --set-mark 1',
    ),
    from: 'client',
  },
  {
    title: 'chains that let packets come back',
    script: nat(
      '-N ZONES',
      '-N PRE',
      '-A ZONES -i docker0 -g PRE',
      '-A ZONES -g PRE',
      '-A ZONES -j ACCEPT',
      '-A PRE -m addrtype --dst-type LOCAL -j RETURN',
      '-A PRE -p tcp -j REDIRECT --to-ports 1',
      '-I PREROUTING -j ZONES',
    ),
    from: 'client',
  },
  {
    title: 'a chain that spares the addresses of the node',
    script: nat(
      '-N PROXY',
      '-A PROXY -d 127.0.0.0/8 -j RETURN',
      '-A PROXY -d 10.0.0.0/8 -j RETURN',
      '-A PROXY -d 198.51.100.1 -j RETURN',
      '-A PROXY -p tcp -j REDIRECT --to-ports 1',
      '-I OUTPUT -j PROXY',
    ),
    from: 'node',
  },
  {
    title: 'an empty chain in the dispatch chain',
    script: nat('-N X', '-I CNI-HOSTPORT-DNAT -j X'),
    from: 'client',
  },
  {
    title: 'another mark',
    script: nat('-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x4000/0x4000'),
    from: 'c1',
  },
  {
    title: 'another masquerade in front',
    script: nat('-I POSTROUTING -s 10.1.0.0/16 -j SNAT --to-source 198.51.100.1'),
    from: 'c1',
  },
  {
    title: 'flannel in front',
    script: nat(
      '-N FLANNEL-POSTRTG',
      '-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN',
      '-A FLANNEL-POSTRTG -s 10.1.0.0/16 -d 10.1.0.0/16 -j RETURN',
      '-A FLANNEL-POSTRTG -s 10.1.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully',
      '-I POSTROUTING -j FLANNEL-POSTRTG',
    ),
    from: 'c1',
  },
  ...[
    { title: 'kube-proxy in front', table: kubeProxyTable('v4') },
    { title: 'Docker with other ports in front', table: dockerTable('v4').replaceAll('8080', '8081') },
  ].map(({ title, table }): State => ({
    title,
    script: load(table.replaceAll(/-A (PREROUTING|OUTPUT|POSTROUTING) /g, '-I $1 ')),
    from: 'client',
  })),
];

// Random rules: at a place that packets pass, and in two chains that it may lead to. All that they ask is known beforehand.
const asked = [
  '',
  '-p tcp',
  '! -p tcp',
  '-p udp',
  '-m addrtype --dst-type LOCAL',
  '-m addrtype ! --dst-type LOCAL',
];
const host = [
  '-p tcp --dport 8080',
  '-p tcp --dport 8000:8079',
  '-p tcp ! --dport 8080',
  '-p tcp -m multiport --dports 22,8080',
  '-d 198.51.100.1',
  '! -d 198.51.100.1',
  '-d 10.1.0.0/16',
  '-d 127.0.0.0/8',
  '-d 203.0.113.0/24',
];
const answered = [
  '-s 10.1.0.0/16',
  '! -s 10.1.0.0/16',
  '-s 127.0.0.1',
  '-d 10.1.0.0/16',
  '-p tcp --dport 80',
  '-p tcp --dport 8080',
];
const go = ['-j ACCEPT', '-j RETURN', '-j MARK --set-mark 0x100/0x100', ''];
const clear = ['-j MARK --set-xmark 0x0/0x2000', '-j MARK --set-mark 7'];
type Ask = readonly [from: From, address: string];
const loopback: Ask = ['node', '127.0.0.1'];
const hairpin: Ask = ['c1', addresses.node.v4];
const gateway: Ask = ['c1', addresses.bridge.v4];
const outside: Ask = ['client', addresses.node.v4];
const local: Ask = ['node', addresses.node.v4];
const places: readonly { chain: string; matches: string[]; ends: string[]; asks: readonly Ask[] }[] = [
  {
    chain: 'PREROUTING',
    matches: host,
    ends: ['-j DNAT --to-destination 127.0.0.1'],
    asks: [outside, gateway],
  },
  {
    chain: 'OUTPUT',
    matches: host,
    ends: ['-j DNAT --to-destination 127.0.0.2'],
    asks: [local, loopback, ['node', addresses.bridge.v4]],
  },
  { chain: 'CNI-HOSTPORT-DNAT', matches: host, ends: [], asks: [outside, gateway, local, loopback] },
  { chain: 'CNI-HOSTPORT-SETMARK', matches: host, ends: clear, asks: [hairpin, gateway, loopback] },
  { chain: 'POSTROUTING', matches: answered, ends: ['-j MASQUERADE'], asks: [hairpin, loopback] },
  { chain: 'CNI-HOSTPORT-MASQ', matches: answered, ends: ['-j MASQUERADE'], asks: [hairpin, loopback] },
];

const tables = fc.constantFrom(...places).chain(({ chain, matches, ends, asks }) => {
  const rules = (command: string, next: readonly string[], maxLength: number) => {
    const match = fc.constantFrom(...asked, ...matches);
    const end = fc.constantFrom(
      ...go,
      ...ends,
      ...next.flatMap((name) => [`-j ${name}`, `-g ${name}`, `-j ${name}`]),
    );
    return fc.array(
      fc.tuple(fc.constant(command), match, end).map((words) => words.join(' ')),
      { maxLength },
    );
  };
  return fc
    .tuple(
      rules(`-I ${chain}`, ['X', 'Y'], 3),
      rules(`-A ${chain}`, ['X', 'Y'], 2),
      rules('-A X', ['Y'], 3),
      rules('-A Y', [], 2),
    )
    .map((lists) => ({ asks, text: ['*nat', ':X -', ':Y -', ...lists.flat(), 'COMMIT', ''].join('\n') }));
});

describeVariants({ serving: ['tcp'] }, ({ node, c1 }) => {
  const ask = (from: From, address: string = addresses.node.v4) =>
    node.probe(from === 'node' ? undefined : from, {
      protocol: 'tcp',
      address,
      port: 8080,
      timeout: 300,
    });

  test.each(faults)(
    'R18: CHECK fails, and so does the connection, when $title',
    async ({ script, from, finding }) => {
      const conf = netconf(c1, [port(8080)]);
      await node.expectPlugin('ADD', conf, c1);
      await node.sh(script);
      const rules = await node.allRules();
      expect(errorOf(await node.plugin('CHECK', conf, c1)).msg, rules).toContain(finding);
      expect((await ask(from))?.name, rules).not.toBe('c1');
      expect(await node.allRules(), 'CHECK is read-only').toBe(rules);
    },
  );

  test.each(sound)(
    'R19: CHECK passes, and the connection is there, beside $title',
    async ({ script, from }) => {
      const conf = netconf(c1, [port(8080)]);
      await node.expectPlugin('ADD', conf, c1);
      await node.sh(script);
      await node.expectPlugin('CHECK', conf, c1);
      expect((await ask(from))?.name, await node.allRules()).toBe('c1');
    },
  );

  test('R18: CHECK names what takes IPv6 alone', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1);
    await node.sh('ip6tables -t nat -I PREROUTING -d 2001:db8:3::/64 -p tcp -j RETURN');
    expect(errorOf(await node.plugin('CHECK', conf, c1)).msg).toContain(
      'ipv6: PREROUTING: an earlier rule takes the traffic of 8080/tcp: -d 2001:db8:3::/64 -p tcp -j RETURN',
    );
  });

  test('R18 and R19: CHECK and the connections say the same of random rules', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1);
    await node.sh('iptables-save -t nat > /run/good');
    const agrees = fc.asyncProperty(tables, async ({ text, asks }) => {
      await node.sh('iptables-restore < /run/good; iptables-restore --noflush', { input: text });
      const { exitCode, stdout } = await node.plugin('CHECK', conf, c1);
      const isWhole = exitCode === 0;
      const answers = [];
      for (const [from, address] of asks) {
        // Of a thousand connections from and to the same ports, one may meet what another has left.
        const answer = (await ask(from, address)) ?? (isWhole ? await ask(from, address) : null);
        answers.push(answer?.name);
      }
      expect(
        answers.every((name) => name === 'c1'),
        `${stdout}${answers.join(', ')}`,
      ).toBe(isWhole);
    });
    await fc.assert(agrees, {
      numRuns: 1_000,
      interruptAfterTimeLimit: limitMs,
      markInterruptAsFailure: false,
    });
  });
});
