// portmap as podman calls it with its CNI backend: containers with published ports, real servers inside them, and
// requests from a client outside. podman gets its own process namespace, because its containers outlive its calls.
import { execa } from 'execa';
import { existsSync } from 'node:fs';
import { realpath, writeFile } from 'node:fs/promises';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { addresses, type Family, type LabNode, openNode, type Outcome, variants } from '../lab.ts';
import type { Order, Transport } from '../station.ts';
import { installPlugins, leftovers, pluginFolder, wipe } from './plugins.ts';

const path = (relative: string): string => fileURLToPath(new URL(relative, import.meta.url));
const network = { name: 'podman', bridge: 'br-podman' };
const { node: own, client } = addresses;
/** A second address of the node, for ports that are published on one address only. */
const second = '198.51.100.9';
const cgroupParent = `/portmap-podman-${process.pid}`;

const conflist = {
  cniVersion: '0.4.0',
  name: network.name,
  plugins: [
    {
      type: 'bridge',
      bridge: network.bridge,
      isGateway: true,
      ipMasq: true,
      hairpinMode: true,
      ipam: {
        type: 'host-local',
        ranges: [[{ subnet: '10.88.0.0/16' }], [{ subnet: '2001:db8:88::/64' }]],
        routes: [{ dst: '0.0.0.0/0' }, { dst: '::/0' }],
      },
    },
    { type: 'portmap', capabilities: { portMappings: true } },
    { type: 'firewall' },
    { type: 'tuning' },
  ],
};

const containersConf = `
[network]
network_backend = "cni"
cni_plugin_dirs = ["${pluginFolder}"]
network_config_dir = "/run/podman/networks"
default_network = "${network.name}"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
log_driver = "k8s-file"
`;

type Podman = (...args: readonly string[]) => Promise<Outcome>;

/** Folders and mounts in which podman keeps everything it writes, and an init that reaps what podman leaves. */
async function openPodman(node: LabNode): Promise<Podman> {
  await node.sh(`
    mkdir -p /run/podman/networks /run/podman/home /run/podman/rootfs
    cd /run/podman/rootfs
    mkdir usr proc sys dev tmp run etc srv
    for folder in bin lib lib64; do ln -s usr/$folder $folder; done`);
  await writeFile(`${node.root}/run/podman/networks/${network.name}.conflist`, JSON.stringify(conflist));
  await writeFile(`${node.root}/run/podman/containers.conf`, containersConf);

  // The process id is read before /proc is replaced by one that only knows the new namespace.
  const init = node.start([
    ...'unshare --mount --pid --fork --kill-child --propagation private bash --norc -ec'.split(' '),
    `read -r pid _ < /proc/self/stat
     mount -t proc proc /proc
     mkdir -p /var/lib/containers
     mount -t tmpfs containers /var/lib/containers
     mount -t tmpfs shm /dev/shm
     echo $pid
     while read -r _; do :; done`,
  ]);
  if (init.stdout === null) throw new Error('the init of podman needs its pipes');
  const lines = createInterface({ input: init.stdout })[Symbol.asyncIterator]();
  const { value: pid } = await lines.next();

  return (...args) =>
    node.run(
      [...`nsenter --target=${pid} --mount --pid --net podman --storage-driver vfs`.split(' '), ...args],
      {
        env: {
          PATH: `${node.toolFolder}:/usr/sbin:/usr/bin:/sbin:/bin`,
          HOME: '/run/podman/home',
          CONTAINERS_CONF: '/run/podman/containers.conf',
        },
        timeout: 60_000,
      },
    );
}

const bothFrom = (name: string): string[] => [`${name} saw ${client.v4}`, `${name} saw ${client.v6}`];

describe.each(variants)('podman with CNI, iptables-%s', (variant) => {
  let node: LabNode;
  let podman: Podman;

  beforeAll(async () => {
    node = await openNode({ variant });
    await node.sh(`ip addr add ${second}/24 dev ext0`);
    await installPlugins(node);
    podman = await openPodman(node);
  });
  afterEach(async () => {
    await podman('rm', '--all', '--force', '--time', '0');
    await wipe(node, network);
  });
  afterAll(async () => {
    await node.close();
    await execa('find', ['/sys/fs/cgroup', '-depth', '-type', 'd', '-path', `*${cgroupParent}*`, '-delete'], {
      reject: false,
    });
  });

  async function expectPodman(...args: string[]): Promise<string> {
    const outcome = await podman(...args);
    if (outcome.exitCode !== 0)
      throw new Error(
        `podman ${args.join(' ')}: exit ${outcome.exitCode}: ${outcome.stderr}\n${await node.allRules()}`,
      );
    return outcome.stdout.trim();
  }

  /** Runs a container with servers in it. Its root is the machine's /usr, so it needs no image. */
  async function runContainer(
    name: string,
    published: readonly string[],
    servers: readonly string[],
  ): Promise<void> {
    const runtime = path('../../node_modules/.bin/node');
    const orders = servers.flatMap((server, index) => {
      const [port = '', protocol] = server.split('/');
      return ['0.0.0.0', '::'].map((address, family): Order & { id: number } => ({
        id: index * 2 + family,
        op: 'serve',
        protocol: protocol === 'udp' ? 'udp' : 'tcp',
        address,
        port: Number(port),
        name,
      }));
    });
    await writeFile(
      `${node.root}/run/podman/${name}.orders`,
      orders.map((order) => `${JSON.stringify(order)}\n`).join(''),
    );
    const volumes = {
      '/usr': '/usr',
      [path('..')]: '/srv/test',
      [existsSync(runtime) ? await realpath(runtime) : process.execPath]: '/srv/node',
      [`/run/podman/${name}.orders`]: '/srv/orders',
    };
    await expectPodman(
      ...`run --detach --name ${name} --cgroup-parent ${cgroupParent}`.split(' '),
      ...published.flatMap((port) => ['--publish', port]),
      ...Object.entries(volumes).flatMap(([source, target]) => ['--volume', `${source}:${target}:ro`]),
      '--rootfs',
      '/run/podman/rootfs',
      'sh',
      '-c',
      '{ cat /srv/orders; exec sleep 600; } | exec /srv/node --no-warnings /srv/test/station.ts',
    );
    // Each order is answered with one line once its server listens.
    await expect
      .poll(async () => (await expectPodman('logs', name)).split('\n').length, { timeout: 20_000 })
      .toBe(orders.length);
  }

  /** Which container answers, and whom it takes the asker for. */
  const ask = async (from: 'client' | 'node', protocol: Transport, address: string, port: number) => {
    const request = { protocol, address, port, timeout: 2_000 };
    const answer = await node.probe(from === 'node' ? undefined : from, request);
    return answer && `${answer.name} saw ${answer.peer}`;
  };
  /** The client's answers on the node's addresses, IPv4 first. */
  const askBoth = async (protocol: Transport, port: number) => [
    await ask('client', protocol, own.v4, port),
    await ask('client', protocol, own.v6, port),
  ];

  async function expectNothingLeft(): Promise<void> {
    expect(await leftovers(node, network), await node.allRules()).toEqual([]);
  }
  /** The containers that the dispatch rules of a family lead to: more than one for a port would be a leak. */
  async function dispatched(family: Family): Promise<string[]> {
    const ids = (await node.rules(family)).match(/(?<=^-A CNI-HOSTPORT-DNAT .* id: \\")\w+/gm) ?? [];
    return [...new Set(ids)];
  }

  test('publishes ports, a port range, a UDP port and ports of one host address', async () => {
    await runContainer(
      'web',
      ['8080:80', '8090-8092:90-92', '5300:53/udp', `${own.v4}:8443:443`, '127.0.0.1:9000:80'],
      ['80/tcp', '90/tcp', '91/tcp', '92/tcp', '53/udp', '443/tcp'],
    );
    const rules = await node.allRules();
    const found: Record<string, unknown> = {};
    for (const port of [8080, 8090, 8091, 8092]) found[port] = await askBoth('tcp', port);
    found[5300] = await askBoth('udp', 5300);
    const both = bothFrom('web');
    expect(found, rules).toEqual({ 8080: both, 8090: both, 8091: both, 8092: both, 5300: both });

    expect(await ask('client', 'tcp', own.v4, 8443), rules).toBe(`web saw ${client.v4}`);
    expect(await ask('client', 'tcp', second, 8443), rules).toBeNull();
    expect(await ask('client', 'tcp', second, 8080), rules).toBe(`web saw ${client.v4}`);

    // From loopback the answer only finds its way back when the bridge's address stands for 127.0.0.1.
    expect(await ask('node', 'tcp', '127.0.0.1', 9000), rules).toBe('web saw 10.88.0.1');
    expect(await ask('client', 'tcp', own.v4, 9000), rules).toBeNull();

    await expectPodman('rm', '--force', '--time', '0', 'web');
    expect(await askBoth('tcp', 8080), await node.allRules()).toEqual([null, null]);
    await expectNothingLeft();
  });

  test('restart moves the ports to the new address of the container', async () => {
    await runContainer('web', ['8080:80', '5300:53/udp'], ['80/tcp', '53/udp']);
    const format = ['--format', '{{.ID}} {{.NetworkSettings.IPAddress}}'];
    const before = await expectPodman('inspect', ...format, 'web');
    await expectPodman('restart', '--time', '0', 'web');
    const after = await expectPodman('inspect', ...format, 'web');
    expect(after).not.toBe(before);

    const [id] = after.split(' ');
    for (const family of ['v4', 'v6'] as const)
      expect(await dispatched(family), await node.allRules()).toEqual([id]);
    // Its servers take a moment to listen again.
    await expect.poll(() => askBoth('tcp', 8080), { timeout: 20_000 }).toEqual(bothFrom('web'));
    await expect.poll(() => askBoth('udp', 5300), { timeout: 20_000 }).toEqual(bothFrom('web'));
    await expectPodman('rm', '--force', '--time', '0', 'web');
    await expectNothingLeft();
  });

  test('network reload opens the ports again after a flush, for one container and for all', async () => {
    await runContainer('web', ['8080:80'], ['80/tcp']);
    await runContainer('mail', ['2500:25', '5300:53/udp'], ['25/tcp', '53/udp']);
    for (const reload of [['--all'], ['web']]) {
      await node.sh('for iptables in iptables ip6tables; do $iptables -t nat -F; $iptables -t nat -X; done');
      // podman itself listens on the port, and never answers.
      expect(await ask('client', 'tcp', own.v4, 8080)).toBeNull();
      await expectPodman('network', 'reload', ...reload);
      expect(await askBoth('tcp', 8080), await node.allRules()).toEqual(bothFrom('web'));
    }
    await expectPodman('network', 'reload', 'mail');
    expect(await askBoth('tcp', 2500), await node.allRules()).toEqual(bothFrom('mail'));
    expect(await askBoth('udp', 5300), await node.allRules()).toEqual(bothFrom('mail'));
    await expectPodman('rm', '--force', '--time', '0', 'web', 'mail');
    await expectNothingLeft();
  });

  test('a container that ends by itself takes its ports with it and leaves those of its neighbour', async () => {
    await runContainer('web', ['8080:80'], ['80/tcp']);
    await runContainer('mail', ['2500:25'], ['25/tcp']);
    const mail = await expectPodman('inspect', '--format', '{{.ID}}', 'mail');
    // The tear-down is podman's own, started by the container's monitor.
    await expectPodman('kill', 'web');
    await expect.poll(() => dispatched('v4'), { timeout: 20_000 }).toEqual([mail]);
    await expect.poll(() => dispatched('v6'), { timeout: 20_000 }).toEqual([mail]);
    expect(await askBoth('tcp', 8080), await node.allRules()).toEqual([null, null]);
    expect(await askBoth('tcp', 2500), await node.allRules()).toEqual(bothFrom('mail'));
    await expectPodman('rm', '--force', '--time', '0', 'web', 'mail');
    await expectNothingLeft();
  });

  test('publishes a range of 300 ports', async () => {
    await runContainer('web', ['20000-20299:1000-1299'], ['1000/tcp', '1299/tcp']);
    const rules = await node.allRules();
    expect(await askBoth('tcp', 20_000), rules).toEqual(bothFrom('web'));
    expect(await askBoth('tcp', 20_299), rules).toEqual(bothFrom('web'));
    await expectPodman('rm', '--force', '--time', '0', 'web');
    await expectNothingLeft();
  });
});
