// The commands for people: what they print, and that those which only look change nothing.
import { expect, test } from 'vitest';
import { bareConf, forBoth, hidePrograms, port, sandboxChain, stateFiles, wipe } from '../footprint.ts';
import {
  addresses,
  cniVersions,
  type Container,
  netconf,
  type Outcome,
  portmapBin,
  upstreamBin,
} from '../lab.ts';
import { describeVariants } from '../nodes.ts';

/** What a plan says to do, by program: comment lines name the program that takes the transaction. */
const transactions = (text: string): { program: string; lines: string }[] =>
  [...text.matchAll(/^# \S+: (\S+) --noflush\n((?:[^#\n].*\n?)+)/gm)].map(([, program = '', lines = '']) => ({
    program,
    lines,
  }));

describeVariants({}, ({ variant, node, c1, c2 }) => {
  const portmap = (args: readonly string[], input = ''): Promise<Outcome> =>
    node.run([portmapBin, ...args], { input });
  const plan = (verb: string, conf: unknown, container = c1): Promise<Outcome> =>
    portmap(['plan', verb, '--container-id', container.id, '--netns', container.netns], JSON.stringify(conf));

  test.each([
    { verb: 'add', title: 'on an empty node', before: async () => {} },
    {
      verb: 'add',
      title: 'beside another sandbox, over an older self',
      before: async () => {
        await node.expectPlugin('ADD', netconf(c2, [port(8090)]), c2);
        await node.expectPlugin('ADD', netconf(c1, [port(8070), port(8080)]), c1);
      },
    },
    {
      verb: 'del',
      title: 'of a recorded sandbox',
      before: async () => {
        await node.expectPlugin('ADD', netconf(c2, [port(8090)]), c2);
        await node.expectPlugin('ADD', netconf(c1, [port(8080), port(5300, 'udp')]), c1);
      },
    },
    {
      verb: 'del',
      title: 'of a sandbox of upstream',
      before: async () => {
        await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1, { bin: upstreamBin });
      },
    },
  ])(
    'plan $verb $title changes nothing, and its transactions are what the call commits',
    async ({ verb, before }) => {
      await before();
      const conf = netconf(c1, [port(8080), port(5300, 'udp')]);
      const rules = await node.allRules();
      const files = await stateFiles(node);
      const planned = await plan(verb, conf);
      expect(await node.allRules()).toBe(rules);
      expect(await stateFiles(node)).toEqual(files);

      expect(planned).toMatchObject({ exitCode: 0, stderr: '' });
      const found = transactions(planned.stdout);
      expect(
        found.map(({ program }) => program.replace(/.*\//, '')),
        planned.stdout,
      ).toEqual([
        expect.stringMatching(/^iptables.*restore$/),
        expect.stringMatching(/^ip6tables.*restore$/),
      ]);
      for (const { program, lines } of found) {
        expect(lines).toMatch(/^\*nat\n[^]*COMMIT\n?$/);
        await node.sh(`${program} --noflush`, { input: `${lines.trimEnd()}\n` });
      }
      const applied = await node.allRules();
      // Back to where the plan was made, and now the call itself.
      await wipe(node);
      await before();
      expect(await node.allRules()).toBe(rules);
      await node.expectPlugin(verb === 'add' ? 'ADD' : 'DEL', conf, c1);
      expect(applied).toBe(await node.allRules());
    },
  );

  test('plan says so when nothing is to be done', async () => {
    const none = [await plan('add', netconf(c1, [])), await plan('del', netconf(c1, [port(8080)]))];
    for (const { exitCode, stdout } of none) {
      expect(exitCode).toBe(0);
      expect(stdout).toMatch(/^# nothing to do: .+\n$/);
    }
  });

  test('plan takes names from the CNI variables, warns as ADD does, and refuses what ADD refuses', async () => {
    await node.expectPlugin('ADD', netconf(c2, [port(8080)]), c2);
    const env = {
      PATH: `${node.toolFolder}:/usr/bin`,
      CNI_CONTAINERID: c1.id,
      CNI_NETNS: c1.netns,
      CNI_IFNAME: 'eth0',
    };
    const input = JSON.stringify(netconf(c1, [port(8080)]));
    const warned = await node.run([portmapBin, 'plan', 'add'], { env, input });
    const taken = await plan('add', netconf(c1, [port(8080)], { onConflict: 'fail' }));
    const bad = await plan('add', netconf(c1, [port(70_000)]));
    const nobody = await portmap(['plan', 'add'], input);
    expect(warned).toMatchObject({
      exitCode: 0,
      stdout: expect.stringContaining(sandboxChain('lab', c1.id)),
    });
    expect(warned.stderr).toContain(c2.id);
    for (const [outcome, word] of [
      [taken, c2.id],
      [bad, 'portMappings[0].hostPort: 70000'],
      [nobody, 'CNI_CONTAINERID'],
    ] as const) {
      expect(outcome).toMatchObject({ exitCode: 1, stdout: '' });
      expect(outcome.stderr).toContain(word);
    }
  });

  test("list shows ours and upstream's, both families, with all that identifies a mapping", async () => {
    const ours = netconf(c1, [port(8080), { ...port(5300, 'udp'), containerPort: 53 }]);
    const theirs = netconf(c2, [port(8081, 'tcp', addresses.node.v4)], { name: 'other' });
    await node.expectPlugin('ADD', ours, c1);
    await node.expectPlugin('ADD', theirs, c2, { bin: upstreamBin });
    const rules = await node.allRules();
    const json = await portmap(['list', '--json']);
    const table = await portmap(['list']);
    expect(await node.allRules()).toBe(rules);

    const entry = (container: Container, network: string, rest: Record<string, unknown>) => ({
      network,
      containerId: container.id,
      variant,
      ...rest,
    });
    const expected = [
      ...(['ipv4', 'ipv6'] as const).flatMap((family) => {
        const containerAddress = family === 'ipv4' ? c1.v4 : c1.v6;
        const of = { family, containerAddress, hostAddress: '' };
        return [
          entry(c1, 'lab', { ...of, protocol: 'tcp', hostPort: 8080, containerPort: 80 }),
          entry(c1, 'lab', { ...of, protocol: 'udp', hostPort: 5300, containerPort: 53 }),
        ];
      }),
      entry(c2, 'other', {
        family: 'ipv4',
        protocol: 'tcp',
        hostAddress: addresses.node.v4,
        hostPort: 8081,
        containerAddress: c2.v4,
        containerPort: 80,
      }),
    ];
    const listed: unknown[] = JSON.parse(json.stdout);
    expect(listed, rules).toHaveLength(expected.length);
    expect(listed).toEqual(expect.arrayContaining(expected));
    expect(table.exitCode).toBe(0);
    const lines = table.stdout.trimEnd().split('\n');
    expect(lines).toHaveLength(expected.length + 1);
    expect(table.stdout).toMatch(
      new RegExp(`^tcp +0\\.0\\.0\\.0:8080 +${c1.v4}:80 +lab +${c1.id} +${variant}$`, 'm'),
    );
    expect(table.stdout).toMatch(new RegExp(`^udp +\\[::\\]:5300 +\\[${c1.v6}\\]:53 +lab `, 'm'));
    expect(table.stdout).toMatch(
      new RegExp(`^tcp +${addresses.node.v4}:8081 +${c2.v4}:80 +other +${c2.id} `, 'm'),
    );
  });

  test('list fails where it may not look, and names a family it has no programs for', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const nobody = await node.run(['setpriv', '--reuid', '65534', '--clear-groups', portmapBin, 'list']);
    expect(nobody, nobody.stderr).toMatchObject({ exitCode: 1, stdout: '' });
    expect(nobody.stderr).toMatch(/not permitted.*root/);
    const restore = await hidePrograms(node, 'ip6tables*');
    try {
      const half = await portmap(['list']);
      expect(half.stdout).toContain('0.0.0.0:8080');
      expect(half.stderr).toMatch(/ip6tables.*mappings of ipv6 are not shown/);
    } finally {
      await restore();
    }
  });

  test('list on a node without mappings is empty', async () => {
    expect(JSON.parse((await portmap(['list', '--json'])).stdout)).toEqual([]);
    expect((await portmap(['list'])).stdout.trimEnd().split('\n')).toHaveLength(1);
  });

  test('reapply says what it did, and has nothing to do on a node without records', async () => {
    const idle = await portmap(['reapply']);
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const done = await portmap(['reapply']);
    expect(idle).toMatchObject({ exitCode: 0, stdout: expect.stringContaining('nothing to do') });
    expect(done).toMatchObject({ exitCode: 0, stderr: '', stdout: expect.stringMatching(/^1 sandbox/) });
  });

  test('plan del says that DEL does nothing where it does nothing: without a record and without mappings', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1, { bin: upstreamBin });
    const rules = await node.allRules();
    expect((await plan('del', bareConf)).stdout).toMatch(/^# nothing to do: no record .* no mappings/);
    await node.expectPlugin('DEL', bareConf, c1);
    expect(await node.allRules()).toBe(rules);
  });

  test('reapply names the sandbox it warns of, and the one it could not put back, after the others', async () => {
    const external = { externalSetMarkChain: 'MARKS' };
    await node.sh(forBoth('$t -N MARKS'));
    await node.expectPlugin('ADD', netconf(c1, [port(8081)], external), c1);
    await node.expectPlugin('ADD', netconf(c2, [port(8080)]), c2);
    const third = { ...c2, id: 'third' };
    await node.expectPlugin('ADD', netconf(third, [port(8080)]), third);
    await node.sh(forBoth('$t -F; $t -X'));
    const { exitCode, stderr } = await portmap(['reapply']);
    expect(exitCode, stderr).toBe(1);
    expect(stderr).toMatch(new RegExp(`warning: container third on network lab: .*container ${c2.id} `));
    expect(stderr).toMatch(
      new RegExp(`^portmap: container ${c1.id} on network lab: .*"MARKS" is missing`, 'm'),
    );
    for (const target of [c2, third]) expect(await node.allRules()).toContain(sandboxChain('lab', target.id));
  });

  if (variant === 'legacy')
    test('reapply commits all sandboxes in one transaction a family', async () => {
      const targets = Array.from({ length: 6 }, (_, index) => ({ ...c1, id: `many-${index}` }));
      for (const [index, target] of targets.entries())
        await node.expectPlugin('ADD', netconf(target, [port(8_000 + index)]), target);
      await node.sh('for t in iptables ip6tables; do $t -t nat -F; $t -t nat -X; done');
      await node.sh(`strace -f -y -qq -e trace=flock -o /run/trace ${portmapBin} reapply`);
      const locks = await node.sh('grep -c "xtables.*LOCK_EX" /run/trace');
      // One for each family's commit, and the one that found no chains.
      expect(Number(locks)).toBe(3);
      for (const [index, target] of targets.entries())
        await node.expectPlugin('CHECK', netconf(target, [port(8_000 + index)]), target);
    });

  // What touches no table cannot depend on the variant.
  if (variant === 'nft') {
    test('without arguments the about text goes to stderr, as other programs expect it', async () => {
      const { exitCode, stdout, stderr } = await portmap([]);
      expect(exitCode).toBe(0);
      expect(stdout).toBe('');
      const [first, second] = stderr.split('\n');
      expect(first).toMatch(/^CNI portmap plugin v\d+\.\d+\.\d+$/);
      expect(second).toBe(`CNI protocol versions supported: ${cniVersions.join(', ')}`);
    });

    test('--version and --help go to stdout', async () => {
      const version = await portmap(['--version']);
      const help = await portmap(['--help']);
      expect(version).toMatchObject({
        exitCode: 0,
        stderr: '',
        stdout: expect.stringMatching(/^\d+\.\d+\.\d+\n$/),
      });
      expect(help).toMatchObject({ exitCode: 0, stderr: '' });
      for (const word of ['list', 'plan', 'reapply', 'CNI_COMMAND']) expect(help.stdout).toContain(word);
    });

    test.each([
      { args: ['lsit'] },
      { args: ['plan'] },
      { args: ['plan', 'check'] },
      { args: ['list', '--jsn'] },
      { args: ['--nope'] },
    ])('the command line $args is refused with a word on it and on the help', async ({ args }) => {
      const { exitCode, stdout, stderr } = await portmap(args);
      expect(exitCode).toBe(1);
      expect(stdout).toBe('');
      expect(stderr).toContain('portmap --help');
      expect(stderr).not.toMatch(/^\s+at /m);
    });

    test('with CNI_COMMAND set, arguments are not looked at', async () => {
      const env = { PATH: '/usr/bin', CNI_COMMAND: 'VERSION', CNI_PATH: '/opt/cni/bin' };
      const { exitCode, stdout } = await node.run([portmapBin, 'list'], { env });
      expect(exitCode).toBe(0);
      expect(JSON.parse(stdout)).toMatchObject({ supportedVersions: cniVersions });
    });

    test('an empty netconf or one that is no JSON is an error of one line for people', async () => {
      for (const input of ['', '{']) {
        const { exitCode, stdout, stderr } = await portmap(['plan', 'add', '--container-id', 'x'], input);
        expect(exitCode).toBe(1);
        expect(stdout).toBe('');
        expect(stderr).toMatch(/netconf: not JSON/);
      }
      expect(await plan('del', bareConf)).toMatchObject({ exitCode: 0 });
    });
  }
});
