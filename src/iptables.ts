// Runs the iptables programs: finds them, reads a family's nat table, commits a transaction, and turns what they
// say into a typed error. It decides nothing and repeats nothing: the commit queue does.
import { readFileSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import type { Family } from './address.ts';
import { PortmapError } from './errors.ts';
import type { Budget } from './budget.ts';
import { findProgram, type Outcome, realProgram, runProgram, searchFolders } from './program.ts';
import { dispatchJump, isMasqueradeChain, masqueradeJump } from './chain.ts';
import { renderListing, type Ruleset, rulesetReader, targetOf } from './restore.ts';

/** iptables has two rule stores in the kernel that know nothing of each other. */
export type Variant = 'nft' | 'legacy';

export const variants = ['nft', 'legacy'] as const satisfies readonly Variant[];

/** The programs of one family and variant. */
export interface Tools {
  readonly family: Family;
  readonly variant: Variant;
  readonly restore: string;
  readonly save: string;
}

const prefixes = { ipv4: 'iptables', ipv6: 'ip6tables' } as const satisfies Record<Family, string>;
// No wait for the xtables lock is longer than this, so that an orphan of a killed call is gone soon.
const maxLockWaitSeconds = 5;

/**
 * Finds the programs of a family: of the variant that `iptables` in PATH is, or of the one asked for. Runs a
 * program only when no file name tells the variant.
 * @throws PortmapError UNAVAILABLE naming the program and the folders.
 */
export async function findTools(family: Family, wanted: Variant | undefined, budget: Budget): Promise<Tools> {
  const folders = searchFolders(process.env['PATH']);
  const prefix = prefixes[family];
  const main = findProgram(prefix, folders) ?? findProgram(`${prefix}-restore`, folders);
  const variant =
    wanted ?? (main === undefined ? undefined : (variantOf(main) ?? (await askVariant(main, budget))));
  const restore =
    variant === undefined ? undefined : await findVariant(prefix, 'restore', variant, folders, main, budget);
  if (variant === undefined || restore === undefined)
    throw new PortmapError(
      'UNAVAILABLE',
      `${wanted === undefined ? prefix : `${prefix}-restore of the ${wanted} variant`}: not executable in any of ${folders.join(', ')}`,
      `install the iptables package, or put the folder of ${prefix} into the PATH of the container runtime`,
    );
  const save =
    (await findVariant(prefix, 'save', variant, folders, main, budget)) ??
    join(dirname(restore), `${prefix}-save`);
  return { family, variant, restore, save };
}

/** Says whether the legacy variant has a nat table in this network namespace; asking iptables would make one. */
export function hasLegacyTable(family: Family): boolean {
  try {
    return readFileSync(`/proc/net/${family === 'ipv4' ? 'ip' : 'ip6'}_tables_names`, 'utf8')
      .split('\n')
      .includes('nat');
  } catch {
    return false;
  }
}

/**
 * Reads what a family's nat table holds of the built-in chains and those in `asked`, the chains that are certain to be
 * there first. Takes no xtables lock. The nft variant is read chain by chain, for a save of 45,000 rules takes seconds.
 * The legacy variant is read in one go, of just these chains where they are there, else with iptables-save.
 * @throws PortmapError UNAVAILABLE, BUSY, or CONFLICT when the read failed for a passing reason.
 */
export async function observe(tools: Tools, asked: readonly string[], budget: Budget): Promise<Ruleset> {
  if (tools.variant === 'nft') return readChains(tools, asked, budget);
  return (await listLegacy(tools, asked, budget)) ?? readSave(tools, asked, budget);
}

/** The observation with further chains in it; those that were looked at before are not read again. */
export async function observeMore(
  tools: Tools,
  observed: Ruleset,
  chains: readonly string[],
  budget: Budget,
): Promise<Ruleset> {
  const unread = [...new Set(chains)].filter(
    (chain) => !observed.chains.has(chain) && !observed.absent.has(chain),
  );
  if (unread.length === 0) return observed;
  return merge(observed, await observe(tools, unread, budget));
}

/** What two looks at one table have seen. */
export function merge(one: Ruleset, other: Ruleset): Ruleset {
  return {
    chains: new Map([...one.chains, ...other.chains]),
    absent: new Set([...one.absent, ...other.absent]),
  };
}

/**
 * Commits one transaction, whole or not at all. `onStart` gets the number of the process before that process has
 * any of the text.
 * @throws PortmapError BUSY (the xtables lock), CONFLICT (the table is not as planned for), REJECTED (the text is
 * refused), UNAVAILABLE.
 */
export async function commit(
  tools: Tools,
  text: string,
  budget: Budget,
  onStart: (pid: number) => void,
): Promise<void> {
  const argv = ['--noflush', ...lockWait(tools, budget)];
  const outcome = await runProgram(tools.restore, argv, { budget, input: text, onStart });
  if (outcome.exitCode !== 0) throw failure(tools.restore, outcome, tools, text);
}

/**
 * The rules of other chains than `except` that lead to this chain, as iptables prints them: while there are any, the
 * kernel lets nobody remove it. For what has failed already: the whole table is read, and what can't be read has none.
 */
export async function rulesLeadingTo(
  tools: Tools,
  chain: string,
  except: string,
  budget: Budget,
): Promise<string[]> {
  const found: string[] = [];
  const onLine = (line: string) => {
    if (line.includes(chain) && targetOf(line) === chain && !line.startsWith(`-A ${except} `))
      found.push(line);
  };
  await runProgram(tools.save, ['-t', 'nat'], { budget, onLine });
  return found;
}

/** Says whether a transaction was refused, whole, for one of its lines. */
export function isLineRefused(error: PortmapError): boolean {
  return error.code === 'CONFLICT' && !error.isUncertain && /line \d+ failed/.test(error.message);
}

/** Where the lock of the legacy variant is. */
export function xtablesLock(): string {
  return process.env['XTABLES_LOCKFILE'] ?? '/run/xtables.lock';
}

/** The options with which iptables-restore waits for the xtables lock, for a part of the call's time. */
export function lockWait(tools: Tools, budget: Budget): string[] {
  if (tools.variant === 'nft') return [];
  // Never without a number and never 0: either waits for ever on iptables 1.8.9.
  const seconds = Math.min(maxLockWaitSeconds, Math.floor(budget.remaining() / 1000));
  return ['-w', String(Math.max(1, seconds))];
}

/** The variant of a program of iptables' own by the name of its file; undefined for a script of somebody's. */
export function variantOf(program: string): Variant | undefined {
  const name = basename(realProgram(program));
  return variants.find((variant) => name.includes(`-${variant}`));
}

async function askVariant(program: string, budget: Budget): Promise<Variant> {
  const lines: string[] = [];
  const outcome = await runProgram(program, ['--version'], { budget, onLine: (line) => lines.push(line) });
  if (outcome.exitCode !== 0) throw failure(program, outcome, undefined);
  // Before 1.8 there was one variant, and it printed no word of it.
  return lines.join(' ').includes('nf_tables') ? 'nft' : 'legacy';
}

async function findVariant(
  prefix: string,
  action: 'restore' | 'save',
  variant: Variant,
  folders: readonly string[],
  main: string | undefined,
  budget: Budget,
): Promise<string | undefined> {
  const plain = `${prefix}-${action}`;
  const beside = main === undefined ? [] : [dirname(main)];
  for (const [name, where] of [
    [plain, folders],
    [plain, beside],
    [`${prefix}-${variant}-${action}`, folders],
  ] as const) {
    const program = findProgram(name, where);
    if (program === undefined) continue;
    const known = variantOf(program);
    if (known === variant) return program;
    // A script of its own name: its word is asked for only where the name says nothing.
    if (known === undefined && (name !== plain || (await askVariant(program, budget)) === variant))
      return program;
  }
  return undefined;
}

// Whoever reads a legacy table has the kernel copy all of it, but to print just these chains takes half of what a save of
// 40,000 rules takes. Undefined: they were not all there, but for the last, or this iptables can't be had to do it.
async function listLegacy(
  tools: Tools,
  asked: readonly string[],
  budget: Budget,
): Promise<Ruleset | undefined> {
  const order = listingOrder(asked);
  const reader = rulesetReader(new Set(order));
  const outcome = await runProgram(tools.restore, ['--noflush', '-w', '1'], {
    budget,
    // Without its COMMIT the text can't change a table, so it needs no lock that another process could hold. An iptables
    // that knows no other than the real one waits for that, for a moment.
    input: renderListing(order, ''),
    env: { XTABLES_LOCKFILE: '/proc/self/stat' },
    onLine: reader.read,
  });
  const found = reader.ruleset(order);
  const missing = order.find((chain) => found.absent.has(chain));
  const isWhole =
    missing === undefined
      ? outcome.stderr.includes('COMMIT expected')
      : missing === order.at(-1) && /line \d+ failed/.test(outcome.stderr);
  return outcome.exitCode === 1 && isWhole ? found : undefined;
}

async function readSave(tools: Tools, asked: readonly string[], budget: Budget): Promise<Ruleset> {
  const reader = rulesetReader(new Set(asked));
  const outcome = await runProgram(tools.save, ['-t', 'nat'], { budget, onLine: reader.read });
  if (outcome.exitCode !== 0) throw failure(tools.save, outcome, tools);
  // A save without the table's header says that the table could not be read, not that it is empty.
  if (!reader.isComplete())
    throw new PortmapError(
      'CONFLICT',
      `${tools.save} -t nat: printed no complete nat table`,
      outcome.stderr.trim(),
    );
  return reader.ruleset(asked);
}

const builtins = ['PREROUTING', 'OUTPUT', 'POSTROUTING'];

/**
 * The chains to look at, the built-in ones among them, in an order that tells the truth: the dispatch chain first, for
 * another program makes its jumps in the same transaction, or after it.
 */
export function listingOrder(asked: readonly string[]): string[] {
  return [...new Set([...asked.slice(0, 1), ...builtins, ...asked])];
}

// One process lists many chains and ends at the first that is missing, so each missing chain costs one more process.
async function readChains(tools: Tools, asked: readonly string[], budget: Budget): Promise<Ruleset> {
  const chains = new Map<string, readonly string[]>();
  const absent = new Set<string>();
  for (let rest = listingOrder(asked); rest.length > 0;) {
    const reader = rulesetReader(new Set(rest));
    const outcome = await runProgram(tools.restore, ['--noflush'], {
      budget,
      input: renderListing(rest),
      onLine: reader.read,
    });
    const found = reader.ruleset(rest);
    for (const [chain, rules] of found.chains) chains.set(chain, rules);
    if (outcome.exitCode === 0 && found.absent.size === 0) break;
    const missing = rest.find((chain) => found.absent.has(chain));
    if (missing === undefined || !isMissingChain(outcome))
      throw failure(tools.restore, outcome, tools, renderListing(rest));
    if (builtins.includes(missing)) chains.set(missing, await probeJumps(tools, missing, asked, budget));
    else absent.add(missing);
    rest = rest.slice(rest.indexOf(missing) + 1);
  }
  return { chains, absent };
}

// iptables 1.8.9 says "incompatible" for a chain that is not there.
function isMissingChain(outcome: Outcome): boolean {
  return (
    outcome.exitCode === 1 &&
    /incompatible|No chain\/target\/match by that name|does not exist/.test(outcome.stderr)
  );
}

// A built-in chain with native nft rules can't be listed (report R27); whether our jumps are in it can still be asked.
async function probeJumps(
  tools: Tools,
  chain: string,
  asked: readonly string[],
  budget: Budget,
): Promise<string[]> {
  const jumps =
    chain === 'POSTROUTING'
      ? asked.filter(isMasqueradeChain).map((name) => masqueradeJump(name).rule)
      : [dispatchJump];
  const found: string[] = [];
  for (const jump of jumps) {
    const input = `*nat\n-C ${chain} ${jump}\nCOMMIT\n`;
    const outcome = await runProgram(tools.restore, ['--noflush'], { budget, input });
    if (outcome.exitCode === 0) found.push(jump);
    // 1: no such rule; 2: not even the chain it jumps to.
    else if (outcome.exitCode !== 1 && outcome.exitCode !== 2)
      throw failure(tools.restore, outcome, tools, input);
  }
  return found;
}

/** The error that tells why a program has failed; `input` is what it was given, for the line that it complains of. */
export function failure(
  program: string,
  outcome: Outcome,
  tools: Tools | undefined,
  input = '',
): PortmapError {
  // iptables speaks of the other variant's tables whenever there are any.
  const said = outcome.stderr.replaceAll(/^# Warning: .*\n?/gm, '').trim();
  const evidence = [outcome.failure ?? `exit status ${outcome.exitCode}`, said, failingLines(said, input)]
    .filter((part) => part !== '')
    .join('; ');
  const called = `${basename(program)}${tools === undefined ? '' : ` (${tools.variant})`}`;
  if (outcome.failure?.startsWith('ended') === true)
    return new PortmapError(
      'BUSY',
      `${called}: not done in time${tools?.variant === 'legacy' ? `: another program may hold the xtables lock ${xtablesLock()}` : ''}`,
      evidence,
      { isUncertain: true },
    );
  if (/holding the xtables lock|xtables lock|Can't lock/.test(said) && outcome.exitCode === 4)
    return new PortmapError(
      'BUSY',
      `${called}: another program holds the xtables lock ${xtablesLock()}`,
      `${evidence}; find its holder with: fuser -v ${xtablesLock()}`,
    );
  if (/Permission denied|must be root|Operation not permitted/.test(said))
    return new PortmapError(
      'UNAVAILABLE',
      `${called}: not permitted: the plugin needs root with CAP_NET_ADMIN`,
      evidence,
      { isUncertain: true },
    );
  if (
    /can't initialize|Cannot initialize|unable to initialize|[Tt]able does not exist|table .* does not exist/.test(
      said,
    )
  )
    return new PortmapError(
      'UNAVAILABLE',
      `${called}: this kernel has no nat table for the family`,
      evidence,
    );
  // A chain of the plugin's that was there a moment ago: another program was faster.
  if (/(?:Chain '|Couldn't load target `)CNI-/.test(said))
    return new PortmapError('CONFLICT', `${called}: ${firstLine(said)}`, evidence);
  const extension = /Couldn't load (match|target) `([^']+)'/.exec(said);
  if (extension !== null)
    return new PortmapError(
      'REJECTED',
      `${called}: can't load ${extension[1]} ${extension[2]} (kernel module xt_${extension[2]?.toLowerCase()})`,
      evidence,
    );
  // The nft variant's kernel refuses a rule for what it says; for a chain that is gone it gives another reason.
  if (/RULE_\w+ failed \((?:Invalid argument|Operation not supported|Too many (?:links|levels))/.test(said))
    return new PortmapError('REJECTED', `${called}: the kernel refuses a rule: ${firstLine(said)}`, evidence);
  if (outcome.exitCode === 2)
    return new PortmapError('REJECTED', `${called}: refused the rules: ${firstLine(said)}`, evidence);
  if (outcome.failure !== undefined && /ENOENT|EACCES|ENOEXEC/.test(outcome.failure))
    return new PortmapError('UNAVAILABLE', `${program}: can't be run: ${outcome.failure}`, evidence);
  // One that was never started has certainly done nothing.
  const isUncertain = outcome.exitCode === undefined && !outcome.isUnstarted;
  return new PortmapError('CONFLICT', `${called}: ${outcome.failure ?? firstLine(said)}`, evidence, {
    isUncertain,
  });
}

function firstLine(text: string): string {
  const lines = text.split('\n').filter((line) => line.trim() !== '' && !line.startsWith('#'));
  // The nft variant gives its name on a line of its own in front of what the kernel says.
  return lines.find((line) => !/^\S+ v[\d.]+ \(\w+\): *$/.test(line)) ?? lines[0] ?? 'no reason given';
}

// The line that iptables complains of and its neighbours; the number is a hint, for it is often that of COMMIT.
function failingLines(said: string, input: string): string {
  const number = /line (\d+) failed|line: (\d+)|line (\d+):|at line (\d+)/
    .exec(said)
    ?.slice(1)
    .find((group) => group !== undefined);
  if (number === undefined || input === '') return '';
  const lines = input.split('\n');
  const at = Number(number);
  return `near line ${at}: ${lines.slice(Math.max(0, at - 2), at + 1).join(' | ')}`;
}
