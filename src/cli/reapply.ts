// `portmap reapply`: after a firewall reload, the rules of every recorded sandbox again.
import { commitTogether } from '../commit.ts';
import { PortmapError } from '../errors.ts';
import { allowLoopback } from '../host.ts';
import type { Budget } from '../budget.ts';
import { newRequest, type Request } from '../queue.ts';
import { readRecords, type SandboxRecord } from '../record.ts';
import { isDead } from '../rival.ts';
import { openState, statePath } from '../state.ts';

/**
 * Puts back the rules of every live recorded sandbox, and removes those of dead ones, in one transaction a table.
 * @throws PortmapError IO without a usable state folder; what failed, by sandbox, after all others were done.
 */
export async function reapplyRecords(terminal: {
  readonly budget: Budget;
  readonly warn: (text: string) => void;
}): Promise<string> {
  const state = openState(false);
  if ('problem' in state) {
    if (state.problem === undefined) return `nothing to do: no sandbox is recorded in ${statePath()}`;
    throw new PortmapError('IO', `state folder: ${state.problem}`);
  }
  const counts = { kept: 0, dropped: 0 };
  const answers = await commitTogether(
    () =>
      readRecords(state).flatMap((record) => {
        const isKept = !isDead(record);
        counts[isKept ? 'kept' : 'dropped'] += 1;
        return isKept ? putBack(record, terminal.warn) : removals(record);
      }),
    state,
    terminal,
  );
  for (const { request, warnings } of answers)
    for (const warning of warnings) terminal.warn(`${nameOf(request)}: ${warning}`);
  const failed = answers.flatMap(({ request, error }) => (error === undefined ? [] : [{ request, error }]));
  const [first] = failed;
  if (first !== undefined)
    throw new PortmapError(
      first.error.code,
      failed.map(({ request, error }) => `${nameOf(request)}: ${error.message}`).join('; '),
      `all others were put back; repair what is named, or restart the container, then repeat: ${first.error.details}`,
      { cause: first.error },
    );
  return `${counts.kept} sandbox(es) put back, ${counts.dropped} dead one(s) dropped`;
}

function nameOf({ containerId, network }: Request): string {
  return `container ${containerId} on network ${network}`;
}

// In the place it had among all, so that the newest owner of a port is in front again.
function putBack(record: SandboxRecord, warn: (text: string) => void): Request[] {
  const [attachment] = record.attachments;
  if (attachment === undefined) return [];
  for (const { config } of record.attachments) for (const warning of allowLoopback(config)) warn(warning);
  const change = { verb: 'ADD', attachment, onConflict: 'warn' } as const;
  return [{ ...newRequest(record.network, record.containerId, change), order: record.order }];
}

function removals(record: SandboxRecord): Request[] {
  return record.attachments.map(({ ifname }) =>
    newRequest(record.network, record.containerId, { verb: 'DEL', ifname }),
  );
}
