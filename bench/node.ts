// The node that is measured on. A stage of the benchmark runs inside network and mount namespaces of its own, so this
// file changes the machine it runs on without asking: it must only be used by stage.ts, which run.ts starts inside
// those namespaces. Nothing stands between the stage and the plugins it starts, no nsenter and no shell, so what is
// measured is the plugin.
import { spawnSync } from 'node:child_process';
import { mkdirSync, readFileSync, symlinkSync } from 'node:fs';

export type Variant = 'nft' | 'legacy';
export type Family = 'v4' | 'v6';

const toolFolder = '/run/iptables';
/** PATH of every plugin that is measured: the iptables programs of one variant first. */
export const path = `${toolFolder}:/usr/sbin:/usr/bin:/sbin:/bin`;

/** Runs a program that must succeed, and returns what it printed. */
export function run(argv: readonly [string, ...string[]], input = ''): string {
  const [file, ...args] = argv;
  const outcome = spawnSync(file, args, {
    input,
    env: { PATH: path },
    encoding: 'utf8',
    maxBuffer: 256 * 1024 * 1024,
  });
  if (outcome.error !== undefined) throw outcome.error;
  if (outcome.status !== 0) throw new Error(`${argv.join(' ')}: exit ${outcome.status}: ${outcome.stderr}`);
  return outcome.stdout;
}

/** Makes these namespaces a node: iptables of one variant, a bridge that leads to containers, `sandboxes` of them. */
export function openNode(variant: Variant, sandboxes: number): void {
  // Guards the machine of whoever starts stage.ts by hand. (/sys still shows the devices outside.)
  const devices = readFileSync('/proc/self/net/dev', 'utf8').match(/^ *[^ |]+:/gm) ?? [];
  if (devices.some((name) => name.trim() !== 'lo:')) throw new Error('not in a network namespace of its own');
  run(['sh', '-ec', 'mount -t tmpfs -o mode=755 run /run; mount -t tmpfs -o mode=755 lib /var/lib']);
  mkdirSync(toolFolder);
  for (const tool of ['iptables', 'ip6tables'])
    for (const end of ['', '-save', '-restore'])
      symlinkSync(`/usr/sbin/xtables-${variant}-multi`, `${toolFolder}/${tool}${end}`);
  const names = Array.from({ length: sandboxes }, (_, index) => `s${index}`);
  run([
    'sh',
    '-ec',
    `ip link set lo up
     echo 1 > /proc/sys/net/ipv4/ip_forward
     ip link add cni0 type bridge
     ip link set cni0 up
     ip addr add 10.1.0.1/16 dev cni0
     ip -6 addr add 2001:db8:1::1/64 dev cni0 nodad
     for name in ${names.join(' ')}; do ip netns add $name; done`,
  ]);
}

/**
 * Rules as kube-proxy writes them, five and two chains for each service, loaded in one transaction. `count` is the
 * number of rules in the service chains.
 */
export function loadServiceRules(count: number): void {
  const services = Math.ceil(count / 5);
  const lines = ['*nat', ':KUBE-SERVICES - [0:0]', ':KUBE-MARK-MASQ - [0:0]'];
  const rules = [
    '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    '-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    '-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000',
  ];
  for (let service = 0; service < services; service += 1) {
    const id = service.toString(36).toUpperCase().padStart(16, 'X');
    const [high, low] = [service >> 8, service & 255];
    const comment = `-m comment --comment "shop/service-${service}:http`;
    lines.push(`:KUBE-SVC-${id} - [0:0]`, `:KUBE-SEP-${id} - [0:0]`);
    rules.push(
      `-A KUBE-SERVICES -d 10.96.${high}.${low}/32 -p tcp ${comment} cluster IP" -m tcp --dport 80 -j KUBE-SVC-${id}`,
      `-A KUBE-SVC-${id} ! -s 10.244.0.0/16 -d 10.96.${high}.${low}/32 -p tcp ${comment} cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ`,
      `-A KUBE-SVC-${id} ${comment} -> 10.244.${high}.${low}:8080" -j KUBE-SEP-${id}`,
      `-A KUBE-SEP-${id} -s 10.244.${high}.${low}/32 ${comment}" -j KUBE-MARK-MASQ`,
      `-A KUBE-SEP-${id} -p tcp ${comment}" -m tcp -j DNAT --to-destination 10.244.${high}.${low}:8080`,
    );
  }
  run(['iptables-restore', '--noflush'], [...lines, ...rules, 'COMMIT', ''].join('\n'));
}

/** Empties the nat table of both families: what one measurement left must not be in the next. */
export function clearTables(): void {
  for (const tool of ['iptables', 'ip6tables'] as const)
    run(
      [`${tool}-restore`],
      '*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\nCOMMIT\n',
    );
}

/** How many chains of sandboxes there are; answered without listing the table, which is slow in the nft variant. */
export function sandboxChains(family: Family): number {
  const tool = family === 'v4' ? 'iptables' : 'ip6tables';
  const outcome = spawnSync(tool, ['-t', 'nat', '-S', 'CNI-HOSTPORT-DNAT'], {
    env: { PATH: path },
    encoding: 'utf8',
  });
  const chains = new Set(outcome.stdout.match(/CNI-DN-[0-9a-f]{21}/g) ?? []);
  return chains.size;
}
