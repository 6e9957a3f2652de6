// Many calls at once, calls repeated, and calls that fail half-way: whatever the order, the tables end as if the
// calls had come one after the other, and a call that fails has done nothing.
import { readFile } from 'node:fs/promises';
import { beforeAll, describe, expect, test } from 'vitest';
import { count, stateFiles } from '../footprint.ts';
import { addresses, type Container, families, netconf, type Outcome, type PortMapping } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const crowd = 40;
const numbers = Array.from({ length: crowd }, (_, index) => index + 1);

const both = (hostPort: number, containerPort = 80): PortMapping[] => [
  { hostPort, containerPort, protocol: 'tcp' },
  { hostPort, containerPort, protocol: 'udp' },
];

const failures = (outcomes: readonly Outcome[]): string[] =>
  outcomes
    .filter(({ exitCode }) => exitCode !== 0)
    .map(({ exitCode, stdout, stderr }) => `exit ${exitCode}: ${stdout}${stderr}`);

/** A tool that does as the script says where the input writes. The nft variant is read with the same program. */
const failing = (script: string): string =>
  `text=$(cat)
   case $text in *-A*|*-N*|*:CNI*) ${script} ;; esac
   printf '%s\\n' "$text" | $REAL "$@"`;

describeVariants({}, ({ node, c1, c2 }) => {
  /** Sandboxes with addresses of their own; their servers all live in c1's namespace. */
  let sandboxes: Container[];

  beforeAll(async () => {
    sandboxes = numbers.map((number) => ({
      name: 'c1',
      id: `crowd-${number}`,
      netns: c1.netns,
      v4: `10.1.9.${number}`,
      v6: `2001:db8:1::9:${number}`,
    }));
    await node.sh('ip -n c1 -batch -', {
      input: sandboxes
        .map(({ v4, v6 }) => `addr add ${v4}/16 dev eth0\naddr add ${v6}/64 dev eth0 nodad\n`)
        .join(''),
    });
    for (const address of ['0.0.0.0', '::']) {
      await node.serve('c1', { protocol: 'tcp', address, port: 80 });
      await node.serve('c2', { protocol: 'tcp', address, port: 80 });
    }
  });

  const reached = (hostPort: number, family: 'v4' | 'v6') =>
    node.probe('client', { protocol: 'tcp', address: addresses.node[family], port: hostPort });

  test('forty DELs of one sandbox at once all succeed, and nothing is left', async () => {
    const conf = netconf(c1, both(8080));
    await node.expectPlugin('ADD', conf, c1);
    const dels = await Promise.all(numbers.map(() => node.plugin('DEL', conf, c1)));
    const rules = await node.allRules();
    expect(failures(dels), rules).toEqual([]);
    expect(count(rules, /CNI-DN-/g), rules).toBe(0);
    expect(await stateFiles(node)).toEqual([]);
  });

  test('forty first ADDs at once: every sandbox is reached, and each shared jump is there once', async () => {
    const confs = sandboxes.map((sandbox, index) => netconf(sandbox, both(9_001 + index)));
    const calls = (verb: 'ADD' | 'DEL') =>
      Promise.all(sandboxes.map((sandbox, index) => node.plugin(verb, confs[index] ?? '', sandbox)));
    const adds = await calls('ADD');
    const added = { v4: await node.rules('v4'), v6: await node.rules('v6') };
    const answers = await Promise.all(
      families.map((family) => Promise.all(sandboxes.map((_, index) => reached(9_001 + index, family)))),
    );
    const dels = await calls('DEL');
    const rules = await node.allRules();

    expect(failures(adds)).toEqual([]);
    for (const [index, family] of families.entries()) {
      const text = added[family];
      expect(
        answers[index]?.map((answer) => answer?.local),
        text,
      ).toEqual(sandboxes.map((sandbox) => sandbox[family]));
      for (const shared of [
        /^-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT$/gm,
        /^-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT$/gm,
        /^-A POSTROUTING .*-j CNI-HOSTPORT-MASQ$/gm,
        /^-A CNI-HOSTPORT-MASQ /gm,
        /^-A CNI-HOSTPORT-SETMARK /gm,
      ])
        expect(count(text, shared), `${String(shared)} in\n${text}`).toBe(1);
      // One line a protocol for each.
      expect(count(text, /^-A CNI-HOSTPORT-DNAT /gm), text).toBe(2 * crowd);
    }
    expect(failures(dels), rules).toEqual([]);
    expect(count(rules, /CNI-DN-/g), rules).toBe(0);
    expect(count(rules, /-j CNI-HOSTPORT-DNAT/g), rules).toBe(4);
    expect(await stateFiles(node)).toEqual([]);
  });

  test('ADDs and DELs at once leave each sandbox as its own last call wants it', async () => {
    const some = sandboxes.slice(0, 20);
    const confs = some.map((sandbox, index) => netconf(sandbox, both(9_101 + index)));
    const old = some.filter((_, index) => index % 2 === 0);
    for (const sandbox of old) await node.expectPlugin('ADD', confs[some.indexOf(sandbox)] ?? '', sandbox);
    const outcomes = await Promise.all(
      some.map((sandbox, index) =>
        node.plugin(old.includes(sandbox) ? 'DEL' : 'ADD', confs[index] ?? '', sandbox),
      ),
    );
    const answers = await Promise.all(some.map((_, index) => reached(9_101 + index, 'v4')));
    expect(failures(outcomes)).toEqual([]);
    expect(
      answers.map((answer) => answer?.local),
      await node.allRules(),
    ).toEqual(some.map((sandbox) => (old.includes(sandbox) ? undefined : sandbox.v4)));
  });

  test('a second ADD with another address and other ports replaces the first', async () => {
    const first = netconf(c1, [...both(8080), ...both(8081)]);
    await node.expectPlugin('ADD', first, c1);
    // The same sandbox came back with the address of c2 and one port less.
    const moved = { ...c1, v4: c2.v4, v6: c2.v6 };
    const second = netconf(moved, [...both(8081), ...both(8082)]);
    await node.expectPlugin('ADD', second, c1);
    const rules = await node.allRules();
    const answers = await Promise.all(
      [8080, 8081, 8082].flatMap((port) => families.map((family) => reached(port, family))),
    );
    await node.expectPlugin('ADD', second, c1);
    const again = await node.allRules();
    await node.expectPlugin('DEL', first, c1);
    const left = await node.allRules();

    expect(
      answers.map((answer) => answer?.name),
      rules,
    ).toEqual([undefined, undefined, 'c2', 'c2', 'c2', 'c2']);
    expect(rules).not.toContain(`${c1.v4}:`);
    expect(rules).not.toContain(`[${c1.v6}]:`);
    expect(rules).not.toMatch(/--dports?\s[\d,]*8080/);
    expect(again).toBe(rules);
    expect(left).not.toContain('CNI-DN-');
    expect(await stateFiles(node)).toEqual([]);
  });

  test('a second ADD that has lost a family takes that family away', async () => {
    await node.expectPlugin('ADD', netconf(c1, both(8080)), c1);
    const conf = netconf({ netns: c1.netns, v4: c1.v4 }, both(8080));
    await node.expectPlugin('ADD', conf, c1);
    const [v4, v6] = [await node.rules('v4'), await node.rules('v6')];
    await node.expectPlugin('DEL', conf, c1);
    expect(v4).toContain('CNI-DN-');
    expect(v6).not.toContain('CNI-DN-');
  });

  test('twenty different ADDs of one sandbox at once end as one of them', async () => {
    const confs = numbers.slice(0, 20).map((number) => netconf(c1, both(9_200 + number, 100 + number)));
    const adds = await Promise.all(confs.map((conf) => node.plugin('ADD', conf, c1)));
    const rules = await node.rules('v4');
    await node.expectPlugin('DEL', confs[0] ?? '', c1);
    expect(failures(adds)).toEqual([]);
    expect(count(rules, /-j DNAT/g), rules).toBe(2);
    expect(count(rules, /^-A CNI-HOSTPORT-DNAT /gm), rules).toBe(2);
    const [dispatched] = /--dports (\d+)/.exec(rules)?.slice(1) ?? [];
    expect(count(rules, new RegExp(`--dports? ${dispatched} `, 'g')), rules).toBe(2 + 6);
    expect(await node.allRules()).not.toContain('CNI-DN-');
  });

  describe('an ADD that fails in one family', () => {
    const refuse = 'echo "Error occurred at line: 3" >&2; exit 2';
    const restores = [
      {
        tool: 'iptables-restore',
        says: 'a refusal',
        script: refuse,
      },
      {
        tool: 'ip6tables-restore',
        says: 'a refusal',
        script: refuse,
      },
      { tool: 'ip6tables-restore', says: 'exit status 4', script: 'exit 4' },
    ];
    test.each(restores)('leaves both tables as they were ($tool: $says)', async ({ tool, script }) => {
      const conf = netconf(c1, both(8080), { timeoutSeconds: 2 });
      const rules = await node.allRules();
      await node.wrapTool(tool, failing(script));
      const outcome = await node.plugin('ADD', conf, c1);
      await node.unwrapTool(tool);
      const after = await node.allRules();
      const left = await stateFiles(node);
      await node.expectPlugin('ADD', conf, c1);
      await node.expectPlugin('DEL', conf, c1);
      expect(outcome.exitCode, outcome.stdout).toBe(1);
      expect(JSON.parse(outcome.stdout)).toHaveProperty('msg');
      expect(after).toBe(rules);
      expect(left).toEqual([]);
    });

    test.each(restores)('leaves nothing beside a neighbour ($tool: $says)', async ({ tool, script }) => {
      await node.expectPlugin('ADD', netconf(c2, both(8088)), c2);
      const rules = await node.allRules();
      const before = await stateFiles(node);
      await node.wrapTool(tool, failing(script));
      const outcome = await node.plugin('ADD', netconf(c1, both(8080), { timeoutSeconds: 2 }), c1);
      await node.unwrapTool(tool);
      const after = await node.allRules();
      const left = await stateFiles(node);
      await node.expectPlugin('DEL', netconf(c2, both(8088)), c2);
      expect(outcome.exitCode, outcome.stdout).toBe(1);
      expect(after, outcome.stdout).toBe(rules);
      expect(left).toEqual(before);
    });

    test.each(restores)('leaves a sandbox that was there before ($tool: $says)', async ({ tool, script }) => {
      const old = netconf(c1, both(8080));
      await node.expectPlugin('ADD', old, c1);
      const rules = await node.allRules();
      const records = await recordTexts();
      await node.wrapTool(tool, failing(script));
      const outcome = await node.plugin('ADD', netconf(c1, both(8090), { timeoutSeconds: 2 }), c1);
      await node.unwrapTool(tool);
      const after = await node.allRules();
      const recordsAfter = await recordTexts();
      const answer = await reached(8080, 'v4');
      await node.expectPlugin('DEL', old, c1);
      expect(outcome.exitCode, outcome.stdout).toBe(1);
      expect(after, outcome.stdout).toBe(rules);
      expect(recordsAfter).toEqual(records);
      expect(answer?.name, rules).toBe('c1');
    });
  });

  const recordTexts = async (): Promise<string[]> =>
    Promise.all(
      (await stateFiles(node))
        .filter((name) => name.endsWith('.record'))
        .map((name) => readFile(`${node.root}/run/portmap/${name}`, 'utf8')),
    );
});
