// A lab node on which containerd runs, with runc, the bridge and host-local plugins, and a portmap of the caller's
// choice. All its files are under the node's private /run. It has a process namespace of its own beneath the node,
// so that its shims and sandboxes, which outlive containerd on purpose, end with the node.
//
//   node ── init (cat) ─┬─ containerd          every sandbox: shim ── web server on port 80, the pod's only process
//                       └─ shims, sandboxes    pods0 (bridge) 10.88.0.1/16, fd00:88::1/64
import { type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { readFile, readdir, rmdir } from 'node:fs/promises';
import { setTimeout as sleep } from 'node:timers/promises';
import { type LabNode, type Variant, openNode } from '../lab.ts';
import { type PortMapping, type RuntimeClient, type SandboxStatus, openRuntimeClient } from './cri.ts';

export type Sandbox = SandboxStatus & {
  readonly id: string;
  /** The pod's host name, which its web server tells. */
  readonly name: string;
  /** The name of its network namespace on the node. */
  readonly netnsName: string;
};

export type ContainerdNode = LabNode & {
  /** The client that talks to the containerd that runs now. */
  runtime(): RuntimeClient;
  /** Runs a pod sandbox and waits until its web server listens. */
  runSandbox(name: string, portMappings: readonly PortMapping[]): Promise<Sandbox>;
  /** What a pod's web server tells a network namespace of the node: its host name and the address it sees asking. */
  browse(netns: string | undefined, host: string, port: number): Promise<string | null>;
  /** Ends containerd with a signal, and waits for its end. Sandboxes stay. */
  stopContainerd(signal: 'SIGTERM' | 'SIGKILL'): Promise<void>;
  startContainerd(): Promise<void>;
  /** Ends the processes of a sandbox, its shim too, and takes its network namespace away, as a power cut does. */
  loseSandbox(sandbox: Sandbox): Promise<void>;
  deleteNetns(sandbox: Sandbox): Promise<void>;
  /** Stops and removes every sandbox that containerd knows. */
  removeSandboxes(): Promise<void>;
  log(): Promise<string>;
};

const address = '/run/containerd/containerd.sock';
const image = 'localhost/pod:test';
const pluginFolder = '/usr/lib/cni';

// The native snapshotter needs nothing of the file system under it, and a node in a container may not be allowed
// to lower the OOM score that kubelet asks for.
const config = `version = 2
root = "/run/containerd/root"
state = "/run/containerd/state"
[grpc]
address = "${address}"
[plugins."io.containerd.internal.v1.opt"]
path = "/run/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
restrict_oom_score_adj = true
sandbox_image = "${image}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/run/cni/bin"
conf_dir = "/run/cni/net.d"
`;

export const network = { name: 'pods', bridge: 'pods0' };
const conflist = {
  cniVersion: '1.0.0',
  name: network.name,
  plugins: [
    {
      type: 'bridge',
      bridge: network.bridge,
      isGateway: true,
      hairpinMode: true,
      ipam: {
        type: 'host-local',
        ranges: [[{ subnet: '10.88.0.0/16' }], [{ subnet: 'fd00:88::/64' }]],
        routes: [{ dst: '0.0.0.0/0' }, { dst: '::/0' }],
      },
    },
    { type: 'portmap', capabilities: { portMappings: true } },
  ],
};

// An image of one layer: busybox, and a web page that tells who answers whom. `docker save` would pack it like this.
const imageScript = `
  mkdir -p /run/image/layer/bin /run/image/layer/www/cgi-bin
  cd /run/image
  cp /bin/busybox layer/bin/busybox
  ln -s busybox layer/bin/sh
  cat > layer/www/cgi-bin/who <<'END'
#!/bin/sh
printf 'Content-Type: text/plain\\r\\n\\r\\n'
echo "$(/bin/busybox hostname) $REMOTE_ADDR"
END
  chmod 755 layer/www/cgi-bin/who
  tar -C layer -cf layer.tar .
  digest=$(sha256sum layer.tar | cut -d' ' -f1)
  cat > config.json <<END
{"architecture":"$(dpkg --print-architecture)","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:$digest"]},
 "config":{"Entrypoint":["/bin/busybox","httpd","-f","-p","80","-h","/www"]}}
END
  echo '[{"Config":"config.json","RepoTags":["${image}"],"Layers":["layer.tar"]}]' > manifest.json
  tar -cf image.tar manifest.json config.json layer.tar`;

/** A node with containerd ready to run sandboxes, whose portmap plugin is `portmap`. */
export async function openContainerdNode(options: {
  readonly variant: Variant;
  readonly portmap: string;
}): Promise<ContainerdNode> {
  const node = await openNode({ variant: options.variant });
  const cgroupParent = `/portmap-test-${node.pid}`;
  let init: number;
  let daemon: { readonly pid: number; readonly gone: Promise<unknown> } | undefined;
  let client: RuntimeClient | undefined;

  // A shell among containerd's processes, which are not those that the node itself sees.
  const inside = (script: string): string[] => [
    'nsenter',
    `--pid=/proc/${init}/ns/pid`,
    `--mount=/proc/${init}/ns/mnt`,
    'sh',
    '-c',
    script,
  ];
  const runtime: ContainerdNode['runtime'] = () => {
    if (client === undefined) throw new Error('containerd does not run');
    return client;
  };
  const log: ContainerdNode['log'] = () => node.sh('tail -n 40 /run/containerd.log');

  const startContainerd: ContainerdNode['startContainerd'] = async () => {
    const child = node.start(
      inside('exec containerd --config /run/containerd.toml >> /run/containerd.log 2>&1'),
    );
    const gone = once(child, 'exit');
    client = openRuntimeClient(`${node.root}${address}`);
    const deadline = Date.now() + 20_000;
    for (;;) {
      const trouble = await client.unready().catch((error: unknown) => [String(error)]);
      if (trouble.length === 0) break;
      if (Date.now() > deadline || child.exitCode !== null)
        throw new Error(`containerd is not ready: ${trouble.join('; ')}\n${await log()}`);
      await sleep(50);
    }
    daemon = { pid: await onlyChild(child), gone };
  };
  const stopContainerd: ContainerdNode['stopContainerd'] = async (signal) => {
    if (daemon === undefined) return;
    process.kill(daemon.pid, signal);
    await daemon.gone;
    client?.close();
    client = daemon = undefined;
  };
  const close = async (): Promise<void> => {
    client?.close();
    await node.close();
    await removeCgroups(cgroupParent);
  };

  try {
    await node.sh(
      `mkdir -p /run/cni/bin /run/cni/net.d
      ln -s ${pluginFolder}/* /run/cni/bin/
      ln -sf ${options.portmap} /run/cni/bin/portmap
      cat > /run/cni/net.d/10-pods.conflist
      echo '${config}' > /run/containerd.toml
      # Namespaces that containerd mounts under /run/netns shall be seen from the node.
      mount --make-rshared /run
      ${imageScript}`,
      { input: JSON.stringify(conflist) },
    );
    const holder = node.start([
      'unshare',
      '--pid',
      '--fork',
      '--kill-child',
      '--mount',
      '--propagation',
      'unchanged',
      '--mount-proc',
      'sh',
      '-c',
      'echo ready; exec cat',
    ]);
    if (holder.stdout === null) throw new Error('the process namespace needs its pipes');
    await once(holder.stdout, 'data');
    init = await onlyChild(holder);
    await startContainerd();
    await node.sh(
      `ctr --address ${address} --namespace k8s.io images import --snapshotter native /run/image/image.tar`,
    );
  } catch (cause) {
    await close();
    throw cause;
  }

  const deleteNetns: ContainerdNode['deleteNetns'] = async ({ netnsName }) => {
    await node.sh(`umount /run/netns/${netnsName}; rm /run/netns/${netnsName}`);
  };
  const browse: ContainerdNode['browse'] = async (netns, host, port) => {
    const { stdout } = await node.run(['busybox', 'nc', '-w', '1', host, String(port)], {
      input: 'GET /cgi-bin/who HTTP/1.0\r\n\r\n',
      timeout: 3_000,
      ...(netns === undefined ? {} : { netns }),
    });
    return /^HTTP\/1\.. 200 OK\r\n[^]*?\r\n\r\n(.*)\n$/.exec(stdout)?.[1] ?? null;
  };

  return {
    ...node,
    close,
    runtime,
    log,
    browse,
    startContainerd,
    stopContainerd,
    runSandbox: async (name, portMappings) => {
      const id = await runtime().runPodSandbox({
        metadata: { name, uid: `uid-${name}`, namespace: 'default', attempt: 0 },
        hostname: name,
        portMappings,
        linux: { cgroupParent },
      });
      const status = await runtime().podSandboxStatus(id);
      // The sandbox runs as soon as its process is started, which is before that process listens.
      const [host = ''] = status.addresses;
      const deadline = Date.now() + 10_000;
      while ((await browse(undefined, host, 80)) === null) {
        if (Date.now() > deadline) throw new Error(`the web server of ${name} at ${host} does not answer`);
        await sleep(20);
      }
      return { id, name, netnsName: status.netns.slice(status.netns.lastIndexOf('/') + 1), ...status };
    },
    deleteNetns,
    loseSandbox: async (sandbox) => {
      await node.run(inside(`kill -KILL $(ps -o ppid= -p ${sandbox.pid}) ${sandbox.pid}`));
      await deleteNetns(sandbox);
    },
    removeSandboxes: async () => {
      const ids = await runtime().listPodSandbox();
      // Removing stops first.
      const outcomes = await Promise.allSettled(ids.map((id) => runtime().removePodSandbox(id)));
      const failures = outcomes.flatMap((outcome) =>
        outcome.status === 'rejected' ? [String(outcome.reason)] : [],
      );
      if (failures.length > 0) throw new Error(`sandboxes stay: ${failures.join('\n')}`);
    },
  };
}

/** The child of a process that entered or made a process namespace: the program meant. */
async function onlyChild({ pid }: ChildProcess): Promise<number> {
  const children = await readFile(`/proc/${pid}/task/${pid}/children`, 'utf8');
  const child = Number.parseInt(children, 10);
  if (Number.isNaN(child)) throw new Error(`process ${pid} has no child`);
  return child;
}

/** Removes the cgroups that runc made for the sandboxes, in whichever hierarchies there are. */
async function removeCgroups(parent: string): Promise<void> {
  const remove = async (folder: string): Promise<void> => {
    const entries = await readdir(folder, { withFileTypes: true }).catch(() => []);
    for (const entry of entries) if (entry.isDirectory()) await remove(`${folder}/${entry.name}`);
    // A killed process may stay in its cgroup for a moment.
    for (let attempt = 0; attempt < 40; attempt += 1) {
      const problem = await rmdir(folder).then(
        () => undefined,
        (error: NodeJS.ErrnoException) => error.code,
      );
      if (problem !== 'EBUSY') return;
      await sleep(50);
    }
  };
  const root = '/sys/fs/cgroup';
  await remove(root + parent);
  for (const hierarchy of await readdir(root)) await remove(`${root}/${hierarchy}${parent}`);
}
