// What fast-check makes up for the properties: calls as runtimes make them, tables as other programs leave them, and
// netconfs that went wrong.
import * as fc from 'fast-check';
import type { Family } from '../../src/address.ts';
import { isObject } from '../../src/network.ts';
import type { Call, Netconf } from './node.ts';
import { emptyTable, type NatTable, restore } from './ruleset.ts';

const portNumber = fc.oneof(fc.integer({ min: 1, max: 65535 }), fc.constantFrom(1, 80, 8080, 65535));
const hostIP = fc.oneof(
  { weight: 3, arbitrary: fc.constantFrom('', '0.0.0.0', '::', '127.0.0.1', '198.51.100.1', '2001:db8::1') },
  { weight: 1, arbitrary: fc.oneof(fc.ipV4(), fc.ipV6()) },
);
const name = fc.oneof(
  fc.constantFrom('a', 'podnet'),
  fc.stringMatching(/^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,140}$/),
);

const mapping = fc.record(
  {
    hostPort: portNumber,
    containerPort: portNumber,
    protocol: fc.constantFrom('tcp', 'udp', 'sctp', 'TCP'),
    hostIP,
  },
  { requiredKeys: ['hostPort', 'containerPort'] },
);

/** Up to `max` mappings; few have more than one line of the dispatch chain. */
export const mappings = (max = 40) =>
  fc.oneof(
    fc.array(mapping, { minLength: 1, maxLength: 3 }),
    fc.array(mapping, { minLength: 1, maxLength: max }),
  );

// In the kernel's own words, and where it puts them, so that what was written is what is printed.
const condition = fc.constantFrom(
  [],
  ['-m', 'mark', '--mark', '0x7'],
  ['-m', 'comment', '--comment', 'a "quoted" word \\'],
  ['-m', 'physdev', '!', '--physdev-is-bridged'],
);

const options = fc.record(
  {
    snat: fc.boolean(),
    masqAll: fc.boolean(),
    markMasqBit: fc.integer({ min: 0, max: 31 }),
    conditionsV4: condition,
    conditionsV6: condition,
  },
  { requiredKeys: [] },
);

const prefixed = (address: fc.Arbitrary<string>, bits: number) =>
  fc.tuple(address, fc.integer({ min: 0, max: bits })).map(([text, prefix]) => `${text}/${prefix}`);

// With host bits set as they come. An IPv6 text that stands for an IPv4 address is not among them.
const v4Cidr = prefixed(fc.ipV4(), 32);
const v6Cidr = prefixed(
  fc.ipV6().filter((text) => !/^(?:0*:){5}|^::/.test(text)),
  128,
);

/** The addresses of a container with one family or both. */
const cidrs = fc.oneof(fc.tuple(v4Cidr), fc.tuple(v6Cidr), fc.tuple(v4Cidr, v6Cidr));

/** A netconf that ADD takes. */
export const netconf = (network: fc.Arbitrary<string> = name, max = 40): fc.Arbitrary<Netconf> =>
  fc.record({ network, settings: options, portMappings: mappings(max), addresses: cidrs }).map((parts) => ({
    cniVersion: '1.0.0',
    name: parts.network,
    type: 'portmap',
    ...parts.settings,
    runtimeConfig: { portMappings: parts.portMappings },
    prevResult: { ips: parts.addresses.map((address) => ({ address })) },
  }));

/** An ADD of some sandbox. */
export const add: fc.Arbitrary<Call> = fc.record({
  verb: fc.constant('ADD' as const),
  containerId: name,
  ifname: fc.constant('eth0'),
  netconf: netconf(),
});

/** ADDs of two sandboxes that share nothing but, perhaps, their ports. */
export const twoAdds: fc.Arbitrary<readonly [Call, Call]> = fc
  .tuple(add, add)
  .filter(([one, other]) => joined(one) !== joined(other));

/** Calls for a few sandboxes, each with up to two attachments, that keep coming back to the same ones. */
export const calls: fc.Arbitrary<readonly Call[]> = fc.array(
  fc.record({
    verb: fc.constantFrom('ADD', 'ADD', 'DEL'),
    containerId: fc.constantFrom('one', 'two', 'three'),
    ifname: fc.constantFrom('eth0', 'eth0', 'net1'),
    netconf: netconf(fc.constantFrom('red', 'blue'), 17),
  }),
  { minLength: 1, maxLength: 12 },
);

/** What tells a sandbox's chain from another's: upstream joins the two names without a separator. */
export function joined(call: Call): string {
  return `${String(call.netconf['name'])}${call.containerId}`;
}

// Rules of service proxies, container engines, and the plugin's own neighbours.
const foreignRules: Record<Family, readonly string[]> = {
  ipv4: [
    '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    '-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER',
    '-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER',
    '-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE',
    '-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80',
    '-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "say -j CNI-DN-0000000000000000000aa \\" here" -m tcp --dport 443 -j KUBE-SVC',
    '-A CNI-DN-0000000000000000000aa -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.9:80',
    '-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \\"old\\" id: \\"aa\\"" -m multiport --dports 8080 -j CNI-DN-0000000000000000000aa',
    '-A CNI-HOSTPORT-SNAT -m comment --comment "snat name: \\"old\\" id: \\"aa\\"" -j CNI-SN-0000000000000000000aa',
  ],
  ipv6: [
    '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    '-A POSTROUTING -s fd00:17::/64 ! -o docker0 -j MASQUERADE',
    '-A CNI-DN-0000000000000000000aa -p tcp -m tcp --dport 8080 -j DNAT --to-destination [fd00::9]:80',
    '-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \\"old\\" id: \\"aa\\"" -m multiport --dports 8080 -j CNI-DN-0000000000000000000aa',
  ],
};
const foreignChains = [
  'KUBE-SERVICES',
  'KUBE-SVC',
  'DOCKER',
  'CNI-DN-0000000000000000000aa',
  'CNI-SN-0000000000000000000aa',
  'CNI-HOSTPORT-DNAT',
  'CNI-HOSTPORT-SNAT',
];

/** A table that other programs, or an earlier plugin, have rules in; or an empty one. */
export const foreignTable = (family: Family): fc.Arbitrary<NatTable> =>
  fc.oneof(
    fc.constant(emptyTable),
    fc
      .subarray([...foreignRules[family], ...foreignRules[family]])
      .map((rules) =>
        restore(
          emptyTable,
          ['*nat', ...foreignChains.map((chain) => `:${chain} - [0:0]`), ...rules, 'COMMIT\n'].join('\n'),
        ),
      ),
  );

/** A netconf of which one part was replaced by anything. */
export const damagedNetconf: fc.Arbitrary<string> = fc
  .tuple(
    netconf(name, 3),
    fc.nat(),
    fc.oneof(fc.jsonValue(), fc.constantFrom(0, -1, 65536, 80.5, '80', '', null)),
  )
  .map(([conf, where, value]) => {
    const text = JSON.stringify(conf);
    const places = paths(conf);
    return JSON.stringify(replaced(JSON.parse(text) as unknown, places[where % places.length] ?? [], value));
  });

function paths(value: unknown, path: readonly string[] = []): (readonly string[])[] {
  if (typeof value !== 'object' || value === null) return [path];
  return [path, ...Object.entries(value).flatMap(([key, inner]) => paths(inner, [...path, key]))];
}

function replaced(value: unknown, [key, ...rest]: readonly string[], by: unknown): unknown {
  if (key === undefined) return by;
  if (Array.isArray(value))
    return value.map((inner: unknown, index) => (String(index) === key ? replaced(inner, rest, by) : inner));
  return isObject(value) ? { ...value, [key]: replaced(value[key], rest, by) } : by;
}
