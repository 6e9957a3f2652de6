// The vocabulary of the nat table: chain names, and which chains and rules an attachment needs. Pure. All text is
// in the spelling iptables-save prints, so that wanted and observed rules can be compared.
//
//   PREROUTING, OUTPUT ──(destination is local)──▶ CNI-HOSTPORT-DNAT ──(protocol, ports)──▶ CNI-DN-<hash>
//                                                                                             │ from the container's
//                                                  CNI-HOSTPORT-SETMARK ◀──────────────────────┤ network or 127.0.0.1
//                                                                                             └▶ DNAT to the container
//   POSTROUTING ──▶ CNI-HOSTPORT-MASQ ──(mark)──▶ MASQUERADE
//
// The names are upstream's and must never change: either plugin removes what the other has added.
import { runtime } from '#runtime';
import { type Address, families, type Family, hostCidr, isUnspecified } from './address.ts';
import type { AttachmentConfig, PortMapping, Protocol } from './netconf.ts';

/** A chain of the nat table and its rules, each without the leading `-A NAME`. */
export interface Chain {
  readonly name: string;
  readonly rules: readonly string[];
}

/** A jump from a built-in chain; `first` jumps go in front of all others, the rest behind. */
export interface Jump {
  readonly from: 'PREROUTING' | 'OUTPUT' | 'POSTROUTING';
  readonly rule: string;
  readonly first: boolean;
}

/** The rules that one sandbox needs in one family's nat table. */
export interface SandboxRules {
  readonly chain: Chain;
  /** Lines of the dispatch chain that lead to `chain`, in order. */
  readonly dispatch: readonly string[];
  /** Shared mark and masquerade chains that `chain` relies on. */
  readonly marks: readonly Chain[];
  readonly jumps: readonly Jump[];
  /** Chains of other programs that must be there already. */
  readonly external: readonly string[];
}

export const dispatchChain = 'CNI-HOSTPORT-DNAT';
export const sandboxPrefix = 'CNI-DN-';
/** What upstream used until 0.6 for source NAT: removed where found, never made. */
export const retiredChain = 'CNI-HOSTPORT-SNAT';
export const retiredPrefix = 'CNI-SN-';

const defaultMarkBit = 13;
const portsPerRule = 15;
const commentBytes = 255;

/**
 * The hash that names a sandbox's chain and its record: upstream's, over the network's name and the container ID.
 * It does not know the interface, so two attachments of one container to one network share a chain.
 */
export function sandboxHash(network: string, containerId: string): string {
  return runtime.sha512(`${network}${containerId}`).slice(0, 21);
}

/** The rules that a sandbox's attachments need in one family, or undefined when they need none. */
export function sandboxRules(
  family: Family,
  network: string,
  containerId: string,
  attachments: readonly AttachmentConfig[],
): SandboxRules | undefined {
  const name = `${sandboxPrefix}${sandboxHash(network, containerId)}`;
  const parts = attachments
    .map((attachment) => attachmentRules(family, attachment))
    .filter((part) => part !== undefined);
  if (parts.length === 0) return undefined;
  const comment = trimComment(`dnat name: "${network}" id: "${containerId}"`);
  const marks = new Map(parts.flatMap((part) => part.marks).map((chain) => [chain.name, chain]));
  return {
    chain: { name, rules: parts.flatMap((part) => part.rules) },
    dispatch: [...new Set(parts.flatMap((part) => part.dispatch(comment, name)))],
    marks: [...marks.values()],
    jumps: [
      ...(['PREROUTING', 'OUTPUT'] as const).map((from) => ({ from, rule: dispatchJump, first: false })),
      ...[...marks.keys()].filter(isMasqueradeChain).map((chain) => masqueradeJump(chain)),
    ],
    external: [...new Set(parts.flatMap((part) => part.external))],
  };
}

/** The jump that both hooks have: only packets for an address of this node are looked at (CVE-2025-67499). */
export const dispatchJump = `-m addrtype --dst-type LOCAL -j ${dispatchChain}`;

/**
 * Says which mappings of an attachment have rules in a family. A mapping of `::1` has none: the kernel routes no packet
 * from there to a container, and a refused connection is better than one that hangs.
 */
export function mappingsOf(family: Family, attachment: AttachmentConfig): readonly PortMapping[] {
  if (attachment.addresses[family] === undefined) return [];
  return attachment.mappings.filter(
    ({ hostIP }) => hostIP === undefined || (hostIP.family === family && hostIP.text !== '::1'),
  );
}

/** The families in which an attachment has rules. */
export function familiesOf(config: AttachmentConfig): Family[] {
  return families.filter((family) => mappingsOf(family, config).length > 0);
}

/** The single host address a mapping is bound to, or undefined when it takes all of the node's. */
export function boundAddress(mapping: PortMapping): Address | undefined {
  return mapping.hostIP === undefined || isUnspecified(mapping.hostIP) ? undefined : mapping.hostIP;
}

/** Says whether two mappings of one family want the same packets: an unbound one overlaps every bound one. */
export function overlaps(one: PortMapping, other: PortMapping): boolean {
  const here = boundAddress(one)?.text;
  const there = boundAddress(other)?.text;
  return (
    one.protocol === other.protocol &&
    one.hostPort === other.hostPort &&
    (here === undefined || there === undefined || here === there)
  );
}

/**
 * `text` as one token of a line for iptables-restore, where only the double quote and the backslash are special. Rules
 * are bytes, one a character: the kernel cuts a long comment in the middle of a letter, and the rest must still be told
 * apart and given back as it is.
 */
export function quote(text: string): string {
  if (/^[A-Za-z0-9_.:/,=@%+!-]+$/.test(text)) return text;
  const bytes = Buffer.from(text, 'utf8').toString('latin1');
  return `"${bytes.replaceAll(/["\\]/g, String.raw`\$&`)}"`;
}

// The default bit keeps upstream's chains; any other has a pair of its own, so that no network's choice changes
// another's.
function markChains(bit: number): { setMark: Chain; masquerade: Chain } {
  const suffix = bit === defaultMarkBit ? '' : `-${bit}`;
  const value = `0x${(2 ** bit).toString(16)}`;
  return {
    setMark: {
      name: `CNI-HOSTPORT-SETMARK${suffix}`,
      rules: [`-m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark ${value}/${value}`],
    },
    masquerade: {
      name: `${masqueradePrefix}${suffix}`,
      rules: [`-m mark --mark ${value}/${value} -j MASQUERADE`],
    },
  };
}

const masqueradePrefix = 'CNI-HOSTPORT-MASQ';

/** Says whether a chain is one of those that masquerade marked packets. */
export function isMasqueradeChain(name: string): boolean {
  return name.startsWith(masqueradePrefix);
}

/** Says whether a chain is one that the bridge or ptp plugin masquerades one container in. */
export function isBridgeChain(name: string): boolean {
  return /^CNI-[0-9a-f]{24}$/.test(name);
}

/** The jump to a masquerade chain: behind the rules of the bridge or ptp plugin it would never be reached. */
export function masqueradeJump(chain: string): Jump {
  return {
    from: 'POSTROUTING',
    rule: `-m comment --comment "CNI portfwd requiring masquerade" -j ${chain}`,
    first: true,
  };
}

interface AttachmentRules {
  readonly rules: readonly string[];
  readonly dispatch: (comment: string, chain: string) => string[];
  readonly marks: readonly Chain[];
  readonly external: readonly string[];
}

function attachmentRules(family: Family, attachment: AttachmentConfig): AttachmentRules | undefined {
  const address = attachment.addresses[family];
  const mappings = mappingsOf(family, attachment);
  if (address === undefined || mappings.length === 0) return undefined;
  const own =
    attachment.externalSetMarkChain === undefined
      ? markChains(attachment.markMasqBit ?? defaultMarkBit)
      : undefined;
  const setMark = attachment.externalSetMarkChain ?? own?.setMark.name;
  const sources = attachment.masqAll
    ? ['']
    : [source(address.network), ...(family === 'ipv4' ? ['-s 127.0.0.1/32 '] : [])];
  const target = family === 'ipv6' ? `[${address.text}]` : address.text;
  const rules = mappings.flatMap((mapping) => {
    const bound = boundAddress(mapping);
    const to = bound === undefined ? '' : `-d ${hostCidr(bound)} `;
    const match = `${to}-p ${mapping.protocol} -m ${mapping.protocol} --dport ${mapping.hostPort}`;
    const masquerade = attachment.snat
      ? sources.map((from) => `${from}${match} -j ${quote(setMark ?? '')}`)
      : [];
    return [...masquerade, `${match} -j DNAT --to-destination ${target}:${mapping.containerPort}`];
  });
  const marksNeeded = attachment.snat && own !== undefined;
  return {
    rules,
    dispatch: (comment, chain) => dispatchLines(mappings, attachment.conditions[family], comment, chain),
    marks: marksNeeded ? [own.setMark, own.masquerade] : [],
    external:
      attachment.snat && attachment.externalSetMarkChain !== undefined
        ? [attachment.externalSetMarkChain]
        : [],
  };
}

function source(network: string): string {
  return network.endsWith('/0') ? '' : `-s ${network} `;
}

function dispatchLines(
  mappings: readonly PortMapping[],
  conditions: readonly string[],
  comment: string,
  chain: string,
): string[] {
  const words = conditions.map((word) => `${quote(word)} `).join('');
  return (['sctp', 'tcp', 'udp'] satisfies Protocol[]).flatMap((protocol) => {
    const ports = mappings
      .filter((mapping) => mapping.protocol === protocol)
      .map((mapping) => mapping.hostPort);
    const groups = Array.from({ length: Math.ceil(ports.length / portsPerRule) }, (_, index) =>
      ports.slice(index * portsPerRule, (index + 1) * portsPerRule),
    );
    return groups.map(
      (group) =>
        `-p ${protocol} -m comment --comment ${quote(comment)} -m multiport --dports ${group.join(',')} ${words}-j ${chain}`,
    );
  });
}

// The kernel keeps 255 bytes of a comment; names and IDs are ASCII, so a character is a byte. Upstream writes 253 and
// three dots, of which the kernel keeps two.
function trimComment(comment: string): string {
  return comment.length > commentBytes ? `${comment.slice(0, commentBytes - 2)}..` : comment;
}
