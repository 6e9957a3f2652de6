// The rules read back: by this plugin, for people and against rivals, and by the other programs that look for used
// ports in them (report R52).
import * as fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { families, readAddress } from '../../src/address.ts';
import { dispatchChain, mappingsOf, sandboxHash } from '../../src/chain.ts';
import { contested, listMappings, readDispatch, readDispatchLine, rivalLines } from '../../src/listing.ts';
import type { PortMapping } from '../../src/netconf.ts';
import { processId } from '../../src/process.ts';
import { contestedBy, findRivals, isDead } from '../../src/rival.ts';
import { add } from './arbitraries.ts';
import { type Call, emptyNode, type Netconf, observe, perform, readConf, recordOf } from './node.ts';
import { list, restore, save } from './ruleset.ts';

const netconf = (portMappings: object[], addresses = ['10.1.0.5/16', 'fd00:10:1::5/64']): Netconf => ({
  cniVersion: '1.0.0',
  name: 'podnet',
  runtimeConfig: { portMappings },
  prevResult: { ips: addresses.map((address) => ({ address })) },
});
const addOf = (containerId: string, portMappings: object[]): Call => ({
  verb: 'ADD',
  containerId,
  ifname: 'eth0',
  netconf: netconf(portMappings),
});
const tcp = (hostPort: number, containerPort = 80, hostIP = '') => ({ hostPort, containerPort, hostIP });
const wanted = (hostPort: number, hostIP = '', protocol: PortMapping['protocol'] = 'tcp'): PortMapping => ({
  hostPort,
  containerPort: 80,
  protocol,
  hostIP: readAddress(hostIP),
});
const chainOf = (containerId: string) => `CNI-DN-${sandboxHash('podnet', containerId)}`;

describe('every mapping is listed', () => {
  test('with its host and container sides, its network and its container', () => {
    const { tables } = perform(emptyNode, [
      addOf('web-1', [
        tcp(8080, 80, '198.51.100.1'),
        { hostPort: 53, containerPort: 5353, protocol: 'udp' },
        tcp(81, 80, '2001:db8::1'),
      ]),
    ]);
    const names = { network: 'podnet', containerId: 'web-1', chain: chainOf('web-1') };
    expect(listMappings('ipv4', observe(tables.ipv4, []))).toEqual([
      {
        family: 'ipv4',
        protocol: 'tcp',
        hostAddress: '198.51.100.1',
        hostPort: 8080,
        containerAddress: '10.1.0.5',
        containerPort: 80,
        ...names,
      },
      {
        family: 'ipv4',
        protocol: 'udp',
        hostAddress: '',
        hostPort: 53,
        containerAddress: '10.1.0.5',
        containerPort: 5353,
        ...names,
      },
    ]);
    expect(listMappings('ipv6', observe(tables.ipv6, []))).toEqual([
      {
        family: 'ipv6',
        protocol: 'udp',
        hostAddress: '',
        hostPort: 53,
        containerAddress: 'fd00:10:1::5',
        containerPort: 5353,
        ...names,
      },
      {
        family: 'ipv6',
        protocol: 'tcp',
        hostAddress: '2001:db8::1',
        hostPort: 81,
        containerAddress: 'fd00:10:1::5',
        containerPort: 80,
        ...names,
      },
    ]);
  });

  test('whatever it is, and no other', () => {
    fc.assert(
      fc.property(add, (call) => {
        const { tables } = perform(emptyNode, [call]);
        const { attachment } = readConf(call.netconf);
        for (const family of families) {
          const listed = listMappings(family, observe(tables[family], []));
          const meant = mappingsOf(family, attachment).map(({ protocol, hostPort, containerPort }) => ({
            protocol,
            hostPort,
            containerPort,
          }));
          expect(
            listed.map(({ protocol, hostPort, containerPort }) => ({ protocol, hostPort, containerPort })),
          ).toEqual(meant);
          for (const { containerAddress } of listed)
            expect(containerAddress).toBe(attachment.addresses[family]?.text);
        }
      }),
    );
  });

  test('under the names that its first line gives', () => {
    const { tables } = perform(emptyNode, [addOf('web-1', [tcp(8080)])]);
    const line = (tables.ipv4.get(dispatchChain) ?? []).join().replace('web-1', 'older');
    const table = restore(tables.ipv4, `*nat\n-A ${dispatchChain} ${line}\nCOMMIT\n`);
    expect(listMappings('ipv4', observe(table, [])).map(({ containerId }) => containerId)).toEqual(['web-1']);
  });

  test('in the order in which the kernel tries them', () => {
    const state = perform(perform(emptyNode, [addOf('old', [tcp(1)])]), [addOf('new', [tcp(2)])]);
    const listed = listMappings('ipv4', observe(state.tables.ipv4, []));
    expect(listed.map(({ containerId }) => containerId)).toEqual(['new', 'old']);
  });
});

describe('a line of the dispatch chain', () => {
  const text = String.raw`-p tcp -m comment --comment "dnat name: \"podnet\" id: \"web-1\"" -m multiport --dports 8080,8081 -j CNI-DN-0000000000000000000aa`;
  const read = {
    chain: 'CNI-DN-0000000000000000000aa',
    protocol: 'tcp',
    ports: [8080, 8081],
    network: 'podnet',
    containerId: 'web-1',
  };
  test.each<[string, string, unknown]>([
    ['as upstream and this plugin write it', text, read],
    ['behind conditions', `-d 198.51.100.1/32 -i eth0 ${text}`, read],
    ['with a range of ports', text.replace('8080,8081', '8080:8082'), { ...read, ports: [8080, 8081, 8082] }],
    [
      'with one port',
      text.replace('-m multiport --dports 8080,8081', '-m tcp --dport 8080'),
      { ...read, ports: [8080] },
    ],
    [
      'with a comment that was cut off',
      text.replace(String.raw`-1\"`, '...'),
      { ...read, network: undefined, containerId: undefined },
    ],
    [
      'with a comment that talks of another chain and other ports',
      text.replace('dnat name:', '-p udp --dports 1 -j CNI-DN-x dnat name:'),
      read,
    ],
    ['that leads elsewhere', text.replace('CNI-DN-0000000000000000000aa', 'KUBE-SVC'), undefined],
    ['without a target', text.replace(/ -j .*/, ''), undefined],
    ['of all ports but its own', text.replace('--dports', '! --dports'), { ...read, ports: [] }],
    ['of all protocols but its own', text.replace('-p ', '! -p '), { ...read, protocol: '' }],
    ['whose range ends nowhere', text.replace('8080,8081', '8080:99999999'), { ...read, ports: [] }],
  ])('%s', (_, rule, expected) => {
    expect(readDispatchLine(rule)).toEqual(expected);
  });
});

describe('a rival is', () => {
  const state = perform(emptyNode, [addOf('web-1', [tcp(8080, 80, '198.51.100.1'), tcp(9090), tcp(53)])]);
  const observed = observe(state.tables.ipv4, []);
  const record = recordOf([addOf('web-1', [tcp(8080, 80, '198.51.100.1'), tcp(9090), tcp(53)])]);

  test.each<[string, PortMapping, number]>([
    ['who has the port on the same address', wanted(8080, '198.51.100.1'), 1],
    ['who has the port on one address when all are wanted', wanted(8080), 1],
    ['who has the port on all addresses when one is wanted', wanted(9090, '198.51.100.7'), 1],
    ['who has the port on all addresses when 0.0.0.0 is wanted', wanted(9090, '0.0.0.0'), 1],
    ['not who has the port on another address', wanted(8080, '198.51.100.2'), 0],
    ['not who has another port', wanted(8081), 0],
    ['not who has the port of another protocol', wanted(53, '', 'udp'), 0],
  ])('%s', (_, mapping, expected) => {
    const [line] = readDispatch(observed);
    if (line === undefined || record === 'missing') throw new Error(save(state.tables.ipv4));
    const expectedTaken = expected === 1 ? [mapping] : [];
    expect(contested('ipv4', observed, line, [mapping])).toEqual(expectedTaken);
    expect(contestedBy('ipv4', record, [mapping])).toEqual(expectedTaken);
    expect(findRivals('ipv4', observed, chainOf('db-1'), [mapping], () => undefined)).toHaveLength(expected);
  });

  test('whoever has the port when it is not known on which address', () => {
    const partly = observe(state.tables.ipv4, [dispatchChain], true);
    const rivals = findRivals(
      'ipv4',
      partly,
      chainOf('db-1'),
      [wanted(8080, '198.51.100.2')],
      () => undefined,
    );
    expect(rivals.map(({ chain, dead }) => [chain, dead])).toEqual([[chainOf('web-1'), undefined]]);
  });

  test('never the sandbox itself', () => {
    expect(rivalLines(readDispatch(observed), chainOf('web-1'), [wanted(8080), wanted(9090)])).toEqual([]);
  });

  test('named with its container, network, chain and what it takes', () => {
    const [rival] = findRivals('ipv4', observed, chainOf('db-1'), [wanted(9090)], () => undefined);
    expect(rival?.description).toBe(
      `9090->80/tcp: host port already mapped for container web-1 on network podnet (chain ${chainOf('web-1')})`,
    );
  });

  test('dead when the path of its network namespace is gone, and only then', () => {
    if (record === 'missing') throw new Error('no record');
    const [attachment] = record.attachments;
    if (attachment === undefined) throw new Error('no attachment');
    const at = (netns: string, namespace?: string) =>
      isDead({ ...record, attachments: [{ ...attachment, netns, namespace }] });
    expect(at('/dev/null')).toBe(false);
    expect(at('/dev/never')).toBe(true);
    expect(at('')).toBe(false);
    // A path below a file can't be there, but neither is that a proof of death.
    expect(at('/dev/null/x')).toBe(false);
    const both = ['/dev/never', '/dev/null'].map((netns) => ({ ...attachment, netns }));
    expect(isDead({ ...record, attachments: both })).toBe(false);

    // The numbers below /proc are those of a pid namespace.
    const here = processId('self')?.namespace;
    expect(at('/proc/self/ns/never', here)).toBe(true);
    expect(at('/proc/self/ns/net', here)).toBe(false);
    expect(at('/proc/self/ns/never', 'pid:[1]')).toBe(false);
    expect(at('/proc/self/ns/never')).toBe(false);
  });

  test('dead in what is said of it only when there is a record', () => {
    const find = (known: boolean) =>
      findRivals('ipv4', observed, chainOf('db-1'), [wanted(9090)], () =>
        known && record !== 'missing' ? record : undefined,
      );
    expect(find(true).map(({ dead }) => dead)).toEqual([record]);
    expect(find(false).map(({ dead }) => dead)).toEqual([undefined]);
  });
});

const consecutive = (count: number, hostIP: string) =>
  Array.from({ length: count }, (_, index) => tcp(8000 + index, 80, hostIP));
const listing = (portMappings: object[]) => {
  const { tables } = perform(emptyNode, [addOf('web-1', portMappings)]);
  return [...tables.ipv4.keys()].flatMap((chain) => list(tables.ipv4, chain));
};

// Written after what these programs look for; each reads lines of `iptables -t nat -S`.
describe('other programs find exactly the mapped ports', () => {
  test.each([
    [1, ''],
    [3, ''],
    [20, ''],
    [1, '198.51.100.1'],
    [3, '198.51.100.1'],
    [20, '198.51.100.1'],
  ])('%d of them, bound to "%s"', (count, hostIP) => {
    const lines = listing(consecutive(count, hostIP));
    const ports = consecutive(count, hostIP).map(({ hostPort }) => hostPort);

    // nerdctl: numbers with commas between them behind --dports; a range would end the match after its first number.
    const inLists = lines.flatMap(
      (line) => /--dports ((?:,?\d+)+)/.exec(line)?.[1]?.split(',').map(Number) ?? [],
    );
    expect(inLists.toSorted((one, other) => one - other)).toEqual(ports);
    for (const line of lines.filter((one) => one.includes('--dports')))
      expect(line).toMatch(/--dports [\d,]+ /);

    // nerdctl: the address and port of each rule of a sandbox's chain that rewrites the destination.
    const rewriting = lines.filter((line) => /^-A CNI-DN-\S+ .*-j DNAT/.test(line));
    expect(rewriting.map((line) => / --dport (\d+) /.exec(line)?.[1]).map(Number)).toEqual(ports);
    expect(new Set(rewriting.map((line) => / -d (\S+?)(?:\/\d+)? /.exec(line)?.[1] ?? ''))).toEqual(
      new Set([hostIP]),
    );

    // lima: the address, if any, directly behind the chain, tcp next, and the port directly in front of the target.
    const seen = lines.flatMap(
      (line) =>
        /^-A CNI-DN-\w+ (?:-d ([\d.]+)\/32 )?-p tcp .*--dport (\d+) -j DNAT/.exec(line)?.slice(1) ?? [],
    );
    expect(seen).toEqual(ports.flatMap((port) => [hostIP === '' ? undefined : hostIP, String(port)]));
  });
});
