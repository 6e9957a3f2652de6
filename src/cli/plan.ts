// `portmap plan`: the transactions of an ADD or DEL, printed and not committed.
import { PortmapError } from '../errors.ts';
import { planBatch } from '../plan.ts';
import { readNetConf } from '../netconf.ts';
import { hasMappings, readJson, readName, readVersion } from '../network.ts';
import type { Budget } from '../budget.ts';
import { newRequest } from '../queue.ts';
import { readVariables } from '../environment.ts';
import { familiesOf } from '../chain.ts';
import { renderTransaction } from '../restore.ts';
import { isKnown } from '../sandbox.ts';
import { openState } from '../state.ts';
import { tableKey } from '../target.ts';

/** Reads the netconf as the plugin would and returns what it would give to iptables-restore, table by table. */
export async function planChange(
  verb: 'add' | 'del',
  attachment: { containerId: string; netns: string; ifname: string },
  terminal: {
    readonly budget: Budget;
    readonly readInput: () => Promise<string>;
    readonly warn: (text: string) => void;
  },
): Promise<string> {
  if (attachment.containerId === '')
    throw new PortmapError('ENV', '--container-id: missing', 'name the container, or set CNI_CONTAINERID');
  const { containerId, ifname, netns } = readVariables('DEL', {
    CNI_CONTAINERID: attachment.containerId,
    CNI_NETNS: attachment.netns,
    CNI_IFNAME: attachment.ifname,
    CNI_PATH: '/',
  });
  const raw = readJson(await terminal.readInput());
  const network = { name: readName(raw), cniVersion: readVersion(raw), raw };
  const state = openState(false);
  const context = { budget: terminal.budget, state: 'problem' in state ? undefined : state };
  if (verb === 'del' && !hasMappings(raw) && !isKnown(network.name, containerId))
    return '# nothing to do: no record of this sandbox, and no mappings in the netconf: give it a mapping, and DEL looks into the kernel';
  const conf = verb === 'add' ? readNetConf(network, ifname) : undefined;
  for (const warning of conf?.warnings ?? []) terminal.warn(warning);
  if (conf !== undefined && familiesOf(conf.attachment).length === 0)
    return '# nothing to do: no mapping for this container';
  const change =
    conf === undefined
      ? ({ verb: 'DEL', ifname } as const)
      : ({
          verb: 'ADD',
          attachment: { ifname, netns, config: conf.attachment },
          onConflict: conf.onConflict,
        } as const);
  const request = newRequest(network.name, containerId, change);
  const plan = await planBatch([request], context);
  const failure = plan.failures.get(request.token);
  if (failure !== undefined) throw failure;
  for (const warning of plan.warnings.get(request.token) ?? []) terminal.warn(warning);
  const parts = plan.tables
    .filter(({ transaction }) => transaction.length > 0)
    .map(
      ({ table, tools, transaction }) =>
        `# ${tableKey(table)}: ${tools.restore} --noflush\n${renderTransaction(transaction)}`,
    );
  return parts.length === 0
    ? '# nothing to do: the kernel holds nothing of this sandbox'
    : parts.join('').trimEnd();
}
