// One call of a plugin as a runtime makes it, and how long it took.
import { spawnSync } from 'node:child_process';
import { path, type Family, type Variant } from './node.ts';

/** The executables that are measured: ours, the one it replaces, and the Node.js of this project for comparison. */
export type Sides = { readonly ours: string; readonly upstream: string; readonly node: string };
export type Options = { readonly variant: Variant; readonly quick: boolean } & Sides;

export type Verb = 'ADD' | 'DEL';
export type Sandbox = {
  readonly id: string;
  readonly netns: string;
  readonly families: readonly Family[];
  readonly address: Readonly<Record<Family, string>>;
  readonly hostPorts: readonly number[];
};

/** The sandbox of a number: ids as long as the real ones, a port and addresses that no other number has. */
export function sandbox(
  number: number,
  { families = ['v4'], mappings = 1 }: { families?: readonly Family[]; mappings?: number } = {},
): Sandbox {
  return {
    id: number.toString(16).padStart(64, 'b'),
    netns: `/run/netns/s${number}`,
    families,
    address: {
      v4: `10.1.${1 + (number >> 8)}.${number & 255}`,
      v6: `2001:db8:1::${(number + 256).toString(16)}`,
    },
    hostPorts: Array.from({ length: mappings }, (_, index) => 20_000 + number + index),
  };
}

export function netconf({ netns, families, address, hostPorts }: Sandbox): string {
  return JSON.stringify({
    cniVersion: '1.0.0',
    name: 'bench',
    type: 'portmap',
    capabilities: { portMappings: true },
    ...(hostPorts.length === 0
      ? {}
      : {
          runtimeConfig: {
            portMappings: hostPorts.map((hostPort) => ({ hostPort, containerPort: 80, protocol: 'tcp' })),
          },
        }),
    prevResult: {
      cniVersion: '1.0.0',
      interfaces: [{ name: 'cni0' }, { name: 'veth0' }, { name: 'eth0', sandbox: netns }],
      ips: families.map((family) => ({
        interface: 2,
        address: `${address[family]}/${family === 'v4' ? 16 : 64}`,
      })),
    },
  });
}

export function environment(verb: Verb, { id, netns }: Sandbox): Record<string, string> {
  return {
    PATH: path,
    CNI_COMMAND: verb,
    CNI_CONTAINERID: id,
    CNI_NETNS: netns,
    CNI_IFNAME: 'eth0',
    CNI_PATH: '/opt/cni/bin',
  };
}

/** Runs a plugin to its end, which must be a success, and returns the milliseconds from before its start to its end. */
export function call(plugin: string, verb: Verb, target: Sandbox): number {
  const [input, env] = [netconf(target), environment(verb, target)];
  const started = process.hrtime.bigint();
  const outcome = spawnSync(plugin, [], { input, env, encoding: 'utf8', timeout: 300_000 });
  const milliseconds = Number(process.hrtime.bigint() - started) / 1e6;
  if (outcome.status !== 0)
    throw new Error(`${verb} by ${plugin}: exit ${outcome.status}: ${outcome.stdout}${outcome.stderr}`);
  return milliseconds;
}

/** The same for any program without input. */
export function callProgram(argv: readonly [string, ...string[]]): number {
  const [file, ...args] = argv;
  const started = process.hrtime.bigint();
  const outcome = spawnSync(file, args, { input: '', env: { PATH: path } });
  const milliseconds = Number(process.hrtime.bigint() - started) / 1e6;
  if (outcome.status !== 0) throw new Error(`${argv.join(' ')}: exit ${outcome.status}`);
  return milliseconds;
}
