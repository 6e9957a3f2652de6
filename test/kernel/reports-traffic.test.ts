// Field reports, part A: traffic that silently goes to the wrong place, because rules or flows of a sandbox outlive it.
// Each test is named after its report; REPORTS.md lists them all.
import { existsSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { expect, test } from 'vitest';
import {
  answers,
  bareConf,
  count,
  errorOf,
  holdXtablesLock,
  port,
  sandboxChain,
  stateFiles,
} from '../footprint.ts';
import { addresses, families, netconf, portmapBin, upstreamBin } from '../lab.ts';
import { describeVariants } from '../nodes.ts';
import { sendSctp } from '../sctp.ts';

describeVariants({ serving: ['tcp'] }, ({ variant, node, c1, c2 }) => {
  /** A sandbox at an address where nobody is. */
  const ghost = { id: 'ghost', netns: '/run/netns/ghost', v4: '10.1.200.1', v6: '2001:db8:1::dead' };

  test("R01: a dead sandbox's rule does not shadow the live one", async () => {
    await node.sh('ip netns add ghost');
    await node.expectPlugin('ADD', netconf(ghost, [port(8080), port(8081)]), ghost);
    const before = await node.allRules();
    await node.sh('ip netns del ghost');
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const after = await node.allRules();
    const chain = sandboxChain('lab', ghost.id);
    expect(before).toContain(chain);
    expect(after).not.toContain(chain);
    expect(await answers(node, 8080), after).toEqual(['c1', 'c1']);
    expect(await stateFiles(node)).toHaveLength(1);
    await node.expectPlugin('CHECK', netconf(c1, [port(8080)]), c1);
  });

  test('R01: a rule of unknown owner does not shadow the live one, and its owner is named', async () => {
    const conf = netconf(ghost, [port(8080)]);
    await node.expectPlugin('ADD', conf, ghost, { bin: upstreamBin });
    const { stderr } = await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1);
    const rules = await node.allRules();
    expect(await answers(node, 8080), rules).toEqual(['c1', 'c1']);
    expect(stderr).toContain(ghost.id);
    // Nothing proves that it is dead.
    expect(rules).toContain(sandboxChain('lab', ghost.id));
  });

  test('R01: CHECK of a sandbox fails when an earlier rule takes its port', async () => {
    const confs = [c1, c2].map((container) => netconf(container, [port(8080)]));
    await node.expectPlugin('ADD', confs[0] ?? '', c1);
    await node.expectPlugin('CHECK', confs[0] ?? '', c1);
    await node.expectPlugin('ADD', confs[1] ?? '', c2);
    const shadowed = errorOf(await node.plugin('CHECK', confs[0] ?? '', c1));
    expect(shadowed.code).toBeGreaterThanOrEqual(100);
    expect(shadowed.msg).toContain(sandboxChain('lab', c2.id));
    await node.expectPlugin('CHECK', confs[1] ?? '', c2);
  });

  test.each([
    { form: 'no runtimeConfig', runtimeConfig: undefined },
    { form: 'runtimeConfig null', runtimeConfig: null },
    { form: 'an empty runtimeConfig', runtimeConfig: {} },
    { form: 'portMappings null', runtimeConfig: { portMappings: null } },
    { form: 'empty portMappings', runtimeConfig: { portMappings: [] } },
  ])('R02: DEL with $form removes what ADD has made', async ({ runtimeConfig }) => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080), port(5300, 'udp')]), c1);
    await node.expectPlugin('DEL', { ...netconf(c1, []), runtimeConfig }, c1);
    const rules = await node.allRules();
    expect(rules).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT/);
    expect(await stateFiles(node)).toEqual([]);
  });

  test('R02: departs: DEL without mappings of a sandbox without a record does nothing, whoever made its rules', async () => {
    await node.expectPlugin('ADD', netconf(c1, [port(8080)]), c1, { bin: upstreamBin });
    const rules = await node.allRules();
    // As cheap as report R07 asks, even while the lock is held; GC and any ADD on the port still find the rules.
    const release = variant === 'legacy' ? await holdXtablesLock(node) : () => {};
    const start = performance.now();
    const outcome = await node.plugin('DEL', bareConf, c1);
    const took = performance.now() - start;
    release();
    expect(outcome).toEqual({ exitCode: 0, stdout: '', stderr: '' });
    expect(took).toBeLessThan(1_000);
    expect(await node.allRules()).toBe(rules);
  });

  test('R03: an ADD that was killed half-way leaves all or nothing, and its retry only the new address', async () => {
    const mappings = [port(8080), port(8081), port(8082)];
    // Holds the transaction back, so that the kill hits the call while its child is at work.
    await node.wrapTool(
      'iptables-restore',
      `text=$(cat)
       case $text in *DNAT--to*|*"-j DNAT"*) touch /run/reached; sleep 0.5 ;; esac
       printf '%s\\n' "$text" | exec $REAL "$@"`,
    );
    const call = node.start([portmapBin], {
      env: {
        PATH: `${node.toolFolder}:/usr/sbin:/usr/bin`,
        CNI_COMMAND: 'ADD',
        CNI_CONTAINERID: c1.id,
        CNI_NETNS: c1.netns,
        CNI_IFNAME: 'eth0',
        CNI_PATH: '/opt/cni/bin',
      },
    });
    call.stdin?.end(JSON.stringify(netconf({ ...c1, v4: '10.1.200.1', v6: '2001:db8:1::dead' }, mappings)));
    for (let tries = 0; tries < 200 && !existsSync(`${node.root}/run/reached`); tries += 1) await sleep(20);
    call.kill('SIGKILL');
    await node.sh('rm /run/reached');
    await node.unwrapTool('iptables-restore');
    await node.expectPlugin('ADD', netconf(c1, mappings), c1);
    const retried = await node.allRules();
    // Longer than what the killed call has left behind can still run.
    await sleep(600);
    const rules = await node.allRules();
    expect(rules).toBe(retried);
    expect(rules).not.toContain('10.1.200.1');
    expect(count(await node.rules('v4'), /-j DNAT/g), rules).toBe(3);
    expect(await answers(node, 8081), rules).toEqual(['c1', 'c1']);
    await node.expectPlugin('CHECK', netconf(c1, mappings), c1);
  });

  test.each(families)(
    'R05 and R06: an SCTP flow goes to the newest sandbox, and ends with it (%s)',
    async (family) => {
      const mapping = { hostPort: 9999, containerPort: 9998, protocol: 'sctp' };
      const to = { family, address: addresses.node[family], port: 9999 };
      // An association that nobody answers is forgotten after three seconds.
      await node.sh('echo 60 > /proc/sys/net/netfilter/nf_conntrack_sctp_timeout_cookie_wait');
      const flows = () =>
        node.sh(`conntrack -L -p sctp -f ${family === 'v4' ? 'ipv4' : 'ipv6'} 2>/dev/null || true`);
      await node.expectPlugin('ADD', netconf(c2, [mapping]), c2);
      await sendSctp(node, 'client', to, 'c2');
      const stale = await flows();
      await node.expectPlugin('ADD', netconf(c1, [mapping]), c1);
      const arrived = await sendSctp(node, 'client', to, 'c1');
      const during = await flows();
      await node.expectPlugin('DEL', bareConf, c1);
      const after = await flows();
      expect(stale, 'the flow must be tracked for the case to mean anything').toContain(`src=${c2[family]} `);
      expect(arrived, during).toEqual({ from: 4000, to: 9998 });
      expect(during).toContain(`src=${c1[family]} `);
      expect(after).not.toContain(`src=${c1[family]} `);
    },
  );

  test.each([
    { what: 'fails', script: 'echo "conntrack: out of luck" >&2; exit 3', says: 'out of luck' },
    { what: 'is not executable', script: undefined, says: 'conntrack' },
  ])('R05 and R06: a conntrack that $what is a warning on ADD and on DEL', async ({ script, says }) => {
    const conf = netconf(c1, [port(5300, 'udp')]);
    const tool = `${node.toolFolder}/conntrack`;
    if (script === undefined) await node.sh(`rm ${tool}; mount --bind /dev/null /usr/sbin/conntrack`);
    else await node.sh(`rm ${tool}; cat > ${tool}; chmod 755 ${tool}`, { input: `#!/bin/sh\n${script}\n` });
    const outcomes = [await node.plugin('ADD', conf, c1), await node.plugin('DEL', conf, c1)];
    if (script === undefined) await node.sh('umount /usr/sbin/conntrack');
    await node.sh(`ln -sf /usr/sbin/conntrack ${tool}`);
    for (const { exitCode, stdout, stderr } of outcomes) {
      expect(exitCode, stdout).toBe(0);
      expect(stderr).toContain('warning');
      expect(stderr).toContain(says);
    }
    expect(await node.allRules()).not.toContain('CNI-DN-');
  });
});
