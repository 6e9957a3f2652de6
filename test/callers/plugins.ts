// What every caller's tests need around the executable under test: a plugin folder that holds it among Debian's
// plugins, as /opt/cni/bin does on a node, and the search for what a torn-down sandbox has left on the node.
import type { Machine } from '../lab.ts';
import { portmapBin } from '../lab.ts';

export const pluginFolder = '/run/plugins';

export type Network = { readonly name: string; readonly bridge: string };

/** The executable under test as `portmap`, its neighbours in the chain from Debian's containernetworking-plugins. */
export async function installPlugins(machine: Machine): Promise<void> {
  await machine.sh(`
    mkdir -p ${pluginFolder}
    for plugin in bridge host-local firewall tuning; do ln -sf /usr/lib/cni/$plugin ${pluginFolder}/$plugin; done
    ln -sf ${portmapBin} ${pluginFolder}/portmap`);
}

/** Everything that still speaks of a sandbox: none may once the network's last sandbox is torn down. */
export async function leftovers(
  machine: Machine,
  network: { name: string; bridge: string },
): Promise<string[]> {
  const rules = `${await machine.rules('v4')}\n${await machine.rules('v6')}`;
  const rest = await machine.sh(`
    find /run/portmap -type f -o -type l 2>/dev/null || true
    find /var/lib/cni/results -type f 2>/dev/null || true
    find /var/lib/cni/networks/${network.name} -type f ! -name 'last_reserved_ip.*' ! -name lock 2>/dev/null || true
    ip -oneline link show master ${network.bridge} 2>/dev/null || true`);
  return [
    // Upstream keeps the shared chains and their jumps, and so do we; what names a sandbox goes.
    ...rules.split('\n').filter((line) => /CNI-DN-|CNI-SN-|^-A CNI-HOSTPORT-DNAT | id: /.test(line)),
    ...rest.split('\n').filter((line) => line !== ''),
  ];
}

/** Back to a node that never ran a plugin, so that a test which failed half-way does not fail the next one. */
export async function wipe(machine: Machine, { bridge }: Network): Promise<void> {
  await machine.sh(`
    for iptables in iptables ip6tables; do $iptables -t nat -F; $iptables -t nat -X; done
    ip link del ${bridge} 2>/dev/null || true
    rm -rf /run/portmap /var/lib/cni/*`);
}
