// Reads the tables that targets touch, each once, with just the chains that a plan for them needs.
import { dispatchChain, mappingsOf, retiredChain, sandboxPrefix } from './chain.ts';
import { PortmapError, toPortmapError } from './errors.ts';
import {
  findTools,
  hasLegacyTable,
  listingOrder,
  merge,
  observe,
  observeMore,
  type Tools,
  variantOf,
} from './iptables.ts';
import { type DispatchLine, readDispatch, rivalLines } from './listing.ts';
import type { PortMapping } from './netconf.ts';
import type { Budget } from './budget.ts';
import { type Ruleset, targetOf } from './restore.ts';
import { openSession, type Session } from './session.ts';
import { type Table, tableKey, tablesOf, tablesOfTarget, type Target, wantedOf } from './target.ts';

/** One table as it was seen, for all targets that touch it. */
export interface View {
  readonly table: Table;
  readonly tools: Tools | undefined;
  readonly observed: Ruleset | undefined;
  /** What has read the table and can change it, if it is not over. */
  readonly session: Session | undefined;
  /** The lines of the dispatch chain. */
  readonly dispatch: readonly DispatchLine[];
  /** Why the table can't be used; set when `tools` or `observed` is not. */
  readonly error: PortmapError | undefined;
}

/**
 * Reads the tables of these targets that were not read yet. With `keepsOpen`, what reads a table stays to change it: see
 * `closeViews`. Throws when a table that is there could not be read.
 */
export async function view(
  targets: readonly Target[],
  budget: Budget,
  views: Map<string, View>,
  keepsOpen: boolean,
): Promise<void> {
  const tables = new Map(
    targets.flatMap((target) => tablesOfTarget(target).map((table) => [tableKey(table), table])),
  );
  const missing = [...tables].filter(([key]) => !views.has(key)).map(([, table]) => table);
  // One alone can have the xtables lock, and what comes later may have to wait for what is open.
  const [holder] = views.size === 0 ? missing.filter(({ variant }) => variant === 'legacy') : [];
  const results = await Promise.allSettled(
    missing.map((table) => {
      const mayStay = keepsOpen && (table.variant === 'nft' || table === holder);
      return viewTable(table, targets, budget, mayStay);
    }),
  );
  // What was kept open must be known before anything is thrown.
  for (const result of results)
    if (result.status === 'fulfilled') views.set(tableKey(result.value.table), result.value);
  for (const result of results) if (result.status === 'rejected') throw toPortmapError(result.reason);
}

/** Ends what these views have kept open, with nothing changed by it. */
export async function closeViews(views: Iterable<Pick<View, 'session'>>): Promise<void> {
  const open = [...views].flatMap(({ session }) => session ?? []);
  await Promise.all(open.map((session) => session.close()));
}

async function viewTable(
  table: Table,
  targets: readonly Target[],
  budget: Budget,
  mayStay: boolean,
): Promise<View> {
  let tools: Tools | undefined;
  let session: Session | undefined;
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
    // A script may read all of its input before it does anything, and where nothing is expected to be done, no lock is
    // worth waiting for.
    if (mayStay && isCertain && variantOf(tools.restore) !== undefined) session = openSession(tools, budget);
    const asked = session === undefined ? askedChains(here, table) : certainChains(here, table);
    let observed = await session?.list(listingOrder(asked));
    if (observed === undefined) {
      session = undefined;
      observed = await observe(tools, askedChains(here, table), budget);
    }
    const unread = unreadChains(here, table, observed);
    if (unread.length > 0) {
      const more = await session?.list(unread);
      if (more === undefined) session = undefined;
      observed =
        more === undefined ? await observeMore(tools, observed, unread, budget) : merge(observed, more);
    }
    return { table, tools, observed, session, dispatch: readDispatch(observed), error: undefined };
  } catch (error) {
    await session?.close();
    const problem = toPortmapError(error);
    if (problem.code !== 'UNAVAILABLE') throw problem;
    return { table, tools, observed: undefined, session: undefined, dispatch: [], error: problem };
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

// The same, without the chains of sandboxes that may not be there.
function certainChains(targets: readonly Target[], table: Table): string[] {
  const doubtful = targets
    .filter(({ before }) => !tablesOf(before).some((other) => tableKey(other) === tableKey(table)))
    .map(({ hash }) => `${sandboxPrefix}${hash}`);
  return askedChains(targets, table).filter((chain) => !doubtful.includes(chain));
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
