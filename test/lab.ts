// A private node for tests: machines made of namespaces, so that nothing here can touch the tables of the machine
// that runs the tests. A machine is a holder process with its own network and mounts; a node is such a machine with
// a bridge, containers on it, and a client host outside. All of it is gone when the holder is.
//
//   client ── ext0 [ node ] cni0 ──┬── eth0 of container c1
//   198.51.100.2   198.51.100.1    ├── eth0 of container c2      (v6 beside every v4)
//                  10.1.0.1/16     └── …
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { readdir, readlink } from 'node:fs/promises';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import type { Answer, Order, Transport } from './station.ts';

export type Variant = 'nft' | 'legacy';
export type Family = 'v4' | 'v6';
export const variants: readonly Variant[] = ['nft', 'legacy'];
export const families: readonly Family[] = ['v4', 'v6'];

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));

/** The executable under test. */
export const portmapBin = process.env['PORTMAP_BIN'] ?? here('../dist/portmap');
/** The plugin that portmap replaces, as this machine has it installed. */
export const upstreamBin = '/usr/lib/cni/portmap';
/** The newest one there is: what `scripts/upstream.sh` has fetched, else the installed one. */
export const newestUpstreamBin =
  process.env['UPSTREAM_BIN'] ??
  [here('../.cache/upstream/sid/usr/lib/cni/portmap')].find((path) => existsSync(path)) ??
  upstreamBin;

// The pinned Node runs TypeScript as it is; the tests themselves may run on an older one.
const nodeBin = existsSync(here('../node_modules/.bin/node'))
  ? here('../node_modules/.bin/node')
  : process.execPath;

export type RunOptions = {
  readonly input?: string;
  /** Replaces the environment; without it there is only PATH. */
  readonly env?: Readonly<Record<string, string>>;
  /** Name of a network namespace of this machine; without it the machine's own. */
  readonly netns?: string;
  /** Milliseconds until SIGKILL. */
  readonly timeout?: number;
};
export type Outcome = { readonly exitCode: number; readonly stdout: string; readonly stderr: string };

export type Machine = {
  readonly variant: Variant;
  /** The holder: `/proc/<pid>/ns/net` and `/proc/<pid>/ns/mnt` are the machine's. */
  readonly pid: number;
  /** Where this process sees the machine's file system, its private /run included. */
  readonly root: string;
  /** The machine's folder of iptables programs, all of one variant. */
  readonly toolFolder: string;
  /** The argument list that runs a program inside. */
  enter(argv: readonly string[], netns?: string): [string, ...string[]];
  /** Runs a program to its end. Never throws for its exit code; a killed program has exit code 128 or more. */
  run(argv: readonly string[], options?: RunOptions): Promise<Outcome>;
  /** Runs shell text that must succeed, and returns its output. */
  sh(script: string, options?: RunOptions): Promise<string>;
  /** Starts a program that stays; close() ends it. */
  start(argv: readonly string[], options?: RunOptions): ChildProcess;
  /** Puts a shell script in front of one of the iptables programs; `$REAL` in it is the program. */
  wrapTool(name: string, script: string): Promise<void>;
  unwrapTool(name: string): Promise<void>;
  /** The nat table as iptables-save prints it, without its comments and counters. */
  rules(family: Family): Promise<string>;
  /** Both families, for the message of a failed assertion. */
  allRules(): Promise<string>;
  /** Ends every process that lives in the machine, and so the machine. */
  close(): Promise<void>;
};

export type MachineOptions = {
  readonly variant: Variant;
  /** Where the xtables-nft-multi and xtables-legacy-multi to use are. */
  readonly tools?: string;
};

const systemPath = '/usr/sbin:/usr/bin:/sbin:/bin';
const toolNames = ['', '-save', '-restore'].flatMap((end) => [`iptables${end}`, `ip6tables${end}`]);

/** An empty private machine: loopback up, forwarding on, iptables of one variant, private /run and /var/lib/cni. */
export async function openMachine({ variant, tools = '/usr/sbin' }: MachineOptions): Promise<Machine> {
  const toolFolder = `/run/iptables-${variant}`;
  const multi = `${tools}/xtables-${variant}-multi`;
  const script = `set -e
    mkdir -p /var/lib/cni
    mount -t tmpfs -o mode=755 run /run
    mount -t tmpfs -o mode=755 cni /var/lib/cni
    mkdir -p /run/netns ${toolFolder}
    for tool in ${toolNames.join(' ')}; do ln -s ${multi} ${toolFolder}/$tool; done
    ln -s /usr/sbin/conntrack ${toolFolder}/conntrack
    ip link set lo up
    cd /proc/sys/net
    echo 1 > ipv4/ip_forward
    echo 1 > ipv6/conf/all/forwarding
    echo 0 > ipv6/conf/default/accept_dad
    echo 0 > ipv4/icmp_ratelimit
    echo 0 > ipv6/icmp/ratelimit
    cd /
    echo ready
    exec cat`;
  const holder = spawn(
    '/usr/bin/unshare',
    ['--net', '--mount', '--propagation', 'private', 'sh', '-c', script],
    {
      stdio: ['pipe', 'pipe', 'inherit'],
      env: { PATH: systemPath },
    },
  );
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  holder.once('error', reject);
  holder.once('exit', (code) =>
    reject(new Error(`the private machine could not be made (exit ${code}): root needed`)),
  );
  holder.stdout.once('data', () => resolve());
  await promise;
  const { pid } = holder;
  if (pid === undefined) throw new Error('the holder has no process id');

  const root = `/proc/${pid}/root`;
  const path = `${toolFolder}:${systemPath}`;
  const started = new Set<ChildProcess>();

  const enter: Machine['enter'] = (argv, netns) => [
    '/usr/bin/nsenter',
    `--mount=/proc/${pid}/ns/mnt`,
    `--net=${netns === undefined ? `/proc/${pid}/ns/net` : `${root}/run/netns/${netns}`}`,
    '--',
    ...argv,
  ];
  const run: Machine['run'] = (argv, { input = '', env = { PATH: path }, netns, timeout = 20_000 } = {}) => {
    const [file, ...args] = enter(argv, netns);
    const ended = Promise.withResolvers<Outcome>();
    const limits = { timeout, killSignal: 'SIGKILL', maxBuffer: Infinity } as const;
    const child = execFile(file, args, { env, ...limits }, (error, stdout, stderr) => {
      const exitCode = error === null ? 0 : typeof error.code === 'number' ? error.code : 128;
      ended.resolve({
        exitCode,
        stdout,
        stderr: error?.killed === true ? `${stderr}\nkilled after ${timeout} ms` : stderr,
      });
    });
    // A program may end without having read its input.
    child.stdin?.on('error', () => {});
    child.stdin?.end(input);
    return ended.promise;
  };
  const sh: Machine['sh'] = async (text, options) => {
    const outcome = await run(['sh', '-ec', text], options);
    if (outcome.exitCode !== 0)
      throw new Error(`exit ${outcome.exitCode}: ${outcome.stderr}\n${outcome.stdout}\nof: ${text}`);
    return outcome.stdout;
  };
  const tables = async (saves: string): Promise<string> =>
    (await sh(saves)).replace(/^#.*\n/gm, '').replace(/ \[\d+:\d+\]$/gm, ' [0:0]');
  const start: Machine['start'] = (argv, { env = { PATH: path }, netns } = {}) => {
    const [file, ...args] = enter(argv, netns);
    const child = spawn(file, args, { stdio: ['pipe', 'pipe', 'inherit'], env });
    started.add(child);
    child.once('exit', () => started.delete(child));
    return child;
  };

  return {
    variant,
    pid,
    root,
    toolFolder,
    enter,
    run,
    sh,
    start,
    wrapTool: async (name, text) => {
      const tool = `${toolFolder}/${name}`;
      await sh(
        `rm -f ${tool}; mkdir -p /run/wrapped; ln -sf ${multi} /run/wrapped/${name}; cat > ${tool}; chmod 755 ${tool}`,
        { input: `#!/bin/sh\nREAL=/run/wrapped/${name}\n${text}\n` },
      );
    },
    unwrapTool: async (name) => {
      await sh(`ln -sf ${multi} ${toolFolder}/${name}`);
    },
    rules: (family) => tables(`${family === 'v4' ? 'iptables' : 'ip6tables'}-save -t nat`),
    allRules: () => tables('echo IPv4:; iptables-save -t nat; echo; echo IPv6:; ip6tables-save -t nat'),
    close: async () => {
      const gone = holder.exitCode === null && holder.signalCode === null ? once(holder, 'exit') : undefined;
      const [mounts, network] = await Promise.all([namespaceOf(pid, 'mnt'), namespaceOf(pid, 'net')]);
      const inside = async (entry: string): Promise<boolean> =>
        (await namespaceOf(entry, 'mnt')) === mounts || (await namespaceOf(entry, 'net')) === network;
      if (mounts !== undefined && network !== undefined)
        for (const entry of await readdir('/proc'))
          if (/^\d+$/.test(entry) && Number(entry) !== pid && (await inside(entry))) kill(Number(entry));
      for (const child of started) child.kill('SIGKILL');
      holder.kill('SIGKILL');
      await gone;
    },
  };
}

const namespaceOf = (pid: number | string, kind: 'mnt' | 'net'): Promise<string | undefined> =>
  readlink(`/proc/${pid}/ns/${kind}`).catch(() => undefined);

function kill(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // It ended by itself.
  }
}

// ---------------------------------------------------------------------------------------------------------------
// The node: a machine with containers and a client.

export const addresses = {
  node: { v4: '198.51.100.1', v6: '2001:db8:3::1' },
  client: { v4: '198.51.100.2', v6: '2001:db8:3::2' },
  bridge: { v4: '10.1.0.1', v6: '2001:db8:1::1' },
  loopback: { v4: '127.0.0.1', v6: '::1' },
} as const satisfies Record<string, Record<Family, string>>;

export type Container = {
  /** Also the name of its network namespace. */
  readonly name: string;
  /** As CNI_CONTAINERID carries it. */
  readonly id: string;
  /** As CNI_NETNS carries it. */
  readonly netns: string;
  readonly v4: string;
  readonly v6: string;
};

export type PortMapping = {
  readonly hostPort: number;
  readonly containerPort: number;
  readonly protocol?: string;
  readonly hostIP?: string;
};

export const cniVersions = ['0.1.0', '0.2.0', '0.3.0', '0.3.1', '0.4.0', '1.0.0', '1.1.0'] as const;
export type CniVersion = (typeof cniVersions)[number];
export type Netconf = Readonly<Record<string, unknown>>;

/** What the plugins before portmap report of a container, in the shape of one cniVersion. */
export function prevResult(
  container: { readonly netns: string; readonly v4?: string; readonly v6?: string },
  cniVersion: CniVersion = '1.0.0',
): Record<string, unknown> {
  const { v4, v6, netns } = container;
  if (cniVersion === '0.1.0' || cniVersion === '0.2.0')
    return {
      cniVersion,
      ...(v4 === undefined ? {} : { ip4: { ip: `${v4}/16`, gateway: addresses.bridge.v4 } }),
      ...(v6 === undefined ? {} : { ip6: { ip: `${v6}/64`, gateway: addresses.bridge.v6 } }),
      dns: {},
    };
  const version = cniVersion.startsWith('0.') ? (value: string) => ({ version: value }) : () => ({});
  return {
    cniVersion,
    interfaces: [{ name: 'cni0' }, { name: 'veth0' }, { name: 'eth0', sandbox: netns }],
    ips: [
      ...(v4 === undefined
        ? []
        : [{ ...version('4'), interface: 2, address: `${v4}/16`, gateway: addresses.bridge.v4 }]),
      ...(v6 === undefined
        ? []
        : [{ ...version('6'), interface: 2, address: `${v6}/64`, gateway: addresses.bridge.v6 }]),
    ],
    dns: {},
  };
}

/** A netconf as a runtime sends it: mappings in runtimeConfig, the container's addresses in prevResult. */
export function netconf(
  container: { readonly netns: string; readonly v4?: string; readonly v6?: string },
  portMappings: readonly PortMapping[],
  options: Netconf & { readonly cniVersion?: CniVersion } = {},
): Record<string, unknown> {
  const { cniVersion = '1.0.0', ...rest } = options;
  return {
    cniVersion,
    name: 'lab',
    type: 'portmap',
    capabilities: { portMappings: true },
    runtimeConfig: { portMappings },
    prevResult: prevResult(container, cniVersion),
    ...rest,
  };
}

export type Verb = 'ADD' | 'DEL' | 'CHECK' | 'GC' | 'STATUS' | 'VERSION';
export type CallOptions = {
  readonly bin?: string;
  readonly containerId?: string;
  readonly netns?: string;
  readonly ifname?: string;
  /** Added to the CNI variables and PATH, which are all there is otherwise. */
  readonly env?: Readonly<Record<string, string>>;
  readonly timeout?: number;
  /** Programs to run it under, strace for one. */
  readonly under?: readonly string[];
};

export type LabNode = Machine & {
  /** A container on the bridge, with an address of each family. Names are short: they end up in interface names. */
  addContainer(name: string): Promise<Container>;
  /** One call of the plugin. `target` gives CNI_CONTAINERID and CNI_NETNS. */
  plugin(
    verb: Verb,
    conf: Netconf | string,
    target: Pick<Container, 'id' | 'netns'>,
    options?: CallOptions,
  ): Promise<Outcome>;
  /** The same for a call that must succeed: throws with what it printed and the rules there are. */
  expectPlugin(...call: Parameters<LabNode['plugin']>): Promise<Outcome>;
  /**
   * An echo server inside a network namespace of the node: a container's name, 'client', or undefined for the node.
   * Gives the function that stops it; close() does so too.
   */
  serve(netns: string | undefined, server: Server): Promise<() => Promise<void>>;
  /** What a request from a network namespace is answered, or null if nothing answers. */
  probe(netns: string | undefined, request: Request): Promise<Answer | null>;
};
export type Server = {
  readonly protocol: Transport;
  readonly address: string;
  readonly port: number;
  readonly name?: string;
};
export type Request = {
  readonly protocol: Transport;
  readonly address: string;
  readonly port: number;
  readonly source?: string;
  readonly sourcePort?: number;
  readonly timeout?: number;
};

/** A node with its bridge and its client, without containers yet. */
export async function openNode(options: MachineOptions): Promise<LabNode> {
  const machine = await openMachine(options);
  const { node, client, bridge } = addresses;
  try {
    await machine.sh(`
      ip netns add client
      ip -batch - <<END
link add cni0 type bridge forward_delay 0 mcast_snooping 0
link set cni0 up
addr add ${bridge.v4}/16 dev cni0
addr add ${bridge.v6}/64 dev cni0 nodad
link add ext0 type veth peer name eth0 netns client
link set ext0 up
addr add ${node.v4}/24 dev ext0
addr add ${node.v6}/64 dev ext0 nodad
route add default via ${client.v4}
route add default via ${client.v6}
END
      ip -n client -batch - <<END
link set lo up
link set eth0 up
addr add ${client.v4}/24 dev eth0
addr add ${client.v6}/64 dev eth0 nodad
route add default via ${node.v4}
route add default via ${node.v6}
END`);
  } catch (cause) {
    await machine.close();
    throw cause;
  }

  const stations = new Map<string, Station>();
  const station = (netns: string | undefined): Station => {
    const key = netns ?? '';
    let found = stations.get(key);
    if (found === undefined) {
      found = openStation(machine, netns);
      stations.set(key, found);
    }
    return found;
  };

  let containers = 0;
  const plugin: LabNode['plugin'] = (verb, conf, target, call = {}) =>
    machine.run([...(call.under ?? []), call.bin ?? portmapBin], {
      input: typeof conf === 'string' ? conf : JSON.stringify(conf),
      env: {
        PATH: `${machine.toolFolder}:${systemPath}`,
        CNI_COMMAND: verb,
        CNI_CONTAINERID: call.containerId ?? target.id,
        CNI_NETNS: call.netns ?? target.netns,
        CNI_IFNAME: call.ifname ?? 'eth0',
        CNI_PATH: '/opt/cni/bin',
        ...call.env,
      },
      timeout: call.timeout ?? 30_000,
    });

  return {
    ...machine,
    addContainer: async (name) => {
      containers += 1;
      const host = containers + 1;
      const v4 = `10.1.${host >> 8}.${host & 255}`;
      const v6 = `2001:db8:1::${host.toString(16)}`;
      await machine.sh(`
        ip netns add ${name}
        nsenter --net=/run/netns/${name} sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad'
        ip -batch - <<END
link add veth-${name} type veth peer name eth0 netns ${name}
link set veth-${name} master cni0 up
link set veth-${name} type bridge_slave hairpin on
END
        ip -n ${name} -batch - <<END
link set lo up
link set eth0 up
addr add ${v4}/16 dev eth0
addr add ${v6}/64 dev eth0 nodad
route add default via ${bridge.v4}
route add default via ${bridge.v6}
END`);
      return { name, id: `${name}-0123456789abcdef`, netns: `/run/netns/${name}`, v4, v6 };
    },
    plugin,
    expectPlugin: async (verb, conf, target, call) => {
      const outcome = await plugin(verb, conf, target, call);
      if (outcome.exitCode !== 0)
        throw new Error(
          `${verb} of ${target.id}: exit ${outcome.exitCode}\n${outcome.stdout}${outcome.stderr}\nnetconf: ` +
            `${typeof conf === 'string' ? conf : JSON.stringify(conf)}\n${await machine.allRules()}`,
        );
      return outcome;
    },
    serve: async (netns, { protocol, address, port, name = netns ?? 'node' }) => {
      await station(netns).order({ op: 'serve', protocol, address, port, name });
      return async () => {
        await station(netns).order({ op: 'stop', protocol, address, port });
      };
    },
    probe: async (netns, { timeout = 1_000, ...request }) => {
      const { answer } = await station(netns).order({ op: 'ask', timeout, ...request });
      return answer ?? null;
    },
  };
}

type StationReply = { readonly id: number; readonly answer?: Answer | null; readonly error?: string };
type Station = { order(order: Order): Promise<StationReply> };

function openStation(machine: Machine, netns: string | undefined): Station {
  const argv = [nodeBin, '--no-warnings', here('station.ts')];
  // Compiled once for all: that is most of a station's start.
  const env = { PATH: systemPath, NODE_COMPILE_CACHE: here('../.cache/station') };
  const child = machine.start(argv, { env, ...(netns === undefined ? {} : { netns }) });
  const { stdin, stdout } = child;
  if (stdin === null || stdout === null) throw new Error('a station needs its pipes');
  const waiting = new Map<number, (reply: StationReply) => void>();
  let lastId = 0;
  createInterface({ input: stdout }).on('line', (line) => {
    const reply: StationReply = JSON.parse(line);
    waiting.get(reply.id)?.(reply);
    waiting.delete(reply.id);
  });
  child.once('exit', (code, signal) => {
    for (const [id, answer] of waiting) answer({ id, error: `the station ended: ${code ?? signal}` });
  });
  // It is told by its exit.
  stdin.on('error', () => {});
  return {
    order: async (order) => {
      const id = (lastId += 1);
      const { promise, resolve } = Promise.withResolvers<StationReply>();
      waiting.set(id, resolve);
      stdin.write(`${JSON.stringify({ id, ...order })}\n`);
      const reply = await promise;
      if (reply.error !== undefined)
        throw new Error(`${JSON.stringify(order)} in ${netns ?? 'the node'}: ${reply.error}`);
      return reply;
    },
  };
}
