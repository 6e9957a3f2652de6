// The reboot storm: hundreds of calls at once beside a huge table and a contended lock, killed at any moment. However
// it goes, few transactions do the work of many calls, every wait ends, and what is left is what the last calls want.
//
// PORTMAP_TEST_LONG=1 kills four times as many calls and repeats more cycles.
import { readdir } from 'node:fs/promises';
import { afterEach, describe, expect, test } from 'vitest';
import { staleMs } from '../../src/lock.ts';
import {
  type Call,
  childrenOf,
  crowd,
  faultsOf,
  type Member,
  memberConf,
  queuedCalls,
  type Running,
  runCrowd,
  seededRandom,
  startCall,
  until,
} from '../crowd.ts';
import { errorOf, holdXtablesLock, sandboxChain, stateFiles } from '../footprint.ts';
import { families, type LabNode } from '../lab.ts';
import { describeVariants } from '../nodes.ts';

const isLong = (process.env['PORTMAP_TEST_LONG'] ?? '') !== '';
const serviceRules = 40_000;
/** What a loaded machine may add to any time that is stated. */
const slackMs = 10_000;

const chain = (number: number): string => `KUBE-SVC-${number.toString(16).toUpperCase().padStart(16, '0')}`;
/** A table as kube-proxy leaves it on a big cluster: chains of twenty rules, each reached by a service address. */
const serviceTable = (): string => {
  const numbers = Array.from({ length: serviceRules / 20 }, (_, index) => index);
  return [
    '*nat',
    ':KUBE-SERVICES - [0:0]',
    ...numbers.map((number) => `:${chain(number)} - [0:0]`),
    '-A PREROUTING -j KUBE-SERVICES',
    ...numbers.flatMap((number) => [
      `-A KUBE-SERVICES -d 10.96.${number >> 8}.${number & 255}/32 -p tcp -m tcp --dport 443 -j ${chain(number)}`,
      ...Array.from({ length: 19 }, (_, pod) => `-A ${chain(number)} -s 10.${pod}.0.0/16 -j ACCEPT`),
    ]),
    'COMMIT',
    '',
  ].join('\n');
};

const complaints = (
  outcomes: readonly { exitCode: number | null; stdout: string; stderr: string }[],
): string[] =>
  outcomes
    .filter(({ exitCode }) => exitCode !== 0)
    .map(({ exitCode, stdout, stderr }) => `exit ${exitCode}: ${stdout}${stderr}`);

const calls = (verb: 'ADD' | 'DEL', members: readonly Member[]): Call[] =>
  members.map((member) => ({ verb, member }));

type Step = { readonly name: string; readonly argv: readonly string[] };
/** The first so many calls of one kind, each as the step before which strace kills the caller. */
const nth = (call: string, count: number): Step[] =>
  Array.from({ length: count }, (_, index) => ({
    name: `${call} ${index + 1}`,
    argv: ['-e', `trace=${call}`, '-e', `inject=${call}:signal=SIGKILL:when=${index + 1}`],
  }));

/** The steps of a call at which files change hands, and what lets strace kill the call before each. */
const steps = (state: (step: number) => string): Step[] => {
  const all = [
    ...nth('rename', 9),
    ...nth('unlink', 11),
    ...nth('vfork', 4),
    ...nth('mkdir', 3),
    ...nth('rmdir', 2),
  ];
  return [
    ...all,
    // Threads count for themselves: the second of two locks is found by its name.
    ...['mkdir', 'rmdir'].map((call, index) => ({
      name: `${call} of the commit lock`,
      argv: [
        '-P',
        `${state(all.length + index)}/commit.lock`,
        '-e',
        `trace=${call}`,
        '-e',
        `inject=${call}:signal=SIGKILL`,
      ],
    })),
  ];
};

const folderOf = (verb: string, step: number): string => `/run/killed/${verb}-${step}`;

const cycle = async (node: LabNode, member: Member): Promise<void> => {
  for (const verb of ['ADD', 'DEL'] as const) await node.expectPlugin(verb, memberConf(member), member);
};

/** What the plugin's calls have an effect on. */
const footprint = async (node: LabNode) => ({
  rules: await Promise.all(families.map((family) => node.rules(family))),
  files: (await readdir(`${node.root}/run/portmap`, { recursive: true })).toSorted(),
  // Blocks and inodes of the private /run.
  space: (await node.sh('stat -f -c "%f %d" /run')).trim(),
});

const everybody = crowd('storm', 151, '/run/netns/c1');

describeVariants({}, ({ variant, node }) => {
  afterEach(async () => {
    for (const tool of ['iptables-restore', 'ip6tables-restore']) await node.unwrapTool(tool);
  });

  const expectState = async (mapped: readonly Member[]): Promise<void> => {
    expect(await faultsOf(node, mapped)).toEqual([]);
    const files = await stateFiles(node);
    expect(files.filter((name) => !name.endsWith('.record'))).toEqual([]);
    expect(files).toHaveLength(mapped.length);
  };

  /**
   * Notes each transaction, and makes it wait while the gate is shut: who commits stands still then, and all others
   * queue up.
   */
  const watchGate = async (): Promise<{ count: () => Promise<number>; shut: () => Promise<() => void> }> => {
    await node.sh('rm -f /run/commits; touch /run/commits /run/gate');
    for (const tool of ['iptables-restore', 'ip6tables-restore'])
      await node.wrapTool(
        tool,
        `text=$(cat)
         case $text in *'-A '*|*'-D '*|*'-X '*) echo one >> /run/commits; flock /run/gate true ;; esac
         printf '%s\\n' "$text" | $REAL "$@"`,
      );
    return {
      count: async () => Number(await node.sh('wc -l < /run/commits')),
      shut: async () => {
        const holder = node.start(['flock', '--no-fork', '/run/gate', 'sleep', '60']);
        await until(async () => (await node.run(['flock', '-n', '/run/gate', 'true'])).exitCode !== 0, 5_000);
        return () => holder.kill('SIGKILL');
      },
    };
  };

  test(`a hundred sandboxes come, half of them go while as many come, and all go, beside ${serviceRules} rules: few transactions do it all`, async () => {
    await node.sh('iptables-restore --noflush', { input: serviceTable() });
    const gate = await watchGate();
    const [first, stay, come] = [0, 50, 100].map((from) => everybody.slice(from, from + 50));
    if (first === undefined || stay === undefined || come === undefined) throw new Error('too few sandboxes');

    const adds = await runCrowd(node, calls('ADD', [...first, ...stay]));
    const added = await gate.count();
    expect(complaints(adds)).toEqual([]);
    await expectState([...first, ...stay]);

    const mixed = await runCrowd(
      node,
      come.flatMap((member, index) => [
        ...calls('ADD', [member]),
        ...calls('DEL', first.slice(index, index + 1)),
      ]),
    );
    const changed = await gate.count();
    expect(complaints(mixed)).toEqual([]);
    await expectState([...stay, ...come]);

    // As after a reboot: nobody gets on until all of them wait.
    const open = await gate.shut();
    const [dels, all] = await Promise.all([
      runCrowd(node, calls('DEL', [...stay, ...come])),
      until(async () => (await queuedCalls(node)) === 100, 30_000).finally(open),
    ]);
    const deleted = await gate.count();
    expect(complaints(dels)).toEqual([]);
    expect(all).toBe(true);
    await expectState([]);

    // Each is one taking of the xtables lock in the legacy variant, one for each family in each batch. Calls that start
    // over seconds are done in some batches; those that wait, in two: of who came first, and of all the others.
    expect(added).toBeLessThanOrEqual(20);
    expect(changed - added).toBeLessThanOrEqual(20);
    expect(deleted - changed).toBeLessThanOrEqual(4);
  }, 120_000);

  test('of fifty that are committed together, the one that iptables refuses fails alone, with its own error', async () => {
    const members = everybody.slice(0, 50);
    const refused = members[23];
    if (refused === undefined) throw new Error('too few sandboxes');
    const gate = await watchGate();
    const open = await gate.shut();
    const options = { conditionsV4: ['-m', 'nosuchmatch'] };
    const [outcomes] = await Promise.all([
      runCrowd(
        node,
        members.map((member) => ({
          verb: 'ADD' as const,
          member,
          ...(member === refused ? { options } : {}),
        })),
      ),
      until(async () => (await queuedCalls(node)) === 50, 20_000).finally(open),
    ]);
    const own = outcomes[members.indexOf(refused)];
    if (own === undefined) throw new Error('an outcome is missing');
    expect(complaints(outcomes.filter((outcome) => outcome !== own))).toEqual([]);
    const error = errorOf(own);
    expect(`${error.msg} ${error.details}`).toContain('nosuchmatch');
    expect(error.code, error.msg).not.toBe(11);
    await expectState(members.filter((member) => member !== refused));
  });

  test('calls from several pid namespaces are committed together, and each gets its own answer', async () => {
    const members = everybody.slice(0, 30);
    const refused = members.slice(10, 20);
    const missing = { externalSetMarkChain: 'MISSING' };
    const mixed = members.map((member, index) => ({
      verb: 'ADD' as const,
      member,
      isApart: index % 2 === 0,
      ...(refused.includes(member) ? { options: missing } : {}),
    }));
    const outcomes = await runCrowd(node, mixed);
    for (const [index, outcome] of outcomes.entries())
      if (index >= 10 && index < 20)
        expect(errorOf(outcome).msg, `call ${index}`).toContain('externalSetMarkChain');
      else expect(outcome.exitCode, outcome.stdout + outcome.stderr).toBe(0);
    await expectState(members.filter((member) => !refused.includes(member)));
    const gone = await runCrowd(
      node,
      members.map((member, index) => ({ verb: 'DEL', member, isApart: index % 2 === 1 })),
    );
    expect(complaints(gone)).toEqual([]);
    await expectState([]);
  });

  test('a call that is told to end while it waits ends at once, with one error, and leaves nothing', async () => {
    const members = everybody.slice(0, 6);
    const gate = await watchGate();
    const open = await gate.shut();
    // The first stands still in its transaction; the others wait for it.
    const calling: Running[] = [];
    for (const [index, member] of members.entries()) {
      calling.push(startCall(node, { verb: 'ADD', member }));
      await until(async () => (await queuedCalls(node)) === index + 1, 10_000);
    }
    const ends: { readonly outcome: Awaited<Running['end']>; readonly took: number }[] = [];
    // Two that wait, then the first, then who has taken over from it with all requests in its hands, and so on.
    for (const index of [1, 4, 0, 2, 5]) {
      const [call] = calling.slice(index);
      if (call === undefined) throw new Error('a call is missing');
      const asked = performance.now();
      call.child.kill(index % 2 === 0 ? 'SIGTERM' : 'SIGINT');
      ends.push({ outcome: await call.end, took: performance.now() - asked });
      await new Promise((resolve) => setTimeout(resolve, 150));
    }
    open();
    const stayed = await calling[3]?.end;
    for (const { outcome } of ends)
      expect(errorOf({ ...outcome, exitCode: outcome.exitCode ?? 128 })).toMatchObject({ code: 11 });
    const times = ends.map(({ took }) => took);
    expect(Math.max(...times.slice(0, 2)), String(times)).toBeLessThan(1_500);
    // Who commits has to see first what it has done, and to look after what the others have left.
    expect(Math.max(...times), String(times)).toBeLessThan(7_000);
    expect(stayed).toMatchObject({ exitCode: 0 });
    await expectState(members.slice(3, 4));
  });

  test('calls that are told to end at any moment have done all or nothing', async () => {
    const random = seededRandom(11);
    const members = everybody.slice(0, 12);
    let usual = 400;
    for (const verb of ['ADD', 'DEL'] as const) {
      expect(complaints(await runCrowd(node, calls(verb === 'ADD' ? 'DEL' : 'ADD', members)))).toEqual([]);
      const ended = await Promise.all(
        members.map(async (member) => {
          const { child, end } = startCall(node, { verb, member });
          const timer = setTimeout(() => child.kill('SIGTERM'), usual * 1.2 * random());
          const outcome = await end;
          clearTimeout(timer);
          return { member, ...outcome };
        }),
      );
      usual = Math.max(...ended.map(({ milliseconds }) => milliseconds));
      // A signal that comes before the program is ready for it ends it like any program: without a word.
      for (const { exitCode, stdout, stderr } of ended)
        if (exitCode !== null && exitCode !== 0)
          expect(JSON.parse(stdout), stderr).toMatchObject({ code: 11 });
      const done = ended.filter(({ exitCode }) => exitCode === 0).map(({ member }) => member);
      if (verb === 'ADD') await expectState(done);
      else {
        const left = (await faultsOf(node, [])).join('\n');
        for (const { id } of done) expect(left).not.toContain(sandboxChain('lab', id));
      }
    }
    expect(complaints(await runCrowd(node, calls('DEL', members)))).toEqual([]);
    await expectState([]);
  });

  describe('a call that is killed', () => {
    // The steps are about files, which the variants share. Each has a state folder of its own, so that locks left
    // without a name are waited for side by side.
    if (variant === 'nft')
      test('before any of its steps leaves nothing that the next call does not clear up', async () => {
        await node.sh('rm -rf /run/killed; mkdir /run/killed');
        // The shared chains are there: calls with different state folders do not wait for each other.
        expect(complaints(await runCrowd(node, calls('ADD', everybody.slice(-1))))).toEqual([]);
        expect(complaints(await runCrowd(node, calls('DEL', everybody.slice(-1))))).toEqual([]);
        let next = 0;
        const jobs = (['ADD', 'DEL'] as const).flatMap((verb) =>
          steps((step) => `${folderOf(verb, step)}/run/portmap`).map((step, index) => {
            const member = everybody[next++];
            if (member === undefined) throw new Error('too few sandboxes');
            return { verb, member, ...step, folder: folderOf(verb, index) };
          }),
        );
        const found = await Promise.all(
          jobs.map(async ({ verb, member, name, argv, folder }) => {
            const env = { PORTMAP_STATE_DIR: `${folder}/run/portmap` };
            const conf = memberConf(member);
            if (verb === 'DEL') await node.expectPlugin('ADD', conf, member, { env, timeout: 60_000 });
            const first = await node.plugin(verb, conf, member, {
              env,
              under: ['/usr/bin/strace', '-f', '-qq', '-o', '/dev/null', ...argv],
              timeout: 60_000,
            });
            const started = performance.now();
            const second = await node.plugin('DEL', conf, member, { env, timeout: 60_000 });
            const took = performance.now() - started;
            const files = await stateFiles({ ...node, root: `${node.root}${folder}` });
            const isRight = second.exitCode === 0 && files.length === 0 && took < staleMs + slackMs;
            return {
              isKilled: first.exitCode >= 128,
              problem: isRight
                ? undefined
                : `${verb}, ${name}: exit ${second.exitCode} after ${Math.round(took)} ms, left: ${files.join(' ')} ${second.stdout}`,
            };
          }),
        );
        expect(found.flatMap(({ problem }) => problem ?? [])).toEqual([]);
        // Not every call has all the steps, but most have most.
        expect(found.filter(({ isKilled }) => isKilled).length).toBeGreaterThan(jobs.length / 2);
        expect(await faultsOf(node, [])).toEqual([]);
      }, 150_000);

    test('leaves an ADD that was under way unable to come after the DEL', async () => {
      const [leader, follower] = everybody;
      if (leader === undefined || follower === undefined) throw new Error('too few sandboxes');
      const gate = await watchGate();
      const open = await gate.shut();
      const first = startCall(node, { verb: 'ADD', member: leader });
      await until(async () => (await queuedCalls(node)) === 1, 10_000);
      const second = startCall(node, { verb: 'ADD', member: follower });
      await until(async () => (await queuedCalls(node)) === 2, 10_000);
      // The programs that the killed have started go on, with all of their input.
      first.child.kill('SIGKILL');
      second.child.kill('SIGKILL');
      await Promise.all([first.end, second.end]);
      const dels = [leader, follower].map((member) => startCall(node, { verb: 'DEL', member }));
      await new Promise((resolve) => setTimeout(resolve, 300));
      open();
      expect(complaints(await Promise.all(dels.map(({ end }) => end)))).toEqual([]);
      await expectState([]);
      // Longer than a program that was left behind may wait for the lock.
      await new Promise((resolve) => setTimeout(resolve, 1_000));
      await expectState([]);
    });

    test(
      'in a storm, leader or follower, over and over, does no harm to the others or to its repetition',
      async () => {
        const wanted = isLong ? 250 : 60;
        const random = seededRandom(20_261_130);
        const members = everybody.slice(0, 16);
        const end = performance.now() + (isLong ? 400_000 : 25_000);
        const busy = node.start([
          'sh',
          '-c',
          `iptables -w 5 -t nat -N FOREIGN
         while :; do
           flock /run/xtables.lock sleep 0.1
           iptables -w 5 -t nat -A FOREIGN -j RETURN
           iptables -w 5 -t nat -D FOREIGN -j RETURN
           sleep 0.1
         done`,
        ]);
        const tally = { calls: 0, killed: 0, children: 0 };
        const failures: string[] = [];
        let usual = 300;
        /** The longest that a call was kept: by its own commit, and by locks of the dead. */
        let longest = 0;
        const worker = async (member: Member): Promise<void> => {
          while (tally.killed < wanted && performance.now() < end) {
            const verb = random() < 0.5 ? 'ADD' : 'DEL';
            const { child, end: ended } = startCall(node, { verb, member });
            tally.calls += 1;
            let isChild = false;
            const timer =
              random() < 0.7
                ? setTimeout(
                    () => {
                      const children = child.pid === undefined ? [] : childrenOf(child.pid);
                      isChild = children.length > 0 && random() < 0.5;
                      if (!isChild) child.kill('SIGKILL');
                      for (const one of isChild ? children.slice(0, 1) : []) killProcess(one);
                    },
                    usual * 1.2 * random(),
                  )
                : undefined;
            const { exitCode, stdout, stderr, milliseconds } = await ended;
            clearTimeout(timer);
            longest = Math.max(longest, milliseconds);
            if (isChild) tally.children += 1;
            if (exitCode === null) tally.killed += 1;
            else if (exitCode === 0) usual += (Math.min(milliseconds, 2_000) - usual) / 10;
            else failures.push(`${verb} ${member.id}: exit ${exitCode}: ${stdout}${stderr}`);
          }
        };
        await Promise.all(members.map(worker));
        busy.kill('SIGKILL');
        const mapped = members.filter(() => random() < 0.5);
        const started = performance.now();
        const last = await runCrowd(
          node,
          members.map((member) => ({
            verb: mapped.includes(member) ? ('ADD' as const) : ('DEL' as const),
            member,
          })),
        );
        const took = performance.now() - started;
        if (isLong) console.log(variant, tally, Math.round(usual), Math.round(longest), Math.round(took));
        expect(failures).toEqual([]);
        expect(complaints(last)).toEqual([]);
        await expectState(mapped);
        expect(tally.killed, JSON.stringify(tally)).toBeGreaterThan(wanted / 4);
        expect(took).toBeLessThan(2 * staleMs + slackMs);
        expect(complaints(await runCrowd(node, calls('DEL', members)))).toEqual([]);
        await expectState([]);
      },
      isLong ? 600_000 : 150_000,
    );
  });

  test(
    'after many cycles of ADD and DEL the tables and the folder are as after the first',
    async () => {
      const cycles = isLong ? 1_000 : 20;
      const members = everybody.slice(0, 5);
      for (const member of members) await cycle(node, member);
      const before = await footprint(node);
      const one = async (member: Member): Promise<void> => {
        for (let count = 0; count < cycles / members.length; count += 1) await cycle(node, member);
      };
      await Promise.all(members.map(one));
      expect(await footprint(node)).toEqual(before);
    },
    isLong ? 600_000 : 120_000,
  );

  if (variant === 'legacy')
    test('while another program keeps the xtables lock, every verb returns in its time, and the repeat succeeds', async () => {
      const options = { timeoutSeconds: 2, cniVersion: '1.1.0' as const };
      const [old, stale, ...others] = everybody.slice(0, 12);
      if (old === undefined || stale === undefined) throw new Error('too few sandboxes');
      for (const member of [old, stale]) await node.expectPlugin('ADD', memberConf(member, options), member);
      const release = await holdXtablesLock(node);
      const garbage = {
        ...memberConf(old, { ...options }),
        'cni.dev/valid-attachments': [old, ...others].map(({ id }) => ({ containerID: id, ifname: 'eth0' })),
      };
      const started = performance.now();
      const blocked = await Promise.all([
        runCrowd(
          node,
          others.map((member) => ({ verb: 'ADD' as const, member, options })),
        ),
        node.plugin('DEL', memberConf(old, options), old),
        node.plugin('GC', garbage, old),
      ]);
      const took = performance.now() - started;
      const looking = await Promise.all([
        node.plugin('CHECK', memberConf(old, options), old),
        node.plugin('STATUS', memberConf(old, options), old),
      ]);
      release();
      for (const outcome of blocked.flat()) {
        const error = errorOf(outcome);
        expect(error.code, error.msg).toBe(11);
        expect(error.msg).toMatch(/lock/);
      }
      expect(
        blocked
          .flat()
          .map(({ stdout }) => stdout)
          .join(''),
      ).toContain('/run/xtables.lock');
      expect(took).toBeLessThan(2_000 + slackMs / 2);
      // These only look, and need no lock.
      expect(complaints(looking)).toEqual([]);
      // What the calls could not take back while the lock was kept, the next one that commits does.
      expect(await faultsOf(node, [old, stale])).toEqual([]);
      await node.expectPlugin('GC', garbage, old);
      expect(
        complaints(
          await runCrowd(
            node,
            others.map((member) => ({ verb: 'ADD' as const, member, options })),
          ),
        ),
      ).toEqual([]);
      await expectState([old, ...others]);
    });
});

function killProcess(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // It has ended by itself.
  }
}
