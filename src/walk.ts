// The way of packets through the chains of a table, as far as it is known: which rule takes them before they get where
// they should. Pure.
import type { Address } from './address.ts';
import type { Ruleset } from './restore.ts';
import type { Packet, Rule } from './rule.ts';

/** What is to be known of the chains that packets may pass. */
export interface WalkContext {
  readonly observed: Ruleset;
  /** The rules of a chain as read; those that match no packet of any walk may be missing. */
  readonly read: (rules: readonly string[]) => readonly Rule[];
  /** What a rule does to packets that match it; a jump to a chain is none of this. */
  readonly effect: (rule: Rule) => 'takes' | 'settles' | 'goes on';
  /** Gets the names of chains that packets may pass and that were not observed. */
  readonly unread: Set<string>;
}

/** Packets on their way, to each of these addresses. */
export interface Flow {
  readonly packet: Packet;
  readonly destinations: readonly Address[];
  /** A rule that names their port takes them, even if it also asks what nobody knows beforehand. */
  readonly isTakenByPort: boolean;
}

/** A rule that takes packets; `chain` is the name of the chain it stands in, or empty: in the one that was walked. */
export interface Taker {
  readonly chain: string;
  readonly rule: string;
}

/** `top`: a packet that returns from these rules never gets where it should. `below`: it goes on behind their jump. */
export type Level = 'top' | 'below';

/** The first rule out of `rules`, or of the chains they lead to, that takes packets of this flow. */
export function findTaker(
  around: WalkContext,
  rules: readonly string[],
  flow: Flow,
  level: Level,
): Taker | undefined {
  const walk = { ...around, flow, known: new Map<string, Passage>() };
  const start = { chain: '', level, isSure: true, isNamed: false, destinations: flow.destinations };
  return pass(walk, rules, start).taker;
}

interface Walk extends WalkContext {
  readonly flow: Flow;
  readonly known: Map<string, Passage>;
}

/** Packets at the start of a chain: whether all of them get there, and whether a rule on their way named their port. */
interface Entry {
  readonly chain: string;
  readonly level: Level;
  readonly isSure: boolean;
  readonly isNamed: boolean;
  readonly destinations: readonly Address[];
}

interface Passage {
  readonly taker?: Taker | undefined;
  /** Those that come back, or may. */
  readonly left: readonly Address[];
}

function pass(walk: Walk, rules: readonly string[], entry: Entry): Passage {
  let open = entry.destinations;
  const returned: Address[] = [];
  for (const rule of walk.read(rules)) {
    if (open.length === 0) break;
    const fit = rule.fits(walk.flow.packet);
    if (fit === 'no') continue;
    const destinations = open.filter((address) => rule.reaches(address));
    if (destinations.length === 0) continue;
    const isSure = entry.isSure && fit === 'surely';
    const isNamed = entry.isNamed || rule.namesPort;
    const { taker, left, isReturn } = apply(walk, rule, { ...entry, isSure, isNamed, destinations });
    if (taker !== undefined) return { taker, left: [] };
    if (fit !== 'surely') continue;
    if (isReturn) returned.push(...left);
    const isGone = (address: Address) =>
      destinations.includes(address) && (isReturn || !left.includes(address));
    open = open.filter((address) => !isGone(address));
  }
  return { left: [...returned, ...open] };
}

// What one rule does to the packets that match it; `isReturn`: what is left leaves the chain.
function apply(walk: Walk, rule: Rule, matched: Entry): Passage & { readonly isReturn: boolean } {
  const { level, chain, destinations } = matched;
  const counts = matched.isSure || (matched.isNamed && walk.flow.isTakenByPort);
  const taker = counts ? { chain, rule: rule.text } : undefined;
  if (rule.target === 'RETURN')
    return level === 'top' ? { taker, left: [], isReturn: false } : { left: destinations, isReturn: true };
  const effect = walk.effect(rule);
  if (effect === 'takes') return { taker, left: [], isReturn: false };
  if (effect === 'settles') return { left: [], isReturn: false };
  const inner = enter(walk, rule.target, matched);
  const isLost = rule.isGoto && level === 'top' && inner.left.length > 0;
  return { taker: inner.taker ?? (isLost ? taker : undefined), left: inner.left, isReturn: rule.isGoto };
}

function enter(walk: Walk, chain: string, matched: Entry): Passage {
  const rules = walk.observed.chains.get(chain);
  if (rules === undefined) {
    if (!passing.has(chain) && !walk.observed.absent.has(chain) && !unspeakable.test(chain))
      walk.unread.add(chain);
    return { left: matched.destinations };
  }
  // Many rules may lead to one chain, and from there to one more.
  const key = [chain, matched.isSure, matched.isNamed, ...matched.destinations.map(({ text }) => text)].join(
    ' ',
  );
  const known = walk.known.get(key) ?? pass(walk, rules, { ...matched, chain, level: 'below' });
  walk.known.set(key, known);
  return known;
}

// What iptables-restore would read as another name.
const unspeakable = /["\\]/;

// No target, and those of iptables' own that let packets go on.
const passing: ReadonlySet<string> = new Set(
  `AUDIT CHECKSUM CLASSIFY CONNMARK CONNSECMARK CT DSCP ECN HL HMARK IDLETIMER LED LOG MARK NFLOG RATEEST SECMARK SET
  TCPMSS TEE TOS TRACE TTL ULOG`
    .split(/\s+/)
    .concat(''),
);
