// Input that ADD refuses: one JSON error with the right code, that names the field and the value; and neither the
// tables nor the state folder know afterwards that it was ever called.
import { beforeAll, expect, test } from 'vitest';
import { forBoth, sandboxChain, stateFiles } from '../footprint.ts';
import { type Container, netconf, type Netconf } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

type Refusal = {
  readonly title: string;
  readonly input: (container: Container) => Netconf | string;
  readonly code: number;
  /** All of these stand in `msg`. */
  readonly names: readonly string[];
};

const good = [{ hostPort: 8080, containerPort: 80, protocol: 'tcp' }];
const withOptions =
  (options: Netconf) =>
  (container: Container): Netconf =>
    netconf(container, good, options);
/** A good mapping, then a bad one, so that the index counts. */
const withMapping =
  (mapping: unknown) =>
  (container: Container): Netconf => ({
    ...netconf(container, []),
    runtimeConfig: { portMappings: [...good, mapping] },
  });
const field = (name: string): string => `runtimeConfig.portMappings[1].${name}`;

const refusals: Refusal[] = [
  { title: 'broken JSON', input: () => '{"cniVersion": "1.0.0", "name": "lab",', code: 6, names: ['JSON'] },
  { title: 'nothing on stdin', input: () => '', code: 6, names: ['stdin'] },
  { title: 'a list', input: () => '[]', code: 6, names: ['[]'] },
  { title: 'no name', input: withOptions({ name: undefined }), code: 7, names: ['missing network name'] },
  { title: 'a name with a slash', input: withOptions({ name: 'a/b' }), code: 7, names: ['name', '"a/b"'] },
  {
    title: 'an unknown cniVersion',
    input: (container) => ({ ...netconf(container, good), cniVersion: '9.9.9' }),
    code: 1,
    names: ['cniVersion', '9.9.9'],
  },
  { title: 'no prevResult', input: withOptions({ prevResult: undefined }), code: 7, names: ['prevResult'] },
  { title: 'prevResult null', input: withOptions({ prevResult: null }), code: 7, names: ['prevResult'] },
  {
    title: 'a prevResult of another version',
    input: withOptions({ prevResult: { cniVersion: '0.4.0' } }),
    code: 7,
    names: ['prevResult.cniVersion', '0.4.0'],
  },
  {
    title: 'a prevResult without addresses',
    input: withOptions({ prevResult: { cniVersion: '1.0.0', ips: [] } }),
    code: 7,
    names: ['prevResult'],
  },
  {
    title: 'an address that is none',
    input: withOptions({ prevResult: { cniVersion: '1.0.0', ips: [{ address: '10.1.0.2' }] } }),
    code: 7,
    names: ['prevResult.ips[0].address', '10.1.0.2'],
  },
  ...(['hostPort', 'containerPort'] as const).flatMap((name) =>
    [0, -1, 65_536, 70_000, 80.5, '80', true, null].map((value) => ({
      title: `${name} ${JSON.stringify(value)}`,
      input: withMapping({ hostPort: 8081, containerPort: 81, protocol: 'tcp', [name]: value }),
      code: 7,
      names: [field(name), value === null ? 'missing' : JSON.stringify(value)],
    })),
  ),
  ...['icmp', 'tcp6', 'tcp,udp', 'tcp\n', 6].map((value) => ({
    title: `protocol ${JSON.stringify(value)}`,
    input: withMapping({ hostPort: 8081, containerPort: 81, protocol: value }),
    code: 7,
    names: [field('protocol'), JSON.stringify(value)],
  })),
  ...[
    'localhost',
    'not-an-ip',
    '198.51.100.0/24',
    '999.1.1.1',
    ' 198.51.100.1',
    '127.1',
    '010.0.0.1',
    'fe80::1%eth0',
    '198.51.100.1\n-j ACCEPT',
    7,
  ].map((value) => ({
    title: `hostIP ${JSON.stringify(value)}`,
    input: withMapping({ hostPort: 8081, containerPort: 81, protocol: 'tcp', hostIP: value }),
    code: 7,
    names: [field('hostIP'), JSON.stringify(value)],
  })),
  {
    title: 'a mapping that is text',
    input: withMapping('8081:81'),
    code: 7,
    names: ['portMappings[1]', '8081:81'],
  },
  {
    title: 'mappings that are no list',
    input: withOptions({ runtimeConfig: { portMappings: { hostPort: 1 } } }),
    code: 7,
    names: ['runtimeConfig.portMappings', '{"hostPort":1}'],
  },
  ...(['conditionsV4', 'conditionsV6'] as const).flatMap((name) => [
    {
      title: `a line break in ${name}`,
      input: withOptions({ [name]: ['-m', 'comment', '--comment', 'a\n-A INPUT -j ACCEPT'] }),
      code: 7,
      names: [`${name}[3]`, '"a\\n-A INPUT -j ACCEPT"'],
    },
    {
      title: `a NUL in ${name}`,
      input: withOptions({ [name]: ['-m', 'comment', '--comment', 'a\0b'] }),
      code: 7,
      names: [`${name}[3]`, '"a\\u0000b"'],
    },
    {
      title: `${name} that is text`,
      input: withOptions({ [name]: '-s 10.0.0.0/8' }),
      code: 7,
      names: [name, '-s 10.0.0.0/8'],
    },
  ]),
  ...[32, -1, 1.5, '13'].map((value) => ({
    title: `markMasqBit ${JSON.stringify(value)}`,
    input: withOptions({ markMasqBit: value }),
    code: 7,
    names: ['markMasqBit', JSON.stringify(value)],
  })),
  {
    title: 'both mark options',
    input: withOptions({ markMasqBit: 9, externalSetMarkChain: 'KUBE-MARK-MASQ' }),
    code: 7,
    names: ['markMasqBit', '9', 'externalSetMarkChain', 'KUBE-MARK-MASQ'],
  },
  {
    title: 'an external mark chain with a name that is too long',
    input: withOptions({ externalSetMarkChain: 'X'.repeat(29) }),
    code: 7,
    names: ['externalSetMarkChain', 'X'.repeat(29)],
  },
  {
    title: 'an external mark chain with a line break',
    input: withOptions({ externalSetMarkChain: 'A\n-F' }),
    code: 7,
    names: ['externalSetMarkChain', '"A\\n-F"'],
  },
  { title: 'snat as text', input: withOptions({ snat: 'no' }), code: 7, names: ['snat', '"no"'] },
  { title: 'masqAll as a number', input: withOptions({ masqAll: 1 }), code: 7, names: ['masqAll', '1'] },
  {
    title: 'the nftables backend',
    input: withOptions({ backend: 'nftables' }),
    code: 7,
    names: ['backend', '"nftables"'],
  },
];

/** What only the kernel can refuse; iptables is asked, and takes nothing. */
const kernelRefusals: Refusal[] = [
  {
    title: 'an external mark chain that is missing',
    input: withOptions({ externalSetMarkChain: 'NO-SUCH-CHAIN' }),
    code: 7,
    names: ['externalSetMarkChain', 'NO-SUCH-CHAIN'],
  },
  {
    title: 'an external mark chain that is missing in one family',
    input: withOptions({ externalSetMarkChain: 'ONLY-IN-V4' }),
    code: 7,
    names: ['externalSetMarkChain', 'ONLY-IN-V4'],
  },
  {
    title: 'a condition that iptables does not know',
    input: withOptions({ conditionsV4: ['--no-such-option', 'x'] }),
    code: 7,
    names: ['conditionsV4', '--no-such-option'],
  },
  {
    title: 'a condition that iptables does not know, in the second family',
    input: withOptions({ conditionsV6: ['-m', 'no_such_match'] }),
    code: 7,
    names: ['conditionsV6', 'no_such_match'],
  },
];

describeVariants({ isKept: true }, ({ variant, node, c1, c2 }) => {
  beforeAll(async () => {
    await node.sh(`iptables -t nat -N ONLY-IN-V4
      ip6tables -t nat -A OUTPUT -p tcp -m tcp --dport 7 -j ACCEPT`);
  });

  // What never reaches iptables cannot depend on its variant.
  const list = variant === 'nft' ? [...refusals, ...kernelRefusals] : kernelRefusals;
  test.each(list)('ADD refuses $title with code $code', async ({ input, code, names }) => {
    const conf = input(c1);
    const rules = await node.allRules();
    const outcome = await node.plugin('ADD', conf, c1);
    const after = await node.allRules();
    const left = await stateFiles(node);
    // A DEL of the same must do, and not fail for the same reason.
    const del = await node.plugin('DEL', conf, c1);

    expect(outcome.exitCode, outcome.stdout + outcome.stderr).toBe(1);
    const error: { code: number; msg: string; cniVersion: string } = JSON.parse(outcome.stdout);
    expect(error.code, error.msg).toBe(code);
    expect(error.cniVersion).toMatch(/^\d\.\d\.\d$/);
    for (const name of names) expect(error.msg).toContain(name);
    expect(error.msg).not.toMatch(/not found|no such file/i);
    expect(error.msg.split('\n')).toHaveLength(1);
    expect(after).toBe(rules);
    expect(left).toEqual([]);
    if (code === 7 && names[0] !== 'missing network name' && names[0] !== 'name')
      expect(del, 'DEL needs none of what is wrong here').toMatchObject({ exitCode: 0, stdout: '' });
  });

  test('a refused ADD leaves the sandbox that was there', async () => {
    const conf = netconf(c1, good);
    await node.expectPlugin('ADD', conf, c1);
    const rules = await node.allRules();
    const records = await stateFiles(node);
    const outcomes = [
      await node.plugin('ADD', withOptions({ externalSetMarkChain: 'ONLY-IN-V4' })(c1), c1),
      await node.plugin('ADD', withMapping({ hostPort: 0, containerPort: 1 })(c1), c1),
    ];
    const after = await node.allRules();
    const recordsAfter = await stateFiles(node);
    await node.expectPlugin('DEL', conf, c1);
    expect(outcomes.map(({ exitCode }) => exitCode)).toEqual([1, 1]);
    expect(after).toBe(rules);
    expect(recordsAfter).toEqual(records);
  });

  test('an externalSetMarkChain that leads back to the port mappings is refused with code 7, and named', async () => {
    const other = netconf(c2, [{ hostPort: 8081, containerPort: 80, protocol: 'tcp' }]);
    await node.expectPlugin('ADD', other, c2);
    await node.sh(forBoth('$t -N BACK; $t -A BACK -j CNI-HOSTPORT-DNAT'));
    const rules = await node.allRules();
    const records = await stateFiles(node);
    for (const chain of ['BACK', 'CNI-HOSTPORT-DNAT', sandboxChain('lab', c2.id)]) {
      const outcome = await node.plugin('ADD', withOptions({ externalSetMarkChain: chain })(c1), c1);
      expect(outcome.exitCode, outcome.stdout).toBe(1);
      const error: { code: number; msg: string } = JSON.parse(outcome.stdout);
      expect(error.code, error.msg).toBe(7);
      expect(error.msg).toContain(`externalSetMarkChain: "${chain}"`);
      expect(await node.allRules()).toBe(rules);
      expect(await stateFiles(node)).toEqual(records);
    }
    await node.sh(forBoth('$t -F BACK; $t -X BACK'));
    await node.expectPlugin('DEL', other, c2);
  });

  test.each(['-j', '-g'])(
    'a DEL leaves a chain that a foreign rule leads to (%s), but nothing in it, and names that rule',
    async (option) => {
      const conf = netconf(c1, good);
      const chain = sandboxChain('lab', c1.id);
      await node.expectPlugin('ADD', conf, c1);
      await node.sh(`iptables -t nat -N OTHER; iptables -t nat -A OTHER -p tcp ${option} ${chain}`);
      const outcome = await node.expectPlugin('DEL', conf, c1);
      expect(outcome.stderr).toContain(`-A OTHER -p tcp ${option} ${chain}`);
      const left = (await node.allRules()).split('\n').filter((line) => line.includes(chain));
      expect(left).toEqual([`:${chain} - [0:0]`, `-A OTHER -p tcp ${option} ${chain}`]);
      expect(await stateFiles(node)).toEqual([]);
      // Again, with the chain there and nothing in it; then without the rule.
      await node.expectPlugin('DEL', conf, c1);
      await node.expectPlugin('ADD', conf, c1);
      await node.sh('iptables -t nat -F OTHER; iptables -t nat -X OTHER');
      // In the plugin's own chain such a rule goes with the rest.
      await node.sh(`iptables -t nat -I CNI-HOSTPORT-DNAT -p tcp ${option} ${chain}`);
      await node.expectPlugin('DEL', conf, c1);
      expect(await node.allRules()).not.toContain(chain);
      expect(await stateFiles(node)).toEqual([]);
    },
  );

  test.each([
    { title: 'CNI_CONTAINERID', env: { CNI_CONTAINERID: '' } },
    { title: 'CNI_NETNS', env: { CNI_NETNS: '' } },
    { title: 'CNI_IFNAME', env: { CNI_IFNAME: '' } },
  ])('ADD without $title is refused with code 4', async ({ title, env }) => {
    const outcome = await node.plugin('ADD', netconf(c1, good), c1, { env });
    expect(outcome.exitCode).toBe(1);
    const error: { code: number; msg: string } = JSON.parse(outcome.stdout);
    expect(error.code).toBe(4);
    expect(error.msg).toContain(title);
  });

  test("ADD into the node's own network namespace is refused with code 8 before anything is done", async () => {
    const rules = await node.allRules();
    const outcome = await node.plugin('ADD', netconf(c1, good), c1, { netns: '/proc/self/ns/net' });
    expect(outcome.exitCode).toBe(1);
    expect(JSON.parse(outcome.stdout)).toMatchObject({ code: 8 });
    expect(await node.allRules()).toBe(rules);
    expect(await stateFiles(node)).toEqual([]);
  });
});
