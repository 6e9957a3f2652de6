// portmap as container runtimes call it: by libcni, last in a conflist after bridge and host-local. The program in
// ./libcni links the library; requests come from a client outside the node.
import { execa } from 'execa';
import { mkdir, writeFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import * as z from 'zod';
import { addresses, type LabNode, openNode, type Outcome, type PortMapping, variants } from '../lab.ts';
import { installPlugins, leftovers, pluginFolder, wipe } from './plugins.ts';

const path = (relative: string): string => fileURLToPath(new URL(relative, import.meta.url));
const caller = path('../../.cache/callers/libcni');

const network = { name: 'callers', bridge: 'br-callers' };
const mappings: readonly PortMapping[] = [
  { hostPort: 8080, containerPort: 80, protocol: 'tcp' },
  { hostPort: 5300, containerPort: 53, protocol: 'udp' },
  { hostPort: 8443, containerPort: 443, protocol: 'tcp', hostIP: addresses.node.v4 },
];

const conflist = (cniVersion: string, { ipMasq = true } = {}): string =>
  JSON.stringify({
    cniVersion,
    name: network.name,
    plugins: [
      {
        type: 'bridge',
        bridge: network.bridge,
        isGateway: true,
        ipMasq,
        hairpinMode: true,
        ipam: {
          type: 'host-local',
          ranges: [[{ subnet: '10.2.0.0/16' }], [{ subnet: '2001:db8:2::/64' }]],
          routes: [{ dst: '0.0.0.0/0' }, { dst: '::/0' }],
        },
      },
      { type: 'portmap', capabilities: { portMappings: true } },
    ],
  });

type Sandbox = { readonly id: string; readonly netns: string };
type Call = {
  readonly conf?: string;
  readonly capabilities?: Record<string, unknown>;
  readonly args?: string[];
};

const answered = (v4: string | null, v6: string | null): Record<string, string | null> => ({
  [`${addresses.node.v4} 8080/tcp`]: v4,
  [`${addresses.node.v6} 8080/tcp`]: v6,
  [`${addresses.node.v4} 5300/udp`]: v4,
  [`${addresses.node.v6} 5300/udp`]: v6,
  [`${addresses.node.v4} 8443/tcp`]: v4,
});
const answeredBy = ({ netns }: Sandbox): Record<string, string | null> => {
  const name = netns.replace('/run/netns/', '');
  return answered(`${name} saw ${addresses.client.v4}`, `${name} saw ${addresses.client.v6}`);
};
const closed = answered(null, null);

beforeAll(async () => {
  const cache = path('../../.cache/callers');
  await mkdir(cache, { recursive: true });
  const build = await execa('go', ['build', '-o', caller, './libcni'], {
    cwd: path('.'),
    // Debian's Go packages instead of modules: nothing is fetched.
    env: {
      GO111MODULE: 'off',
      GOFLAGS: '',
      GOPATH: '/usr/share/gocode',
      GOCACHE: `${cache}/go`,
      CGO_ENABLED: '0',
    },
    timeout: 100_000,
    reject: false,
  });
  if (build.failed)
    throw new Error(
      `the libcni caller needs golang-go and golang-github-appc-cni-dev: ${build.shortMessage}\n${build.stderr}`,
    );
});

const stormReport = z.object({ adds: z.number(), dels: z.number(), errors: z.array(z.string()) });

describe.each(variants)('libcni, iptables-%s', (variant) => {
  let node: LabNode;

  beforeAll(async () => {
    node = await openNode({ variant });
    await installPlugins(node);
  });
  afterEach(() => wipe(node, network));
  afterAll(() => node.close());

  let sandboxes = 0;
  /** An empty sandbox whose three servers wait for the mappings. */
  async function openSandbox(): Promise<Sandbox> {
    sandboxes += 1;
    const name = `box${sandboxes}`;
    await node.sh(`
      ip netns add ${name}
      ip -n ${name} link set lo up
      nsenter --net=/run/netns/${name} sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad'`);
    for (const address of ['0.0.0.0', '::']) {
      await node.serve(name, { protocol: 'tcp', address, port: 80 });
      await node.serve(name, { protocol: 'tcp', address, port: 443 });
      await node.serve(name, { protocol: 'udp', address, port: 53 });
    }
    return { id: `${name}-0123456789abcdef`, netns: `/run/netns/${name}` };
  }

  async function call(verb: string, { id, netns }: Sandbox, options: Call = {}): Promise<Outcome> {
    const { conf = conflist('1.0.0'), capabilities = { portMappings: mappings }, args = [] } = options;
    const file = `/run/${network.name}.conflist`;
    await writeFile(`${node.root}${file}`, conf);
    return node.run([caller, verb, file, id, netns, ...args], {
      env: {
        PATH: `${node.toolFolder}:/usr/sbin:/usr/bin:/sbin:/bin`,
        CNI_PATH: pluginFolder,
        CAP_ARGS: JSON.stringify(capabilities),
      },
      timeout: 100_000,
    });
  }

  async function expectCall(...[verb, sandbox, options]: Parameters<typeof call>): Promise<unknown> {
    const outcome = await call(verb, sandbox, options);
    if (outcome.exitCode !== 0)
      throw new Error(`${verb}: exit ${outcome.exitCode}: ${outcome.stderr}\n${await node.allRules()}`);
    return JSON.parse(outcome.stdout);
  }

  /** Which sandbox answers the client on each mapped port, and whom it takes the client for. */
  async function answers(): Promise<Record<string, string | null>> {
    const found: Record<string, string | null> = {};
    for (const [protocol, address, port] of [
      ['tcp', addresses.node.v4, 8080],
      ['tcp', addresses.node.v6, 8080],
      ['udp', addresses.node.v4, 5300],
      ['udp', addresses.node.v6, 5300],
      ['tcp', addresses.node.v4, 8443],
    ] as const) {
      const answer = await node.probe('client', { protocol, address, port, timeout: 2_000 });
      found[`${address} ${port}/${protocol}`] = answer && `${answer.name} saw ${answer.peer}`;
    }
    return found;
  }
  async function expectNothingLeft(): Promise<void> {
    expect(await leftovers(node, network), await node.allRules()).toEqual([]);
  }

  test('is accepted with its portMappings capability when the conflist is validated', async () => {
    expect(await expectCall('validate', { id: 'none', netns: '' })).toEqual(['portMappings']);
  });

  test.each(['0.3.1', '0.4.0', '1.0.0'])(
    'opens the ports on ADD and closes them on DEL, cniVersion %s',
    async (cniVersion) => {
      const sandbox = await openSandbox();
      const conf = conflist(cniVersion);

      const result = await expectCall('add', sandbox, { conf });
      expect(result).toMatchObject({
        cniVersion,
        ips: [
          { address: expect.stringContaining('10.2.') },
          { address: expect.stringContaining('2001:db8:2:') },
        ],
      });
      expect(await expectCall('cached', sandbox, { conf })).toEqual(result);
      expect(await answers(), await node.allRules()).toEqual(answeredBy(sandbox));

      // The library itself refuses CHECK before 0.4.0.
      if (cniVersion !== '0.3.1') await expectCall('check', sandbox, { conf });

      await expectCall('del', sandbox, { conf });
      expect(await answers(), await node.allRules()).toEqual(closed);
      await expectNothingLeft();

      await expectCall('del', sandbox, { conf });
      await expectNothingLeft();
    },
  );

  test('a second sandbox keeps its ports while the first one is torn down', async () => {
    const [first, second] = [await openSandbox(), await openSandbox()];
    const others = {
      portMappings: mappings.map((mapping) => ({ ...mapping, hostPort: mapping.hostPort + 1000 })),
    };
    await expectCall('add', first, { capabilities: others });
    await expectCall('add', second);
    await expectCall('del', first, { capabilities: others });
    await expectCall('check', second);
    expect(await answers(), await node.allRules()).toEqual(answeredBy(second));
    await expectCall('del', second);
    await expectNothingLeft();
  });

  test('CHECK fails and says so when the rules are gone, and ADD after DEL brings them back', async () => {
    const sandbox = await openSandbox();
    await expectCall('add', sandbox);
    await node.sh('iptables -t nat -F CNI-HOSTPORT-DNAT');
    const check = await call('check', sandbox);
    expect(check.exitCode).toBe(1);
    expect(check.stderr).toMatch(/CNI-/);
    expect(check.stderr).not.toMatch(/error parsing/);
    await expectCall('del', sandbox);
    await expectCall('add', sandbox);
    await expectCall('check', sandbox);
    expect(await answers(), await node.allRules()).toEqual(answeredBy(sandbox));
    await expectCall('del', sandbox);
    await expectNothingLeft();
  });

  test.each([
    ['with the capability args', { portMappings: mappings }],
    ['without capability args', {}],
  ])('DEL cleans up for a sandbox whose netns is gone, %s', async (_, capabilities) => {
    // Without ipMasq: the bridge plugin needs the netns to find its own rules.
    const conf = conflist('1.0.0', { ipMasq: false });
    const sandbox = await openSandbox();
    await expectCall('add', sandbox, { conf });
    await node.sh(`umount ${sandbox.netns}; rm ${sandbox.netns}; ip link del ${network.bridge}`);
    await expectCall('del', { ...sandbox, netns: '' }, { conf, capabilities });
    expect(await answers(), await node.allRules()).toEqual(closed);
    await expectNothingLeft();
  });

  test('a mapping that cannot be is refused in words the library passes on, and leaves nothing after DEL', async () => {
    const sandbox = await openSandbox();
    const capabilities = {
      portMappings: [...mappings, { hostPort: 70_000, containerPort: 80, protocol: 'tcp' }],
    };
    const add = await call('add', sandbox, { capabilities });
    expect(add.exitCode).toBe(1);
    expect(add.stderr).toContain('runtimeConfig.portMappings[3].hostPort');
    expect(add.stderr).toContain('70000');
    await expectCall('del', sandbox, { capabilities });
    await expectNothingLeft();
  });

  test('one sandbox torn down by 11 DELs, 8 at a time, ten times: no DEL fails and nothing is left', async () => {
    const sandbox = await openSandbox();
    const report = await expectCall('storm', sandbox, {
      // Without the bridge plugin's own iptables rules: their parallel teardown is not what is tested.
      conf: conflist('1.0.0', { ipMasq: false }),
      capabilities: { portMappings: mappings.slice(0, 2) },
      args: ['10', '11', '8'],
    });
    // The bridge plugin, which comes after portmap in a DEL, has a race of its own: two that see the interface, and one that
    // deletes it.
    const ofBridge =
      /^round \d+: plugin type="bridge" failed \(delete\): failed to delete "eth0": no such device$/;
    const { errors, ...counts } = stormReport.parse(report);
    expect(errors.filter((error) => !ofBridge.test(error))).toEqual([]);
    expect(counts).toEqual({ adds: 10, dels: 110 });
    expect(await answers(), await node.allRules()).toEqual(closed);
    await expectNothingLeft();
  });
});
