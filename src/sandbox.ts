// ADD and DEL of one sandbox: what to skip, and the order of the steps around the commit. What only a call with
// something to do needs is loaded when that is clear: most calls of a node have nothing to do.
import { resolve } from 'node:path';
import { familiesOf, sandboxHash } from './chain.ts';
import type { Surroundings } from './change.ts';
import type { CniVariables } from './environment.ts';
import { PortmapError } from './errors.ts';
import type { AttachmentConfig, NetConf } from './netconf.ts';
import { hasMappings, type NetworkConf } from './network.ts';
import { ownName, processId } from './process.ts';
import { isPresent, isQueued, openState, sandboxFiles, type StateFolder } from './state.ts';

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
    if (isKnown(conf.name, containerId)) {
      const { changeSandbox } = await import('./change.ts');
      await changeSandbox(conf.name, containerId, { verb: 'DEL', ifname }, call);
    }
    return;
  }
  const [{ changeSandbox }, { allowLoopback, doubtsOf, dropStaleFlows }] = await Promise.all([
    import('./change.ts'),
    import('./host.ts'),
  ]);
  for (const warning of [...doubtsOf(attachment, netns), ...allowLoopback(attachment)]) call.warn(warning);
  const add = {
    verb: 'ADD',
    // Another call, in another folder, asks later whether it is still there.
    attachment: {
      ifname,
      netns: netns === '' ? '' : resolve(netns),
      config: attachment,
      ...(netns.startsWith('/proc/') ? { namespace: processId('self')?.namespace } : {}),
    },
    onConflict: conf.onConflict,
  } as const;
  await changeSandbox(conf.name, containerId, add, call);
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
  call: Surroundings & { readonly isUndo?: boolean },
): Promise<void> {
  const { containerId, ifname } = variables;
  if (!hasMappings(network.raw) && !isKnown(network.name, containerId)) return;
  const [{ changeSandbox }, { dropStaleFlows }] = await Promise.all([
    import('./change.ts'),
    import('./host.ts'),
  ]);
  const known = await knowledgeOf(network, containerId, ifname);
  const of = call.isUndo === true ? ownName() : undefined;
  // A later ADD has taken its place.
  if (of !== undefined && known.token !== undefined && known.token !== of) return;
  try {
    await changeSandbox(network.name, containerId, { verb: 'DEL', ifname, of }, call);
  } catch (error) {
    throw asTryAgain(error);
  }
  for (const warning of await dropStaleFlows(known.config, 'to this container', call.budget))
    call.warn(warning);
  if (network.raw['backend'] === 'nftables' || !known.hasFolder) {
    const { removeUpstreamRules } = await import('./nftables.ts');
    await removeUpstreamRules(containerId, call.budget);
  }
}

// What is known of a sandbox beside its name: its record, or what the netconf says where no record can be had. Runtimes
// repeat DEL; one without a record has no flows behind it any more. Without a folder this is the first call since the
// node was started, or since it changed to this plugin.
async function knowledgeOf(
  network: NetworkConf,
  containerId: string,
  ifname: string,
): Promise<{
  config: Pick<AttachmentConfig, 'mappings' | 'addresses'>;
  token?: string | undefined;
  hasFolder: boolean;
}> {
  const [{ readRecord }, { readRemnants }] = await Promise.all([
    import('./record.ts'),
    import('./netconf.ts'),
  ]);
  const state = openState(false);
  const hasFolder = !('problem' in state);
  const record = hasFolder ? readRecord(state, sandboxHash(network.name, containerId)) : 'unknown';
  if (record === 'missing') return { config: { mappings: [], addresses: {} }, hasFolder };
  const recorded = record === 'unknown' ? undefined : record.attachments.find((one) => one.ifname === ifname);
  return { config: recorded?.config ?? readRemnants(network, ifname), token: recorded?.token, hasFolder };
}

/** Says whether the state folder has anything on a sandbox, or can't be asked. */
export function isKnown(network: string, containerId: string): boolean {
  const state = openState(false);
  return 'problem' in state
    ? state.problem !== undefined
    : hasFiles(state, sandboxHash(network, containerId));
}

// A request is looked for before the record: an ADD under way has one or the other at any time.
function hasFiles(state: StateFolder, hash: string): boolean {
  const { lock, record } = sandboxFiles(state, hash);
  return isPresent(lock) || isQueued(state, hash) || isPresent(record);
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
