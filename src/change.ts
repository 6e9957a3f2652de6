// One change of one sandbox, from its lock to its commit; without lock and queue where the state folder is no use.
import { commitLock, submit } from './commit.ts';
import { PortmapError, systemCode } from './errors.ts';
import { withLock } from './lock.ts';
import type { Budget } from './budget.ts';
import { drop, hashOf, newRequest, type Request } from './queue.ts';
import { removeRecord } from './record.ts';
import { openState, sandboxFiles, type StateFolder, statePath } from './state.ts';

/** What a step needs of the call it is part of. */
export interface Surroundings {
  readonly budget: Budget;
  readonly warn: (text: string) => void;
}

/**
 * Brings a change to the kernel while no other call works on the same sandbox.
 * @throws PortmapError what the change came to; nothing of it is then left.
 */
export async function changeSandbox(
  network: string,
  containerId: string,
  change: Request['change'],
  call: Surroundings,
): Promise<void> {
  const request = newRequest(network, containerId, change);
  const state = openState(true);
  const warnings =
    'problem' in state
      ? await changeAlone(request, call, state.problem ?? 'missing')
      : await changeInTurn(request, call, state);
  for (const warning of warnings) call.warn(warning);
}
async function changeInTurn(
  request: Request,
  call: Surroundings,
  state: StateFolder,
): Promise<readonly string[]> {
  const { change } = request;
  const record = sandboxFiles(state, hashOf(request)).record;
  try {
    const work = () => submit(request, state, call.budget);
    return await withLock(record, call.budget, work, commitLock(state));
  } catch (error) {
    // A full or read-only folder must not keep a container from its network.
    if (error instanceof PortmapError || systemCode(error) === '') throw error;
    drop(state, request);
    const warnings = await changeAlone(request, call, error instanceof Error ? error.message : String(error));
    // To remove a file takes no room.
    if (change.verb === 'DEL') removeRecord(state, hashOf(request));
    return warnings;
  }
}

async function changeAlone(
  request: Request,
  call: Surroundings,
  problem: string,
): Promise<readonly string[]> {
  call.warn(
    `state folder ${statePath()}: ${problem}; working without it: make room in it, or set PORTMAP_STATE_DIR to another folder of root's own`,
  );
  return submit(request, undefined, call.budget);
}
