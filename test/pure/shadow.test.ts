// CHECK beside the rules of others: whoever takes a mapping's packets on their way is named, wherever the rule stands
// (report R18), and whoever does not is left alone (report R19). Other programs' chains are read as CHECK reads them.
import { describe, expect, test } from 'vitest';
import { type Family, readAddress } from '../../src/address.ts';
import { sandboxHash, sandboxRules } from '../../src/chain.ts';
import { checkRules } from '../../src/check.ts';
import { rulesetReader } from '../../src/restore.ts';
import { dockerTable, kubeProxyTable } from '../shapes.ts';
import { type Netconf, readConf } from './node.ts';

const own = `CNI-DN-${sandboxHash('podnet', 'web-1')}`;
const other = `CNI-DN-${sandboxHash('podnet', 'db-1')}`;
const bridge = 'CNI-6b4d8b0e1c2a3f4e5d6c7b8a';
const local = ['127.0.0.1', '198.51.100.1', '10.1.0.1', '::1', 'fe80::1', '2001:db8::1'].flatMap(
  (text) => readAddress(text) ?? [],
);
const mapping = { hostPort: 8080, containerPort: 80 };
const conf = (settings: Netconf = {}): Netconf => ({
  cniVersion: '1.0.0',
  name: 'podnet',
  runtimeConfig: { portMappings: [mapping] },
  prevResult: { ips: [{ address: '10.1.0.5/16' }] },
  ...settings,
});
const bound = (hostIP: string): Netconf =>
  conf({ runtimeConfig: { portMappings: [{ ...mapping, hostIP }] } });
const v6 = conf({ prevResult: { ips: [{ address: '2001:db8:1::5/64' }] } });

const dispatch = (chain = own, match = '-p tcp', ports = '--dports 8080') =>
  String.raw`-A CNI-HOSTPORT-DNAT ${match} -m comment --comment "dnat name: \"podnet\" id: \"web-1\"" -m multiport ${ports} -j ${chain}`;

// What an ADD has made for a netconf, behind these rules of others.
function table(front: string, netconf: Netconf, family: Family): string {
  const { attachment } = readConf(netconf);
  const wanted = sandboxRules(family, 'podnet', 'web-1', [attachment]);
  if (wanted === undefined) throw new Error(`nothing to check in ${family}`);
  const chains = [...wanted.marks, wanted.chain];
  return [
    front,
    ...wanted.jumps.map(({ from, rule }) => `-A ${from} ${rule}`),
    ...wanted.dispatch.map((rule) => `-A CNI-HOSTPORT-DNAT ${rule}`),
    ...chains.flatMap(({ name, rules }) => rules.map((rule) => `-A ${name} ${rule}`)),
  ].join('\n');
}

// What CHECK finds in it, and which chains of others it reads for that.
function check(text: string, netconf: Netconf = conf(), family: Family = 'ipv4') {
  const { attachment } = readConf(netconf);
  const wanted = sandboxRules(family, 'podnet', 'web-1', [attachment]);
  if (wanted === undefined) throw new Error(`nothing to check in ${family}`);
  const rules = [...text.matchAll(/^(?:\[\S+\] )?(-A .*)$/gm)].map(([, rule = '']) => rule);
  const chains = new Set(
    [...text.matchAll(/^:(\S+)/gm), ...rules.join('\n').matchAll(/^-A (\S+)/gm)].map(([, name = '']) => name),
  );
  const read: string[] = [];
  for (let round = 0; round < 10; round += 1) {
    const asked = ['CNI-HOSTPORT-DNAT', ...wanted.marks.map(({ name }) => name), wanted.chain.name, ...read];
    const reader = rulesetReader(new Set(asked));
    for (const line of [...[...chains].map((chain) => `:${chain} - [0:0]`), ...rules]) reader.read(line);
    const { findings, unread } = checkRules({ family, observed: reader.ruleset(asked), local }, wanted, [
      attachment,
    ]);
    if (unread.length === 0) return { findings, read };
    read.push(...unread);
  }
  throw new Error(`CHECK never has enough: ${read.join(', ')}`);
}

type Case = readonly [title: string, rules: string, netconf?: Netconf];
type Fault = readonly [title: string, rules: string, finding: string, netconf?: Netconf];

const takes = (chain: string, rule: string) =>
  `${chain}: an earlier rule takes the traffic of 8080/tcp: ${rule}`;
const both = (rule: string) => `-A PREROUTING ${rule}\n-A OUTPUT ${rule}`;

describe('CHECK names', () => {
  const faults: Fault[] = [
    ...[
      '-p tcp -m tcp --dport 8080 -j REDIRECT --to-ports 1',
      '-p tcp -m tcp --dport 8000:9000 -j DNAT --to-destination 1.2.3.4',
      '-p tcp -m multiport --dports 80,8000:8100 -j ACCEPT',
      '-p tcp -m multiport --ports 80,8080 -j ACCEPT',
      '-p tcp -m tcp ! --dport 22 -j ACCEPT',
      '-p tcp -j RETURN',
      '! -p udp -j ACCEPT',
      '-j NFQUEUE --queue-num 0',
      '-m addrtype --dst-type LOCAL -j ACCEPT',
      '-m addrtype --dst-type LOCAL,BROADCAST -j ACCEPT',
      '-m addrtype ! --dst-type UNICAST -j ACCEPT',
      '-d 198.51.100.1/32 -p tcp -j DNAT --to-destination 10.0.0.9',
      '-d 198.51.100.0/24 -j RETURN',
      '! -d 203.0.113.9/32 -j ACCEPT',
      '! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80',
      '-s 192.0.2.0/24 -p tcp -m tcp --dport 8080 -j RETURN',
      '-d 198.51.100.1/32 -i eth0 -p tcp -m tcp --dport 8080 -j REDIRECT',
      '-m comment --comment "see --dport 5 " -j ACCEPT',
      '-m comment --comment "a --dport 5 b" -p tcp -m tcp --dport 8080 -j ACCEPT',
      String.raw`-m comment --comment "no -j RETURN \" -p udp" -j ACCEPT`,
    ].map((rule): Fault => [`in PREROUTING: ${rule}`, `-A PREROUTING ${rule}`, takes('PREROUTING', rule)]),
    ['in OUTPUT', '-A OUTPUT -p tcp -j RETURN', takes('OUTPUT', '-p tcp -j RETURN')],
    [
      'in OUTPUT, for 127.0.0.1 alone',
      '-A OUTPUT -d 127.0.0.0/8 -j ACCEPT',
      takes('OUTPUT', '-d 127.0.0.0/8 -j ACCEPT'),
    ],
    [
      'for the address that the mapping is bound to',
      '-A PREROUTING -d 198.51.100.0/24 -p tcp -j ACCEPT',
      takes('PREROUTING', '-d 198.51.100.0/24 -p tcp -j ACCEPT'),
      bound('198.51.100.1'),
    ],
    [
      'a chain that takes the port',
      '-A PREROUTING -j X\n-A X -p tcp -m tcp --dport 8080 -j REDIRECT',
      takes('PREROUTING', 'X: -p tcp -m tcp --dport 8080 -j REDIRECT'),
    ],
    [
      'a chain that takes everything',
      '-A PREROUTING -p tcp -j X\n-A X -p udp -j RETURN\n-A X -p tcp -j ACCEPT',
      takes('PREROUTING', 'X: -p tcp -j ACCEPT'),
    ],
    [
      'a chain that the port leads to',
      '-A PREROUTING -i eth0 -p tcp -m tcp --dport 8080 -j X\n-A X -j Y\n-A Y -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.0.0.9',
      takes(
        'PREROUTING',
        'Y: -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.0.0.9',
      ),
    ],
    ['a goto, after which nothing comes', '-A PREROUTING -g X\n:X', takes('PREROUTING', '-g X')],
    [
      'a goto whose chain takes the port',
      '-A PREROUTING -j ZONES\n-A ZONES -g X\n-A X -p tcp -m tcp --dport 8080 -j REDIRECT',
      takes('PREROUTING', 'X: -p tcp -m tcp --dport 8080 -j REDIRECT'),
    ],
    [
      'a chain that spares other addresses only',
      '-A PREROUTING -j PROXY\n-A PROXY -d 10.0.0.0/8 -j RETURN\n-A PROXY -p tcp -j REDIRECT --to-ports 1',
      takes('PREROUTING', 'PROXY: -p tcp -j REDIRECT --to-ports 1'),
    ],
    ['a goto in the dispatch chain', `-A CNI-HOSTPORT-DNAT -g X\n:X`, takes('CNI-HOSTPORT-DNAT', '-g X')],
    [
      'a chain in the dispatch chain that takes everything',
      '-A CNI-HOSTPORT-DNAT -j X\n-A X -j ACCEPT',
      takes('CNI-HOSTPORT-DNAT', 'X: -j ACCEPT'),
    ],
    [
      'another sandbox that a hook leads to',
      `-A PREROUTING -j ${other}\n-A ${other} -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.7:80`,
      takes('PREROUTING', `${other}: -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.7:80`),
    ],
    ...[
      '-j RETURN',
      '-s 10.1.0.0/24 -d 10.1.0.0/24 -j ACCEPT',
      '-s 10.1.0.0/16 -d 10.1.0.0/16 -j RETURN',
      '-s 127.0.0.0/8 -j ACCEPT',
      '-d 10.1.0.5/32 -p tcp -m tcp --dport 80 -j ACCEPT',
      '! -d 224.0.0.0/4 -j ACCEPT',
      '-m addrtype ! --dst-type LOCAL -j RETURN',
    ].flatMap((rule): Fault[] =>
      ['POSTROUTING', 'CNI-HOSTPORT-MASQ'].map((chain) => [
        `the rule in ${chain} that leaves the source: ${rule}`,
        `-A ${chain} ${rule}`,
        takes(chain, rule),
      ]),
    ),
    [
      'the rule in POSTROUTING that leaves the source, in a chain',
      '-A POSTROUTING -s 10.1.0.0/16 -j X\n-A X -d 10.1.0.0/16 -j ACCEPT',
      takes('POSTROUTING', 'X: -d 10.1.0.0/16 -j ACCEPT'),
    ],
    [
      'a kube-proxy node port',
      kubeProxyTable('v4').replace('30053', '8080').replaceAll('-p udp', '-p tcp'),
      takes(
        'PREROUTING',
        'KUBE-SEP-6E7XQMQ4RAYOWTTM: -p tcp -m comment --comment "kube-system/kube-dns:dns" -m udp -j DNAT --to-destination 10.244.1.5:53',
      ),
    ],
    [
      'a port that Docker has published',
      dockerTable('v4'),
      takes(
        'PREROUTING',
        'DOCKER: ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80',
      ),
    ],
  ];
  test.each(faults.map(([title, ...fault]) => ({ title, fault })))('$title', ({ fault }) => {
    const [front, finding, netconf = conf()] = fault;
    expect(check(table(front, netconf, 'ipv4'), netconf).findings).toContain(finding);
  });

  test.each([
    ['negated ports', dispatch(own, '-p tcp', '! --dports 8080')],
    ['a negated protocol', dispatch(own, '! -p tcp')],
  ])('a dispatch line with %s', (_, line) => {
    const good = table('', conf(), 'ipv4');
    const [rule = ''] = /^-A CNI-HOSTPORT-DNAT .*/m.exec(good) ?? [];
    expect(check(good.replace(rule, line)).findings).toEqual([
      `CNI-HOSTPORT-DNAT: no rule leads 8080/tcp to ${own}`,
    ]);
  });

  test.each([
    ['all of it', '-j MARK --set-xmark 0x0/0xffffffff'],
    ['its bit', '-j MARK --set-xmark 0x0/0x2000'],
    ['its bit, turned over', '-j MARK --set-xmark 0x2000/0x0'],
    ['all but another bit', '-j MARK --set-xmark 0x4000/0xffffffff'],
    ['its bit, for the port', '-s 10.1.0.0/16 -p tcp -m tcp --dport 8080 -j MARK --set-xmark 0x0/0x2000'],
  ])('a mark that is cleared again: %s', (_, rule) => {
    expect(check(`${table('', conf(), 'ipv4')}\n-A CNI-HOSTPORT-SETMARK ${rule}`).findings).toEqual([
      `CNI-HOSTPORT-SETMARK: a later rule clears the mark of 8080/tcp: ${rule}`,
    ]);
  });

  test('packets that are taken behind their mark', () => {
    expect(check(`${table('', conf(), 'ipv4')}\n-A CNI-HOSTPORT-SETMARK -j ACCEPT`).findings).toEqual([
      'CNI-HOSTPORT-SETMARK: a later rule takes the traffic of 8080/tcp: -j ACCEPT',
    ]);
  });

  test('packets that never get their mark', () => {
    expect(check(table('-A CNI-HOSTPORT-SETMARK -p tcp -j RETURN', conf(), 'ipv4')).findings).toEqual([
      takes('CNI-HOSTPORT-SETMARK', '-p tcp -j RETURN'),
    ]);
  });

  test('what takes IPv6', () => {
    const front = '-A PREROUTING -d 2001:db8::/64 -p tcp -j RETURN';
    expect(check(table(front, v6, 'ipv6'), v6, 'ipv6').findings).toEqual([
      takes('PREROUTING', '-d 2001:db8::/64 -p tcp -j RETURN'),
    ]);
  });

  test('one rule once, with every port it takes', () => {
    const netconf = conf({
      runtimeConfig: {
        portMappings: [mapping, { hostPort: 8081, containerPort: 80 }, { ...mapping, protocol: 'udp' }],
      },
    });
    expect(check(table('-A OUTPUT -p tcp -j ACCEPT', netconf, 'ipv4'), netconf).findings).toEqual([
      'OUTPUT: an earlier rule takes the traffic of 8080/tcp, 8081/tcp: -p tcp -j ACCEPT',
    ]);
  });
});

describe('CHECK is content beside', () => {
  const cases: Case[] = [
    ...[
      '-p tcp -m tcp --dport 8081 -j REDIRECT',
      '-p tcp -m tcp --dport 8081:9000 -j REDIRECT',
      '-p tcp -m tcp ! --dport 8080 -j REDIRECT',
      '-p tcp -m multiport --ports 80,81 -j REDIRECT',
      '-p udp -m udp --dport 8080 -j REDIRECT',
      '! -p tcp -j ACCEPT',
      '-d 10.96.0.10/32 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.244.1.5:53',
      '-d 203.0.113.0/24 -j RETURN',
      '-d 1.2.3.4/255.255.0.255 -p tcp -m tcp --dport 8080 -j RETURN',
      '-i eth1 -j DNAT --to-destination 10.0.0.9',
      '-i eth1 -p tcp -j REDIRECT --to-ports 1',
      '-m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT',
      '-p tcp -m tcp --dport 8080 -m iprange --dst-range 203.0.113.1-203.0.113.9 -j ACCEPT',
      '-m addrtype ! --dst-type LOCAL -j ACCEPT',
      '-m mark --mark 0x1 -j RETURN',
      '-p tcp -m tcp --dport 8080 -j LOG --log-prefix "-j ACCEPT"',
      '-p tcp -m tcp --dport 8080 -j CONNMARK --save-mark --nfmask 0xf --ctmask 0xf',
      '-p tcp -m tcp --dport 8080 -j MARK --set-xmark 0x0/0xffffffff',
      '-p tcp -m tcp --dport 8080 -j NEWTARGET',
      '-p tcp -m tcp --dport 8080',
      '-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT',
    ].map((rule): Case => [`a rule in both hooks: ${rule}`, both(rule)]),
    ['a rule in PREROUTING for 127.0.0.1', '-A PREROUTING -d 127.0.0.0/8 -j ACCEPT'],
    [
      'a rule for another address than the mapping is bound to',
      both('-d 10.1.0.1/32 -p tcp -m tcp --dport 8080 -j REDIRECT'),
      bound('198.51.100.1'),
    ],
    [
      'a rule for another address than the conditions ask',
      both('-d 10.1.0.1/32 -p tcp -m tcp --dport 8080 -j REDIRECT'),
      conf({ conditionsV4: ['-d', '198.51.100.1/32'] }),
    ],
    [
      'a rule with other conditions than the netconf’s',
      both('-s 10.0.0.0/8 -p tcp -m tcp --dport 8080 -j REDIRECT'),
      conf({ conditionsV4: ['-s', '192.0.2.0/24'] }),
    ],
    [
      'a rule for 127.0.0.1, which is not served without snat',
      '-A OUTPUT -d 127.0.0.1/32 -j RETURN',
      conf({ snat: false }),
    ],
    [
      'a chain that spares all of the node’s addresses',
      both('-j X') + '\n-A X -m addrtype --dst-type LOCAL -j RETURN\n-A X -p tcp -j REDIRECT --to-ports 1',
    ],
    [
      'a chain that spares them one by one',
      `${both('-j X')}\n-A X -d 127.0.0.0/8 -j RETURN\n-A X -d 10.0.0.0/8 -j RETURN\n-A X -d 198.51.100.1/32 -g Y\n-A X -p tcp -j REDIRECT\n-A Y -p udp -j ACCEPT`,
    ],
    [
      'zones of firewalld',
      `${both('-j ZONES')}\n-A ZONES -i eth0 -g PRE\n-A ZONES -g PRE\n-A PRE -j PRE_log\n-A PRE -j PRE_allow\n-A PRE_log -j LOG\n-A PRE_allow -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.9`,
    ],
    [
      'chains of firewalld that come back to what was in front',
      `${both('-j A')}\n-A A -g B\n-A A -j ACCEPT\n-A B -p udp -j ACCEPT`,
    ],
    ['kube-proxy', kubeProxyTable('v4')],
    [
      'kube-proxy with the port of a service',
      kubeProxyTable('v4').replaceAll('--dport 80 ', '--dport 8080 '),
    ],
    ['Docker with other ports', dockerTable('v4').replaceAll('8080', '8081')],
    ['an empty chain in the dispatch chain', '-A CNI-HOSTPORT-DNAT -j X\n:X'],
    ['a chain in the dispatch chain that takes others', '-A CNI-HOSTPORT-DNAT -p udp -j X\n-A X -j ACCEPT'],
    ['a way round to the dispatch chain', `${both('-j X')}\n-A X -j CNI-HOSTPORT-DNAT`],
    ...[
      '-s 10.1.0.0/24 -j SNAT --to-source 198.51.100.1',
      '-j MASQUERADE',
      '-s 10.1.0.0/16 ! -d 10.1.0.0/16 -j MASQUERADE',
      '-s 10.2.0.0/16 -d 10.1.0.0/16 -j RETURN',
      '-s 10.1.0.6/32 -d 10.1.0.0/16 -j ACCEPT',
      '-p tcp -m tcp --dport 8080 -j ACCEPT',
      '-o docker0 -p tcp -m tcp --dport 80 -j ACCEPT',
      '-m mark ! --mark 0x4000/0x4000 -j RETURN',
    ].map((rule): Case => [`a rule in POSTROUTING: ${rule}`, `-A POSTROUTING ${rule}`]),
    [
      'flannel',
      '-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG\n-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n-A FLANNEL-POSTRTG -s 10.1.0.0/16 -d 10.1.0.0/16 -j RETURN\n-A FLANNEL-POSTRTG -s 10.1.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully',
    ],
    ['a goto that masquerades', '-A POSTROUTING -g X\n-A X -j MASQUERADE'],
    [
      'a rule that leaves the source where none is to change',
      '-A POSTROUTING -j RETURN',
      conf({ snat: false }),
    ],
    ['another mark', '-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x0/0xffffffff'],
  ];
  test.each(cases.map(([title, ...rest]) => ({ title, rest })))('$title', ({ rest }) => {
    const [front, netconf = conf()] = rest;
    expect(check(table(front, netconf, 'ipv4'), netconf).findings).toEqual([]);
  });

  test.each([
    '-j MARK --set-xmark 0x4000/0x4000',
    '-j MARK --set-xmark 0x2000/0x2000',
    '-j MARK --set-xmark 0x2001/0xffffffff',
    '-j MARK --set-xmark 0x0/0xffffdfff',
    '-j MARK --set-xmark 0x1/0x0',
    '-p udp -j MARK --set-xmark 0x0/0xffffffff',
    '-m mark --mark 0x1 -j MARK --set-xmark 0x0/0xffffffff',
    '-j RETURN',
    '-j LOG',
  ])('a rule behind its own in the mark chain: %s', (rule) => {
    expect(check(`${table('', conf(), 'ipv4')}\n-A CNI-HOSTPORT-SETMARK ${rule}`).findings).toEqual([]);
  });

  test.each([
    ['kube-proxy', kubeProxyTable('v6')],
    ['Docker', dockerTable('v6').replaceAll('8080', '8081')],
    ['a rule for link-local addresses', both('-d fe80::/10 -j RETURN')],
    ['a rule for ::1', both('-d ::1/128 -j RETURN')],
    ['another network', both('-d 2001:db8:1::/64 -j RETURN')],
  ])('IPv6 and %s', (_, front) => {
    expect(check(table(front, v6, 'ipv6'), v6, 'ipv6').findings).toEqual([]);
  });
});

describe('CHECK reads', () => {
  test('nothing more when its jumps are in front', () => {
    const behind = `${both('-j X')}\n-A POSTROUTING -j X\n-A X -j ACCEPT`;
    expect(check(`${table('', conf(), 'ipv4')}\n${behind}`)).toEqual({ findings: [], read: [] });
  });

  test('of kube-proxy only the chains that its packets pass', () => {
    const { read } = check(table(kubeProxyTable('v4'), conf(), 'ipv4'));
    expect(read).toEqual(['KUBE-SERVICES', 'KUBE-POSTROUTING', 'KUBE-NODEPORTS']);
  });

  test('no targets of iptables, and no chains of the bridge plugin', () => {
    const front = `${both('-j LOG')}\n-A POSTROUTING -s 10.1.0.5/32 -j ${bridge}\n-A ${bridge} -d 10.1.0.0/16 -j ACCEPT`;
    expect(check(table(front, conf(), 'ipv4'))).toEqual({
      findings: [expect.stringContaining('decides before CNI-HOSTPORT-MASQ')],
      read: [],
    });
  });

  test('chains that lead to each other in many ways, in a moment', () => {
    const depth = 24;
    const chains = Array.from(
      { length: depth },
      (_, at) => `-A X${at} -j X${at + 1}\n-A X${at} -i eth0 -j X${at + 1}`,
    );
    const front = `${both('-j X0')}\n${chains.join('\n')}\n-A X${depth} -p udp -j ACCEPT`;
    const text = table(front, conf(), 'ipv4');
    const { attachment } = readConf(conf());
    const wanted = sandboxRules('ipv4', 'podnet', 'web-1', [attachment]);
    const reader = rulesetReader(new Set(Array.from({ length: depth + 1 }, (_, at) => `X${at}`)));
    for (const chain of new Set([...text.matchAll(/^-A (\S+)/gm)].map(([, name]) => name)))
      reader.read(`:${chain} - [0:0]`);
    for (const rule of text.split('\n')) reader.read(rule);
    if (wanted === undefined) throw new Error('nothing to check');
    const verdict = checkRules({ family: 'ipv4', observed: reader.ruleset([]), local }, wanted, [attachment]);
    expect(verdict).toEqual({ findings: [], unread: [] });
  });
});
