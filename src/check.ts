// Compares what a sandbox needs with what the kernel holds, by meaning where iptables may spell a rule in more than
// one way. Pure. Each finding names the piece that keeps packets from flowing.
import type { Family } from './address.ts';
import { readInterfaceAddress } from './address.ts';
import { type Chain, dispatchChain, type SandboxRules } from './chain.ts';
import { contested, type DispatchLine, readDispatchLine } from './listing.ts';
import type { PortMapping } from './netconf.ts';
import { type Ruleset, targetOf } from './restore.ts';

/** What is wrong with a sandbox's rules in one family's table; empty when packets flow as they should. */
export function checkRules(
  family: Family,
  observed: Ruleset,
  wanted: SandboxRules,
  mappings: readonly PortMapping[],
  conditions: readonly (readonly string[])[],
): string[] {
  return [
    ...wanted.jumps.flatMap(({ from, rule }) =>
      observed.chains.get(from)?.includes(rule) === true ? [] : [`${from}: the jump is missing: ${rule}`],
    ),
    ...endings(observed, wanted),
    ...masqueradeOrder(observed, wanted),
    ...[...wanted.marks].flatMap((chain) => missingRules(observed, chain)),
    ...wanted.external.flatMap((chain) =>
      observed.chains.has(chain) ? [] : [`${chain}: the external chain is missing`],
    ),
    ...ownChain(observed, wanted.chain),
    ...dispatchFindings(observed, wanted, conditions),
    ...shadows(family, observed, wanted, mappings),
  ];
}

function missingRules(observed: Ruleset, chain: Chain): string[] {
  const rules = observed.chains.get(chain.name);
  if (rules === undefined) return [`${chain.name}: the chain is missing`];
  return chain.rules
    .filter((rule) => !rules.includes(rule))
    .map((rule) => `${chain.name}: the rule is missing: ${rule}`);
}

// Rules as iptables prints them that decide for every packet, so that none reaches what is behind them.
const ending = /^-j (?:ACCEPT|DROP|RETURN|QUEUE|DNAT|SNAT|MASQUERADE|REDIRECT)(?: |$)/;

function endings(observed: Ruleset, wanted: SandboxRules): string[] {
  const pieces = [
    ...wanted.jumps.map(({ from, rule }) => ({ chain: from, rule })),
    ...wanted.marks.flatMap(({ name, rules }) => rules.map((rule) => ({ chain: name, rule }))),
  ];
  return pieces.flatMap(({ chain, rule }) => {
    const rules = observed.chains.get(chain) ?? [];
    const earlier = rules.slice(0, Math.max(0, rules.indexOf(rule))).find((other) => ending.test(other));
    return earlier === undefined ? [] : [`${chain}: an earlier rule takes all packets: ${earlier}`];
  });
}

// A masquerade rule of the bridge or ptp plugin in front of ours would decide first, and spare hairpin packets.
function masqueradeOrder(observed: Ruleset, wanted: SandboxRules): string[] {
  const rules = observed.chains.get('POSTROUTING') ?? [];
  return wanted.jumps
    .filter(({ first }) => first)
    .flatMap(({ rule }) => {
      const earlier = rules
        .slice(0, Math.max(0, rules.indexOf(rule)))
        .find((other) => /^CNI-[0-9a-f]{24}$/.test(targetOf(other)));
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

function alternativesOf(named: Conditions['named']): Conditions['named'][] {
  return named.reduce<Conditions['named'][]>(
    (before, one) =>
      before.flatMap((chosen) => one.value.split(',').map((value) => [...chosen, { ...one, value }])),
    [[]],
  );
}

function serves(rule: string, line: DispatchLine, port: number, alternative: Conditions['named']): boolean {
  const found = readDispatchLine(rule);
  const { named } = readConditions(tokens(rule));
  return (
    found?.protocol === line.protocol &&
    found.ports.includes(port) &&
    alternative.every(({ option, value }) =>
      named.some((one) => one.option === option && one.value === value),
    )
  );
}

// Options whose values iptables respells; a comma list becomes a rule for each value.
const respelled = new Map([
  ['-s', '-s'],
  ['--source', '-s'],
  ['--src', '-s'],
  ['-d', '-d'],
  ['--destination', '-d'],
  ['--dst', '-d'],
  ['-i', '-i'],
  ['--in-interface', '-i'],
]);

// Says whether a line of the dispatch chain may come from these conditions: the same addresses and interfaces, and
// other matches where, and only where, the netconf has some.
function isSameCondition(rule: string, words: readonly string[]): boolean {
  const found = readConditions(tokens(rule));
  const meant = readConditions(words);
  const fits = found.named.every(({ option, value, negated }) =>
    meant.named.some(
      (other) =>
        other.option === option && other.negated === negated && other.value.split(',').includes(value),
    ),
  );
  const complete = meant.named.every(({ option }) => found.named.some((other) => other.option === option));
  return fits && complete && found.others > 0 === meant.others > 0;
}

interface Conditions {
  readonly named: readonly { readonly option: string; readonly value: string; readonly negated: boolean }[];
  readonly others: number;
}

function readConditions(words: readonly string[]): Conditions {
  const named: { option: string; value: string; negated: boolean }[] = [];
  let others = 0;
  for (let index = 0; index < words.length; index += 1) {
    const word = words[index] ?? '';
    const option = respelled.get(word);
    // Ours in every line, whatever the netconf says.
    if (['-p', '-j', '--comment', '--dports'].includes(word)) index += 1;
    else if (word === '-m' && ['comment', 'multiport', 'tcp', 'udp', 'sctp'].includes(words[index + 1] ?? ''))
      index += 1;
    else if (option !== undefined) {
      const value = (words[index + 1] ?? '')
        .split(',')
        .map(canonicalNetwork)
        .filter((text) => !text.endsWith('/0') && text !== '+')
        .join(',');
      if (value !== '') named.push({ option, value, negated: words[index - 1] === '!' });
      index += 1;
    } else if (word !== '!') others += 1;
  }
  return { named, others };
}

function canonicalNetwork(text: string): string {
  const dotted = /^(.*)\/(\d+\.\d+\.\d+\.\d+)$/.exec(text);
  const prefix = dotted?.[2]
    ?.split('.')
    .map((part) => Number(part).toString(2).replaceAll('0', '').length)
    .reduce((sum, bits) => sum + bits, 0);
  const full = dotted === null ? text : `${dotted[1]}/${prefix}`;
  const withPrefix = full.includes('/') ? full : `${full}/${full.includes(':') ? 128 : 32}`;
  return readInterfaceAddress(withPrefix)?.network ?? text;
}

/** The tokens of a rule as iptables prints it: only the double quote groups, only the backslash escapes. */
export function tokens(rule: string): string[] {
  return [...rule.matchAll(/"((?:[^"\\]|\\.)*)"|(\S+)/g)].map(
    (match) => match[2] ?? (match[1] ?? '').replaceAll(/\\(.)/g, '$1'),
  );
}

// Rules of the dispatch chain, in front of the last of ours, that take packets meant for this sandbox.
function shadows(
  family: Family,
  observed: Ruleset,
  wanted: SandboxRules,
  mappings: readonly PortMapping[],
): string[] {
  const rules = observed.chains.get(dispatchChain) ?? [];
  const last = rules.map(targetOf).lastIndexOf(wanted.chain.name);
  const served = new Set<string>();
  const findings: string[] = [];
  for (const rule of rules.slice(0, Math.max(0, last + 1))) {
    const line = readDispatchLine(rule);
    if (line?.chain === wanted.chain.name) {
      for (const port of line.ports) served.add(`${line.protocol} ${port}`);
      continue;
    }
    const open = mappings.filter(({ protocol, hostPort }) => !served.has(`${protocol} ${hostPort}`));
    const taken = line === undefined ? foreignTakes(rule, open) : contested(family, observed, line, open);
    if (taken.length > 0)
      findings.push(
        `${dispatchChain}: an earlier rule takes the traffic of ${taken.map(({ protocol, hostPort }) => `${hostPort}/${protocol}`).join(', ')}: ${rule}`,
      );
  }
  return findings;
}

function foreignTakes(rule: string, mappings: readonly PortMapping[]): PortMapping[] {
  if (['', 'LOG', 'MARK', 'NFLOG', 'CONNMARK'].includes(targetOf(rule))) return [];
  const words = tokens(rule);
  const valueOf = (...options: string[]) => words[words.findIndex((word) => options.includes(word)) + 1];
  const protocol = words.includes('-p') ? valueOf('-p') : undefined;
  const ports =
    words.includes('--dport') || words.includes('--dports') ? valueOf('--dport', '--dports') : undefined;
  return mappings.filter(
    (mapping) =>
      (protocol === undefined || protocol === mapping.protocol) &&
      (ports === undefined ||
        ports.split(',').some((range) => {
          const [first = Number.NaN, end = first] = range.split(':').map(Number);
          return first <= mapping.hostPort && mapping.hostPort <= end;
        })),
  );
}
