// The language of iptables-save and iptables-restore, and the plan: text → Ruleset, (Ruleset, wanted) →
// Transaction → text. Pure. What iptables prints is what it reads back, so observed rules are kept verbatim and
// never taken apart to be removed.
import { type Chain, dispatchChain, type Jump, retiredChain, type SandboxRules } from './chain.ts';

/**
 * What was seen of one family's nat table. A chain that is in neither field was not looked at: its state is
 * unknown, which is not the same as absent.
 */
export interface Ruleset {
  readonly chains: ReadonlyMap<string, readonly string[]>;
  readonly absent: ReadonlySet<string>;
}

/** What one sandbox's part of a table shall be: its rules, or nothing of it (`rules` undefined). */
export interface Wanted {
  readonly chain: string;
  readonly rules?: SandboxRules | undefined;
  /** It has nothing new, and so no claim to stand in front of those that came after it. */
  readonly keepsPlace?: boolean;
  /** A rule of another program leads to its chain, which can't be removed then, and is left empty. */
  readonly keepsChain?: boolean;
  /** A chain of the retired scheme that goes with the sandbox. */
  readonly retired?: string | undefined;
}

/** One change to the table; `before` is what an undo puts back. */
export type Step =
  | { readonly do: 'new'; readonly chain: string }
  | { readonly do: 'fill'; readonly chain: Chain; readonly before: readonly string[] | undefined }
  | { readonly do: 'remove'; readonly chain: string; readonly before: readonly string[] | undefined }
  | { readonly do: 'insert'; readonly chain: string; readonly at: number; readonly rule: string }
  | { readonly do: 'append'; readonly chain: string; readonly rule: string }
  | { readonly do: 'delete'; readonly chain: string; readonly at: number; readonly rule: string };

/** The changes to one family's nat table that are committed together. No steps: nothing is to be done. */
export type Transaction = readonly Step[];

/**
 * The changes that bring a table from what was observed to what is wanted, for any number of sandboxes at once.
 * The premises are part of the transaction: it is refused as a whole when a chain it makes has appeared, or a line
 * it deletes has gone, since the observation.
 */
export function planTransaction(observed: Ruleset, wanted: readonly Wanted[]): Transaction {
  const needed = wanted.flatMap(({ rules }) => (rules === undefined ? [] : [rules]));
  const marks = new Map(needed.flatMap((rules) => rules.marks).map((chain) => [chain.name, chain]));
  const jumps = new Map(
    needed.flatMap((rules) => rules.jumps).map((jump) => [`${jump.from} ${jump.rule}`, jump]),
  );
  const dispatch = observed.chains.get(dispatchChain);
  const targets = new Set(wanted.map(({ chain }) => chain));
  const kept = new Set(wanted.flatMap((want) => keptLines(want, dispatch ?? [])));
  const retired = new Set(wanted.flatMap((want) => (want.retired === undefined ? [] : [want.retired])));
  return [
    ...(needed.length > 0 && dispatch === undefined ? [{ do: 'new', chain: dispatchChain } as const] : []),
    ...deletions(dispatchChain, dispatch ?? [], targets).filter(({ rule }) => !kept.has(rule)),
    ...deletions(retiredChain, observed.chains.get(retiredChain) ?? [], retired),
    // Rewriting a chain that is right would cost more than all the rest: the nft variant waits for the kernel to let
    // go of every rule that is replaced.
    ...[...marks.values()].filter((chain) => !holds(observed, chain)).map((chain) => fill(observed, chain)),
    ...needed.map(({ chain }) => fill(observed, chain)),
    ...needed.flatMap((rules) => insertions(rules.dispatch.filter((line) => !kept.has(line)))),
    ...[...jumps.values()].flatMap((jump) => jumpStep(observed, jump)),
    ...wanted.flatMap((want) => (want.rules === undefined ? ending(observed, want) : [])),
    ...[...retired]
      .filter((chain) => observed.chains.has(chain) || isJumpedTo(observed, chain))
      .flatMap((chain) => removal(observed, chain)),
  ];
}

/** The transaction that takes `transaction` back: the table is then as it was observed before. */
export function invertTransaction(transaction: Transaction): Transaction {
  return transaction.toReversed().map((step): Step => {
    switch (step.do) {
      case 'new':
        return { do: 'remove', chain: step.chain, before: [] };
      case 'fill':
        return step.before === undefined
          ? { do: 'remove', chain: step.chain.name, before: step.chain.rules }
          : { do: 'fill', chain: { name: step.chain.name, rules: step.before }, before: step.chain.rules };
      case 'remove':
        return { do: 'fill', chain: { name: step.chain, rules: step.before ?? [] }, before: undefined };
      case 'insert':
        return { do: 'delete', chain: step.chain, at: step.at, rule: step.rule };
      case 'append':
        return { do: 'delete', chain: step.chain, at: 0, rule: step.rule };
      case 'delete':
        return { do: 'insert', chain: step.chain, at: step.at, rule: step.rule };
      default:
        return step satisfies never;
    }
  });
}

/**
 * Says whether a table shows the outcome of a transaction: every chain it fills is as it fills it, every line it
 * inserts is there, every line it deletes is not. For one whose process was ended, nobody has said whether it was before
 * or after its commit. A transaction that only removes chains leaves nothing to tell by, and nothing worth an undo.
 */
export function isApplied(transaction: Transaction, seen: Ruleset): boolean {
  const has = (chain: string, rule: string) => seen.chains.get(chain)?.includes(rule) === true;
  const inserted = new Set(transaction.flatMap((step) => (step.do === 'insert' ? [step.rule] : [])));
  const signs = transaction.flatMap((step): boolean[] => {
    if (step.do === 'fill') return [holds(seen, step.chain)];
    if (step.do === 'insert' || step.do === 'append') return [has(step.chain, step.rule)];
    if (step.do === 'delete' && !inserted.has(step.rule)) return [!has(step.chain, step.rule)];
    return [];
  });
  return signs.length > 0 && signs.every(Boolean);
}

/** The chains that tell whether a transaction was applied. */
export function decisiveChains(transaction: Transaction): string[] {
  const chains = transaction.flatMap((step) => {
    if (step.do === 'fill') return [step.chain.name];
    return step.do === 'remove' || step.do === 'new' ? [] : [step.chain];
  });
  return [...new Set(chains)];
}

/** How a line is named that is deleted: by its text, which is a premise as well, or by its place. */
export type Naming = 'text' | 'place';

/**
 * The transaction as input for `iptables-restore --noflush`: one table, one COMMIT. Lines are deleted by their text; a
 * few matches (`recent`) make rules that iptables does not know again by it, and these go by their place.
 */
export function renderTransaction(transaction: Transaction, naming: Naming = 'text'): string {
  return `${['*nat', ...transaction.flatMap((step) => renderStep(step, naming)), 'COMMIT'].join('\n')}\n`;
}

/**
 * The request for the rules of these chains, in order, as input for `iptables-restore --noflush`: it changes nothing.
 * Without its end, a COMMIT, iptables-restore fails after it has printed them, and could not change anything if it would.
 */
export function renderListing(chains: readonly string[], end: 'COMMIT' | '' = 'COMMIT'): string {
  return ['*nat', ...chains.map((chain) => `-S ${chain}`), end].join('\n').concat(end === '' ? '' : '\n');
}

/** Something that takes the lines of a save or a listing one by one and keeps what concerns this plugin. */
export interface RulesetReader {
  readonly read: (line: string) => void;
  /** What was read; a chain of `asked` that did not show is absent. */
  readonly ruleset: (asked: readonly string[]) => Ruleset;
  /** Says whether a table header and its COMMIT went by: without both, a save says nothing about the table. */
  readonly isComplete: () => boolean;
}

/**
 * Reads the output of iptables-save or `-S`. Of a table with 200,000 rules it keeps the rules of the built-in
 * chains and the plugin's, and the names in `asked`.
 */
export function rulesetReader(asked: ReadonlySet<string>): RulesetReader {
  const chains = new Map<string, string[]>();
  let header = false;
  let complete = false;
  const isKept = (chain: string) => builtins.has(chain) || chain.startsWith('CNI-') || asked.has(chain);
  return {
    read: (line) => {
      if (line.startsWith('-A ')) {
        const end = line.indexOf(' ', 3);
        const chain = end < 0 ? line.slice(3) : line.slice(3, end);
        if (isKept(chain)) chains.get(chain)?.push(end < 0 ? '' : line.slice(end + 1));
      } else if (line.startsWith(':') || line.startsWith('-P ') || line.startsWith('-N ')) {
        const chain = line.slice(line.startsWith(':') ? 1 : 3).split(' ', 1)[0] ?? '';
        if (isKept(chain)) chains.set(chain, []);
      } else if (line === '*nat') header = true;
      else if (line === 'COMMIT') complete = header;
    },
    ruleset: (expected) => ({ chains, absent: new Set(expected.filter((chain) => !chains.has(chain))) }),
    isComplete: () => complete,
  };
}

/** The chain a rule jumps or goes to, or its other target, or the empty string. */
export function targetOf(rule: string): string {
  return /(?:^| )-[jg] ([^ ]+)(?: |$)/.exec(unquoted(rule))?.[1] ?? '';
}

/** The tokens of a rule as iptables prints it: only the double quote groups, only the backslash escapes. */
export function tokens(rule: string): string[] {
  return [...rule.matchAll(/"((?:[^"\\]|\\.)*)"|(\S+)/g)].map(
    (match) => match[2] ?? (match[1] ?? '').replaceAll(/\\(.)/g, '$1'),
  );
}

const builtins: ReadonlySet<string> = new Set(['PREROUTING', 'INPUT', 'OUTPUT', 'POSTROUTING']);

// A comment may hold anything, even " -j X ", so quoted text is blanked before a rule is searched.
function unquoted(rule: string): string {
  return rule.includes('"') ? rule.replaceAll(/"(?:[^"\\]|\\.)*"/g, '""') : rule;
}

type Deletion = Extract<Step, { do: 'delete' }>;

function deletions(chain: string, rules: readonly string[], targets: ReadonlySet<string>): Deletion[] {
  return rules
    .map((rule, index): Deletion => ({ do: 'delete', chain, at: index + 1, rule }))
    .filter(({ rule }) => targets.has(targetOf(rule)))
    .toReversed();
}

// The lines of the dispatch chain that stay where they are: all that are wanted of a sandbox, if all are there.
function keptLines({ keepsPlace, rules }: Wanted, dispatch: readonly string[]): readonly string[] {
  const lines = rules?.dispatch ?? [];
  return keepsPlace === true && lines.every((line) => dispatch.includes(line)) ? lines : [];
}

function holds(observed: Ruleset, { name, rules }: Chain): boolean {
  return observed.chains.get(name)?.join('\n') === rules.join('\n');
}

// A chain line under --noflush makes the chain or empties it, so a fill needs no knowledge of what was there.
function fill(observed: Ruleset, chain: Chain): Step {
  return { do: 'fill', chain, before: observed.chains.get(chain.name) };
}

// At the top, so that no older line for the same port is in front; the last is inserted first to keep the order.
function insertions(rules: readonly string[]): Step[] {
  return rules.toReversed().map((rule) => ({ do: 'insert', chain: dispatchChain, at: 1, rule }));
}

function jumpStep(observed: Ruleset, jump: Jump): Step[] {
  if (observed.chains.get(jump.from)?.includes(jump.rule) === true) return [];
  return [
    jump.first
      ? { do: 'insert', chain: jump.from, at: 1, rule: jump.rule }
      : { do: 'append', chain: jump.from, rule: jump.rule },
  ];
}

// A chain of the retired scheme that is jumped to is there, whether it was read or not.
function isJumpedTo(observed: Ruleset, chain: string): boolean {
  return (observed.chains.get(retiredChain) ?? []).some((rule) => targetOf(rule) === chain);
}

function ending(observed: Ruleset, { chain, keepsChain = false }: Wanted): Step[] {
  if (!keepsChain) return removal(observed, chain);
  return observed.absent.has(chain) ? [] : [fill(observed, { name: chain, rules: [] })];
}

function removal(observed: Ruleset, chain: string): Step[] {
  return observed.absent.has(chain) ? [] : [{ do: 'remove', chain, before: observed.chains.get(chain) }];
}

// A rule with neither a match nor a target is empty.
function command(option: string, chain: string, rule: string): string {
  return rule === '' ? `${option} ${chain}` : `${option} ${chain} ${rule}`;
}

function renderStep(step: Step, naming: Naming): string[] {
  switch (step.do) {
    case 'new':
      return [`-N ${step.chain}`];
    case 'fill':
      return [
        `:${step.chain.name} - [0:0]`,
        ...step.chain.rules.map((rule) => command('-A', step.chain.name, rule)),
      ];
    case 'remove':
      return [`:${step.chain} - [0:0]`, `-X ${step.chain}`];
    case 'insert':
      return [command('-I', `${step.chain} ${step.at}`, step.rule)];
    case 'append':
      return [command('-A', step.chain, step.rule)];
    case 'delete':
      return [command('-D', step.chain, naming === 'place' && step.at > 0 ? String(step.at) : step.rule)];
    default:
      return step satisfies never;
  }
}
