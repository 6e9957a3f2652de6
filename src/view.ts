// Reads the tables that targets touch, each once, with just the chains that a plan for them needs.
import { dispatchChain, mappingsOf, retiredChain, sandboxPrefix } from './chain.ts';
import { PortmapError, toPortmapError } from './errors.ts';
import { findTools, hasLegacyTable, observe, observeMore, type Tools } from './iptables.ts';
import { type DispatchLine, readDispatch, rivalLines } from './listing.ts';
import type { PortMapping } from './netconf.ts';
import type { Budget } from './budget.ts';
import { type Ruleset, targetOf } from './restore.ts';
import { type Table, tableKey, tablesOfTarget, type Target, wantedOf } from './target.ts';

/** One table as it was seen, for all targets that touch it. */
export interface View {
  readonly table: Table;
  readonly tools: Tools | undefined;
  readonly observed: Ruleset | undefined;
  /** The lines of the dispatch chain. */
  readonly dispatch: readonly DispatchLine[];
  /** Why the table can't be used; set when `tools` or `observed` is not. */
  readonly error: PortmapError | undefined;
}

/** Reads the tables of these targets that were not read yet. Throws when a table that is there could not be read. */
export async function view(
  targets: readonly Target[],
  budget: Budget,
  views: Map<string, View>,
): Promise<void> {
  const tables = new Map(
    targets.flatMap((target) => tablesOfTarget(target).map((table) => [tableKey(table), table])),
  );
  const missing = [...tables].filter(([key]) => !views.has(key)).map(([, table]) => table);
  const found = await Promise.all(missing.map((table) => viewTable(table, targets, budget)));
  for (const one of found) views.set(tableKey(one.table), one);
}

async function viewTable(table: Table, targets: readonly Target[], budget: Budget): Promise<View> {
  let tools: Tools | undefined;
  try {
    // Reading a legacy table makes it; where the kernel has none there is nothing to find.
    const here = targets.filter((target) =>
      tablesOfTarget(target).some((other) => tableKey(other) === tableKey(table)),
    );
    const isCertain = here.some(
      (target) => !target.possible.some((other) => tableKey(other) === tableKey(table)),
    );
    if (!isCertain && table.variant === 'legacy' && !hasLegacyTable(table.family))
      throw new PortmapError('UNAVAILABLE', `no legacy nat table for ${table.family}`);
    tools = await findTools(table.family, table.variant, budget);
    const observed = await observe(tools, askedChains(here, table), budget);
    const whole = await observeMore(tools, observed, unreadChains(here, table, observed), budget);
    return { table, tools, observed: whole, dispatch: readDispatch(whole), error: undefined };
  } catch (error) {
    const problem = toPortmapError(error);
    if (problem.code !== 'UNAVAILABLE') throw problem;
    return { table, tools, observed: undefined, dispatch: [], error: problem };
  }
}

// The chains most likely to be there first, because a read ends at the first that is not. Whether a
// sandbox's own chain is there matters only when it stands alone; for many, the transaction is made to fit both.
function askedChains(targets: readonly Target[], table: Table): string[] {
  const rules = targets.flatMap((target) => wantedOf(target, table).rules ?? []);
  const shared = rules.flatMap(({ marks, external }) => [...marks.map(({ name }) => name), ...external]);
  const own = targets.length === 1 ? targets.map(({ hash }) => `${sandboxPrefix}${hash}`) : [];
  return [...new Set([dispatchChain, ...shared, ...own])];
}

// Chains whose content is needed and known to be there: those of rivals, and of sandboxes whose rules are replaced in
// both families, for they may have to be put back.
function unreadChains(targets: readonly Target[], table: Table, observed: Ruleset): string[] {
  const dispatched = new Set((observed.chains.get(dispatchChain) ?? []).map(targetOf));
  const own = targets
    .filter((target) => tablesOfTarget(target).length > 1)
    .map(({ hash }) => `${sandboxPrefix}${hash}`)
    .filter((chain) => dispatched.has(chain));
  const lines = readDispatch(observed);
  const rivals = targets.flatMap((target) =>
    rivalLines(lines, `${sandboxPrefix}${target.hash}`, newMappings(target, table)).map(({ chain }) => chain),
  );
  const retired = [...(observed.chains.get('POSTROUTING') ?? [])]
    .map(targetOf)
    .filter((chain) => chain === retiredChain);
  return [...new Set([...own, ...rivals, ...retired])].filter((chain) => !observed.chains.has(chain));
}

/** The mappings that a target newly wants in one table. */
export function newMappings(target: Target, table: Table): readonly PortMapping[] {
  const { request, after } = target;
  if (request?.change.verb !== 'ADD' || after?.variant !== table.variant) return [];
  return mappingsOf(table.family, request.change.attachment.config);
}
