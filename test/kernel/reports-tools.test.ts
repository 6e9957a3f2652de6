// Field reports, part E: the two variants of iptables on one node, tools that fail, and folders that can't be written.
// Each test is named after its report; REPORTS.md lists them all.
import { readdir, stat } from 'node:fs/promises';
import { beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { bareConf, count, errorOf, port, stateFiles } from '../footprint.ts';
import { addresses, type LabNode, netconf, portmapBin, upstreamBin } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const asNobody = ['setpriv', '--reuid', '65534', '--regid', '65534', '--clear-groups', '--inh-caps=-all'];

/** A restore that does as the script says where it is to change something; reading goes on as ever. */
const onChange = (script: string): string =>
  `text=$(cat)
   case $text in *'-A '*|*'-D '*) echo change >> /run/changes; ${script} ;; esac
   printf '%s\\n' "$text" | exec $REAL "$@"`;

const readOnly = async <T>(node: LabNode, body: () => Promise<T>): Promise<T> => {
  await node.sh('mount -o remount,ro /run');
  try {
    return await body();
  } finally {
    await node.sh('mount -o remount,rw /run');
  }
};

describeVariants({ serving: ['tcp'] }, ({ variant, node, c1, c2 }) => {
  const other = variant === 'nft' ? 'legacy' : 'nft';
  const system = '/usr/sbin:/usr/bin';

  beforeAll(async () => {
    // The other variant, as an administrator switches to it.
    await node.sh(`mkdir -p /run/switched
      for tool in iptables ip6tables; do for end in '' -save -restore; do
        ln -s /usr/sbin/xtables-${other}-multi /run/switched/$tool$end
      done; done`);
  });
  beforeEach(async () => {
    await node.sh(
      'for t in iptables ip6tables; do /run/switched/$t -t nat -F; /run/switched/$t -t nat -X; done',
    );
  });

  /** Every nat table of the node: both families, both variants. */
  const everyTable = () =>
    node.sh(
      `for t in iptables ip6tables; do ${node.toolFolder}/$t-save -t nat; /run/switched/$t-save -t nat; done | grep -v '^#'`,
    );
  const expectNothing = async (): Promise<void> => {
    const tables = await everyTable();
    expect(tables).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT/);
    expect(await stateFiles(node), tables).toEqual([]);
  };
  const switched = { env: { PATH: `/run/switched:${system}` } };

  test.each([
    { title: 'a record', forget: '' },
    { title: 'no record', forget: 'rm -r /run/portmap' },
    { title: 'a broken record', forget: ': > $(ls /run/portmap/*.record)' },
  ])('R26: after the variant was switched DEL leaves nothing in either ($title)', async ({ forget }) => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1);
    await node.sh(forget);
    await node.expectPlugin('DEL', conf, c1, switched);
    await expectNothing();
  });

  test('R26: what upstream added before the switch goes too', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1, { bin: upstreamBin });
    await node.expectPlugin('DEL', conf, c1, switched);
    await expectNothing();
  });

  test.each([
    { title: 'with its record', forget: '' },
    { title: 'without its record', forget: 'rm -r /run/portmap' },
  ])('R26: GC after the switch finds a sandbox in the other variant ($title)', async ({ forget }) => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    await node.sh(forget);
    const conf = { ...bareConf, cniVersion: '1.1.0', 'cni.dev/valid-attachments': [] };
    await node.expectPlugin('GC', conf, c1, switched);
    await expectNothing();
  });

  test('R26: an ADD after the switch moves the rules, and traffic follows', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('CHECK', conf, c1, switched);
    await node.expectPlugin('ADD', conf, c1, switched);
    const tables = await everyTable();
    const left = await node.allRules();
    await node.expectPlugin('CHECK', conf, c1, switched);
    const answer = await node.probe('client', { protocol: 'tcp', address: addresses.node.v4, port: 8080 });
    await node.expectPlugin('DEL', conf, c1);
    expect(left).not.toMatch(/CNI-DN-/);
    expect(count(tables, /-j DNAT/g), tables).toBe(2);
    expect(answer?.name, tables).toBe('c1');
    await expectNothing();
  });

  test('R26: departs: an ADD goes to the variant of the iptables in PATH, wherever other chains are', async () => {
    await node.sh('/run/switched/iptables -t nat -N KUBE-SERVICES');
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    expect(await node.rules('v4')).toContain('CNI-DN-');
  });

  const changes = async (): Promise<number> =>
    count(await node.sh('cat /run/changes; rm /run/changes'), /change/g);

  test.each(['iptables-restore', 'ip6tables-restore'])(
    'R28: one exit status 4 of %s is tried again',
    async (tool) => {
      const conf = netconf(c1, [port(8080)]);
      for (const verb of ['ADD', 'DEL'] as const) {
        await node.wrapTool(tool, onChange('if mkdir /run/first 2>/dev/null; then exit 4; fi'));
        await node.expectPlugin(verb, conf, c1);
        await node.unwrapTool(tool);
        await node.sh('rmdir /run/first');
        expect(await changes(), verb).toBe(2);
        if (verb === 'ADD') await node.expectPlugin('CHECK', conf, c1);
      }
      await expectNothing();
    },
  );

  test('R28: what iptables refuses is not tried again', async () => {
    await node.wrapTool('iptables-restore', onChange('echo "Error occurred at line: 3" >&2; exit 2'));
    const outcome = await node.plugin('ADD', netconf(c1, [port(8080)]), c1);
    await node.unwrapTool('iptables-restore');
    // Once for the change; the other family is put back by its own program.
    expect(await changes()).toBe(1);
    expect(errorOf(outcome).code).toBeGreaterThanOrEqual(100);
    await expectNothing();
  });

  test('R28: twenty calls succeed beside a program that keeps writing rules of its own', async () => {
    await node.sh('iptables -t nat -N FOREIGN');
    const writer = node.start([
      'sh',
      '-c',
      'for i in $(seq 400); do iptables -w 5 -t nat -A FOREIGN -j RETURN; iptables -w 5 -t nat -D FOREIGN -j RETURN; done',
    ]);
    const targets = Array.from({ length: 10 }, (_, index) => ({ ...c1, id: `busy-${index}` }));
    const confs = targets.map((_, index) => netconf(c1, [port(9000 + index)]));
    const adds = await Promise.all(
      targets.map((target, index) => node.plugin('ADD', confs[index] ?? '', target)),
    );
    const added = await node.rules('v4');
    const dels = await Promise.all(
      targets.map((target, index) => node.plugin('DEL', confs[index] ?? '', target)),
    );
    writer.kill('SIGKILL');
    const failures = [...adds, ...dels].filter(({ exitCode }) => exitCode !== 0).map(({ stdout }) => stdout);
    expect(failures).toEqual([]);
    expect(count(added, /-j DNAT/g), added).toBe(10);
    await expectNothing();
  });

  test.each([
    { kind: 'match', name: 'multiport', module: 'xt_multiport', seen: '*multiport*' },
    { kind: 'match', name: 'comment', module: 'xt_comment', seen: '*comment*' },
    { kind: 'target', name: 'MARK', module: 'xt_mark', seen: '*"-j MARK"*' },
  ])(
    'R29: a kernel without $module: the error names it and nothing is left',
    async ({ kind, name, module, seen }) => {
      const rules = await node.allRules();
      const refusal = `echo "iptables-restore v1.8.9: Couldn't load ${kind} \\\`${name}':No such file or directory" >&2
      printf '\\nError occurred at line: 9\\n' >&2
      exit 2`;
      await node.wrapTool(
        'iptables-restore',
        `text=$(cat)
      case $text in ${seen}) ${refusal} ;; esac
      printf '%s\\n' "$text" | exec $REAL "$@"`,
      );
      const outcome = await node.plugin('ADD', netconf(c1, [port(8080)]), c1);
      await node.unwrapTool('iptables-restore');
      const error = errorOf(outcome);
      expect(error.code, error.msg).toBeGreaterThanOrEqual(100);
      expect(error.msg).toContain(name);
      expect(error.msg).toContain(module);
      expect(await node.allRules()).toBe(rules);
      expect(await stateFiles(node)).toEqual([]);
    },
  );

  test('R30: the nftables backend is refused on ADD, and DEL of the same netconf succeeds', async () => {
    const conf = netconf(c1, [port(8080)], { backend: 'nftables' });
    const error = errorOf(await node.plugin('ADD', conf, c1));
    expect(error.code).toBe(7);
    expect(error.msg).toContain('backend');
    await node.expectPlugin('DEL', conf, c1);
    await node.expectPlugin('ADD', netconf(c1, [port(8080)], { backend: 'iptables' }), c1);
  });

  test('R31: what the plugin writes is for its owner alone, under names that no caller chooses', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const folder = `${node.root}/run/portmap`;
    for (const name of ['', ...(await readdir(folder, { recursive: true }))]) {
      const { mode } = await stat(`${folder}/${name}`);
      expect((mode & 0o077).toString(8), name).toBe('0');
    }
    expect(await stateFiles(node)).toEqual([expect.stringMatching(/^[0-9a-f]{21}\.record$/)]);
  });

  test('R31: a state folder that is a link is not followed, and the call works without it', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.sh('rm -rf /run/portmap; mkdir -p /run/elsewhere; ln -s /run/elsewhere /run/portmap');
    const add = await node.expectPlugin('ADD', conf, c1);
    const check = await node.plugin('CHECK', conf, c1);
    const del = await node.expectPlugin('DEL', conf, c1);
    const written = await node.sh('find /run/elsewhere -type f; rm -r /run/elsewhere; rm /run/portmap');
    expect(add.stderr).toContain('/run/portmap');
    expect(check).toMatchObject({ exitCode: 0 });
    expect(del.stderr).toContain('/run/portmap');
    expect(written).toBe('');
    expect(await everyTable()).not.toContain('CNI-DN-');
  });

  describe('R31: on a read-only /run', () => {
    const elsewhere = { env: { XTABLES_LOCKFILE: '/var/lib/cni/xtables.lock' } };

    test('R31: the call works without a state folder, and says so', async () => {
      const conf = netconf(c1, [port(8080)]);
      const { add, rules, del } = await readOnly(node, async () => ({
        add: await node.plugin('ADD', conf, c1, elsewhere),
        rules: await node.allRules(),
        del: await node.plugin('DEL', conf, c1, elsewhere),
      }));
      expect(add, rules).toMatchObject({ exitCode: 0 });
      expect(add.stderr).toContain('PORTMAP_STATE_DIR');
      expect(rules).toContain('CNI-DN-');
      expect(del).toMatchObject({ exitCode: 0, stdout: '' });
      await expectNothing();
    });

    test('R31: PORTMAP_STATE_DIR leads the state to another folder', async () => {
      const conf = netconf(c1, [port(8080)]);
      const env = { ...elsewhere.env, PORTMAP_STATE_DIR: '/var/lib/cni/portmap' };
      const [add, files, del] = await readOnly(node, async () => [
        await node.plugin('ADD', conf, c1, { env }),
        await node.sh('ls /var/lib/cni/portmap'),
        await node.plugin('DEL', bareConf, c1, { env }),
      ]);
      expect(add).toMatchObject({ exitCode: 0, stderr: '' });
      expect(files).toContain('.record');
      expect(del).toMatchObject({ exitCode: 0, stderr: '' });
      await expectNothing();
    });

    if (variant === 'legacy')
      test('R31: a lock that legacy iptables cannot have is an error, and nothing goes to the other variant', async () => {
        const conf = netconf(c1, [port(8080)], { timeoutSeconds: 2 });
        await node.sh('rm -f /run/xtables.lock');
        const outcome = await readOnly(node, () => node.plugin('ADD', conf, c1));
        const error = errorOf(outcome);
        expect(error.msg + (error.details ?? '')).toContain('xtables.lock');
        await expectNothing();
      });
  });

  if (variant === 'legacy')
    test('R31: a lock path that is a folder is an error that names it', async () => {
      await node.sh('rm -f /run/xtables.lock; mkdir /run/xtables.lock');
      const outcome = await node.plugin('ADD', netconf(c1, [port(8080)], { timeoutSeconds: 2 }), c1);
      await node.sh('rmdir /run/xtables.lock');
      const error = errorOf(outcome);
      expect(error.msg + (error.details ?? '')).toContain('/run/xtables.lock');
      await expectNothing();
    });

  test('R31: without the rights of root ADD is refused with a word on rights, and changes nothing', async () => {
    const rules = await node.allRules();
    const env = { PORTMAP_STATE_DIR: '/run/unwritable' };
    const conf = netconf(c1, [port(8080)], { timeoutSeconds: 3, cniVersion: '1.1.0' });
    const add = await node.plugin('ADD', conf, c1, { under: asNobody, env });
    const none = await node.plugin('ADD', netconf(c1, []), c1, { under: asNobody, env });
    const error = errorOf(add);
    expect(error.msg).toMatch(/permitted|root|CAP_NET_ADMIN/);
    expect(none).toMatchObject({ exitCode: 0 });
    expect(await node.allRules()).toBe(rules);
  });

  test('R31: without the rights of root DEL of what is there is an error to repeat, not a success', async () => {
    const conf = netconf(c1, [port(8080)], { timeoutSeconds: 3 });
    await node.expectPlugin('ADD', conf, c1);
    const failed = await node.plugin('DEL', conf, c1, {
      under: asNobody,
      env: { PORTMAP_STATE_DIR: '/run/unwritable' },
    });
    await node.expectPlugin('DEL', conf, c1);
    const error = errorOf(failed);
    expect(error.code, error.msg).toBe(11);
    expect(error.msg).toMatch(/permitted|root|CAP_NET_ADMIN/);
    await expectNothing();
  });

  test('R26: departs: two variants on one node are one node to list', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    await node.expectPlugin('ADD', netconf(c2, [port(8081)]), c2, switched);
    const listed: { hostPort: number; variant: string }[] = JSON.parse(
      await node.sh(`${portmapBin} list --json`),
    );
    const found = [...new Set(listed.map((one) => `${one.hostPort} ${one.variant}`))].toSorted();
    expect(found).toEqual([`8080 ${variant}`, `8081 ${other}`]);
  });
});
