// Reads mappings back out of the rules, ours and upstream's alike: who has which host port. Pure.
import type { Family } from './address.ts';
import { dispatchChain, overlaps, sandboxPrefix } from './chain.ts';
import type { PortMapping, Protocol } from './netconf.ts';
import { readAddress } from './address.ts';
import { type Ruleset, targetOf } from './restore.ts';

/** A line of the dispatch chain: which ports lead to which chain, and the names its comment gives. */
export interface DispatchLine {
  readonly chain: string;
  /** The empty string when the line names none, or all but one. */
  readonly protocol: string;
  /** None when the line names all but some. */
  readonly ports: readonly number[];
  readonly network: string | undefined;
  readonly containerId: string | undefined;
}

/** One mapping as the kernel holds it. */
export interface ListedMapping {
  readonly family: Family;
  readonly protocol: string;
  /** The empty string for a mapping of all local addresses. */
  readonly hostAddress: string;
  readonly hostPort: number;
  readonly containerAddress: string;
  readonly containerPort: number;
  readonly network: string | undefined;
  readonly containerId: string | undefined;
  readonly chain: string;
}

/** The lines of the dispatch chain that lead to a sandbox's chain, in order. */
export function readDispatch(observed: Ruleset): DispatchLine[] {
  return (observed.chains.get(dispatchChain) ?? []).flatMap((rule) => readDispatchLine(rule) ?? []);
}

/** One rule of the dispatch chain; undefined when it leads to no sandbox's chain. */
export function readDispatchLine(rule: string): DispatchLine | undefined {
  const chain = targetOf(rule);
  if (!chain.startsWith(sandboxPrefix)) return undefined;
  const plain = rule.replaceAll(/"(?:[^"\\]|\\.)*"/g, '""');
  const names = /dnat name: \\"([^"\\]*)\\" id: \\"([^"\\]*)\\"/.exec(rule);
  return {
    chain,
    protocol: /(?<!! )-p (\S+)/.exec(plain)?.[1] ?? '',
    ports: (/(?<!! )--dports? (\S+)/.exec(plain)?.[1] ?? '').split(',').flatMap(readPorts),
    network: names?.[1],
    containerId: names?.[2],
  };
}

/** Every mapping whose chain was observed, in the order in which the kernel tries them. */
export function listMappings(family: Family, observed: Ruleset): ListedMapping[] {
  // The first line of a chain decides its place and gives its names.
  const lines = new Map<string, DispatchLine>();
  for (const line of readDispatch(observed)) if (!lines.has(line.chain)) lines.set(line.chain, line);
  return [...lines.values()].flatMap((line) => chainMappings(family, observed, line));
}

function chainMappings(family: Family, observed: Ruleset, line: DispatchLine): ListedMapping[] {
  const { chain, network, containerId } = line;
  return (observed.chains.get(chain) ?? []).flatMap((rule) => {
    const match = /-p (\S+) .*--dport (\d+) .*-j DNAT --to-destination (\S+)/.exec(rule);
    const target = /^\[?([^\]]+?)\]?:(\d+)$/.exec(match?.[3] ?? '');
    if (match === null || target === null) return [];
    return [
      {
        family,
        protocol: match[1] ?? '',
        hostAddress: /(?:^| )-d ([^ /]+)/.exec(rule)?.[1] ?? '',
        hostPort: Number(match[2]),
        containerAddress: target[1] ?? '',
        containerPort: Number(target[2]),
        network,
        containerId,
        chain,
      },
    ];
  });
}

/** Those lines of other sandboxes that may take packets of one of these mappings, judged by protocol and port. */
export function rivalLines(
  lines: readonly DispatchLine[],
  ownChain: string,
  mappings: readonly PortMapping[],
): DispatchLine[] {
  const wanted = new Set(mappings.map((mapping) => `${mapping.protocol} ${mapping.hostPort}`));
  return lines.filter(
    (line) => line.chain !== ownChain && line.ports.some((port) => wanted.has(`${line.protocol} ${port}`)),
  );
}

/** The mappings out of `mappings` that another sandbox's chain, as observed, takes packets of. */
export function contested(
  family: Family,
  observed: Ruleset,
  line: DispatchLine,
  mappings: readonly PortMapping[],
): readonly PortMapping[] {
  if (!observed.chains.has(line.chain))
    return mappings.filter(
      ({ protocol, hostPort }) => protocol === line.protocol && line.ports.includes(hostPort),
    );
  const taken = chainMappings(family, observed, line);
  return mappings.filter((mapping) => taken.some((other) => overlaps(mapping, asMapping(other))));
}

function asMapping(listed: ListedMapping): PortMapping {
  const { hostPort, containerPort } = listed;
  return {
    hostPort,
    containerPort,
    protocol: readProtocol(listed.protocol),
    hostIP: readAddress(listed.hostAddress),
  };
}

function readProtocol(text: string): Protocol {
  return text === 'udp' || text === 'sctp' ? text : 'tcp';
}

function readPorts(text: string): number[] {
  const [first = Number.NaN, last = first] = text.split(':').map(Number);
  if (text === '' || !(first >= 0 && last <= 65535)) return [];
  return Array.from({ length: last - first + 1 }, (_, index) => first + index);
}
