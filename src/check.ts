// Compares what a sandbox needs with what the kernel holds, by meaning where iptables may spell a rule in more than
// one way. Pure. Each finding names the piece that keeps packets from flowing.
import type { AttachmentConfig } from './netconf.ts';
import { type Chain, dispatchChain, isBridgeChain, type SandboxRules } from './chain.ts';
import { alternativesOf, isSameCondition, readConditions, serves } from './condition.ts';
import { readDispatchLine } from './listing.ts';
import { type Ruleset, targetOf, tokens } from './restore.ts';
import { findShadows, type NodeView } from './shadow.ts';

/** What CHECK says of a family's table, as far as it was observed. */
export interface Verdict {
  /** What is wrong with a sandbox's rules; empty when packets flow as they should. */
  readonly findings: readonly string[];
  /** Chains that may hold more of it and were not observed. */
  readonly unread: readonly string[];
}

/** Judges a sandbox with these attachments in one family's table of a node with these addresses. */
export function checkRules(
  view: Omit<NodeView, 'unread'>,
  wanted: SandboxRules,
  attachments: readonly AttachmentConfig[],
): Verdict {
  const { family, observed } = view;
  const unread = new Set<string>();
  const findings = [
    ...wanted.jumps.flatMap(({ from, rule }) =>
      observed.chains.get(from)?.includes(rule) === true ? [] : [`${from}: the jump is missing: ${rule}`],
    ),
    ...masqueradeOrder(observed, wanted),
    ...[...wanted.marks].flatMap((chain) => missingRules(observed, chain)),
    ...wanted.external.flatMap((chain) =>
      observed.chains.has(chain) ? [] : [`${chain}: the external chain is missing`],
    ),
    ...ownChain(observed, wanted.chain),
    ...dispatchFindings(
      observed,
      wanted,
      attachments.map(({ conditions }) => conditions[family]),
    ),
    ...findShadows({ ...view, unread }, wanted, attachments),
  ];
  return { findings, unread: [...unread] };
}

function missingRules(observed: Ruleset, chain: Chain): string[] {
  const rules = observed.chains.get(chain.name);
  if (rules === undefined) return [`${chain.name}: the chain is missing`];
  return chain.rules
    .filter((rule) => !rules.includes(rule))
    .map((rule) => `${chain.name}: the rule is missing: ${rule}`);
}

// A masquerade rule of the bridge or ptp plugin in front of ours would decide first, and spare hairpin packets.
function masqueradeOrder(observed: Ruleset, wanted: SandboxRules): string[] {
  const rules = observed.chains.get('POSTROUTING') ?? [];
  return wanted.jumps
    .filter(({ first }) => first)
    .flatMap(({ rule }) => {
      const earlier = rules
        .slice(0, Math.max(0, rules.indexOf(rule)))
        .find((other) => isBridgeChain(targetOf(other)));
      return earlier === undefined
        ? []
        : [`POSTROUTING: an earlier rule decides before ${targetOf(rule)}: ${earlier}`];
    });
}

function ownChain(observed: Ruleset, wanted: Chain): string[] {
  const rules = observed.chains.get(wanted.name);
  if (rules === undefined) return [`${wanted.name}: the sandbox's chain is missing`];
  const missing = wanted.rules.filter((rule) => !rules.includes(rule));
  const foreign = rules.filter((rule) => !wanted.rules.includes(rule));
  const findings = [
    ...missing.map((rule) => `${wanted.name}: the rule is missing: ${rule}`),
    ...foreign.map((rule) => `${wanted.name}: a rule that does not belong there: ${rule}`),
  ];
  if (findings.length > 0) return findings;
  const order = rules.filter((rule, index) => rules.indexOf(rule) === index);
  return order.join('\n') === [...new Set(wanted.rules)].join('\n')
    ? []
    : [`${wanted.name}: the rules are in the wrong order`];
}

function dispatchFindings(
  observed: Ruleset,
  wanted: SandboxRules,
  conditions: readonly (readonly string[])[],
): string[] {
  const rules = observed.chains.get(dispatchChain);
  if (rules === undefined) return [`${dispatchChain}: the chain is missing`];
  const ours = rules.filter((rule) => targetOf(rule) === wanted.chain.name);
  const lines = ours.flatMap((rule) => readDispatchLine(rule) ?? []);
  const needed = wanted.dispatch.flatMap((rule) => readDispatchLine(rule) ?? []);
  const unserved = needed.flatMap((line) =>
    line.ports
      .filter(
        (port) => !lines.some((other) => other.protocol === line.protocol && other.ports.includes(port)),
      )
      .map((port) => `${port}/${line.protocol}`),
  );
  const strange = ours.filter((rule) => !conditions.some((words) => isSameCondition(rule, words)));
  return [
    ...(unserved.length > 0
      ? [`${dispatchChain}: no rule leads ${unserved.join(', ')} to ${wanted.chain.name}`]
      : []),
    ...strange.map((rule) => `${dispatchChain}: the rule has other conditions than the netconf: ${rule}`),
    ...lostAlternatives(ours, wanted),
  ];
}

// A comma list among the conditions becomes a rule for each of its values, and any of these can be lost by itself.
function lostAlternatives(rules: readonly string[], wanted: SandboxRules): string[] {
  return wanted.dispatch.flatMap((need) => {
    const line = readDispatchLine(need);
    const alternatives = alternativesOf(readConditions(tokens(need)).named);
    if (line === undefined || alternatives.length < 2) return [];
    return alternatives
      .filter(
        (alternative) =>
          !line.ports.every((port) => rules.some((rule) => serves(rule, line, port, alternative))),
      )
      .map(
        (alternative) =>
          `${dispatchChain}: no rule leads ${line.ports.map((port) => `${port}/${line.protocol}`).join(', ')} to ${wanted.chain.name} for ${alternative.map(({ option, value }) => `${option} ${value}`).join(' ')}`,
      );
  });
}
