// Any sequence of calls over a few sandboxes, with tables flushed, containers dead and callers killed in between: after
// every step the kernel holds what test/model.ts says, in both families, and nothing else. A failed test shows the
// shortest sequence it found, and the seed that brings it again.
//
// PORTMAP_TEST_LONG=1 goes on for ten times as long.
import * as fc from 'fast-check';
import { once } from 'node:events';
import { readdir, readlink } from 'node:fs/promises';
import { setTimeout as sleep } from 'node:timers/promises';
import { expect, test } from 'vitest';
import { until } from '../crowd.ts';
import { wipe, wrapRestore } from '../footprint.ts';
import {
  addresses,
  families,
  type Family,
  type LabNode,
  type Netconf,
  portmapBin,
  type Verb,
} from '../lab.ts';
import {
  add,
  type Attachment,
  collect,
  del,
  delIfKnown,
  flush,
  freshWorld,
  halfway,
  isWhole,
  type Mapping,
  printTable,
  readTable,
  reapply,
  withNamespace,
  type World,
} from '../model.ts';
import { describeVariants } from '../nodes.ts';

const isLong = (process.env['PORTMAP_TEST_LONG'] ?? '') !== '';
const limitMs = isLong ? 120_000 : 12_000;

const networks = ['web', 'db'];
const containers = ['k1', 'k2', 'k3'];
const interfaces = ['eth0', 'eth1'];

type Place = Pick<Attachment, 'network' | 'container' | 'ifname'>;
/** When a call is killed: so long after its start, or when it writes the table of a family, before or after that. */
type Kill =
  { readonly milliseconds: number } | { readonly family: Family; readonly when: 'before' | 'after' };
type Step =
  | {
      readonly do: 'ADD';
      readonly at: Place;
      readonly mappings: readonly Mapping[];
      readonly kill?: Kill;
    }
  | { readonly do: 'DEL'; readonly at: Place; readonly isBare: boolean; readonly kill?: Kill }
  | { readonly do: 'CHECK'; readonly at: Place }
  | { readonly do: 'GC'; readonly network: string; readonly valid: readonly Omit<Place, 'network'>[] }
  | { readonly do: 'reapply' }
  | { readonly do: 'flush'; readonly which: Parameters<typeof flush>[1] }
  | { readonly do: 'remove namespace'; readonly container: string };

const anyOf = {
  network: fc.constantFrom(...networks),
  container: fc.constantFrom(...containers),
  ifname: fc.constantFrom(...interfaces),
};
// One sandbox more than the others, so that it often has two interfaces.
const place = fc.oneof(
  fc.record(anyOf, { noNullPrototype: true }),
  fc.record(
    { ...anyOf, network: fc.constant('web'), container: fc.constant('k1') },
    { noNullPrototype: true },
  ),
);
const interfaceOf = fc.record(
  { container: anyOf.container, ifname: anyOf.ifname },
  { noNullPrototype: true },
);
// Few ports, so that sandboxes are often in each other's way.
const mappingList = fc.uniqueArray(
  fc.record(
    {
      hostPort: fc.constantFrom(8080, 8081, 8082),
      protocol: fc.constantFrom('tcp' as const, 'udp' as const),
      hostIP: fc.constantFrom(addresses.node.v4, addresses.node.v6),
    },
    { requiredKeys: ['hostPort', 'protocol'], noNullPrototype: true },
  ),
  { maxLength: 3, selector: ({ hostPort, protocol }) => `${hostPort}/${protocol}` },
);
const kill = fc.oneof(
  fc.record({ milliseconds: fc.integer({ min: 0, max: 40 }) }, { noNullPrototype: true }),
  fc.record(
    { family: fc.constantFrom(...families), when: fc.constantFrom('before' as const, 'after' as const) },
    { noNullPrototype: true },
  ),
);
const anyStep: fc.Arbitrary<Step> = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant('ADD' as const), at: place, mappings: mappingList }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant('DEL' as const), at: place, isBare: fc.boolean() }) },
  {
    weight: 2,
    arbitrary: fc.record({
      do: fc.constant('ADD' as const),
      at: place,
      mappings: mappingList,
      kill,
    }),
  },
  {
    weight: 2,
    arbitrary: fc.record({
      do: fc.constant('DEL' as const),
      at: place,
      isBare: fc.boolean(),
      kill,
    }),
  },
  { weight: 3, arbitrary: fc.record({ do: fc.constant('CHECK' as const), at: place }) },
  {
    weight: 1,
    arbitrary: fc.record({
      do: fc.constant('GC' as const),
      network: fc.constantFrom(...networks),
      valid: fc.array(interfaceOf, { maxLength: 4 }),
    }),
  },
  { weight: 1, arbitrary: fc.constant({ do: 'reapply' } as const) },
  {
    weight: 1,
    arbitrary: fc.record({
      do: fc.constant('flush' as const),
      which: fc.constantFrom('everything' as const, 'built-in chains' as const),
    }),
  },
  {
    weight: 2,
    arbitrary: fc.record({
      do: fc.constant('remove namespace' as const),
      container: fc.constantFrom(...containers),
    }),
  },
);

const at = (container: string, ifname = 'eth0'): Place => ({ network: 'web', container, ifname });
const port = (hostPort: number, hostIP?: string): Mapping => ({
  hostPort,
  protocol: 'tcp',
  ...(hostIP === undefined ? {} : { hostIP }),
});

/** Short sequences that are worth being followed in every run. */
const sequences: Record<string, readonly Step[]> = {
  'a sandbox that loses one of two interfaces stays behind a newer one': [
    { do: 'ADD', at: at('k1', 'eth0'), mappings: [port(8080)] },
    { do: 'ADD', at: at('k1', 'eth1'), mappings: [port(8081)] },
    { do: 'ADD', at: at('k2'), mappings: [port(8080)] },
    { do: 'DEL', at: at('k1', 'eth1'), isBare: false },
  ],
  'a repeated DEL of one of two interfaces removes what the first one, killed, has left': [
    { do: 'ADD', at: at('k1', 'eth0'), mappings: [port(8080)] },
    { do: 'ADD', at: at('k1', 'eth1'), mappings: [port(8081)] },
    { do: 'DEL', at: at('k1', 'eth1'), isBare: false, kill: { family: 'v4', when: 'before' } },
    { do: 'DEL', at: at('k1', 'eth1'), isBare: false },
  ],
  'a DEL removes what a killed ADD has left in a family that it gave up': [
    { do: 'ADD', at: at('k1'), mappings: [port(8080)] },
    {
      do: 'ADD',
      at: at('k1'),
      mappings: [port(8080, addresses.node.v4)],
      kill: { family: 'v6', when: 'before' },
    },
    { do: 'DEL', at: at('k1'), isBare: true },
  ],
  'a DEL whose caller was killed is finished by the next call': [
    { do: 'ADD', at: at('k1'), mappings: [port(8080)] },
    { do: 'DEL', at: at('k1'), isBare: true, kill: { family: 'v6', when: 'before' } },
    { do: 'ADD', at: at('k2'), mappings: [port(8081)] },
  ],
  'a dead owner of a port goes also when a DEL of one of its interfaces waits': [
    { do: 'ADD', at: at('k1', 'eth0'), mappings: [port(8080)] },
    { do: 'ADD', at: at('k1', 'eth1'), mappings: [port(8080)] },
    { do: 'remove namespace', container: 'k1' },
    { do: 'DEL', at: at('k1', 'eth1'), isBare: false, kill: { family: 'v4', when: 'before' } },
    { do: 'ADD', at: at('k2'), mappings: [port(8080)] },
  ],
  'after a flush, reapply brings back the living in their order, and the dead go': [
    { do: 'ADD', at: at('k1'), mappings: [port(8080)] },
    { do: 'ADD', at: at('k2'), mappings: [port(8080)] },
    { do: 'ADD', at: at('k3'), mappings: [port(8081)] },
    { do: 'remove namespace', container: 'k3' },
    { do: 'flush', which: 'everything' },
    { do: 'CHECK', at: at('k2') },
    { do: 'reapply' },
    { do: 'CHECK', at: at('k2') },
    { do: 'CHECK', at: at('k1') },
  ],
};

describeVariants({}, ({ node }) => {
  for (const [name, steps] of Object.entries(sequences)) test(name, () => follow(node, steps));

  test(
    'the kernel holds exactly what a small model says, after every step of any sequence',
    { timeout: limitMs + 75_000 },
    async () => {
      const end = performance.now() + limitMs;
      let runs = 0;
      await fc.assert(
        fc.asyncProperty(fc.array(anyStep, { minLength: 1, maxLength: 14 }), async (steps) => {
          // When the time is over, the sequences that are left, and the shorter ones of a failed one, count as passed.
          if (performance.now() > end) return;
          runs += 1;
          await follow(node, steps);
        }),
        { numRuns: isLong ? 1_000 : 100 },
      );
      expect(runs).toBeGreaterThan(2);
    },
  );
});

/** Goes through a sequence on a wiped node. Throws where the kernel holds what the model does not allow. */
async function follow(node: LabNode, steps: readonly Step[]): Promise<void> {
  await wipe(node);
  await node.sh(
    `for name in ${containers.join(' ')}; do ip netns del $name 2>/dev/null || true; ip netns add $name; done`,
  );
  const latest = new Map<string, Attachment>();
  /** What the last ADD at a place has asked for, or would. */
  const attached = (where: Place): Attachment =>
    latest.get(JSON.stringify(where)) ?? attachmentOf(where, [{ hostPort: 8080, protocol: 'tcp' }]);
  let worlds: World[] = [freshWorld];
  for (const [index, step] of steps.entries()) {
    if (step.do === 'ADD') {
      const isDead = worlds.some(({ dead }) => dead.has(step.at.container));
      if (isDead) await node.sh(`ip netns add ${step.at.container}`);
      latest.set(JSON.stringify(step.at), attachmentOf(step.at, step.mappings));
    }
    const verdict = await perform(node, step, attached);
    const allowed = worlds.flatMap((world) => worldsAfter(world, step, index, attached, verdict));
    const found = await node.sh('iptables-save -t nat; echo; ip6tables-save -t nat');
    const [v4 = '', v6 = ''] = found.split('\n\n');
    const seen = `v4\n${readTable(v4)}\nv6\n${readTable(v6)}`;
    const expected = allowed.map((world) =>
      families.map((family) => `${family}\n${printTable(family, world.tables[family])}`).join('\n'),
    );
    const context = `after step ${index + 1}, ${JSON.stringify(step)}, ${verdict}`;
    if (!expected.includes(seen))
      expect(seen, `${context}, of ${expected.length} possible tables the first`).toBe(
        expected[0] ?? 'no world in which that could be said',
      );
    worlds = distinct(allowed.filter((_, number) => expected[number] === seen));
  }
}

type Verdict = 'done' | 'killed' | 'refused';

/** The worlds that a step can lead to, when it went as it did. */
function worldsAfter(
  world: World,
  step: Step,
  order: number,
  attached: (where: Place) => Attachment,
  verdict: Verdict,
): World[] {
  switch (step.do) {
    case 'ADD': {
      const attachment = attached(step.at);
      const before = withNamespace(world, step.at.container, true);
      const after =
        step.mappings.length === 0 ? delIfKnown(before, attachment) : [add(before, attachment, order)];
      if (verdict === 'done') return after;
      const verb = step.mappings.length === 0 ? 'DEL' : 'ADD';
      return after.flatMap((one) => halfway(before, one, attachment, verb));
    }
    case 'DEL': {
      const attachment = attached(step.at);
      const isBare = step.isBare || attachment.mappings.length === 0;
      const after = isBare ? delIfKnown(world, attachment) : [del(world, attachment)];
      return verdict === 'done' ? after : after.flatMap((one) => halfway(world, one, attachment, 'DEL'));
    }
    case 'CHECK':
      return isWhole(world, attached(step.at)) === (verdict === 'done') ? [world] : [];
    case 'GC':
      return collect(world, step.network, step.valid);
    case 'reapply':
      return reapply(world);
    case 'flush':
      return [flush(world, step.which)];
    case 'remove namespace':
      return [withNamespace(world, step.container, false)];
    default:
      return step satisfies never;
  }
}

async function perform(node: LabNode, step: Step, attached: (where: Place) => Attachment): Promise<Verdict> {
  switch (step.do) {
    case 'ADD':
    case 'DEL': {
      const conf = confOf(attached(step.at), step.do === 'DEL' && step.isBare);
      if (step.kill !== undefined) return callAndKill(node, step.do, conf, step.at, step.kill);
      await node.expectPlugin(step.do, conf, targetOf(step.at), { ifname: step.at.ifname });
      return 'done';
    }
    case 'CHECK': {
      const attachment = attached(step.at);
      const outcome = await node.plugin('CHECK', confOf(attachment), targetOf(step.at), {
        ifname: step.at.ifname,
      });
      expect([0, 1], outcome.stdout + outcome.stderr).toContain(outcome.exitCode);
      return outcome.exitCode === 0 ? 'done' : 'refused';
    }
    case 'GC': {
      const valid = step.valid.map(({ container, ifname }) => ({ containerID: container, ifname }));
      const conf = { cniVersion: '1.1.0', name: step.network, type: 'portmap' };
      await node.expectPlugin(
        'GC',
        { ...conf, 'cni.dev/valid-attachments': valid },
        targetOf({ container: '' }),
      );
      return 'done';
    }
    case 'reapply':
      await node.sh(`${portmapBin} reapply`);
      return 'done';
    case 'flush': {
      const chains = step.which === 'everything' ? [''] : ['PREROUTING', 'OUTPUT', 'POSTROUTING'];
      const commands = chains.flatMap((chain) =>
        ['iptables', 'ip6tables'].map((program) => `${program} -t nat -F ${chain}`),
      );
      await node.sh(commands.join('; '));
      return 'done';
    }
    case 'remove namespace':
      await node.sh(`ip netns del ${step.container} 2>/dev/null || true`);
      return 'done';
    default:
      return step satisfies never;
  }
}

/** Starts a call and kills it; what it has started itself may go on to its end. */
async function callAndKill(
  node: LabNode,
  verb: Verb,
  conf: Netconf,
  where: Place,
  moment: Kill,
): Promise<Verdict> {
  const { id, netns } = targetOf(where);
  const tool = 'family' in moment ? (moment.family === 'v4' ? 'iptables-restore' : 'ip6tables-restore') : '';
  if ('family' in moment) {
    const { variant } = node;
    const killer = 'kill -9 $PPID';
    await wrapRestore(node, {
      variant,
      tool,
      ...(moment.when === 'before' ? { before: `${killer}; exit 1` } : { after: killer }),
    });
  }
  // What it warns of is not for the reader of the test.
  const child = node.start(['sh', '-c', `exec ${portmapBin} 2>&1`], {
    env: {
      PATH: `${node.toolFolder}:/usr/sbin:/usr/bin:/sbin:/bin`,
      CNI_COMMAND: verb,
      CNI_CONTAINERID: id,
      CNI_NETNS: netns,
      CNI_IFNAME: where.ifname,
      CNI_PATH: '/opt/cni/bin',
    },
  });
  const ended = once(child, 'exit');
  let said = '';
  child.stdout?.on('data', (text: Buffer) => (said += text.toString()));
  // It may be killed before it has read anything.
  child.stdin?.on('error', () => {});
  child.stdin?.end(JSON.stringify(conf));
  if ('milliseconds' in moment) {
    await sleep(moment.milliseconds);
    child.kill('SIGKILL');
  }
  const [exitCode] = await ended;
  expect([0, null], `${verb} that was to be killed: ${said}`).toContain(exitCode);
  expect(await until(async () => (await processesIn(node)) === 1, 10_000), 'what it started ends').toBe(true);
  if ('family' in moment) await node.unwrapTool(tool);
  return exitCode === 0 ? 'done' : 'killed';
}

/** How many processes live in the node's own network namespace; one of them holds it. */
async function processesIn(node: LabNode): Promise<number> {
  const own = await namespaceOf(node.pid);
  const pids = (await readdir('/proc')).filter((name) => /^\d+$/.test(name));
  return (await Promise.all(pids.map(namespaceOf))).filter((namespace) => namespace === own).length;
}

const namespaceOf = (pid: number | string): Promise<string> =>
  readlink(`/proc/${pid}/ns/net`).catch(() => '');

/** Every attachment has addresses of its own. */
function attachmentOf(where: Place, wanted: readonly Mapping[]): Attachment {
  const number =
    containers.indexOf(where.container) * 4 +
    networks.indexOf(where.network) * 2 +
    interfaces.indexOf(where.ifname) +
    1;
  return {
    ...where,
    mappings: wanted,
    addresses: { v4: `10.1.9.${number}`, v6: `2001:db8:1::9:${number.toString(16)}` },
  };
}

function confOf({ network, addresses: own, mappings: wanted }: Attachment, isBare = false): Netconf {
  return {
    cniVersion: '1.0.0',
    name: network,
    type: 'portmap',
    ...(isBare
      ? {}
      : {
          runtimeConfig: { portMappings: wanted.map((one) => ({ ...one, containerPort: 80 })) },
          prevResult: {
            cniVersion: '1.0.0',
            ips: [{ address: `${own.v4}/16` }, { address: `${own.v6}/64` }],
          },
        }),
  };
}

const targetOf = ({ container }: Pick<Place, 'container'>): { id: string; netns: string } => ({
  id: container,
  netns: `/run/netns/${container}`,
});

const distinct = (worlds: readonly World[]): World[] => [
  ...new Map(worlds.map((world) => [asText(world), world])).values(),
];

const asText = (world: World): string =>
  JSON.stringify(world, (_, value) => (value instanceof Map || value instanceof Set ? [...value] : value));
