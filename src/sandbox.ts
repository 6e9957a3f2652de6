// ADD and DEL of one sandbox: what to skip, what to lock, and the order of the steps around the commit.
import { allowLoopback, dropStaleFlows } from './host.ts';
import { sandboxHash } from './chain.ts';
import { submit } from './commit.ts';
import type { CniVariables } from './environment.ts';
import { PortmapError, systemCode } from './errors.ts';
import { lockFolder, withLock } from './lock.ts';
import { hasMappings, type NetConf, type NetworkConf, readRemnants } from './netconf.ts';
import type { Budget } from './program.ts';
import { isQueued, newRequest, type Request } from './queue.ts';
import { familiesOf, readRecord, recordPath } from './record.ts';
import { isPresent, openState, type StateFolder } from './state.ts';

/** What a step needs of the call it is part of. */
export interface Surroundings {
  readonly budget: Budget;
  readonly warn: (text: string) => void;
}

/**
 * Installs the mappings of an attachment in place of those it had. Without mappings nothing runs, waits or is
 * written, unless the attachment had some before.
 * @throws PortmapError after which nothing of the new mappings is left.
 */
export async function addSandbox(conf: NetConf, variables: CniVariables, call: Surroundings): Promise<void> {
  const { containerId, ifname, netns } = variables;
  const { attachment } = conf;
  for (const warning of conf.warnings) call.warn(warning);
  if (familiesOf(attachment).length === 0) {
    if (isKnown(sandboxHash(conf.name, containerId)))
      await change(newRequest(conf.name, containerId, { verb: 'DEL', ifname }), call);
    return;
  }
  for (const warning of allowLoopback(attachment)) call.warn(warning);
  const add = {
    verb: 'ADD',
    attachment: { ifname, netns, config: attachment },
    onConflict: conf.onConflict,
  } as const;
  await change(newRequest(conf.name, containerId, add), call);
  for (const warning of await dropStaleFlows(attachment, 'not to this container', call.budget))
    call.warn(warning);
}

/**
 * Removes an attachment's mappings, by its record or by what the kernel holds under the sandbox's names. A sandbox
 * that has neither mappings in the netconf nor anything in the state folder costs nothing (report R07).
 * @throws PortmapError BUSY when rules may exist and could not be removed.
 */
export async function deleteSandbox(
  network: NetworkConf,
  variables: CniVariables,
  call: Surroundings,
): Promise<void> {
  const { containerId, ifname } = variables;
  const hash = sandboxHash(network.name, containerId);
  if (!hasMappings(network.raw) && !isKnown(hash)) return;
  const state = openState(false);
  const record = 'problem' in state ? 'missing' : readRecord(state, hash);
  const recorded =
    typeof record === 'string' ? undefined : record.attachments.find((one) => one.ifname === ifname);
  const remnants = recorded?.config ?? readRemnants(network, ifname);
  try {
    await change(newRequest(network.name, containerId, { verb: 'DEL', ifname }), call);
  } catch (error) {
    throw asTryAgain(error);
  }
  for (const warning of await dropStaleFlows(remnants, 'to this container', call.budget)) call.warn(warning);
}

// Says whether the state folder has anything on a sandbox, or can't be asked. A request is looked for before the
// record: an ADD under way has one or the other at any time.
function isKnown(hash: string): boolean {
  const state = openState(false);
  if ('problem' in state) return state.problem !== undefined;
  const record = recordPath(state, hash);
  return isPresent(lockFolder(record)) || isQueued(state, hash) || isPresent(record);
}

// Brings a change to the kernel under the sandbox's lock; without lock and queue where the state folder is no use.
async function change(request: Request, call: Surroundings): Promise<void> {
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
  const record = recordPath(state, sandboxHash(request.network, request.containerId));
  try {
    return await withLock(record, call.budget, () => submit(request, state, call.budget));
  } catch (error) {
    // A full or read-only folder must not keep a container from its network.
    if (error instanceof PortmapError || systemCode(error) === '') throw error;
    return changeAlone(request, call, error instanceof Error ? error.message : String(error));
  }
}

async function changeAlone(
  request: Request,
  call: Surroundings,
  problem: string,
): Promise<readonly string[]> {
  call.warn(
    `state folder: ${problem}; working without it: set PORTMAP_STATE_DIR to a folder that root can write`,
  );
  return submit(request, undefined, call.budget);
}

// On DEL every failure is one to repeat. Some runtimes take an error that speaks of things not found for success.
function asTryAgain(error: unknown): PortmapError {
  const { message, details } =
    error instanceof PortmapError
      ? error
      : new PortmapError('INTERNAL', error instanceof Error ? error.message : String(error));
  return new PortmapError('BUSY', `rules may be left: ${plain(message)}`, plain(details), { cause: error });
}

function plain(text: string): string {
  return text.replaceAll(/not found/gi, 'missing').replaceAll(/no such file/gi, 'missing file');
}
