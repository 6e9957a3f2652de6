// CHECK on tables as the kernel prints them: every fault that keeps packets from flowing is found and named (report
// R18), and nothing is said of a table in which they flow, however iptables spells it (report R19).
import { describe, expect, test } from 'vitest';
import { type Family, readAddress } from '../../src/address.ts';
import { sandboxHash, sandboxRules } from '../../src/chain.ts';
import { checkRules } from '../../src/check.ts';
import { type Netconf, observe, readConf } from './node.ts';
import { emptyTable, restore } from './ruleset.ts';

const own = `CNI-DN-${sandboxHash('podnet', 'web-1')}`;
// The chain of the bridge plugin for one container's address.
const bridge = 'CNI-6b4d8b0e1c2a3f4e5d6c7b8a';
const other = `CNI-DN-${sandboxHash('podnet', 'db-1')}`;
const to = (chain: string, id: string, ports: string, protocol = 'tcp') => {
  const comment = String.raw`dnat name: \"podnet\" id: \"${id}\"`;
  return `-A CNI-HOSTPORT-DNAT -p ${protocol} -m comment --comment "${comment}" -m multiport --dports ${ports} -j ${chain}`;
};
const line = to(own, 'web-1', '8080,8081');

const hooks = `
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000`;
const rules = (target = '10.1.0.5', bound = '') => `
-A ${own} -s 10.1.0.0/16 ${bound}-p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK
-A ${own} -s 127.0.0.1/32 ${bound}-p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK
-A ${own} ${bound}-p tcp -m tcp --dport 8080 -j DNAT --to-destination ${target}:80
-A ${own} -s 10.1.0.0/16 ${bound}-p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK
-A ${own} -s 127.0.0.1/32 ${bound}-p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK
-A ${own} ${bound}-p tcp -m tcp --dport 8081 -j DNAT --to-destination ${target}:81`;
const healthy = `${hooks}\n${line}${rules()}`;

const ports = (hostIP = '') => [
  { hostPort: 8080, containerPort: 80, hostIP },
  { hostPort: 8081, containerPort: 81, hostIP },
];
const conf = (settings: Netconf = {}, hostIP = ''): Netconf => ({
  cniVersion: '1.0.0',
  name: 'podnet',
  runtimeConfig: { portMappings: ports(hostIP) },
  prevResult: { ips: [{ address: '10.1.0.5/16' }] },
  ...settings,
});

const local = ['127.0.0.1', '198.51.100.1', '10.1.0.1', '::1', '2001:db8::1'].flatMap(
  (text) => readAddress(text) ?? [],
);

// What CHECK finds in a table that holds these rules, and every chain they speak of.
function check(
  text: string,
  netconf: Netconf = conf(),
  family: Family = 'ipv4',
  without: readonly string[] = [],
) {
  const { attachment } = readConf(netconf);
  const wanted = sandboxRules(family, 'podnet', 'web-1', [attachment]);
  if (wanted === undefined) throw new Error(`nothing to check in ${family}`);
  const chains = ['CNI-HOSTPORT-DNAT', 'CNI-HOSTPORT-MASQ', 'CNI-HOSTPORT-SETMARK', own, other, bridge];
  const made = [
    ...new Set([...chains, ...[...text.matchAll(/^-A (\S+) /gm)].map((match) => match[1] ?? '')]),
  ];
  const known = made.filter((chain) => !without.includes(chain) && !emptyTable.has(chain));
  const table = restore(
    emptyTable,
    ['*nat', ...known.map((chain) => `:${chain} - [0:0]`), text.trim(), 'COMMIT', ''].join('\n'),
  );
  const observed = observe(table, [...wanted.external, own, other]);
  return checkRules({ family, observed, local }, wanted, [attachment]).findings;
}

const lose = (text: string) => {
  expect(healthy).toContain(text);
  return healthy.replace(text, '');
};

describe('CHECK is content with', () => {
  test('the rules that ADD makes', () => {
    expect(check(healthy)).toEqual([]);
  });

  test.each<[string, string, Netconf]>([
    [
      'rules of other programs in the hooks',
      `-A PREROUTING -j KUBE-SERVICES\n-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 8080 -j RETURN\n-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n${healthy}`,
      conf(),
    ],
    [
      'masquerade rules of the bridge plugin behind its own',
      `${healthy}\n-A POSTROUTING -s 10.1.0.5/32 -m comment --comment "name: \\"podnet\\"" -j ${bridge}`,
      conf(),
    ],
    [
      'another sandbox with other ports in front',
      `${hooks}\n${to(other, 'db-1', '9090')}\n${line}${rules()}`,
      conf(),
    ],
    ['another sandbox with the same port behind', `${healthy}\n${to(other, 'db-1', '8080')}`, conf()],
    [
      'another sandbox with the same port of another protocol in front',
      `${hooks}\n${to(other, 'db-1', '8080', 'udp')}\n${line}${rules()}`,
      conf(),
    ],
    [
      'another sandbox with the port on another address in front',
      `${hooks}\n${to(other, 'db-1', '8080')}\n-A ${other} -d 198.51.100.2/32 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.7:80\n${line}${rules('10.1.0.5', '-d 198.51.100.1/32 ')}`,
      conf({}, '198.51.100.1'),
    ],
    [
      'a rule in the dispatch chain that decides nothing',
      `${hooks}\n-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8080 -j LOG\n${line}${rules()}`,
      conf(),
    ],
    [
      'a foreign rule for other ports in the dispatch chain',
      `${hooks}\n-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 9000:9100 -j RETURN\n${line}${rules()}`,
      conf(),
    ],
    [
      'a line for each port, as other releases wrote them',
      `${hooks}\n${to(own, 'web-1', '8080')}\n${to(own, 'web-1', '8081')}${rules()}`,
      conf(),
    ],
    ['a comment that was cut off', healthy.replace(String.raw`id: \"web-1\""`, 'id..."'), conf()],
    ['rules that are there twice', `${healthy}\n${line}`, conf()],
    [
      'snat off',
      `${hooks.replace(/\n-A POSTROUTING[^]*/, '')}\n${line}${rules().replaceAll(/\n.*SETMARK/g, '')}`,
      conf({ snat: false }),
    ],
    [
      'the address of another family in the request',
      healthy,
      conf({
        runtimeConfig: {
          portMappings: [...ports(), { hostPort: 5, containerPort: 5, hostIP: '2001:db8::1' }],
        },
      }),
    ],
    [
      'another program’s mark chain',
      `${hooks.replaceAll(/\n.*(?:MASQ|SETMARK).*/g, '')}\n-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n${line}${rules().replaceAll('CNI-HOSTPORT-SETMARK', 'KUBE-MARK-MASQ')}`,
      conf({ externalSetMarkChain: 'KUBE-MARK-MASQ' }),
    ],
    [
      'a mark bit of its own',
      `${hooks.replaceAll('MASQ', 'MASQ-5').replaceAll('-j MASQ-5UERADE', '-j MASQUERADE').replaceAll('SETMARK', 'SETMARK-5').replaceAll('0x2000', '0x20')}\n${line}${rules().replaceAll('SETMARK', 'SETMARK-5')}`,
      conf({ markMasqBit: 5 }),
    ],
  ])('%s', (_, text, netconf) => {
    expect(check(text, netconf)).toEqual([]);
  });

  // As iptables prints them: what names an address or interface goes to the front, a list becomes a rule for each.
  const line2 = (front: string) => line.replace('-A CNI-HOSTPORT-DNAT ', `-A CNI-HOSTPORT-DNAT ${front} `);
  test.each<[string, string[], string]>([
    [
      'of a comma list, one line for each',
      ['-d', '198.51.100.1,127.0.0.1'],
      `${line2('-d 127.0.0.1/32')}\n${line2('-d 198.51.100.1/32')}`,
    ],
    ['with host bits, which the kernel clears', ['-s', '192.0.2.2/24'], line2('-s 192.0.2.0/24')],
    ['with a netmask', ['-s', '192.0.2.0/255.255.255.0'], line2('-s 192.0.2.0/24')],
    ['without a prefix length, which becomes /32', ['-d', '198.51.100.1'], line2('-d 198.51.100.1/32')],
    ['with /32', ['-d', '198.51.100.1/32'], line2('-d 198.51.100.1/32')],
    ['by the option’s long name', ['--destination', '198.51.100.1'], line2('-d 198.51.100.1/32')],
    ['negated', ['!', '-d', '10.96.0.0/16'], line2('! -d 10.96.0.0/16')],
    ['of an interface by its long name', ['--in-interface', 'eth1'], line2('-i eth1')],
    ['of everything, which is no condition', ['-s', '0.0.0.0/0'], line],
    ['with a match', ['-m', 'mark', '--mark', '0x7'], line.replace(' -j', ' -m mark --mark 0x7 -j')],
    [
      'with both',
      ['-i', 'eth1', '-m', 'mark', '--mark', '7'],
      line2('-i eth1').replace(' -j', ' -m mark --mark 0x7 -j'),
    ],
    [
      'with a word in quotes',
      ['-m', 'comment', '--comment', 'a "-j X" b'],
      line.replace(' -j', String.raw` -m comment --comment "a \"-j X\" b" -j`),
    ],
  ])('conditions %s', (_, conditionsV4, lines) => {
    expect(check(`${hooks}\n${lines}${rules()}`, conf({ conditionsV4 }))).toEqual([]);
  });

  test('IPv6 as the kernel spells it', () => {
    const netconf = conf(
      { prevResult: { ips: [{ address: 'FD00:10:1:0::5/64' }] }, conditionsV6: ['-s', '2001:DB8:0::/32'] },
      '2001:DB8:0:0::1',
    );
    const v6 = rules('[fd00:10:1::5]', '-d 2001:db8::1/128 ')
      .replaceAll(/\n.*127\.0\.0\.1.*/g, '')
      .replaceAll('10.1.0.0/16', 'fd00:10:1::/64');
    const front = line.replace('-A CNI-HOSTPORT-DNAT ', '-A CNI-HOSTPORT-DNAT -s 2001:db8::/32 ');
    expect(check(`${hooks}\n${front}${v6}`, netconf, 'ipv6')).toEqual([]);
  });
});

describe('CHECK names', () => {
  const jump = '-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT';
  test.each<[string, string, (string | RegExp)[]]>([
    [
      'the jump that is gone from PREROUTING',
      lose(`-A PREROUTING ${jump}`),
      [`PREROUTING: the jump is missing: ${jump}`],
    ],
    [
      'the jump that is gone from OUTPUT',
      lose(`-A OUTPUT ${jump}`),
      [`OUTPUT: the jump is missing: ${jump}`],
    ],
    [
      'both after a flush of the hooks',
      lose(`-A OUTPUT ${jump}`).replace(`-A PREROUTING ${jump}`, ''),
      [/^PREROUTING: /, /^OUTPUT: /],
    ],
    [
      'the jump to masquerading that is gone',
      lose('-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ'),
      [/^POSTROUTING: the jump is missing: .*-j CNI-HOSTPORT-MASQ$/],
    ],
    [
      'a masquerade chain that was emptied',
      lose('-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE'),
      ['CNI-HOSTPORT-MASQ: the rule is missing: -m mark --mark 0x2000/0x2000 -j MASQUERADE'],
    ],
    [
      'a mark chain that was emptied',
      lose(
        '-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000',
      ),
      [/^CNI-HOSTPORT-SETMARK: the rule is missing: /],
    ],
    [
      'a mark chain with the mark of another bit',
      healthy.replaceAll('--set-xmark 0x2000/0x2000', '--set-xmark 0x4000/0x4000'),
      [/^CNI-HOSTPORT-SETMARK: the rule is missing: .*0x2000/],
    ],
    [
      'a masquerade rule of the bridge plugin in front of its own',
      `-A POSTROUTING -s 10.1.0.5/32 -j ${bridge}\n${healthy}`,
      [/^POSTROUTING: an earlier rule decides before CNI-HOSTPORT-MASQ: -s 10\.1\.0\.5\/32/],
    ],
    [
      'a rule that is gone from its chain',
      lose(`-A ${own} -s 127.0.0.1/32 -p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK`),
      [`${own}: the rule is missing: -s 127.0.0.1/32 -p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK`],
    ],
    [
      'an older target in front (report R03)',
      `${hooks}\n${line}\n-A ${own} -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.4:80${rules()}`,
      [
        `${own}: a rule that does not belong there: -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.4:80`,
      ],
    ],
    [
      'another container’s address for target',
      healthy.replaceAll('10.1.0.5:80', '10.1.0.9:80'),
      [/the rule is missing: .*10\.1\.0\.5:80$/, /does not belong there: .*10\.1\.0\.9:80$/],
    ],
    [
      'rules in the wrong order',
      `${hooks}\n${line}\n${rules().trim().split('\n').toReversed().join('\n')}`,
      [`${own}: the rules are in the wrong order`],
    ],
    [
      'a chain that nothing leads to',
      lose(line),
      [`CNI-HOSTPORT-DNAT: no rule leads 8080/tcp, 8081/tcp to ${own}`],
    ],
    [
      'a port that nothing leads to',
      healthy.replace('--dports 8080,8081', '--dports 8080'),
      [`CNI-HOSTPORT-DNAT: no rule leads 8081/tcp to ${own}`],
    ],
    [
      'a line of another protocol',
      healthy.replace(line, to(own, 'web-1', '8080,8081', 'udp')),
      [`CNI-HOSTPORT-DNAT: no rule leads 8080/tcp, 8081/tcp to ${own}`],
    ],
    [
      'a sandbox with the same port in front',
      `${hooks}\n${to(other, 'db-1', '8080')}\n-A ${other} -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.7:80\n${line}${rules()}`,
      [/^CNI-HOSTPORT-DNAT: an earlier rule takes the traffic of 8080\/tcp: .*db-1/],
    ],
    [
      'a foreign rule for the port in front',
      `${hooks}\n-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8080 -j DNAT --to-destination 192.0.2.7:80\n${line}${rules()}`,
      [/^CNI-HOSTPORT-DNAT: an earlier rule takes the traffic of 8080\/tcp: .*192\.0\.2\.7/],
    ],
    [
      'a foreign rule for a range of ports in front',
      `${hooks}\n-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8000:8080 -j RETURN\n${line}${rules()}`,
      [/takes the traffic of 8080\/tcp: /],
    ],
    [
      'a rule that takes everything in front',
      `${hooks}\n-A CNI-HOSTPORT-DNAT -j ACCEPT\n${line}${rules()}`,
      [/takes the traffic of 8080\/tcp, 8081\/tcp: -j ACCEPT$/],
    ],
    [
      'conditions that the netconf does not have',
      healthy.replace(line, line.replace('-p tcp', '-d 198.51.100.1/32 -p tcp')),
      [/^CNI-HOSTPORT-DNAT: the rule has other conditions than the netconf: -d 198/],
    ],
  ])('%s', (_, text, expected) => {
    expect(check(text)).toEqual(
      expected.map((one) => (typeof one === 'string' ? one : expect.stringMatching(one))),
    );
  });

  test.each<[string, string, Netconf, string]>([
    ['the sandbox’s chain that is missing', own, conf(), `${own}: the sandbox's chain is missing`],
    [
      'a mark chain that is missing',
      'CNI-HOSTPORT-SETMARK',
      conf(),
      'CNI-HOSTPORT-SETMARK: the chain is missing',
    ],
    [
      'the dispatch chain that is missing',
      'CNI-HOSTPORT-DNAT',
      conf(),
      'CNI-HOSTPORT-DNAT: the chain is missing',
    ],
    [
      'another program’s mark chain that is missing',
      'KUBE-MARK-MASQ',
      conf({ externalSetMarkChain: 'KUBE-MARK-MASQ' }),
      'KUBE-MARK-MASQ: the external chain is missing',
    ],
  ])('%s', (_, chain, netconf, expected) => {
    const rest = healthy.split('\n').filter((rule) => !rule.includes(chain));
    expect(check(rest.join('\n'), netconf, 'ipv4', [chain])).toContain(expected);
  });

  test.each<[string, string[], string]>([
    ['conditions that are missing from the line', ['-d', '198.51.100.1'], ''],
    ['conditions of another address', ['-d', '198.51.100.1'], '-d 198.51.100.2/32 '],
    ['conditions of a wider network', ['-d', '198.51.100.0/24'], '-d 198.51.100.0/23 '],
    ['conditions that are not negated', ['!', '-d', '198.51.100.1'], '-d 198.51.100.1/32 '],
    [
      'conditions of the source in the place of the destination',
      ['-d', '198.51.100.1'],
      '-s 198.51.100.1/32 ',
    ],
    ['conditions without their match', ['-i', 'eth1', '-m', 'mark', '--mark', '7'], '-i eth1 '],
  ])('%s', (_, conditionsV4, front) => {
    const text = `${hooks}\n${line.replace('-A CNI-HOSTPORT-DNAT ', `-A CNI-HOSTPORT-DNAT ${front}`)}${rules()}`;
    expect(check(text, conf({ conditionsV4 }))).toEqual([
      expect.stringMatching(/^CNI-HOSTPORT-DNAT: the rule has other conditions than the netconf: /),
    ]);
  });

  test('an address of a comma list that has lost its line', () => {
    const rest = line.replace('-p tcp', '-s 10.0.0.0/8 -p tcp');
    const findings = check(
      `${hooks}\n${rest}${rules()}`,
      conf({ conditionsV4: ['-s', '10.0.0.0/8,192.168.0.0/16'] }),
    );
    // The rule for the other is gone, and no packet from there gets through.
    expect(findings).toEqual([expect.stringMatching(/^CNI-HOSTPORT-DNAT: .*192\.168\.0\.0\/16/)]);
  });

  test.each([
    ['PREROUTING', '-j ACCEPT'],
    ['OUTPUT', '-j RETURN'],
    ['POSTROUTING', '-j RETURN'],
    ['CNI-HOSTPORT-SETMARK', '-j RETURN'],
    ['CNI-HOSTPORT-MASQ', '-j RETURN'],
  ])('a rule in %s that lets nothing get as far as the plugin’s: %s', (chain, rule) => {
    expect(check(`-A ${chain} ${rule}\n${healthy}`)).toEqual([
      `${chain}: an earlier rule takes the traffic of 8080/tcp, 8081/tcp: ${rule}`,
    ]);
  });

  test('everything at once when the table was emptied', () => {
    expect(check('').map((finding) => finding.slice(0, finding.indexOf(':')))).toEqual([
      'PREROUTING',
      'OUTPUT',
      'POSTROUTING',
      'CNI-HOSTPORT-SETMARK',
      'CNI-HOSTPORT-MASQ',
      ...Array.from({ length: 6 }, () => own),
      'CNI-HOSTPORT-DNAT',
    ]);
  });
});
