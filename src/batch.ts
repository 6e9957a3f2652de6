// Commits a plan: one transaction a table, all tables or none. When one is refused, those that were committed are taken
// back before the failure is told.
import { PortmapError, toPortmapError } from './errors.ts';
import { commit, isLineRefused, observe } from './iptables.ts';
import type { BatchContext, Plan, PlannedTable } from './plan.ts';
import { graceBudget } from './budget.ts';
import { removeRecord, writeRecord } from './record.ts';
import { decisiveChains, invertTransaction, isApplied, renderTransaction, type Ruleset } from './restore.ts';
import { onlyLoses, type Table, tableKey, tablesOf, type Target } from './target.ts';
import { closeViews } from './view.ts';

// The call may be over its time, or told to end at once, when it has to look what it has done and put a family back.
const lookMs = 800;
const undoMs = 2000;

/**
 * Commits a plan, records first. `cover` gets the number of each process that changes a table.
 * @throws PortmapError the first failure, after everything was put back.
 */
export async function commitPlan(
  plan: Plan,
  context: BatchContext,
  cover: (pid: number) => void,
): Promise<string[]> {
  const problems = saveRecords(plan.targets, context, 'pending');
  const todo = plan.tables.filter(({ transaction }) => transaction.length > 0);
  // What is open in a table with nothing to do may have the xtables lock that another one waits for.
  await closeViews(plan.tables.filter(({ transaction }) => transaction.length === 0));
  const results = await Promise.allSettled(
    todo.map(({ tools, transaction, session }) => {
      const text = renderTransaction(transaction, context.naming);
      return session === undefined ? commit(tools, text, context.budget, cover) : session.commit(text, cover);
    }),
  );
  const failed = results.flatMap((result) =>
    result.status === 'rejected' ? [toPortmapError(result.reason)] : [],
  );
  const first = failed[0];
  if (first === undefined) {
    for (const { hash, after } of plan.targets)
      if (after === undefined && context.state !== undefined) removeRecord(context.state, hash);
    return [...problems, ...saveRecords(plan.targets.filter(isUnsettled), context, 'after')];
  }
  const undone = await Promise.allSettled(todo.map((planned, index) => undo(planned, results[index], cover)));
  const stuck = undone.flatMap((result) =>
    result.status === 'rejected' ? [toPortmapError(result.reason)] : [],
  );
  // A record without rules costs nothing; rules without a record are never found again by a DEL without mappings.
  if (stuck.length === 0) saveRecords(plan.targets, context, 'before');
  if (stuck.length === 0) throw first;
  const reason = stuck.map((error) => error.message).join('; ');
  throw new PortmapError(
    first.code,
    first.message,
    `${first.details}; a family could not be put back: ${reason}; DEL removes what is left`,
  );
}

// Takes back a transaction that was committed, or that may have been.
async function undo(
  planned: PlannedTable,
  result: PromiseSettledResult<void> | undefined,
  cover: (pid: number) => void,
): Promise<void> {
  const { tools, transaction } = planned;
  if (result?.status === 'rejected') {
    if (!toPortmapError(result.reason).isUncertain) return;
    const seen = await observe(tools, decisiveChains(transaction), graceBudget(lookMs));
    const isUnchanged = decisiveChains(transaction).every(
      (chain) => textOf(seen, chain) === textOf(planned.observed, chain),
    );
    if (isUnchanged || !isApplied(transaction, seen)) return;
  }
  const budget = graceBudget(undoMs);
  const inverse = invertTransaction(transaction);
  try {
    await commit(tools, renderTransaction(inverse), budget, cover);
  } catch (error) {
    // By place only what was surely not done: a second time, a place is another line's.
    if (!isLineRefused(toPortmapError(error))) throw error;
    await commit(tools, renderTransaction(inverse, 'place'), budget, cover);
  }
}

function textOf(ruleset: Ruleset, chain: string): string | undefined {
  return ruleset.chains.get(chain)?.join('\n');
}

// Says whether the record of a sandbox changes once more when its commit is done.
function isUnsettled(target: Target): boolean {
  return target.after !== undefined && (onlyLoses(target) || olderTables(target).length > 0);
}

// Tables that hold rules of before, and none after the commit: whoever is killed in between must find them.
function olderTables({ after, old }: Target): Table[] {
  const wanted = new Set(tablesOf(after).map(tableKey));
  return old.filter((table) => !wanted.has(tableKey(table)));
}

// Writes what will be, with where it may still be otherwise, then what is; or puts back what was. A sandbox that goes
// keeps its record until it is gone. A record that can't be written is a problem to report, not a failure.
function saveRecords(
  targets: readonly Target[],
  context: BatchContext,
  which: 'before' | 'pending' | 'after',
): string[] {
  const { state } = context;
  if (state === undefined) return [];
  return targets.flatMap((target) => {
    const { hash, before, after } = target;
    // One that only loses an attachment keeps the record of all until that is gone.
    if (after === undefined || (which === 'pending' && onlyLoses(target))) return [];
    const older = olderTables(target);
    const record =
      which === 'before' ? before : which === 'pending' && older.length > 0 ? { ...after, older } : after;
    try {
      if (record !== undefined) writeRecord(state, record);
      else removeRecord(state, hash);
      return [];
    } catch (error) {
      return [
        `the record of the sandbox can't be written: ${error instanceof Error ? error.message : String(error)}`,
      ];
    }
  });
}
