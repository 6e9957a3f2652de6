// What keeps packets from the pieces of a sandbox although all of these are in place: rules of others, in the chains
// that the packets come through on their way. Pure.
import { type Address, type Family, isInNetwork, readAddress } from './address.ts';
import {
  boundAddress,
  dispatchChain,
  isBridgeChain,
  isMasqueradeChain,
  mappingsOf,
  type SandboxRules,
} from './chain.ts';
import { admits, asksMore, readConditions } from './condition.ts';
import { contested, readDispatchLine } from './listing.ts';
import type { AttachmentConfig, PortMapping } from './netconf.ts';
import { type Ruleset, targetOf } from './restore.ts';
import { type Interest, readRule, type Rule, ruleReader } from './rule.ts';
import { findTaker, type Flow, type Level, type WalkContext, type Taker } from './walk.ts';

/** The node as a sandbox's packets find it. */
export interface NodeView {
  readonly family: Family;
  readonly observed: Ruleset;
  /** The addresses of the node. */
  readonly local: readonly Address[];
  /** Gets the names of chains that packets may pass and that were not observed. */
  readonly unread: Set<string>;
}

/** Names every rule that takes packets of these attachments before they get where `wanted` leads them. */
export function findShadows(
  view: NodeView,
  wanted: SandboxRules,
  attachments: readonly AttachmentConfig[],
): string[] {
  const parts = attachments.flatMap((attachment) =>
    mappingsOf(view.family, attachment).map((mapping) => ({ mapping, attachment })),
  );
  const scene = { ...view, read: ruleReader(interestOf(view, parts)) };
  const masqueraded = parts.filter(
    ({ attachment }) => attachment.snat && attachment.externalSetMarkChain === undefined,
  );
  return [
    ...wanted.jumps.flatMap(({ from, rule }) => {
      const rules = before(scene, from, rule);
      return from === 'POSTROUTING'
        ? masqueradeShadows(scene, from, rules, masqueraded)
        : hookShadows(scene, from, rules, wanted, parts);
    }),
    ...wanted.marks.flatMap((chain) =>
      chain.rules.flatMap((rule) =>
        isMasqueradeChain(chain.name)
          ? masqueradeShadows(scene, chain.name, before(scene, chain.name, rule), masqueraded)
          : markShadows(scene, chain.name, rule, masqueraded),
      ),
    ),
    ...dispatchShadows(scene, wanted, parts),
  ];
}

// A view, and the rules in it.
type Scene = NodeView & Pick<WalkContext, 'read'>;

/** A mapping, and the attachment it is of. */
interface Part {
  readonly mapping: PortMapping;
  readonly attachment: AttachmentConfig;
}

function interestOf({ family, local }: NodeView, parts: readonly Part[]): Interest {
  const addresses = parts.flatMap(({ mapping, attachment }) => [
    boundAddress(mapping),
    attachment.addresses[family],
  ]);
  const ports = parts.flatMap(({ mapping }) => [mapping.hostPort, mapping.containerPort]);
  return {
    addresses: new Set([...local, ...addresses].flatMap((address) => address?.text ?? [])),
    ports: new Set(ports.map(String)),
  };
}

function before({ observed }: Scene, chain: string, rule: string): readonly string[] {
  const rules = observed.chains.get(chain) ?? [];
  const end = rules.indexOf(rule);
  // The common case, for which nothing is to be made.
  return end <= 0 ? [] : rules.slice(0, end);
}

function hookShadows(
  scene: Scene,
  hook: string,
  rules: readonly string[],
  wanted: SandboxRules,
  parts: readonly Part[],
): string[] {
  const flowsOf = (part: Part) =>
    hostFlows(scene, part, (address) => hook === 'OUTPUT' || !isLoopback(address));
  return shadows(scene, hook, rules, parts, { flowsOf, effect: towards(dispatchChain, wanted.chain.name) });
}

// Rules of the dispatch chain, in front of the last of ours.
function dispatchShadows(scene: Scene, wanted: SandboxRules, parts: readonly Part[]): string[] {
  const { family, observed, unread } = scene;
  const rules = observed.chains.get(dispatchChain) ?? [];
  const last = rules.map(targetOf).lastIndexOf(wanted.chain.name);
  const flowsOf = (part: Part) => hostFlows(scene, part, () => true);
  const effect = towards(wanted.chain.name);
  const served = new Set<string>();
  return rules.slice(0, Math.max(0, last + 1)).flatMap((rule) => {
    const line = readDispatchLine(rule);
    if (line?.chain === wanted.chain.name) {
      for (const port of line.ports) served.add(`${line.protocol} ${port}`);
      return [];
    }
    const open = parts.filter(({ mapping }) => !served.has(`${mapping.protocol} ${mapping.hostPort}`));
    if (line === undefined) return shadows(scene, dispatchChain, [rule], open, { flowsOf, effect });
    const mappings = open.map(({ mapping }) => mapping);
    const taken = contested(family, observed, line, mappings).filter(
      ({ protocol, hostPort }) =>
        line.ports.length === 0 || (protocol === line.protocol && line.ports.includes(hostPort)),
    );
    if (taken.length === 0) return [];
    // Not known yet, and judged by its line alone.
    if (!observed.chains.has(line.chain) && !observed.absent.has(line.chain)) unread.add(line.chain);
    return [say(dispatchChain, 'an earlier rule takes the traffic', { chain: '', rule }, taken)];
  });
}

function masqueradeShadows(
  scene: Scene,
  chain: string,
  rules: readonly string[],
  parts: readonly Part[],
): string[] {
  const flowsOf = (part: Part) => answeredFlows(scene.family, part);
  return shadows(scene, chain, rules, parts, { flowsOf, effect: towardsMasquerade });
}

// The mark must be set, and it must last until the chain is left.
function markShadows(scene: Scene, chain: string, rule: string, parts: readonly Part[]): string[] {
  const rules = scene.observed.chains.get(chain) ?? [];
  const flowsOf = (part: Part) => hostFlows(scene, part, () => true);
  const bit = xmark(readRule(rule))?.value ?? 0;
  const clears = (other: Rule) => {
    const { value, mask } = xmark(other) ?? { value: 0, mask: 0 };
    return ((value ^ mask) & bit) !== 0;
  };
  const effect = (other: Rule) => (clears(other) ? 'takes' : towards()(other));
  const behind = rules.includes(rule) ? rules.slice(rules.lastIndexOf(rule) + 1) : [];
  return [
    ...shadows(scene, chain, before(scene, chain, rule), parts, { flowsOf, effect: towards() }),
    ...shadows(scene, chain, behind, parts, { flowsOf, effect, level: 'below' }),
  ];
}

interface Way {
  readonly flowsOf: (part: Part) => Flow[];
  readonly effect: WalkContext['effect'];
  readonly level?: Level;
}

function shadows(
  { observed, unread, read }: Scene,
  chain: string,
  rules: readonly string[],
  parts: readonly Part[],
  { flowsOf, effect, level = 'top' }: Way,
): string[] {
  if (rules.length === 0) return [];
  const found = new Map<string, { readonly taker: Taker; readonly mappings: PortMapping[] }>();
  for (const part of parts) {
    const taker = flowsOf(part)
      .map((flow) => findTaker({ observed, read, effect, unread }, rules, flow, level))
      .find((one) => one !== undefined);
    if (taker === undefined) continue;
    const key = `${taker.chain} ${taker.rule}`;
    const known = found.get(key) ?? { taker, mappings: [] };
    known.mappings.push(part.mapping);
    found.set(key, known);
  }
  return [...found.values()].map(({ taker, mappings }) => {
    const isMark = readRule(taker.rule).target === 'MARK';
    const who = level === 'top' ? 'an earlier rule' : 'a later rule';
    return say(chain, `${who} ${isMark ? 'clears the mark' : 'takes the traffic'}`, taker, mappings);
  });
}

function say(chain: string, fault: string, taker: Taker, mappings: readonly PortMapping[]): string {
  const ports = new Set(mappings.map(({ protocol, hostPort }) => `${hostPort}/${protocol}`));
  const where = taker.chain === '' ? '' : `${taker.chain}: `;
  return `${chain}: ${fault} of ${[...ports].join(', ')}: ${where}${taker.rule}`;
}

// What ends a packet's way through the nat table.
const ending: ReadonlySet<string> = new Set(
  'ACCEPT DROP QUEUE NFQUEUE DNAT REDIRECT NETMAP SNAT MASQUERADE'.split(' '),
);
const newSource: ReadonlySet<string> = new Set(['NETMAP', 'SNAT', 'MASQUERADE']);

function towards(...goals: readonly string[]): WalkContext['effect'] {
  return ({ target }) => (goals.includes(target) ? 'settles' : ending.has(target) ? 'takes' : 'goes on');
}

// Any other source is as good, and what the bridge plugin's chains take is said where their place is.
const towardsMasquerade: WalkContext['effect'] = ({ target }) =>
  newSource.has(target) || isBridgeChain(target) ? 'settles' : ending.has(target) ? 'takes' : 'goes on';

function xmark({ target, options }: Rule): { readonly value: number; readonly mask: number } | undefined {
  if (target !== 'MARK' || options[0] !== '--set-xmark') return undefined;
  const [value, mask] = (options[1] ?? '').split('/').map(Number);
  return value === undefined || mask === undefined ? undefined : { value, mask };
}

// The packets of a mapping before they are sent to the container: to each address of the node that it takes.
function hostFlows({ family, local }: Scene, part: Part, isSeen: (address: Address) => boolean): Flow[] {
  const { mapping, attachment } = part;
  const conditions = readConditions(attachment.conditions[family]);
  const bound = boundAddress(mapping);
  const all = local.filter((address) => address.family === family && isServed(address, attachment));
  return [
    {
      packet: { protocol: mapping.protocol, port: mapping.hostPort, type: 'LOCAL' },
      destinations: (bound === undefined ? all : [bound]).filter(
        (address) => isSeen(address) && admits(conditions, address),
      ),
      // Where the netconf has conditions, a rule with others may stand beside it.
      isTakenByPort: !asksMore(conditions),
    },
  ];
}

// Packets to ::1, or from a link-local address, are not sent on to a container; those to 127.0.0.1 only with another
// source.
function isServed(address: Address, { snat }: AttachmentConfig): boolean {
  if (address.family === 'ipv4') return snat || !isLoopback(address);
  return address.text !== '::1' && !isInNetwork(address, 'fe80::/10');
}

// The packets that need another source, so that the answer comes back through the node: the container's own, and those
// from 127.0.0.1. Which interface they leave through, and so which rule means them, is not known: only its addresses.
function answeredFlows(family: Family, { mapping, attachment }: Part): Flow[] {
  const container = attachment.addresses[family];
  if (container === undefined) return [];
  const bound = boundAddress(mapping);
  const isBoundToLoopback = bound !== undefined && isLoopback(bound);
  const loopback = family === 'ipv4' ? readAddress('127.0.0.1') : undefined;
  const sources = [
    ...(isBoundToLoopback ? [] : [container]),
    ...(loopback !== undefined && (bound === undefined || isBoundToLoopback) ? [loopback] : []),
  ];
  return sources.map((source) => ({
    packet: { protocol: mapping.protocol, port: mapping.containerPort, source, type: 'UNICAST' },
    destinations: [container],
    isTakenByPort: false,
  }));
}

function isLoopback(address: Address): boolean {
  return address.text === '::1' || (address.family === 'ipv4' && isInNetwork(address, '127.0.0.0/8'));
}
