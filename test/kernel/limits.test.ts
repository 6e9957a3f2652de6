// A node at its limits, for real: no room for another process, and a wall clock that somebody sets.
import { existsSync, readFileSync } from 'node:fs';
import { mkdir, rmdir, writeFile } from 'node:fs/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { faultsOf, crowd, type Member, memberConf, ownRules } from '../crowd.ts';
import { errorOf, expectNoSandbox, holdXtablesLock, stateFiles } from '../footprint.ts';
import { type CallOptions, families, type LabNode, openNode, type Verb } from '../lab.ts';

let node: LabNode;
let own: Member;

beforeAll(async () => {
  node = await openNode({ variant: 'legacy' });
  await node.sh('ip netns add crowd');
  const [member] = crowd('limits', 1, '/run/netns/crowd');
  if (member === undefined) throw new Error('a crowd of none');
  own = member;
  // Shared chains, which stay, are made before anything is compared.
  await node.expectPlugin('ADD', memberConf(own), own);
  await node.expectPlugin('DEL', memberConf(own), own);
});
afterAll(() => node?.close());

const call = (verb: Verb, options: CallOptions = {}) =>
  node.plugin(verb, memberConf(own, { timeoutSeconds: 5 }), own, options);
const pause = (milliseconds: number) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const rulesOfAll = () => Promise.all(families.map((family) => ownRules(node, family)));

/** A cgroup of this test's own with a limit of processes and threads, of the first or the second kind of cgroups. */
async function openPidsGroup(): Promise<string> {
  const root = '/sys/fs/cgroup';
  const first = existsSync(`${root}/pids`);
  if (!first) {
    if (!readFileSync(`${root}/cgroup.controllers`, 'utf8').includes('pids'))
      throw new Error(`${root}: no pids controller, so no limit of processes can be set`);
    await writeFile(`${root}/cgroup.subtree_control`, '+pids');
  }
  const group = `${root}/${first ? 'pids/' : ''}portmap-test-${process.pid}`;
  await mkdir(group);
  return group;
}

describe('a limit of processes', () => {
  let group: string;
  beforeAll(async () => {
    group = await openPidsGroup();
  });
  afterAll(() => rmdir(group));

  test('however low, ADD and DEL do all or nothing, and can be repeated without it', async () => {
    const limited = { under: ['sh', '-c', `echo $$ > ${group}/cgroup.procs; exec "$0"`] };
    const before = await rulesOfAll();
    const seen = new Set<string>();
    for (const limit of [1, 3, 4, 5, 6, 8]) {
      await writeFile(`${group}/pids.max`, String(limit));
      const added = await call('ADD', limited);
      const said = `limit ${limit}: ${added.stdout}${added.stderr}\n${await node.allRules()}`;
      seen.add(String(added.exitCode));
      if (added.exitCode === 0) expect(await faultsOf(node, [own]), said).toEqual([]);
      else expect(await rulesOfAll(), said).toEqual(before);
      if (added.exitCode === 1)
        expect(errorOf(added)).toMatchObject({ code: 11, msg: expect.stringMatching(/EAGAIN/) });
      expect((await call('ADD')).exitCode, said).toBe(0);
      const removed = await call('DEL', limited);
      if (removed.exitCode === 0) expect(await rulesOfAll(), said).toEqual(before);
      else expect(await faultsOf(node, [own]), said).toEqual([]);
      expect((await call('DEL')).exitCode, said).toBe(0);
      expect(await rulesOfAll(), said).toEqual(before);
      expect(await stateFiles(node), said).toEqual([]);
    }
    // Too few for the runtime itself, too few for iptables, enough: all three were met.
    expect([...seen].toSorted()).toEqual(['0', '1', '128']);
  });
});

describe('a wall clock that is set while a call waits', () => {
  const library = '/usr/lib/$LIB/faketime/libfaketimeMT.so.1';
  const clock = '/run/clock';
  const onThatClock = {
    env: {
      LD_PRELOAD: library,
      DONT_FAKE_MONOTONIC: '1',
      FAKETIME_NO_CACHE: '1',
      FAKETIME_TIMESTAMP_FILE: clock,
    },
  };
  const set = (to: string) => writeFile(`${node.root}${clock}`, `${to}\n`);

  test.each(['+400d', '-400d'])('(%s) changes nothing of how long it waits', async (jump) => {
    await set('+0d');
    const release = await holdXtablesLock(node);
    const started = performance.now();
    const waits = node.plugin('ADD', memberConf(own, { timeoutSeconds: 2 }), own, onThatClock);
    await pause(700);
    await set(jump);
    const error = errorOf(await waits);
    const took = performance.now() - started;
    release();
    expect(error).toMatchObject({ code: 11, msg: expect.stringMatching(/xtables lock/) });
    expect(took).toBeGreaterThan(1_800);
    expect(took).toBeLessThan(4_500);
    await expectNoSandbox(node);
  });

  test.each(['+400d', '-400d'])('(%s) takes no lock from it, and its work is done', async (jump) => {
    await set('+0d');
    const release = await holdXtablesLock(node);
    const waits = call('ADD', onThatClock);
    await pause(500);
    await set(jump);
    const next = call('DEL', onThatClock);
    await pause(500);
    release();
    expect((await waits).exitCode).toBe(0);
    expect((await next).exitCode).toBe(0);
    await expectNoSandbox(node);
    expect(await stateFiles(node)).toEqual([]);
  });
});
