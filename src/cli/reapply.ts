// `portmap reapply`: after a firewall reload, the rules of every recorded sandbox again.
import { commitTogether } from '../commit.ts';
import { PortmapError } from '../errors.ts';
import { allowLoopback } from '../host.ts';
import type { Budget } from '../program.ts';
import { newRequest } from '../queue.ts';
import { readRecords } from '../record.ts';
import { isDead } from '../rival.ts';
import { openState } from '../state.ts';

/**
 * Puts back the rules of every live recorded sandbox, and removes those of dead ones, in one transaction a table.
 * @throws PortmapError IO without a usable state folder; the first failure of a sandbox after all others were done.
 */
export async function reapplyRecords(terminal: {
  readonly budget: Budget;
  readonly warn: (text: string) => void;
}): Promise<string> {
  const state = openState(false);
  if ('problem' in state) {
    if (state.problem === undefined) return 'nothing to do: no sandbox is recorded';
    throw new PortmapError('IO', `state folder: ${state.problem}`);
  }
  // The oldest first, so that the newest owner of a port is in front again.
  const records = readRecords(state).toSorted((one, other) => one.order - other.order);
  const dead = records.filter(isDead);
  const requests = records.flatMap((record) => {
    const [newest] = record.attachments;
    if (newest === undefined) return [];
    if (dead.includes(record))
      return record.attachments.map(({ ifname }) =>
        newRequest(record.network, record.containerId, { verb: 'DEL', ifname }),
      );
    for (const { config } of record.attachments)
      for (const warning of allowLoopback(config)) terminal.warn(warning);
    const request = newRequest(record.network, record.containerId, {
      verb: 'ADD',
      attachment: newest,
      onConflict: 'warn',
    });
    return [{ ...request, order: record.order }];
  });
  const numbered = requests.map((request, index) => ({ ...request, token: `${request.token}-${index}` }));
  const answers = await commitTogether(numbered, state, terminal);
  for (const warning of answers.flatMap(({ warnings }) => warnings)) terminal.warn(warning);
  const failed = answers.flatMap(({ error }) => error ?? []);
  if (failed[0] !== undefined) throw failed[0];
  return `${records.length - dead.length} sandbox(es) put back, ${dead.length} dead one(s) dropped`;
}
