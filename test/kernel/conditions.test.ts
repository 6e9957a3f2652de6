// What the words of conditionsV4 and conditionsV6 may do to a run of iptables-restore: nothing but narrow the rule.
import { expect, test } from 'vitest';
import { errorOf, expectNoSandbox, port } from '../footprint.ts';
import { netconf } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

describeVariants({}, ({ node, c1 }) => {
  test.each([
    ['ends the run with success before the commit', ['-h']],
    ['is the start of such an option', ['--vers']],
    ['makes the line be skipped in one family', ['-6']],
    ['runs a program', ['--modprobe', '/bin/true']],
    ['sets counters', ['-c', '1', '2']],
    ['jumps elsewhere', ['-j', 'ACCEPT']],
    ['is a name to look up', ['-d', 'localhost']],
    ['is an octal address', ['-d', '010.1.1.1']],
    ['only the kernel refuses, in any place', ['-m', 'cgroup', '--path', '/nowhere']],
    ['only the kernel refuses, for where the rule is reached from', ['-m', 'owner', '--uid-owner', '0']],
  ])('a word that %s is refused with code 7, and nothing is left', async (_, words) => {
    const before = await node.allRules();
    const outcome = await node.plugin('ADD', netconf(c1, [port(8080)], { conditionsV4: words }), c1);
    const error = errorOf(outcome);
    expect(error.code, error.msg).toBe(7);
    expect(error.msg).toContain('conditionsV4');
    expect(error.msg).not.toMatch(/: *$/);
    expect(await node.allRules()).toBe(before);
  });

  test('a rule that iptables does not know again by its text can still be replaced and removed', async () => {
    const conf = netconf(c1, [port(8080)], { conditionsV4: ['-m', 'recent', '--set'] });
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('ADD', conf, c1);
    expect((await node.rules('v4')).match(/-m recent --set/g)).toHaveLength(1);
    await node.expectPlugin('DEL', conf, c1);
    await expectNoSandbox(node);
  });

  test.each([
    [
      'a match whose option is the start of a command',
      ['-m', 'statistic', '--mode', 'random', '--probability', '0.5'],
    ],
    ['addresses with a mask and in a list', ['!', '-d', '10.0.0.0/255.0.0.0']],
    ['an interface', ['-i', 'ext0']],
  ])('%s is a condition, and CHECK knows it again', async (_, words) => {
    const conf = netconf(c1, [port(8080)], { conditionsV4: words });
    await node.expectPlugin('ADD', conf, c1);
    await node.expectPlugin('CHECK', conf, c1);
    await node.expectPlugin('DEL', conf, c1);
    await expectNoSandbox(node);
  });
});
