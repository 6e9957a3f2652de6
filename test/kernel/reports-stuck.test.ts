// Field reports, part B: pods that can't be torn down, ports claimed twice, rules that a reload has taken, and calls
// that wait for what they do not need. Each test is named after its report; REPORTS.md lists them all.
import { setTimeout as sleep } from 'node:timers/promises';
import { describe, expect, test } from 'vitest';
import {
  answers,
  bareConf,
  chainRules,
  count,
  errorOf,
  expectNoSandbox,
  fewerOnLegacy,
  forBoth,
  hidePrograms,
  holdXtablesLock,
  port,
  sandboxChain,
  stateFiles,
} from '../footprint.ts';
import {
  addresses,
  type Container,
  families,
  netconf,
  type Netconf,
  type Outcome,
  portmapBin,
  prevResult,
  upstreamBin,
} from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const confOf = (container: Container, hostPort: number): Netconf => netconf(container, [port(hostPort)]);

describeVariants({ serving: ['tcp'] }, ({ variant, node, c1, c2 }) => {
  if (variant === 'legacy') {
    test('R07: calls without mappings do not wait for a lock that somebody keeps', async () => {
      const release = await holdXtablesLock(node);
      const start = performance.now();
      const outcomes = await Promise.all(
        (['ADD', 'CHECK', 'DEL'] as const).map((verb) => node.plugin(verb, netconf(c1, []), c1)),
      );
      const took = performance.now() - start;
      release();
      expect(outcomes.map(({ exitCode }) => exitCode)).toEqual([0, 0, 0]);
      expect(JSON.parse(outcomes[0]?.stdout ?? '')).toEqual(prevResult(c1));
      // Three processes on a busy machine; with the lock it would be the whole budget.
      expect(took).toBeLessThan(1_500);
    });

    test('R08: a DEL that gave up leaves every rule once, also when the lock is free a moment later', async () => {
      const conf = netconf(c1, [port(8080)]);
      await node.expectPlugin('ADD', conf, c1);
      const rules = await node.allRules();
      const release = await holdXtablesLock(node);
      const del = node.plugin('DEL', { ...conf, timeoutSeconds: 1 }, c1);
      // After the call's time, before whatever it still does at its end.
      await sleep(2_000);
      release();
      const outcome = await del;
      const after = await node.allRules();
      await node.expectPlugin('DEL', conf, c1);
      expect(errorOf(outcome).code).toBe(11);
      expect(after).toBe(rules);
      await expectNoSandbox(node);
    });

    test('R08: ADD and DEL give up in their time while the lock is kept, and their repeats succeed', async () => {
      const conf = netconf(c1, [port(8080)]);
      const second = netconf(c2, [port(8081)]);
      const hurried = { timeoutSeconds: 2 };
      await node.expectPlugin('ADD', conf, c1);
      const rules = await node.allRules();
      const files = await stateFiles(node);
      const release = await holdXtablesLock(node);
      const start = performance.now();
      const [del, add] = await Promise.all([
        node.plugin('DEL', { ...conf, ...hurried }, c1),
        node.plugin('ADD', { ...second, ...hurried }, c2),
      ]);
      const took = performance.now() - start;
      release();
      const after = await node.allRules();
      const filesAfter = await stateFiles(node);
      await node.expectPlugin('ADD', second, c2);
      await node.expectPlugin('DEL', conf, c1);
      await node.expectPlugin('DEL', second, c2);
      for (const outcome of [del, add]) {
        const error = errorOf(outcome);
        expect(error.code, error.msg).toBe(11);
        expect(error.msg).toContain('lock');
      }
      expect(took).toBeLessThan(5_000);
      expect(after).toBe(rules);
      expect(filesAfter).toEqual(files);
      await expectNoSandbox(node);
    });
  }

  describe('two sandboxes that want one host port', () => {
    test('R11: departs: both ADDs succeed, the newest gets the traffic, and a warning names the other', async () => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const { stderr } = await node.expectPlugin('ADD', netconf(c2, [port(8080)]), c2);
      const rules = await node.allRules();
      const newest = await answers(node, 8080);
      await node.expectPlugin('DEL', bareConf, c2);
      expect(newest, rules).toEqual(['c2', 'c2']);
      expect(stderr).toContain(c1.id);
      expect(stderr).toContain('network lab');
      expect(await answers(node, 8080)).toEqual(['c1', 'c1']);
    });

    test.each(
      fewerOnLegacy(variant, [
        { title: 'everywhere', first: port(8080), second: port(8080) },
        {
          title: 'everywhere and at one address',
          first: port(8080),
          second: port(8080, 'tcp', addresses.node.v4),
        },
        {
          title: 'at one address and everywhere',
          first: port(8080, 'tcp', addresses.node.v6),
          second: port(8080),
        },
        {
          title: 'at one address, spelled in two ways',
          first: port(8080, 'tcp', addresses.node.v6),
          second: port(8080, 'tcp', '2001:DB8:3:0::1'),
        },
      ]),
    )(
      'R11: with onConflict "fail" the second is refused with code 100 ($title)',
      async ({ first, second }) => {
        await node.expectPlugin('ADD', netconf(c1, [port(8070), first]), c1);
        const rules = await node.allRules();
        const files = await stateFiles(node);
        const conf = netconf(c2, [port(8090), second], { onConflict: 'fail' });
        const error = errorOf(await node.plugin('ADD', conf, c2));
        expect(error.code, error.msg).toBe(100);
        expect(error.msg).toContain(c1.id);
        expect(error.msg).toContain('network lab');
        expect(await node.allRules()).toBe(rules);
        expect(await stateFiles(node)).toEqual(files);
      },
    );

    test.each(
      fewerOnLegacy(variant, [
        { title: 'tcp and udp', first: [port(8080)], second: [port(8080, 'udp')] },
        {
          title: 'two host addresses',
          first: [port(8080, 'tcp', addresses.node.v4)],
          second: [port(8080, 'tcp', '198.51.100.11')],
        },
        {
          title: 'IPv4 and IPv6',
          first: [port(8080, 'tcp', '0.0.0.0')],
          second: [port(8080, 'tcp', '::')],
        },
      ]),
    )('R11: $title are no conflict', async ({ first, second }) => {
      await node.expectPlugin('ADD', netconf(c1, first, { onConflict: 'fail' }), c1);
      const conf = netconf(c2, second, { onConflict: 'fail' });
      const { stderr } = await node.expectPlugin('ADD', conf, c2);
      expect(stderr).not.toContain(c1.id);
      await node.expectPlugin('CHECK', netconf(c1, first), c1);
      await node.expectPlugin('CHECK', conf, c2);
    });

    test('R11: equal entries of one request become one, and a repeated ADD is no conflict with itself', async () => {
      const conf = netconf(c1, [port(8080), port(8080, 'TCP'), port(8080)], { onConflict: 'fail' });
      await node.expectPlugin('ADD', conf, c1);
      await node.expectPlugin('ADD', conf, c1);
      for (const family of families) {
        const rules = await node.rules(family);
        expect(count(rules, /-j DNAT/g), rules).toBe(1);
        expect(rules).toContain('--dports 8080 -j');
      }
    });

    test('R11: an entry that an earlier one of the request takes the packets of is named', async () => {
      const { node: own } = addresses;
      const shadowed = [port(8080), { ...port(8080, 'tcp', own.v4), containerPort: 81 }];
      const beside = [{ ...port(8080, 'tcp', own.v4), containerPort: 81 }, port(8080)];
      const warned = await node.expectPlugin('ADD', netconf(c1, shadowed), c1);
      const silent = await node.expectPlugin('ADD', netconf(c1, beside), c1);
      expect(warned.stderr).toContain(`${own.v4}:8080->81/tcp`);
      expect(silent.stderr).toBe('');
    });

    test('R11: of ten that come at once with onConflict "fail" exactly one gets the port', async () => {
      const ids = Array.from({ length: 10 }, (_, index) => ({ ...c1, id: `rival-${index}` }));
      const conf = netconf(c1, [port(8080)], { onConflict: 'fail' });
      const outcomes = await Promise.all(ids.map((target) => node.plugin('ADD', conf, target)));
      const rules = await node.rules('v4');
      expect(
        outcomes.filter(({ exitCode }) => exitCode === 0),
        rules,
      ).toHaveLength(1);
      for (const outcome of outcomes.filter(({ exitCode }) => exitCode !== 0))
        expect(errorOf(outcome).code).toBe(100);
      expect(count(rules, /-j DNAT/g), rules).toBe(1);
      expect(await stateFiles(node)).toHaveLength(1);
    });

    test('R11: a server of the node itself on the port is no reason to fail', async () => {
      const stop = await node.serve(undefined, { protocol: 'tcp', address: addresses.node.v4, port: 8080 });
      const conf = netconf(c1, [port(8080)], { onConflict: 'fail' });
      await node.expectPlugin('ADD', conf, c1);
      const taken = await answers(node, 8080);
      await node.expectPlugin('DEL', conf, c1);
      const back = await answers(node, 8080);
      await stop();
      expect(taken).toEqual(['c1', 'c1']);
      expect(back).toEqual(['node', undefined]);
    });
  });

  test('R12: a service address on the node is taken over as before, unless a condition spares it', async () => {
    const service = '10.96.0.1';
    await node.sh(
      `ip addr add ${service}/32 dev lo; iptables -t nat -N KUBE-SERVICES; iptables -t nat -A PREROUTING -j KUBE-SERVICES`,
    );
    const stop = await node.serve(undefined, { protocol: 'tcp', address: service, port: 8080 });
    await node.sh(`ip -n client route add ${service} via ${addresses.node.v4} || true`);
    const ask = async () =>
      (await node.probe('client', { protocol: 'tcp', address: service, port: 8080 }))?.name;
    const conditions = { conditionsV4: ['!', '-d', '10.96.0.0/16'] };
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const hooks = await chainRules(node, 'v4', 'PREROUTING');
    const hijacked = await ask();
    await node.expectPlugin('ADD', netconf(c1, [port(8080)], conditions), c1);
    const rules = await node.rules('v4');
    const spared = await ask();
    const own = await answers(node, 8080);
    await stop();
    await node.sh(`ip addr del ${service}/32 dev lo`);
    expect(hijacked, rules).toBe('c1');
    expect(spared, rules).toBe('node');
    expect(own, rules).toEqual(['c1', 'c1']);
    // What service rules decide must stay decided.
    expect(hooks.at(-1)).toContain('-j CNI-HOSTPORT-DNAT');
    expect(hooks.indexOf('-j KUBE-SERVICES')).toBe(1);
  });

  describe('after a firewall reload', () => {
    const reloads = [
      {
        title: 'everything',
        script: forBoth('$t -F; $t -X'),
        missing: ['PREROUTING', 'OUTPUT', 'POSTROUTING', 'CNI-HOSTPORT-DNAT', 'CNI-DN-'],
        total: true,
      },
      {
        title: 'the built-in chains',
        script: forBoth('for c in PREROUTING OUTPUT POSTROUTING; do $t -F $c; done'),
        missing: ['PREROUTING', 'OUTPUT', 'POSTROUTING'],
        total: false,
      },
      // What a restart of the service that loads the node's own nft rules does.
      ...(variant === 'nft'
        ? [
            {
              title: 'the whole ruleset of nft',
              script: 'nft flush ruleset',
              missing: ['PREROUTING', 'CNI-HOSTPORT-DNAT', 'CNI-DN-'],
              total: true,
            },
          ]
        : []),
    ];

    test.each(reloads)(
      'R13: CHECK says what is gone and DEL makes no noise ($title)',
      async ({ script, missing }) => {
        await node.expectPlugin('ADD', confOf(c1, 8080), c1);
        await node.sh(script);
        const check = errorOf(await node.plugin('CHECK', confOf(c1, 8080), c1));
        const del = await node.plugin('DEL', confOf(c1, 8080), c1);
        expect(check.code).toBeGreaterThanOrEqual(100);
        for (const piece of missing) expect(check.msg).toContain(piece);
        expect(del).toEqual({ exitCode: 0, stdout: '', stderr: '' });
        await expectNoSandbox(node);
      },
    );

    test.each(reloads)(
      'R13: an ADD of any sandbox puts the shared parts back ($title)',
      async ({ script, total }) => {
        await node.expectPlugin('ADD', confOf(c1, 8080), c1);
        await node.sh(script);
        await node.expectPlugin('ADD', confOf(c2, 8081), c2);
        const rules = await node.allRules();
        expect(await answers(node, 8081), rules).toEqual(['c2', 'c2']);
        await node.expectPlugin('CHECK', confOf(c2, 8081), c2);
        // What was the other's own comes back with its own ADD, or with reapply.
        if (!total) await node.expectPlugin('CHECK', confOf(c1, 8080), c1);
        for (const family of families)
          expect(count(await node.rules(family), /-j CNI-HOSTPORT-DNAT/g), rules).toBe(2);
      },
    );

    test.each(reloads)(
      'R13: reapply puts back every live sandbox and drops the dead ($title)',
      async ({ script }) => {
        const dead = { id: 'dead', netns: '/run/netns/dead', v4: '10.1.200.1', v6: '2001:db8:1::dead' };
        await node.sh('ip netns add dead');
        await node.expectPlugin('ADD', netconf(dead, [port(8089)]), dead);
        await node.expectPlugin('ADD', confOf(c1, 8080), c1);
        await node.expectPlugin('ADD', confOf(c2, 8081), c2);
        await node.sh(`ip netns del dead; ${script}`);
        const outcome = await node.run([portmapBin, 'reapply']);
        const rules = await node.allRules();
        expect(outcome, rules).toMatchObject({ exitCode: 0, stdout: expect.stringMatching(/2 .* 1 dead/) });
        expect(await answers(node, 8080), rules).toEqual(['c1', 'c1']);
        expect(await answers(node, 8081), rules).toEqual(['c2', 'c2']);
        expect(rules).not.toContain(sandboxChain('lab', dead.id));
        await node.expectPlugin('CHECK', confOf(c1, 8080), c1);
        await node.expectPlugin('CHECK', confOf(c2, 8081), c2);
        expect(await stateFiles(node)).toHaveLength(2);
      },
    );

    test('R13: reapply changes nothing where nothing is missing, and keeps the order of two owners', async () => {
      await node.expectPlugin('ADD', confOf(c1, 8080), c1);
      await node.expectPlugin('ADD', confOf(c2, 8080), c2);
      const rules = await node.allRules();
      await node.sh(`${portmapBin} reapply`);
      const again = await node.allRules();
      await node.sh(reloads[0]?.script ?? '');
      await node.sh(`${portmapBin} reapply`);
      expect(again).toBe(rules);
      expect(await answers(node, 8080), await node.allRules()).toEqual(['c2', 'c2']);
    });

    test('R13: reapply does not bring back what DEL has removed', async () => {
      await node.expectPlugin('ADD', confOf(c1, 8080), c1);
      await node.expectPlugin('DEL', confOf(c1, 8080), c1);
      await node.sh(`${portmapBin} reapply`);
      await expectNoSandbox(node);
    });
  });

  const results: { title: string; conf: Netconf }[] = [
    { title: 'no prevResult', conf: { prevResult: undefined } },
    { title: 'prevResult null', conf: { prevResult: null } },
    { title: 'an empty prevResult', conf: { prevResult: {} } },
    { title: 'a prevResult without cniVersion', conf: { prevResult: { ips: [{ address: '10.1.0.2/16' }] } } },
    {
      title: 'a prevResult with a broken address',
      conf: { prevResult: { cniVersion: '1.0.0', ips: [{ address: 'x/y' }] } },
    },
    { title: 'a prevResult of an unknown version', conf: { prevResult: { cniVersion: '9.9.9' } } },
    { title: 'a prevResult that is text', conf: { prevResult: 'lost' } },
  ];
  const settings: { title: string; conf: Netconf }[] = [
    { title: 'hostPort 0', conf: { runtimeConfig: { portMappings: [{ hostPort: 0, containerPort: 80 }] } } },
    {
      title: 'hostPort as text',
      conf: { runtimeConfig: { portMappings: [{ hostPort: '80', containerPort: 80 }] } },
    },
    {
      title: 'hostPort 70000',
      conf: { runtimeConfig: { portMappings: [{ hostPort: 70_000, containerPort: 80 }] } },
    },
    {
      title: 'protocol icmp',
      conf: { runtimeConfig: { portMappings: [{ hostPort: 8080, containerPort: 80, protocol: 'icmp' }] } },
    },
    { title: 'mappings that are text', conf: { runtimeConfig: { portMappings: 'all' } } },
    { title: 'runtimeConfig that is a list', conf: { runtimeConfig: [] } },
    { title: 'markMasqBit 99', conf: { markMasqBit: 99 } },
    { title: 'both mark options', conf: { markMasqBit: 9, externalSetMarkChain: 'KUBE-MARK-MASQ' } },
    { title: 'an unknown backend', conf: { backend: 'magic' } },
    { title: 'the nftables backend', conf: { backend: 'nftables' } },
    { title: 'conditions in the words of nft', conf: { conditionsV4: ['ip', 'saddr', '10.0.0.0/8'] } },
    { title: 'conditions that are text', conf: { conditionsV6: '-s ::/0' } },
    { title: 'snat as text', conf: { snat: 'maybe' } },
    { title: 'timeoutSeconds as text', conf: { timeoutSeconds: 'soon' } },
  ];
  // What DEL does not read cannot depend on the variant.
  test.each(fewerOnLegacy(variant, settings))(
    'R14: DEL succeeds and cleans with $title',
    async ({ conf }) => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      const outcome = await node.plugin('DEL', { ...netconf(c1, [port(8080)]), ...conf }, c1);
      expect(outcome).toMatchObject({ exitCode: 0, stdout: '' });
      await expectNoSandbox(node);
    },
  );

  test.each(fewerOnLegacy(variant, results))('R15: DEL succeeds and cleans with $title', async ({ conf }) => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const outcome = await node.plugin('DEL', { ...netconf(c1, [port(8080)]), ...conf }, c1);
    expect(outcome).toMatchObject({ exitCode: 0, stdout: '' });
    await expectNoSandbox(node);
  });

  const damages = [
    { title: 'empty', script: ': > $record' },
    { title: 'cut off', script: 'head -c 40 $record > /run/cut; cp /run/cut $record' },
    { title: 'of a format to come', script: `sed -i 's/"format":1/"format":2/' $record` },
    { title: 'another file that a link leads to', script: 'mv $record /run/moved; ln -s /run/moved $record' },
    { title: 'a dangling link', script: 'rm $record; ln -s /run/nowhere $record' },
    { title: 'the record of another sandbox', script: `sed -i 's/c1-0123/x-0123/' $record` },
  ];
  test.each(fewerOnLegacy(variant, damages))(
    'R15: DEL without mappings cleans when the record is $title',
    async ({ script }) => {
      await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
      await node.sh(`record=$(ls /run/portmap/*.record); ${script}`);
      const outcome = await node.plugin('DEL', bareConf, c1);
      expect(outcome).toMatchObject({ exitCode: 0, stdout: '' });
      await expectNoSandbox(node);
    },
  );

  test.each([
    { title: 'the record is gone', script: 'rm /run/portmap/*.record' },
    { title: 'the state folder is gone', script: 'rm -r /run/portmap' },
    { title: 'the record is empty', script: ': > $(ls /run/portmap/*.record)' },
  ])('R15: DEL with mappings cleans, and ADD replaces, when $title', async ({ script }) => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', netconf(c1, [port(8080), port(8081)]), c1);
    await node.sh(script);
    await node.expectPlugin('ADD', conf, c1);
    const replaced = await node.allRules();
    await node.sh(script);
    await node.expectPlugin('DEL', { ...conf, prevResult: undefined }, c1);
    expect(replaced).not.toMatch(/--dports? [\d,]*8081/);
    await expectNoSandbox(node);
  });

  test('R15: DEL succeeds without a network namespace, twice, and for a sandbox that never was', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('DEL', conf, c1, { netns: '' });
    await expectNoSandbox(node);
    await node.expectPlugin('DEL', conf, c1, { netns: '/run/netns/gone' });
    await node.expectPlugin('DEL', conf, c1, { containerId: 'never-seen' });
    await expectNoSandbox(node);
  });

  // The system's own iptables is of one variant; which one does not matter here.
  if (variant === 'nft') {
    test.each([
      { title: 'without the folders of administrators', path: '/usr/local/bin:/usr/bin:/bin' },
      { title: 'that leads nowhere', path: '/nonexistent' },
      { title: 'that is empty', path: '' },
      { title: 'that is relative', path: 'bin:.:sbin' },
    ])('R16: every verb works with a PATH $title', async ({ path }) => {
      const env = { PATH: path };
      const conf = netconf(c1, [port(8080)], { cniVersion: '1.1.0' });
      for (const verb of ['STATUS', 'ADD', 'CHECK'] as const)
        await node.expectPlugin(verb, conf, c1, { env });
      expect(await answers(node, 8080), await node.allRules()).toEqual(['c1', 'c1']);
      await node.expectPlugin('DEL', conf, c1, { env });
      await expectNoSandbox(node);
    });
  }

  test('R16: without any iptables ADD and STATUS name it, and DEL fails only for what is recorded', async () => {
    const conf = netconf(c1, [port(8080)], { cniVersion: '1.1.0' });
    await node.expectPlugin('ADD', conf, c1);
    const putBack = await hidePrograms(node, 'ip*tables* xtables*');
    const outcomes = {
      add: await node.plugin('ADD', netconf(c2, [port(8081)]), c2),
      status: await node.plugin('STATUS', conf, c1),
      recorded: await node.plugin('DEL', bareConf, c1),
      unknown: await node.plugin('DEL', netconf(c2, [port(8081)]), c2),
      none: await node.plugin('ADD', netconf(c2, []), c2),
    };
    await putBack();
    const files = await stateFiles(node);
    await node.expectPlugin('DEL', bareConf, c1);
    for (const error of [errorOf(outcomes.add), errorOf(outcomes.status)]) {
      expect(error.msg).toContain('iptables');
      for (const folder of ['/usr/sbin', '/sbin', '/usr/local/sbin', '/usr/bin'])
        expect(error.msg).toContain(folder);
    }
    expect(errorOf(outcomes.status).code).toBe(50);
    expect(errorOf(outcomes.recorded).code).toBe(11);
    expect(errorOf(outcomes.recorded).msg).not.toMatch(/not found|no such file/i);
    expect(outcomes.unknown).toMatchObject({ exitCode: 0, stdout: '' });
    expect(outcomes.none).toMatchObject({ exitCode: 0 });
    expect(files).toHaveLength(1);
    await expectNoSandbox(node);
  });

  test('R17: a sandbox of one family needs the tools of that family only; one of both fails whole', async () => {
    for (const family of families) {
      const only = { netns: c1.netns, [family]: c1[family] };
      const putBack = await hidePrograms(node, family === 'v4' ? 'ip6tables*' : 'iptables*');
      const conf = netconf(only, [port(8080)], { cniVersion: '1.1.0' });
      const single: Outcome[] = [];
      for (const verb of ['ADD', 'CHECK', 'STATUS', 'DEL'] as const)
        single.push(await node.plugin(verb, conf, c1));
      const dual = await node.plugin('ADD', netconf(c1, [port(8080)]), c1);
      const { stderr } = single[2] ?? { stderr: '' };
      await putBack();
      expect(single.map(({ exitCode, stdout }) => (exitCode === 0 ? 'ok' : stdout))).toEqual([
        'ok',
        'ok',
        'ok',
        'ok',
      ]);
      expect(stderr, 'STATUS').toContain(family === 'v4' ? 'ip6tables' : 'iptables');
      expect(errorOf(dual).msg).toContain(family === 'v4' ? 'ip6tables' : 'iptables');
      await expectNoSandbox(node);
    }
  });

  test('R17: what upstream has left in one family goes even when the other family has no tools', async () => {
    const conf = netconf(c1, [port(8080)]);
    await node.expectPlugin('ADD', conf, c1, { bin: upstreamBin });
    const putBack = await hidePrograms(node, 'ip6tables*');
    const outcome = await node.plugin('DEL', conf, c1);
    await putBack();
    expect(outcome).toMatchObject({ exitCode: 0, stdout: '' });
    expect(await node.rules('v4')).not.toContain('CNI-DN-');
  });
});
