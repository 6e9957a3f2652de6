// A state folder as people and killed calls leave it: odd things in the place of its files, parts of it gone, locks that
// nobody holds. Every DEL still removes the rules, in the stated time, and says so only then.
import { mkdir, writeFile } from 'node:fs/promises';
import { setTimeout as pause } from 'node:timers/promises';
import { describe, expect, test } from 'vitest';
import { staleMs } from '../../src/lock.ts';
import { processId, uptimeMs } from '../../src/process.ts';
import { crowd, faultsOf, memberConf, startCall, until } from '../crowd.ts';
import { bareConf, holdXtablesLock, sandboxChain, stateFiles } from '../footprint.ts';
import { describeNode, describeVariants } from '../nodes.ts';

const [own, neighbour] = crowd('odd', 2, '/run/netns/c1');
if (own === undefined || neighbour === undefined) throw new Error('two sandboxes are needed');
const hash = sandboxChain('lab', own.id).slice('CNI-DN-'.length);

// Most of their time is waiting, so the suites run beside each other.
describe.concurrent('odd things', () => {
  describeNode('in the state folder:', { variant: 'nft' }, ({ node }) => {
    test.each([
      { name: 'no queue', script: 'rmdir queue' },
      { name: 'a queue that is a file', script: 'rmdir queue; echo > queue' },
      { name: 'a folder as a request that is taken', script: `mkdir -p queue/${hash}.taken/deep` },
      { name: 'a folder as a request', script: `mkdir queue/${hash}.request` },
      { name: "folders as another sandbox's request", script: 'mkdir queue/0123456789abcdef01234.taken' },
      { name: 'a request that says nothing', script: `echo '{' > queue/${hash}.request` },
      { name: 'a pipe as record', script: `rm ${hash}.record; mkfifo ${hash}.record` },
      { name: 'a folder as record', script: `rm ${hash}.record; mkdir -p ${hash}.record/deep` },
      { name: 'a file as lock', script: `echo > ${hash}.lock` },
      { name: 'a lock with something in it', script: `mkdir ${hash}.lock; echo > ${hash}.lock/x` },
      { name: 'a file as commit lock', script: 'echo > commit.lock' },
      { name: 'a commit lock with something in it', script: 'mkdir -p commit.lock/deep' },
      { name: "a folder as the name of a lock's holder", script: 'mkdir -p commit.holder/deep' },
      {
        name: 'a record of nothing',
        script: `sed -i 's/"attachments":.*/"attachments":[]}/' ${hash}.record`,
      },
      {
        name: 'a record of no family',
        script: `sed -i 's/"families":[^]]*]/"families":[]/' ${hash}.record`,
      },
    ])('with $name a DEL without mappings removes the rules, and ADD and DEL go on', async ({ script }) => {
      const conf = memberConf(own, { timeoutSeconds: 15 });
      await node.expectPlugin('ADD', conf, own);
      await node.sh(`cd /run/portmap; ${script}`);
      await node.expectPlugin('DEL', { ...bareConf, timeoutSeconds: 15 }, own);
      expect(await faultsOf(node, [])).toEqual([]);
      await node.expectPlugin('ADD', conf, own);
      expect(await faultsOf(node, [own])).toEqual([]);
      await node.expectPlugin('DEL', conf, own);
      expect(await faultsOf(node, [])).toEqual([]);
      if (!script.includes('echo > queue')) expect(await stateFiles(node)).toEqual([]);
    });
  });
});

describe.concurrent('locks', () => {
  const ticks = String(Math.round(uptimeMs() / 10));
  const namespace = processId('self')?.namespace;
  describeNode(
    'with a lock that nobody holds, the last of many short calls has it in the stated time:',
    { variant: 'nft' },
    ({ node }) => {
      test.each([
        { name: 'one without a name', holder: undefined, boundMs: 4000 },
        {
          name: 'one of another pid namespace',
          holder: { pid: 1, started: ticks, namespace: 'pid:[1]' },
          boundMs: staleMs,
        },
        {
          name: 'one of a process that is gone',
          holder: { pid: 999_999_999, started: ticks, namespace },
          boundMs: 0,
        },
      ])('$name', { timeout: 60_000 }, async ({ holder, boundMs }) => {
        await node.expectPlugin('ADD', memberConf(own), own);
        await mkdir(`${node.root}/run/portmap/commit.lock`);
        if (holder !== undefined)
          await writeFile(`${node.root}/run/portmap/commit.holder`, JSON.stringify([holder]));
        const started = performance.now();
        const isGone = async () =>
          (await node.plugin('DEL', memberConf(own, { timeoutSeconds: 1 }), own)).exitCode === 0;
        expect(await until(isGone, staleMs + 10_000)).toBe(true);
        const took = performance.now() - started;
        expect(took).toBeGreaterThan(boundMs - 500);
        expect(await faultsOf(node, [])).toEqual([]);
        expect(await stateFiles(node)).toEqual([]);
      });
    },
  );
});

describe.concurrent('scripts', () => {
  describeVariants({}, ({ node, variant }) => {
    // It does not become the program that it runs, and on nft, which has no lock to wait for, waits by itself.
    const script =
      variant === 'legacy'
        ? '$REAL "$@"'
        : `if [ "$1" = --version ]; then exec $REAL "$@"; fi
         text=$(cat)
         case $text in *--to-destination*) mkdir /run/slow; sleep 2 ;; esac
         printf '%s\\n' "$text" | $REAL "$@"`;
    const isWaiting = async (): Promise<boolean> =>
      (await node.run(['test', '-d', '/run/slow'])).exitCode === 0;

    test.each(['SIGTERM', 'SIGKILL'] as const)(
      'what an ADD has started through a script changes nothing after a later DEL (%s)',
      async (signal) => {
        await node.expectPlugin('ADD', memberConf(neighbour), neighbour);
        await node.wrapTool('iptables-restore', script);
        const free = variant === 'legacy' ? await holdXtablesLock(node) : () => {};
        const { child, end } = startCall(node, { verb: 'ADD', member: own });
        if (variant === 'nft') expect(await until(isWaiting, 5000)).toBe(true);
        else await pause(1000);
        child.kill(signal);
        const { exitCode, stdout } = await end;
        if (signal === 'SIGTERM') expect(JSON.parse(stdout)).toMatchObject({ code: 11 });
        else expect(exitCode).toBe(null);
        setTimeout(free, 1500);
        await node.expectPlugin('DEL', bareConf, own);
        await pause(2500);
        await node.unwrapTool('iptables-restore');
        await node.sh('rm -rf /run/slow');
        expect(await faultsOf(node, [neighbour])).toEqual([]);
      },
    );
  });
});
