// IP addresses as text in the kernel's spelling. Pure: nothing is looked up, a name is never an address. It reads
// addresses itself because loading node:net for its isIP takes longer than all the rest of a call without mappings;
// a property test holds the two together.

export type Family = 'ipv4' | 'ipv6';

export const families = ['ipv4', 'ipv6'] as const satisfies readonly Family[];

/** An address in the spelling iptables prints, without a prefix length. */
export interface Address {
  readonly family: Family;
  readonly text: string;
}

/** An address and the network it is in, as CIDR text in the spelling iptables prints (host bits zero). */
export interface InterfaceAddress extends Address {
  readonly network: string;
}

const octet = '(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)';
const dottedQuad = new RegExp(`^${octet}(?:\\.${octet}){3}$`);

const bitsOf = { ipv4: 32, ipv6: 128 } as const satisfies Record<Family, number>;

/**
 * Reads an IP address strictly: no names, zones, prefix lengths, octal or shortened IPv4 forms. An IPv4-mapped
 * IPv6 address counts as the IPv4 address. Returns undefined when the text is no address.
 */
export function readAddress(text: string): Address | undefined {
  if (dottedQuad.test(text)) return { family: 'ipv4', text };
  const groups = groupsOf(text);
  if (groups === undefined) return undefined;
  const [g5 = 0, g6 = 0, g7 = 0] = groups.slice(5);
  if (g5 === 0xffff && groups.slice(0, 5).every((group) => group === 0))
    return { family: 'ipv4', text: dottedOf(g6, g7) };
  return { family: 'ipv6', text: textOf(groups) };
}

/** Reads `address/prefix` as CNI results hold it. Returns undefined when the text is none. */
export function readInterfaceAddress(text: string): InterfaceAddress | undefined {
  const slash = text.indexOf('/');
  if (slash < 0) return undefined;
  const address = readAddress(text.slice(0, slash));
  const prefix = text.slice(slash + 1);
  if (address === undefined || !/^\d{1,3}$/.test(prefix) || Number(prefix) > bitsOf[address.family])
    return undefined;
  return { ...address, network: `${maskAddress(address, Number(prefix))}/${Number(prefix)}` };
}

/** The single-host CIDR of an address (`192.0.2.1/32`), as iptables spells it. */
export function hostCidr(address: Address): string {
  return `${address.text}/${bitsOf[address.family]}`;
}

/** Says whether the address is the unspecified one of its family (`0.0.0.0`, `::`). */
export function isUnspecified(address: Address): boolean {
  return address.text === '0.0.0.0' || address.text === '::';
}

/** Says whether an address lies in a network of its family, given as CIDR text in the kernel's spelling. */
export function isInNetwork(address: Address, cidr: string): boolean {
  const prefix = Number(cidr.slice(cidr.indexOf('/') + 1));
  return `${maskAddress(address, prefix)}/${prefix}` === cidr;
}

/** The network's first address: `address` with the bits behind the prefix cleared. */
export function maskAddress(address: Address, prefix: number): string {
  const unit = address.family === 'ipv4' ? 8 : 16;
  const numbers =
    address.family === 'ipv4' ? address.text.split('.').map(Number) : (groupsOf(address.text) ?? []);
  const masked = numbers.map((number, index) => {
    const kept = Math.min(Math.max(prefix - index * unit, 0), unit);
    return number & ~((1 << (unit - kept)) - 1);
  });
  return address.family === 'ipv4' ? masked.join('.') : textOf(masked);
}

// The eight 16-bit groups of an IPv6 address, or undefined when the text is none.
function groupsOf(text: string): number[] | undefined {
  const colon = text.lastIndexOf(':');
  const last = text.slice(colon + 1);
  if (last.includes('.')) {
    if (!dottedQuad.test(last)) return undefined;
    const [a = 0, b = 0, c = 0, d = 0] = last.split('.').map(Number);
    return groupsOf(
      `${text.slice(0, colon + 1)}${((a << 8) | b).toString(16)}:${((c << 8) | d).toString(16)}`,
    );
  }
  const [head = '', tail, more] = text.split('::');
  if (more !== undefined) return undefined;
  const before = head === '' ? [] : head.split(':');
  const after = tail === undefined || tail === '' ? [] : tail.split(':');
  const zeros = 8 - before.length - after.length;
  // "::" stands for at least one group, and nothing stands for none.
  if (tail === undefined ? zeros !== 0 : zeros < 1) return undefined;
  const groups = [...before, ...Array<string>(zeros).fill('0'), ...after];
  return groups.every((group) => /^[0-9a-f]{1,4}$/i.test(group))
    ? groups.map((group) => Number.parseInt(group, 16))
    : undefined;
}

function dottedOf(high: number, low: number): string {
  return [high >> 8, high & 255, low >> 8, low & 255].join('.');
}

// RFC 5952, the way inet_ntop and so iptables prints it: the first longest run of two or more zero groups is cut.
function textOf(groups: readonly number[]): string {
  const [g6 = 0, g7 = 0] = groups.slice(6);
  // inet_ntop writes an IPv4-compatible address with the IPv4 address at its end.
  if (g6 !== 0 && groups.slice(0, 6).every((group) => group === 0)) return `::${dottedOf(g6, g7)}`;
  const hex = groups.map((group) => group.toString(16)).join(':');
  const runs = hex.match(/(?:^|(?<=:))0(?::0)+(?=:|$)/g) ?? [];
  const longest = runs.reduce((best, run) => (run.length > best.length ? run : best), '');
  if (longest === '') return hex;
  const at = hex.search(new RegExp(`(?:^|(?<=:))${longest}(?=:|$)`));
  return `${hex.slice(0, at).replace(/:$/, '')}::${hex.slice(at + longest.length).replace(/^:/, '')}`;
}
