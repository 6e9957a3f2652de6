// What is read from a netconf, and how each fault in one is named: the field, the value, what it should be.
import * as fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { cniCodes, PortmapError } from '../../src/errors.ts';
import { readNetConf, readRemnants, readValidAttachments } from '../../src/netconf.ts';
import {
  cniVersions,
  hasMappings,
  type NetworkConf,
  readJson,
  readName,
  readTimeoutSeconds,
  readVersion,
} from '../../src/network.ts';
import { renderResult } from '../../src/result.ts';
import { damagedNetconf } from './arbitraries.ts';
import { type Netconf, readConf } from './node.ts';

const tcp = { hostPort: 8080, containerPort: 80, protocol: 'tcp' };
const address = { address: '10.1.0.5/16' };
const base: Netconf = {
  cniVersion: '1.0.0',
  name: 'podnet',
  runtimeConfig: { portMappings: [tcp] },
  prevResult: { cniVersion: '1.0.0', ips: [address] },
};
const mapped = (mapping: object): Netconf => ({
  ...base,
  runtimeConfig: { portMappings: [tcp, { ...tcp, ...mapping }] },
});
const networkOf = (text: string): NetworkConf => {
  const raw = readJson(text);
  return { name: readName(raw), cniVersion: readVersion(raw), raw };
};

// What a call is refused with, as CNI shows it.
function refusal(read: () => unknown): string {
  try {
    read();
  } catch (error) {
    if (error instanceof PortmapError) return `${cniCodes[error.code]} ${error.message}`;
    throw error;
  }
  return 'not refused';
}

describe('ADD refuses', () => {
  const port = 'is not a port: a whole number from 1 to 65535';
  const where = 'runtimeConfig.portMappings[1]';
  const notAddress = 'is not an IP address (names, zones and prefix lengths are not taken)';
  const notProtocol = 'is not a protocol: tcp, udp or sctp';
  test.each<[string, Netconf, string]>([
    ['no name', { ...base, name: undefined }, '7 missing network name'],
    ['an empty name', { ...base, name: '' }, '7 missing network name'],
    ['a name with a space', { ...base, name: 'my net' }, '7 name: "my net" is not a network name'],
    ['a name that is a number', { ...base, name: 7 }, '7 name: 7 is not a network name'],
    [
      'a cniVersion to come',
      { ...base, cniVersion: '9.9.9' },
      '1 incompatible CNI versions: cniVersion "9.9.9" is not supported',
    ],
    [
      'a cniVersion that is a number',
      { ...base, cniVersion: 1 },
      '1 incompatible CNI versions: cniVersion 1 is not supported',
    ],
    ['no prevResult', { ...base, prevResult: undefined }, '7 prevResult: missing'],
    ['prevResult null', { ...base, prevResult: null }, '7 prevResult: missing'],
    ['a prevResult that is a list', { ...base, prevResult: [] }, '7 prevResult: [] is not an object'],
    ['host port 0', mapped({ hostPort: 0 }), `7 ${where}.hostPort: 0 ${port}`],
    ['host port -1', mapped({ hostPort: -1 }), `7 ${where}.hostPort: -1 ${port}`],
    ['host port 65536', mapped({ hostPort: 65536 }), `7 ${where}.hostPort: 65536 ${port}`],
    ['host port 80.5', mapped({ hostPort: 80.5 }), `7 ${where}.hostPort: 80.5 ${port}`],
    ['host port 1e300', mapped({ hostPort: 1e300 }), `7 ${where}.hostPort: 1e+300 ${port}`],
    ['a host port in quotes', mapped({ hostPort: '80' }), `7 ${where}.hostPort: "80" ${port}`],
    [
      'no host port',
      mapped({ hostPort: null }),
      `7 ${where}.hostPort: missing: it must be a port: a whole number from 1 to 65535`,
    ],
    ['container port 0', mapped({ containerPort: 0 }), `7 ${where}.containerPort: 0 ${port}`],
    ['container port 65536', mapped({ containerPort: 65536 }), `7 ${where}.containerPort: 65536 ${port}`],
    ['protocol icmp', mapped({ protocol: 'icmp' }), `7 ${where}.protocol: "icmp" ${notProtocol}`],
    ['protocol tcp6', mapped({ protocol: 'tcp6' }), `7 ${where}.protocol: "tcp6" ${notProtocol}`],
    ['a protocol that is a number', mapped({ protocol: 6 }), `7 ${where}.protocol: 6 ${notProtocol}`],
    ...[
      'localhost',
      '198.51.100.0/24',
      '999.1.1.1',
      ' 198.51.100.1',
      'fe80::1%eth0',
      '127.1',
      '010.0.0.1',
    ].map((hostIP): [string, Netconf, string] => [
      `host address ${hostIP}`,
      mapped({ hostIP }),
      `7 ${where}.hostIP: "${hostIP}" ${notAddress}`,
    ]),
    ['a host address that is a number', mapped({ hostIP: 1 }), `7 ${where}.hostIP: 1 is not text`],
    [
      'a mapping that is text',
      { ...base, runtimeConfig: { portMappings: ['8080:80'] } },
      '7 runtimeConfig.portMappings[0]: "8080:80" is not an object',
    ],
    [
      'mappings that are no list',
      { ...base, runtimeConfig: { portMappings: tcp } },
      '7 runtimeConfig.portMappings: {"hostPort":8080,"containerPort":80,"protocol":"tcp"} is not a list of port mappings',
    ],
    [
      'a runtimeConfig that is text',
      { ...base, runtimeConfig: 'x' },
      '7 runtimeConfig: "x" is not an object',
    ],
    [
      'a line break in a condition',
      { ...base, conditionsV4: ['-m', 'comment', '--comment', 'x\n-A OUTPUT -j ACCEPT'] },
      '7 conditionsV4[3]: "x\\n-A OUTPUT -j ACCEPT" holds a line break or NUL',
    ],
    [
      'a NUL in a condition',
      { ...base, conditionsV6: ['-i', 'a\0b'] },
      '7 conditionsV6[1]: "a\\u0000b" holds a line break or NUL',
    ],
    [
      'a condition of several words in one',
      { ...base, conditionsV4: ['-d 198.51.100.1'] },
      '7 conditionsV4[0]: "-d 198.51.100.1" holds several words: give each word of the rule as an element',
    ],
    [
      'an empty word in a condition',
      { ...base, conditionsV4: [''] },
      '7 conditionsV4[0]: "" is empty: give one word of the iptables rule',
    ],
    [
      'a condition that is text',
      { ...base, conditionsV4: '-d 198.51.100.1' },
      '7 conditionsV4: "-d 198.51.100.1" is not a list of words of an iptables rule',
    ],
    [
      'a condition in the language of nftables',
      { ...base, conditionsV4: ['ip', 'daddr', '198.51.100.1'] },
      '7 conditionsV4: ["ip","daddr","198.51.100.1"] does not start with an iptables option or "!": nftables syntax is not taken',
    ],
    [
      'half of a surrogate pair in a condition',
      { ...base, conditionsV4: ['-i', '\ud800'] },
      '7 conditionsV4[1]: "\\ud800" is not well-formed Unicode',
    ],
    [
      'mark bit 32',
      { ...base, markMasqBit: 32 },
      '7 markMasqBit: 32 is not a mark bit: a whole number from 0 to 31',
    ],
    [
      'mark bit -1',
      { ...base, markMasqBit: -1 },
      '7 markMasqBit: -1 is not a mark bit: a whole number from 0 to 31',
    ],
    [
      'a mark bit in quotes',
      { ...base, markMasqBit: '13' },
      '7 markMasqBit: "13" is not a mark bit: a whole number from 0 to 31',
    ],
    [
      'both mark options',
      { ...base, markMasqBit: 0, externalSetMarkChain: 'KUBE-MARK-MASQ' },
      '7 markMasqBit: 0 and externalSetMarkChain: "KUBE-MARK-MASQ" exclude each other',
    ],
    ...['', 'a b', 'x'.repeat(29), '-j', 'a"b', '!x'].map((chain): [string, Netconf, string] => [
      `mark chain "${chain}"`,
      { ...base, externalSetMarkChain: chain },
      `7 externalSetMarkChain: ${JSON.stringify(chain)} is not the name of a chain: 1 to 28 characters without spaces`,
    ]),
    ['snat in quotes', { ...base, snat: 'true' }, '7 snat: "true" is not true or false'],
    ['masqAll 1', { ...base, masqAll: 1 }, '7 masqAll: 1 is not true or false'],
    [
      'the nftables backend',
      { ...base, backend: 'nftables' },
      '7 backend: "nftables" is not a backend of this plugin: only "iptables" is',
    ],
    [
      'an onConflict of its own',
      { ...base, onConflict: 'ignore' },
      '7 onConflict: "ignore" is neither "warn" nor "fail"',
    ],
    [
      'no time at all',
      { ...base, timeoutSeconds: 0 },
      '7 timeoutSeconds: 0 is not a time in seconds: a number from 0.1 to 3600',
    ],
    [
      'a container without an address',
      { ...base, prevResult: { ips: [] } },
      "7 prevResult: no address for interface eth0, so 1 port mapping(s) can't be made",
    ],
    [
      'an address without a prefix length',
      { ...base, prevResult: { ips: [{ address: '10.1.0.5' }] } },
      '7 prevResult.ips[0].address: "10.1.0.5" is not an IP address with a prefix length',
    ],
    [
      'an address with too long a prefix',
      { ...base, prevResult: { ips: [{ address: '10.1.0.5/33' }] } },
      '7 prevResult.ips[0].address: "10.1.0.5/33" is not an IP address with a prefix length',
    ],
    [
      'a result of another version',
      { ...base, prevResult: { cniVersion: '0.4.0', ips: [address] } },
      '7 prevResult.cniVersion: "0.4.0" does not go with cniVersion "1.0.0"',
    ],
  ])('%s', (_, conf, message) => {
    expect(refusal(() => readConf(conf))).toBe(message);
  });

  test.each([
    ['nothing on stdin', '', '6 netconf: not JSON: stdin is empty'],
    ['a list', '[1]', '6 netconf: [1] is not a JSON object'],
    ['null', 'null', '6 netconf: null is not a JSON object'],
  ])('%s', (_, text, message) => {
    expect(refusal(() => networkOf(text))).toBe(message);
  });

  test('half a netconf, with what the JSON parser has to say', () => {
    expect(refusal(() => networkOf('{"name": "podnet", '))).toMatch(/^6 netconf: not JSON: .*JSON/);
  });

  test('conditions that together make a line longer than iptables-restore reads at once', () => {
    const word = ['-m', 'comment', '--comment', '"'.repeat(250)];
    const conditionsV4 = Array.from({ length: 15 }, () => word).flat();
    expect(refusal(() => readConf({ ...base, conditionsV4 }))).toMatch(/^7 conditionsV4: /);
  });
});

describe('ADD reads', () => {
  test('a netconf without settings with the defaults of the upstream plugin', () => {
    const { attachment, onConflict, warnings } = readConf(base);
    expect({ ...attachment, onConflict, warnings }).toEqual({
      mappings: [tcp],
      addresses: { ipv4: { family: 'ipv4', text: '10.1.0.5', network: '10.1.0.0/16' } },
      snat: true,
      masqAll: false,
      markMasqBit: undefined,
      externalSetMarkChain: undefined,
      conditions: { ipv4: [], ipv6: [] },
      onConflict: 'warn',
      warnings: [],
    });
  });

  test('keys in any case, the last of several spellings, and null as if it were not there', () => {
    const spelled = {
      CNIVERSION: '1.0.0',
      Name: 'podnet',
      SNAT: false,
      masqall: null,
      MARKMASQBIT: 5,
      RuntimeConfig: {
        portmappings: null,
        PortMappings: [{ hostPort: 1, HostPort: 8080, ContainerPort: 80, PROTOCOL: 'UDP', HostIP: '' }],
      },
      PrevResult: { IPs: [{ Address: '10.1.0.5/16', Interface: null }] },
    };
    const { name, attachment } = readConf(spelled);
    expect(name).toBe('podnet');
    expect(attachment).toMatchObject({ snat: false, masqAll: false, markMasqBit: 5 });
    expect(attachment.mappings).toEqual([{ hostPort: 8080, containerPort: 80, protocol: 'udp' }]);
    expect(attachment.addresses.ipv4?.text).toBe('10.1.0.5');
  });

  test('a mapping without a protocol as tcp', () => {
    const portMappings = [
      { hostPort: 1, containerPort: 2 },
      { hostPort: 3, containerPort: 4, protocol: '' },
    ];
    const { attachment } = readConf({ ...base, runtimeConfig: { portMappings } });
    expect(attachment.mappings.map(({ protocol }) => protocol)).toEqual(['tcp', 'tcp']);
  });

  test('keys it does not know as if they were not there', () => {
    const more = { type: 'portmap', capabilities: { portMappings: true }, ipMasq: true, args: { x: [{}] } };
    const { raw: _, ...plain } = readConf(base);
    expect(readConf({ ...base, ...more })).toMatchObject(plain);
  });

  test.each(cniVersions)('a netconf of version %s', (cniVersion) => {
    const prevResult = ['0.1.0', '0.2.0'].includes(cniVersion)
      ? { ip4: { ip: '10.1.0.5/16' } }
      : { ips: [{ version: '4', address: '10.1.0.5/16' }] };
    expect(readConf({ ...base, cniVersion, prevResult }).attachment.addresses.ipv4?.network).toBe(
      '10.1.0.0/16',
    );
  });

  test('a netconf without a version as one of 0.1.0', () => {
    const old = { ...base, cniVersion: undefined, prevResult: { ip4: { ip: '10.1.0.5/16' } } };
    expect(readConf(old).cniVersion).toBe('0.1.0');
  });

  test.each<[string, Netconf, RegExp]>([
    [
      'a mapping whose family the container lacks',
      mapped({ hostPort: 81, hostIP: '2001:db8::1' }),
      /^\[2001:db8::1\]:81->80\/tcp: not mapped: the container has no IPv6 address/,
    ],
    [
      'a host port that an earlier entry takes',
      mapped({ containerPort: 81 }),
      /^8080->81\/tcp: an earlier entry of this request has the same host port/,
    ],
    [
      'a mapping of ::1',
      {
        ...mapped({ hostPort: 81, hostIP: '::1' }),
        prevResult: { ips: [address, { address: 'fd00::5/64' }] },
      },
      /^\[::1\]:81->80\/tcp: not mapped: the kernel routes no packet from ::1/,
    ],
    ['masqAll without snat', { ...base, masqAll: true, snat: false }, /^masqAll: has no effect/],
  ])('%s with a warning', (_, conf, warning) => {
    expect(readConf(conf).warnings).toEqual([expect.stringMatching(warning)]);
  });
});

describe('the container has', () => {
  const interfaces = [
    { name: 'veth1' },
    { name: 'eth0', sandbox: '/run/netns/c' },
    { name: 'net1', sandbox: '/run/netns/c' },
    { name: 'eth0' },
    { name: 'eth0', sandbox: '' },
  ];
  test.each<[string, Netconf, string, string[]]>([
    [
      'the first address that names no interface',
      { ips: [{ address: '192.0.2.1/24' }, { address: '192.0.2.2/24' }] },
      'eth0',
      ['192.0.2.1'],
    ],
    [
      'the address of its own interface',
      {
        interfaces,
        ips: [
          { interface: 0, address: '192.0.2.1/24' },
          { interface: 2, address: '192.0.2.2/24' },
          { interface: 1, address: '192.0.2.3/24' },
        ],
      },
      'eth0',
      ['192.0.2.3'],
    ],
    [
      'the address of the interface that is asked for',
      {
        interfaces,
        ips: [
          { interface: 1, address: '192.0.2.1/24' },
          { interface: 2, address: '192.0.2.2/24' },
        ],
      },
      'net1',
      ['192.0.2.2'],
    ],
    [
      'no address of an interface outside of a sandbox',
      {
        interfaces,
        ips: [
          { interface: 3, address: '192.0.2.1/24' },
          { interface: 4, address: '192.0.2.2/24' },
          { interface: 1, address: '192.0.2.3/24' },
        ],
      },
      'eth0',
      ['192.0.2.3'],
    ],
    [
      'an address whose interface is out of range',
      {
        interfaces,
        ips: [
          { interface: 9, address: '192.0.2.1/24' },
          { interface: 1, address: '192.0.2.3/24' },
        ],
      },
      'eth0',
      ['192.0.2.1'],
    ],
    [
      'an address whose interface is negative',
      { interfaces, ips: [{ interface: -1, address: '192.0.2.1/24' }] },
      'eth0',
      ['192.0.2.1'],
    ],
    [
      'an address when the result lists no interfaces',
      { ips: [{ interface: 1, address: '192.0.2.1/24' }] },
      'eth0',
      ['192.0.2.1'],
    ],
    [
      'one address of each family',
      { ips: [{ address: 'FD00:0::5/64' }, { address: '192.0.2.1/24' }, { address: 'fd00::6/64' }] },
      'eth0',
      ['192.0.2.1', 'fd00::5'],
    ],
  ])('%s', (_, prevResult, ifname, expected) => {
    const { addresses } = readConf({ ...base, prevResult }, ifname).attachment;
    expect([addresses.ipv4?.text, addresses.ipv6?.text].filter((text) => text !== undefined)).toEqual(
      expected,
    );
  });
});

describe('ADD answers', () => {
  test('with prevResult as it came, unknown keys too, in the version of the netconf', () => {
    const prevResult = {
      cniVersion: '1.0.0',
      ips: [{ ...address, extra: [1] }],
      later: { x: null },
      dns: {},
    };
    const conf = readConf({ ...base, cniVersion: '1.1.0', prevResult });
    expect(JSON.parse(renderResult(conf))).toEqual({ ...prevResult, cniVersion: '1.1.0' });
  });

  test('with a version when prevResult had none', () => {
    const conf = readConf({ ...base, runtimeConfig: undefined, prevResult: {} });
    expect(JSON.parse(renderResult(conf))).toEqual({ cniVersion: '1.0.0' });
  });
});

describe('DEL reads', () => {
  test('the mappings and addresses that make sense, and no more', () => {
    const portMappings = [
      tcp,
      { ...tcp, hostPort: 0 },
      'x',
      null,
      { ...tcp, hostIP: 'nowhere' },
      { ...tcp, hostPort: 81 },
    ];
    const conf = { ...base, markMasqBit: 99, conditionsV4: 'x', runtimeConfig: { portMappings } };
    const { mappings, addresses } = readRemnants(networkOf(JSON.stringify(conf)), 'eth0');
    expect(mappings.map(({ hostPort }) => hostPort)).toEqual([8080, 81]);
    expect(addresses.ipv4?.text).toBe('10.1.0.5');
  });

  test.each<[string, unknown, boolean]>([
    ['no runtimeConfig', undefined, false],
    ['runtimeConfig null', null, false],
    ['no list', {}, false],
    ['a null list', { portMappings: null }, false],
    ['an empty list', { PortMappings: [] }, false],
    ['a list', { PortMappings: [tcp] }, true],
    ['a list of nonsense', { portMappings: ['x'] }, true],
    ['nonsense for a list', { portMappings: 'x' }, true],
  ])('whether there may be mappings in %s', (_, runtimeConfig, expected) => {
    expect(hasMappings(readJson(JSON.stringify({ ...base, runtimeConfig })))).toBe(expected);
  });

  test.each<[unknown, number]>([
    [undefined, 60],
    [null, 60],
    [5, 5],
    [0.5, 0.5],
    [0, 60],
    [-1, 60],
    ['9', 60],
    [1e9, 60],
  ])('timeoutSeconds %j as %d', (timeoutSeconds, expected) => {
    expect(readTimeoutSeconds(readJson(JSON.stringify({ timeoutSeconds })))).toBe(expected);
  });
});

const listed = (conf: object) => readValidAttachments(networkOf(JSON.stringify({ ...base, ...conf })));

describe('GC reads', () => {
  const one = [{ containerID: 'c1', ifname: 'eth0' }];

  test.each<[string, object, unknown]>([
    ['the list of live attachments', { 'cni.dev/valid-attachments': one }, one],
    ['the list under the name of an early libcni', { 'cni.dev/attachments': one }, one],
    [
      'the newer name where both are there',
      { 'cni.dev/attachments': [], 'cni.dev/valid-attachments': one },
      one,
    ],
    ['an empty list as nobody', { 'cni.dev/valid-attachments': [] }, []],
    ['null, which is how Go writes an empty list, as nobody', { 'cni.dev/valid-attachments': null }, []],
    ['keys in any case', { 'CNI.dev/Valid-Attachments': [{ ContainerID: 'c1', IfName: 'eth0' }] }, one],
  ])('%s', (_, conf, expected) => {
    expect(listed(conf)).toEqual(expected);
  });

  test.each<[string, object, string]>([
    ['no list', {}, '7 cni.dev/valid-attachments: missing, so nothing was deleted'],
    [
      'a list that is none',
      { 'cni.dev/valid-attachments': {} },
      '7 cni.dev/valid-attachments: {} is not a list of attachments',
    ],
    [
      'an attachment without an interface',
      { 'cni.dev/valid-attachments': [...one, { containerID: 'c2' }] },
      '7 cni.dev/valid-attachments[1].ifname: missing: it must be text',
    ],
    [
      'an attachment that is text',
      { 'cni.dev/attachments': ['c1'] },
      '7 cni.dev/attachments[0]: "c1" is not an attachment',
    ],
  ])('%s as a mistake, so that nothing is deleted', (_, conf, message) => {
    expect(refusal(() => listed(conf))).toBe(message);
  });
});

const readAll = (text: string) => {
  const outcomes: string[] = [];
  const network = networkOf(text);
  outcomes.push(refusal(() => readNetConf(network, 'eth0')));
  outcomes.push(refusal(() => readValidAttachments(network)));
  // These must answer for every netconf that has a name and a version.
  readRemnants(network, 'eth0');
  hasMappings(network.raw);
  readTimeoutSeconds(network.raw);
  return outcomes.join('\n');
};

describe('whatever comes on stdin', () => {
  test('is a netconf, or an error with a CNI code', () => {
    const anything = fc.oneof(
      fc.string(),
      fc.json({ depthSize: 'medium' }),
      fc.jsonValue().map((value) => JSON.stringify({ ...base, runtimeConfig: value })),
      fc.jsonValue().map((value) => JSON.stringify({ ...base, prevResult: value })),
      damagedNetconf,
    );
    fc.assert(
      fc.property(anything, (text) => {
        expect(refusal(() => readAll(text))).toMatch(/^(?:not refused|(?:1|6|7) )/);
      }),
      { numRuns: 1000 },
    );
  });

  test('may be nested deeper than any stack', () => {
    const deep = [
      `${'['.repeat(100_000)}${']'.repeat(100_000)}`,
      `${'{"a":'.repeat(100_000)}1${'}'.repeat(100_000)}`,
    ];
    for (const value of deep)
      for (const key of [
        'name',
        'prevResult',
        'runtimeConfig',
        'conditionsV4',
        'cni.dev/valid-attachments',
        'other',
      ])
        expect(refusal(() => readAll(`{"name": "podnet", "${key}": ${value}}`))).toMatch(
          /^(?:not refused|(?:1|6|7) )/,
        );
  });
});
