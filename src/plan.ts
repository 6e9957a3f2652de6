// From requests to a plan: observe the tables they touch, see who else has the ports, plan one transaction a table.
// Changes nothing.
import { PortmapError, toPortmapError } from './errors.ts';
import { findTools, type Tools, type Variant } from './iptables.ts';
import { mappingsOf, overlaps, sandboxPrefix } from './chain.ts';
import { describeMapping } from './netconf.ts';
import type { Budget } from './budget.ts';
import { hashOf, type Request } from './queue.ts';
import { readRecord, type SandboxRecord } from './record.ts';
import { type Naming, planTransaction, type Ruleset, type Transaction } from './restore.ts';
import type { Session } from './session.ts';
import { closeViews, newMappings, type View, view } from './view.ts';
import { contestedBy, findRivals, isDead } from './rival.ts';
import type { StateFolder } from './state.ts';
import {
  type Table,
  tableKey,
  tablesOfTarget,
  chainTaken,
  type Target,
  targetOfRecord,
  targetOfRequest,
  wantedOf,
} from './target.ts';

/** Where a batch works: the state folder if there is one, and the time it has. */
export interface BatchContext {
  readonly budget: Budget;
  readonly state: StateFolder | undefined;
  /** How lines are deleted: by their place once their text was refused again and again. */
  readonly naming?: Naming;
  /** Tables, by key, in which chains that go are left empty, because rules of others lead to them. */
  readonly keepsChains?: ReadonlySet<string>;
  /** Whether what reads a table may wait for the plan, to commit it. */
  readonly keepsOpen?: boolean;
}

/** One table with what was seen of it and what is to be done. */
export interface PlannedTable {
  readonly table: Table;
  readonly tools: Tools;
  readonly observed: Ruleset;
  readonly transaction: Transaction;
  /** What has read the table and waits to change it. */
  readonly session: Session | undefined;
}

/** A plan for several targets. Requests that can't be planned are in `failures`, by token. */
export interface Plan {
  readonly targets: readonly Target[];
  readonly tables: readonly PlannedTable[];
  readonly failures: ReadonlyMap<string, PortmapError>;
  readonly warnings: ReadonlyMap<string, readonly string[]>;
  /** Ends, with nothing changed by it, what waits for the plan. */
  readonly close: () => Promise<void>;
}

/**
 * Observes and plans; changes nothing.
 * @throws PortmapError when a table that is there could not be read: nothing is then known of any request.
 */
export async function planBatch(requests: readonly Request[], context: BatchContext): Promise<Plan> {
  const failures = new Map<string, PortmapError>();
  const warnings = new Map<string, string[]>();
  const variant = requests.some(({ change }) => change.verb === 'ADD')
    ? await defaultVariant(context.budget)
    : 'nft';
  const targets = new Map<string, Target>();
  for (const request of requests) {
    try {
      const earlier = targets.get(hashOf(request));
      if (earlier !== undefined && earlier.after === undefined && request.change.verb === 'DEL') continue;
      const record = earlier === undefined ? recordOfSandbox(context, request) : (earlier.after ?? 'missing');
      const target = targetOfRequest(request, record, variant);
      // A later request for the same sandbox goes on from what the earlier one leaves.
      if (target !== undefined)
        targets.set(
          target.hash,
          earlier === undefined ? target : { ...target, before: earlier.before, old: earlier.old },
        );
    } catch (error) {
      failures.set(request.token, toPortmapError(error));
    }
  }
  const views = new Map<string, View>();
  try {
    return await planTargets([...targets.values()], context, views, failures, warnings);
  } catch (error) {
    await closeViews(views.values());
    throw error;
  }
}

async function planTargets(
  targets: readonly Target[],
  context: BatchContext,
  views: Map<string, View>,
  failures: Map<string, PortmapError>,
  warnings: Map<string, string[]>,
): Promise<Plan> {
  const { budget, keepsOpen = false } = context;
  await view(targets, budget, views, keepsOpen);
  const fail = (target: Target, error: PortmapError) => {
    if (target.request !== undefined) failures.set(target.request.token, error);
  };
  const viable = targets.filter((target) => {
    const owner = foreignOwner(target, views);
    const error = owner === undefined ? obstacle(target, views) : chainTaken(target.hash, owner);
    // Another sandbox's chain is not this one's to remove, so there is nothing to do.
    const isDone = owner !== undefined && target.request?.change.verb === 'DEL';
    if (error !== undefined && !isDone) fail(target, error);
    return error === undefined;
  });
  const { kept, evicted } = settleRivals(viable, context, views, fail, warnings);
  await view(evicted, budget, views, keepsOpen);
  const final = [...kept, ...evicted.filter((target) => obstacle(target, views) === undefined)];
  const tables = [...views.values()].flatMap(({ table, tools, observed, session }) => {
    if (tools === undefined || observed === undefined) return [];
    const wanted = final
      .filter((target) => tablesOfTarget(target).some((other) => tableKey(other) === tableKey(table)))
      .map((target) => ({
        ...wantedOf(target, table),
        keepsChain: context.keepsChains?.has(tableKey(table)) === true,
      }));
    return [{ table, tools, observed, session, transaction: planTransaction(observed, wanted) }];
  });
  return { targets: final, tables, failures, warnings, close: () => closeViews(views.values()) };
}

async function defaultVariant(budget: Budget): Promise<Variant> {
  // The node's own choice. IPv6-only nodes may have no iptables, others no ip6tables.
  try {
    return (await findTools('ipv4', undefined, budget)).variant;
  } catch (error) {
    try {
      return (await findTools('ipv6', undefined, budget)).variant;
    } catch {
      throw error;
    }
  }
}

function recordOfSandbox(context: BatchContext, request: Request): SandboxRecord | 'missing' | 'unknown' {
  return context.state === undefined ? 'unknown' : readRecord(context.state, hashOf(request));
}

// What keeps a target from being planned: a table it needs can't be used, or another program's chain is missing.
function obstacle(target: Target, views: ReadonlyMap<string, View>): PortmapError | undefined {
  for (const table of tablesOfTarget(target)) {
    const seen = views.get(tableKey(table));
    const wanted = wantedOf(target, table);
    const isPossible = target.possible.some((other) => tableKey(other) === tableKey(table));
    // Where rules are only possible, tools or tables that are not there say that there are none.
    if (seen?.error !== undefined && (!isPossible || seen.error.isUncertain)) {
      if (target.after !== undefined || target.request?.change.verb === 'ADD') return seen.error;
      return new PortmapError(
        seen.error.code,
        `container ${target.request?.containerId ?? target.before?.containerId ?? 'unknown'}: ${seen.error.message}`,
        seen.error.details,
      );
    }
    const external = wanted.rules?.external.find((chain) => seen?.observed?.absent.has(chain) === true);
    if (external !== undefined)
      return new PortmapError(
        'CONFIG',
        `externalSetMarkChain: chain ${JSON.stringify(external)} is missing from the ${table.family} nat table`,
        'portmap makes no chain of another program; remove externalSetMarkChain from the netconf to use the plugin’s own',
      );
  }
  return undefined;
}

// The sandbox that a chain belongs to by the comment of the line that leads there, if that is another than the target's
// and no record says better. A comment that was cut names nobody.
function foreignOwner(
  target: Target,
  views: ReadonlyMap<string, View>,
): { network: string; containerId: string } | undefined {
  const { request, before, hash } = target;
  if (request === undefined || before !== undefined) return undefined;
  return [...views.values()]
    .flatMap(({ dispatch }) => dispatch)
    .flatMap(({ chain, network, containerId }) =>
      chain === `${sandboxPrefix}${hash}` && network !== undefined && containerId !== undefined
        ? [{ network, containerId }]
        : [],
    )
    .find((owner) => owner.network !== request.network || owner.containerId !== request.containerId);
}

// Dead owners of a wanted port are evicted; live or unknown ones are named, or make the request fail.
function settleRivals(
  targets: readonly Target[],
  context: BatchContext,
  views: ReadonlyMap<string, View>,
  fail: (target: Target, error: PortmapError) => void,
  warnings: Map<string, string[]>,
): { kept: Target[]; evicted: Target[] } {
  const inBatch = new Set(targets.map(({ hash }) => `${sandboxPrefix}${hash}`));
  const evicted = new Map<string, Target>();
  const deadInBatch = new Set<string>();
  const kept: Target[] = [];
  const recordOf = (hash: string) => {
    const record = context.state === undefined ? 'missing' : readRecord(context.state, hash);
    return typeof record === 'string' ? undefined : record;
  };
  for (const target of targets) {
    const change = target.request?.change;
    const named = new Set<string>();
    for (const { table, observed, dispatch } of views.values()) {
      const mappings = newMappings(target, table);
      if (mappings.length === 0 || observed === undefined) continue;
      const own = `${sandboxPrefix}${target.hash}`;
      for (const rival of findRivals(table.family, observed, own, mappings, recordOf, dispatch)) {
        if (inBatch.has(rival.chain)) {
          if (rival.dead !== undefined) deadInBatch.add(rival.chain);
          continue;
        }
        if (rival.dead === undefined) named.add(rival.description);
        else evicted.set(rival.chain, targetOfRecord(rival.dead, false, rival.dead.variant));
      }
      for (const { ifname, config } of target.after?.attachments.slice(1) ?? [])
        for (const mapping of mappings.filter((one) =>
          mappingsOf(table.family, config).some((other) => overlaps(one, other)),
        ))
          named.add(
            `${describeMapping(mapping)}: host port already mapped for interface ${ifname} of this container`,
          );
      // Those that come to the table together do not see each other there.
      for (const { after } of kept)
        if (after?.variant === table.variant && !isDead(after))
          for (const mapping of contestedBy(table.family, after, mappings))
            named.add(
              `${describeMapping(mapping)}: host port already mapped for container ${after.containerId} on network ${after.network}`,
            );
    }
    if (named.size > 0 && change?.verb === 'ADD' && target.request !== undefined) {
      if (change.onConflict === 'fail') {
        fail(
          target,
          new PortmapError(
            'PORT_TAKEN',
            [...named].join('; '),
            'stop the other container, or map another host port',
          ),
        );
        continue;
      }
      warnings.set(
        target.request.token,
        [...named].map((text) => `${text}; this attachment now gets its traffic`),
      );
    }
    kept.push(target);
  }
  // A DEL of one of two interfaces of a dead owner leaves the other, which is in the way just so.
  const isOver = ({ hash, request }: Target) =>
    request?.change.verb === 'DEL' && deadInBatch.has(`${sandboxPrefix}${hash}`);
  return {
    kept: kept.map((target) => (isOver(target) ? { ...target, after: undefined } : target)),
    evicted: [...evicted.values()],
  };
}
