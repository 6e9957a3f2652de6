// One rule as iptables prints it, and whether packets of one kind match it. Pure. What a rule asks that is not known here
// may hold or not: such a rule is not sure to match.
import { type Address, hostCidr, isInNetwork } from './address.ts';
import { tokens } from './restore.ts';

/** Packets that differ in their destination only, and in what nobody knows beforehand. */
export interface Packet {
  readonly protocol: string;
  /** The destination port. */
  readonly port: number;
  /** Undefined when they may come from anywhere. */
  readonly source?: Address | undefined;
  /** What the kernel calls an address of the node is LOCAL. */
  readonly type: 'LOCAL' | 'UNICAST';
}

/** What a rule asks, and where the packets that match it go. */
export interface Rule {
  readonly text: string;
  /** The empty string when it has none. */
  readonly target: string;
  /** The words behind the target. */
  readonly options: readonly string[];
  /** Nothing comes back from the chain it leads to (`-g`). */
  readonly isGoto: boolean;
  /** It asks for ports of its own choice, whatever else it asks. */
  readonly namesPort: boolean;
  /** Says whether such packets can match at all, their destination aside; `surely`: they match. */
  readonly fits: (packet: Packet) => 'no' | 'maybe' | 'surely';
  readonly reaches: (address: Address) => boolean;
}

type Test = (packet: Packet) => boolean | undefined;

/** Reads one rule. */
export function readRule(text: string): Rule {
  const words = tokens(text);
  const end = words.findIndex((word) => word === '-j' || word === '-g');
  const asked = readConditions(end < 0 ? words : words.slice(0, end));
  const { tests, destinations } = asked;
  return {
    text,
    target: end < 0 ? '' : (words[end + 1] ?? ''),
    options: end < 0 ? [] : words.slice(end + 2),
    isGoto: words[end] === '-g',
    namesPort: asked.namesPort && !asked.isNarrow,
    fits: (packet) => {
      let isSure = !asked.isOpen;
      for (const test of tests) {
        const answer = test(packet);
        if (answer === false) return 'no';
        if (answer === undefined) isSure = false;
      }
      return isSure ? 'surely' : 'maybe';
    },
    reaches: (address) => destinations.every((reaches) => reaches(address)),
  };
}

/** What packets have in common: one of these destinations, and one of these ports. */
export interface Interest {
  readonly addresses: ReadonlySet<string>;
  readonly ports: ReadonlySet<string>;
}

/**
 * Reads lists of rules, each once, and leaves out what can't match a packet of interest. Of kube-proxy's thousands of
 * rules, each for an address or a port of its own, none but a few are taken apart.
 */
export function ruleReader(interest: Interest): (rules: readonly string[]) => readonly Rule[] {
  const known = new Map<readonly string[], readonly Rule[]>();
  return (rules) => {
    const found = known.get(rules) ?? rules.filter((rule) => mayMatch(rule, interest)).map(readRule);
    known.set(rules, found);
    return found;
  };
}

// iptables prints an address in front of all that has no address. A port in a comment has a quotation mark behind it.
function mayMatch(rule: string, { addresses, ports }: Interest): boolean {
  if (rule.startsWith('-d ')) {
    const end = rule.indexOf('/', 3);
    const isHost = rule.startsWith('/32 ', end) || rule.startsWith('/128 ', end);
    if (isHost && !addresses.has(rule.slice(3, end))) return false;
  }
  const at = rule.indexOf(' --dport ');
  if (at < 0 || rule[at - 1] === '!' || rule.includes('"', at)) return true;
  const [value = ''] = rule.slice(at + 9).split(' ', 1);
  return value.includes(':') || ports.has(value);
}

interface Asked {
  readonly tests: readonly Test[];
  readonly destinations: readonly ((address: Address) => boolean)[];
  readonly namesPort: boolean;
  /** It asks something that is not known here. */
  readonly isOpen: boolean;
  /** It asks for destinations that are not known here, which need not be the node's. */
  readonly isNarrow: boolean;
}

// What these matches ask is in their options.
const plainMatches = new Set(['tcp', 'udp', 'sctp', 'multiport', 'comment', 'addrtype']);
const narrowing = new Set(['--dst-range', '--match-set', '--ctorigdst', '--u32', '--bytecode']);

function readConditions(words: readonly string[]): Asked {
  const tests: Test[] = [];
  const destinations: ((address: Address) => boolean)[] = [];
  let namesPort = false;
  let isOpen = false;
  let isNarrow = false;
  for (let index = 0; index < words.length; index += 1) {
    const isNegated = words[index] === '!';
    if (isNegated) index += 1;
    const word = words[index] ?? '';
    const value = words[index + 1] ?? '';
    const test = word === '-d' ? undefined : testOf(word, value, isNegated);
    if (word === '-d') {
      const isWithin = network(value);
      destinations.push((address) => isWithin(address) !== isNegated);
    } else if (test !== undefined) {
      tests.push(test);
      namesPort ||= word.startsWith('--dport') && !isNegated;
    } else if (word !== '--comment' && !(word === '-m' && plainMatches.has(value))) {
      isOpen = true;
      isNarrow ||= narrowing.has(word);
      continue;
    }
    index += 1;
  }
  return { tests, destinations, namesPort, isOpen, isNarrow };
}

function testOf(option: string, value: string, isNegated: boolean): Test | undefined {
  if (option === '-p') return ({ protocol }) => (protocol === value) !== isNegated;
  if (option === '-s') {
    const isWithin = network(value);
    return ({ source }) => (source === undefined ? undefined : isWithin(source) !== isNegated);
  }
  if (option === '--dport' || option === '--dports') {
    const isAmong = portRanges(value);
    return ({ port }) => isAmong(port) !== isNegated;
  }
  // The source port or the destination port.
  if (option === '--ports' && !isNegated) {
    const isAmong = portRanges(value);
    return ({ port }) => (isAmong(port) ? true : undefined);
  }
  if (option === '--dst-type') {
    const types = value.split(',');
    return ({ type }) => types.includes(type) !== isNegated;
  }
  return undefined;
}

// No address counts as within a mask that has gaps: nobody asks for a node's own address like that.
function network(cidr: string): (address: Address) => boolean {
  return (address) => cidr === hostCidr(address) || isInNetwork(address, cidr);
}

function portRanges(list: string): (port: number) => boolean {
  const ranges = list.split(',').map((range) => {
    const [first = '', last = first] = range.split(':');
    return { first: Number(first), last: last === '' ? 65_535 : Number(last) };
  });
  return (port) => ranges.some(({ first, last }) => first <= port && port <= last);
}
