// Faults of the node: programs that are missing, hang, die or talk nonsense, a state folder that can't be used, streams
// that are closed or never end, a clock that jumps, a system out of processes or files. The call returns the right
// code in time, leaves nothing half-done and its neighbour alone, and its repetition succeeds once the fault is gone.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdir, readFile, rm, utimes, writeFile } from 'node:fs/promises';
import { beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { staleMs } from '../../src/lock.ts';
import { crowd, faultsOf, type Member, memberConf, queuedCalls, startCall, until } from '../crowd.ts';
import { bareConf, errorOf, hidePrograms, sandboxChain, stateFiles, wrapRestore } from '../footprint.ts';
import {
  type CallOptions,
  type LabNode,
  type Netconf,
  type Outcome,
  portmapBin,
  prevResult,
  type Variant,
  variants,
  type Verb,
} from '../lab.ts';
import { describeNode } from '../nodes.ts';

/** What a call comes to: done, or one of these codes with a message that says why. */
type End = 'done' | { readonly codes: readonly number[]; readonly says: RegExp };

type Fault = {
  readonly name: string;
  /** Brings the fault about; gives what takes it away. */
  readonly arrange: (node: LabNode) => Promise<() => Promise<void>>;
  readonly add: End;
  readonly del: End;
  /** Whether anything was done is never known: the record stays, so that any DEL looks. */
  readonly isUnknown?: boolean;
  /** Standard error names the trouble although the call succeeds. */
  readonly warns?: RegExp;
  readonly call?: CallOptions;
};

/** The programs of one family, or of both, do as the script says; `$text` is their input, `$1` their first argument. */
const broken =
  (script: string, tools: readonly string[]) =>
  async (node: LabNode): Promise<() => Promise<void>> => {
    for (const tool of tools) await node.wrapTool(tool, script);
    return async () => {
      await node.sh('rm -rf /run/once');
      for (const tool of tools) await node.unwrapTool(tool);
    };
  };
const restores = ['iptables-restore', 'ip6tables-restore'];
/** The script where the input changes something; otherwise the program is as ever. */
const onChange = (script: string): string =>
  `text=$(cat)
   case $text in *'-A '*|*'-D '*) ${script} ;; esac
   printf '%s\\n' "$text" | exec $REAL "$@"`;
const onRead = (script: string): string =>
  `case "$*" in *version*) exec $REAL "$@" ;; esac
   text=$(cat)
   case $text in *'-A '*|*'-D '*) printf '%s\\n' "$text" | exec $REAL "$@" ;; esac
   ${script}`;
const readers: Record<Variant, readonly string[]> = {
  nft: ['iptables-restore'],
  legacy: ['iptables-restore', 'iptables-save'],
};

const tryAgain = (says: RegExp): End => ({ codes: [11], says });
const bothTryAgain = (says: RegExp) => ({ add: tryAgain(says), del: tryAgain(says) });
const bothDone = { add: 'done', del: 'done' } as const;

const programFaults = (variant: Variant): Fault[] => [
  {
    name: 'no iptables at all',
    arrange: (node) => hidePrograms(node, '*tables*'),
    add: { codes: [50], says: /iptables/ },
    del: tryAgain(/iptables/),
  },
  {
    name: 'an iptables-restore that can not be run',
    arrange: async (node) => {
      await node.sh(
        `cd ${node.toolFolder} && rm iptables-restore && printf '#!/run/nowhere\\n' > iptables-restore && chmod 755 iptables-restore`,
      );
      return () => node.unwrapTool('iptables-restore');
    },
    add: { codes: [50, 11], says: /iptables-restore/ },
    del: tryAgain(/iptables-restore/),
  },
  {
    name: 'an iptables-restore that nobody may execute, beside another one',
    arrange: async (node) => {
      await node.sh(`cd ${node.toolFolder} && rm iptables-restore && echo > iptables-restore`);
      return () => node.unwrapTool('iptables-restore');
    },
    ...bothDone,
  },
  // Each variant has trouble in another family, the first or the second to be committed, and hangs at another point.
  ...[variant === 'nft' ? 'iptables-restore' : 'ip6tables-restore'].flatMap((tool): Fault[] => [
    variant === 'nft'
      ? {
          name: `${tool} that hangs before its commit`,
          arrange: broken(onChange('exec sleep 30'), [tool]),
          // On a busy machine the look at what was done may not end in its moment.
          isUnknown: true,
          ...bothTryAgain(/time/),
        }
      : {
          name: `${tool} that hangs after its commit`,
          arrange: broken(onChange(`printf '%s\\n' "$text" | $REAL "$@"; exec sleep 30`), [tool]),
          isUnknown: true,
          ...bothTryAgain(/time/),
        },
    {
      name: `${tool} that is killed after its commit`,
      arrange: broken(onChange(`printf '%s\\n' "$text" | $REAL "$@"; kill -9 $$`), [tool]),
      isUnknown: true,
      ...bothTryAgain(/SIGKILL|time/),
    },
    {
      name: `${tool} that is killed once`,
      arrange: broken(onChange('if mkdir /run/once 2>/dev/null; then kill -9 $$; fi'), [tool]),
      ...bothDone,
    },
    {
      name: `${tool} that is always killed`,
      arrange: broken(onChange('kill -9 $$'), [tool]),
      ...bothTryAgain(/SIGKILL|time/),
    },
    {
      name: `${tool} with exit status 4, once`,
      arrange: broken(onChange('if mkdir /run/once 2>/dev/null; then exit 4; fi'), [tool]),
      ...bothDone,
    },
    {
      name: `${tool} with exit status 4, for ever`,
      arrange: broken(onChange('exit 4'), [tool]),
      ...bothTryAgain(/ip6?tables-restore|time/),
    },
  ]),
  ...runFaults(variant),
  {
    name: 'a read that hangs',
    arrange: broken(onRead('exec sleep 30'), readers[variant]),
    ...bothTryAgain(/time/),
  },
  {
    name: 'a read that is garbage',
    arrange: broken(onRead('head -c 30000 /dev/urandom; exit 0'), readers[variant]),
    ...bothTryAgain(/iptables/),
  },
  {
    name: 'a read that is garbage without end',
    arrange: broken(onRead('exec yes "-A PREROUTING -j GARBAGE"'), readers[variant]),
    ...bothTryAgain(/time|iptables/),
  },
  {
    name: 'a read that is empty',
    arrange: broken(onRead('exit 0'), readers[variant]),
    ...bothTryAgain(/iptables/),
  },
  {
    name: 'no nat table for IPv6',
    arrange: broken(
      `case "$*" in *version*) exec $REAL "$@" ;; esac
       echo "ip6tables v1.8.9: can't initialize ip6tables table \\\`nat': Table does not exist (do you need to insmod?)" >&2
       exit 3`,
      ['ip6tables-restore', 'ip6tables-save'],
    ),
    add: { codes: [50], says: /nat table/ },
    del: tryAgain(/nat table/),
  },
];

/** Of a run that reads and commits. */
function runFaults(variant: Variant): Fault[] {
  const tool = variant === 'nft' ? 'ip6tables-restore' : 'iptables-restore';
  const run =
    (script: { readonly before?: string; readonly after?: string }) =>
    async (node: LabNode): Promise<() => Promise<void>> => {
      await wrapRestore(node, { variant, tool, ...script });
      return async () => {
        await node.sh('rm -rf /run/once');
        await node.unwrapTool(tool);
      };
    };
  return [
    {
      name: `a run of ${tool} that hangs before its commit`,
      arrange: run({ before: 'exec sleep 30' }),
      isUnknown: true,
      ...bothTryAgain(/time/),
    },
    {
      name: `a run of ${tool} that hangs after its commit`,
      arrange: run({ after: 'sleep 30' }),
      isUnknown: true,
      ...bothTryAgain(/time/),
    },
    {
      name: `a run of ${tool} that is always killed`,
      arrange: run({ before: 'kill -9 0' }),
      ...bothTryAgain(/SIGKILL|time/),
    },
    {
      name: `a run of ${tool} that is killed once`,
      arrange: run({ before: 'if mkdir /run/once 2>/dev/null; then kill -9 0; fi' }),
      ...bothDone,
    },
    {
      name: `a run of ${tool} that is killed once after its commit`,
      arrange: run({ after: 'if mkdir /run/once 2>/dev/null; then kill -9 0; fi' }),
      ...bothDone,
    },
    {
      name: `a run of ${tool} that keeps what it prints`,
      arrange: async (node) => {
        const repair = await run({})(node);
        await node.sh(`sed -i 's/"$@"$/"$@" | { sleep 20; cat; }/' ${node.toolFolder}/${tool}`);
        return repair;
      },
      ...bothTryAgain(/time/),
    },
  ];
}

const stateFaults: Fault[] = [
  {
    name: 'a state folder that is read-only',
    arrange: mounted('tmpfs -o ro'),
  },
  {
    name: 'a state folder without room for a file',
    arrange: mounted('tmpfs -o nr_inodes=2'),
  },
  {
    name: 'a state folder that is full',
    arrange: mounted('tmpfs -o size=4k', 'head -c 4096 /dev/zero > /run/portmap/fill'),
  },
  {
    name: 'a state folder that is a file',
    arrange: replaced('echo > /run/portmap'),
  },
  {
    name: 'a state folder that is a link to nowhere',
    arrange: replaced('ln -s /run/nowhere /run/portmap'),
  },
  {
    name: "a state folder that is another user's",
    arrange: replaced('mkdir /run/portmap; chown 1234 /run/portmap'),
  },
  {
    name: 'a state folder that others can write',
    arrange: replaced('mkdir -m 777 /run/portmap'),
  },
].map((fault) => ({ ...fault, ...bothDone, warns: /state folder/ }));

function mounted(type: string, then = ':') {
  return async (node: LabNode): Promise<() => Promise<void>> => {
    await node.sh(`mkdir -p /run/portmap; mount -t ${type} state /run/portmap; ${then}`);
    return async () => {
      await node.sh('umount /run/portmap');
    };
  };
}

function replaced(script: string) {
  return async (node: LabNode): Promise<() => Promise<void>> => {
    await node.sh(`mv /run/portmap /run/portmap.kept; ${script}`);
    return async () => {
      await node.sh('rm -rf /run/portmap; mv /run/portmap.kept /run/portmap');
    };
  };
}

/** Runs the plugin under shell text in which it is `"$0"`. */
const shell = (text: string): CallOptions => ({ under: ['/bin/bash', '-c', text] });
/** Makes a system call of the plugin itself fail. */
const injected = (call: string, error: string): CallOptions => ({
  under: [
    '/usr/bin/strace',
    '-f',
    '-qq',
    '-o',
    '/dev/null',
    '-e',
    `trace=${call}`,
    '-e',
    `inject=${call}:error=${error}`,
  ],
});
const limited = (limit: string): CallOptions => ({ under: ['/usr/bin/prlimit', limit] });
const nothing = async (): Promise<() => Promise<void>> => async () => {};

const systemFaults: Fault[] = [
  {
    name: 'no process can be started',
    arrange: nothing,
    call: injected('vfork', 'EAGAIN'),
    ...bothTryAgain(/EAGAIN|temporarily/),
  },
];

const withFlows = (member: Member): Netconf => ({
  ...memberConf(member, { timeoutSeconds: 3 }),
  runtimeConfig: { portMappings: [{ hostPort: 5353, containerPort: 53, protocol: 'udp' }] },
});

const lockFolder = (node: LabNode): string => `${node.root}/run/portmap/commit.lock`;

/** The sandbox that the calls are for, and one that nothing may happen to. */
const [own, neighbour] = crowd('fault', 2, '/run/netns/c1');
if (own === undefined || neighbour === undefined) throw new Error('two sandboxes are needed');

const conf = (options: Netconf = {}): Netconf => memberConf(own, { timeoutSeconds: 3, ...options });

// A result, and warnings, of more than a pipe takes.
const wordy = (options: Netconf = {}): Netconf => ({
  ...conf({ timeoutSeconds: 2, ...options }),
  runtimeConfig: {
    portMappings: Array.from({ length: 1500 }, (_, index) => ({
      hostPort: 9000 + index,
      containerPort: 80,
      hostIP: '::1',
      protocol: 'tcp',
    })),
  },
  prevResult: { ...prevResult(own), padding: 'x'.repeat(300_000) },
});
const nonBlocking = (stream: string): string =>
  `perl -MFcntl -e 'fcntl(${stream}, F_SETFL, O_NONBLOCK); exec @ARGV' "$0"`;

const callEnvironment = (node: LabNode): Record<string, string> => ({
  PATH: `${node.toolFolder}:/usr/bin:/bin`,
  CNI_COMMAND: 'ADD',
  CNI_CONTAINERID: own.id,
  CNI_NETNS: own.netns,
  CNI_IFNAME: 'eth0',
  CNI_PATH: '/opt/cni/bin',
});

/** An ADD whose stdin stays open in the middle of the netconf. */
const callWithOpenStdin = (node: LabNode) => {
  const [file, ...args] = node.enter([portmapBin]);
  const child = spawn(file, args, { stdio: 'pipe', env: callEnvironment(node) });
  child.stdin.write('{"cniVersion": "1.0.0",');
  let stdout = '';
  child.stdout.setEncoding('utf8').on('data', (data: string) => (stdout += data));
  return { child, end: once(child, 'close').then(() => JSON.parse(stdout)) };
};

type Suite = {
  readonly node: LabNode;
  /** The call, which must come to its end in time. */
  readonly call: (verb: Verb, end: End, fault?: Partial<Fault>, input?: Netconf | string) => Promise<Outcome>;
  /** Fails unless rules and files are as they were before the test. */
  readonly expectAsBefore: (said?: string) => Promise<void>;
  /** ADD and DEL under the fault, each followed by its repetition without it. */
  readonly survive: (fault: Fault) => Promise<void>;
};

/**
 * Tests that are about one subject, on a node with a neighbour that nothing may happen to. Most of their time is
 * waiting, so the suites run beside each other, each on a node of its own.
 */
const suite = (variant: Variant, subject: string, body: (suite: Suite) => void): void => {
  describe.concurrent(`iptables-${variant}`, () => {
    describeNode(subject, { variant }, ({ node }) => {
      let before: { rules: string; files: string[] };
      beforeEach(async () => {
        await node.expectPlugin('ADD', memberConf(neighbour), neighbour);
        before = await footprint();
      });

      const footprint = async () => ({ rules: await node.allRules(), files: await stateFiles(node) });
      const expectAsBefore: Suite['expectAsBefore'] = async (said) =>
        expect(await footprint(), said).toEqual(before);

      const call: Suite['call'] = async (verb, end, fault = {}, input) => {
        const started = performance.now();
        // A call that can't succeed is to give up soon; one that can is not to fail for a busy machine.
        const outcome = await node.plugin(
          verb,
          input ?? conf(end === 'done' ? { timeoutSeconds: 20 } : {}),
          own,
          fault.call,
        );
        const took = performance.now() - started;
        const said = `${verb}: exit ${outcome.exitCode}: ${outcome.stdout}${outcome.stderr}`;
        if (end === 'done') {
          expect(outcome.exitCode, said).toBe(0);
          if (fault.warns !== undefined) expect(outcome.stderr, said).toMatch(fault.warns);
        } else {
          const error = errorOf(outcome);
          expect(end.codes, said).toContain(error.code);
          expect(`${error.msg} ${error.details ?? ''}`).toMatch(end.says);
          expect(`${error.msg} ${error.details ?? ''}`).not.toContain('please report');
        }
        // Three seconds of the call, some to put things back, and what a loaded machine adds.
        expect(took, said).toBeLessThan(12_000);
        return outcome;
      };

      const survive: Suite['survive'] = async (fault) => {
        const repairs: (() => Promise<void>)[] = [];
        const under = async (verb: Verb, end: End): Promise<void> => {
          repairs.push(await fault.arrange(node));
          try {
            await call(verb, end, fault);
          } finally {
            await repairs.pop()?.();
          }
        };
        const neighbourLines = async (): Promise<string[]> =>
          (await node.allRules())
            .split('\n')
            .filter((line) => line.includes(sandboxChain('lab', neighbour.id)));
        const untouched = await neighbourLines();
        await under('ADD', fault.add);
        if (fault.add === 'done') expect(await faultsOf(node, [own, neighbour])).toEqual([]);
        else {
          const after = await footprint();
          // Where nobody can say what was done, a busy machine may not get to put it back either. Then the record has to
          // stay, which leads any DEL to it, and the neighbour's rules too.
          if (fault.isUnknown !== true) expect(after).toEqual(before);
          else if (after.rules !== before.rules) {
            expect(after.files).toEqual(expect.arrayContaining(before.files));
            expect(after.files.length, after.rules).toBeGreaterThan(before.files.length);
            expect(await neighbourLines()).toEqual(untouched);
          }
        }
        await call('ADD', 'done');
        await call('CHECK', 'done');
        await under('DEL', fault.del);
        // All of it is gone, or all of it is there: rules that are left must be found again.
        await call('DEL', 'done', {}, fault.del === 'done' ? undefined : bareConf);
        expect(await footprint()).toEqual(before);
      };

      body({ node, call, expectAsBefore, survive });
    });
  });
};

for (const variant of variants) {
  suite(variant, 'programs:', ({ survive }) => {
    test.each(programFaults(variant))('$name', survive);
  });
}

// What the variants have in common is asked of one: files, flows and streams are no matter of tables.
suite('nft', 'streams:', ({ node, call, expectAsBefore }) => {
  /** Begun first, because it takes its half minute beside the other tests. */
  let patient: ReturnType<typeof callWithOpenStdin>;
  beforeAll(() => {
    patient = callWithOpenStdin(node);
  });

  test('stdin that is closed, empty, ten megabytes of nothing or without end is refused, and nothing is touched', async () => {
    for (const text of [
      '"$0" <&-',
      'true | "$0"',
      'head -c 10000000 /dev/zero | "$0"',
      'cat /dev/zero 2>/dev/null | "$0"',
      '"$0" < /run',
    ]) {
      await call('ADD', { codes: [5, 6], says: /stdin|JSON/ }, { call: shell(`set -o pipefail; ${text}`) });
      await expectAsBefore(text);
    }
  });

  test('a netconf of ten megabytes is read', async () => {
    // More time than the other calls get: what is asked is whether it is read, not how fast.
    const large = conf({ timeoutSeconds: 30, padding: 'x'.repeat(10_000_000) });
    await call('ADD', 'done', {}, large);
    expect(await faultsOf(node, [own, neighbour])).toEqual([]);
    await call('DEL', 'done', {}, large);
    await expectAsBefore();
  });

  test.each(['"$0" >&-', '"$0" > /dev/full', '"$0" > >(exec true)', '"$0" >&- 2>&-', '"$0" 2> /dev/full'])(
    'an ADD that can not say what it did (%s) has done all or nothing, as its exit status tells, and the repetition succeeds',
    async (text) => {
      const outcome = await node.plugin('ADD', conf(), own, shell(text));
      expect(outcome.exitCode, outcome.stderr).toBeLessThan(2);
      if (outcome.exitCode === 0) expect(await faultsOf(node, [own, neighbour])).toEqual([]);
      else await expectAsBefore();
      await call('ADD', 'done');
      await call('DEL', 'done');
      await expectAsBefore();
    },
  );

  test.each([
    { name: 'a pipe', text: '"$0"' },
    { name: 'a pipe that is not to be waited for', text: nonBlocking('STDOUT') },
  ])('an ADD whose result nobody reads from $name ends in its time and leaves nothing', async ({ text }) => {
    const input = { ...conf({ timeoutSeconds: 2 }), prevResult: wordy()['prevResult'] };
    const outcome = await node.plugin('ADD', input, own, shell(`${text} | sleep 5; exit \${PIPESTATUS[0]}`));
    expect(outcome, outcome.stderr).toMatchObject({ exitCode: 1 });
    expect(outcome.stderr).toContain("can't write the result: nobody has read it in time");
    await expectAsBefore();
  });

  test('an ADD whose warnings nobody reads says that it succeeded, in its time', async () => {
    const started = performance.now();
    const text = '"$0" 2> >(exec sleep 14 >/dev/null 2>&1) > /run/result; echo $?; cat /run/result';
    const outcome = await node.plugin('ADD', wordy({ timeoutSeconds: 15 }), own, shell(text));
    expect(outcome.stdout).toMatch(/^0\n\{/);
    expect(performance.now() - started).toBeLessThan(13_000);
    await call('DEL', 'done');
    await expectAsBefore();
  });

  test('an ADD whose result nobody reads from a socket ends at once when it is told to end, and leaves nothing', async () => {
    const [file, ...args] = node.enter([portmapBin]);
    const child = spawn(file, args, { stdio: 'pipe', env: callEnvironment(node) });
    child.stdin.end(JSON.stringify({ ...conf({ timeoutSeconds: 30 }), prevResult: wordy()['prevResult'] }));
    const ended = once(child, 'exit');
    expect(
      await until(async () => (await node.rules('v4')).includes(sandboxChain('lab', own.id)), 5000),
    ).toBe(true);
    await new Promise((resolve) => setTimeout(resolve, 500));
    const started = performance.now();
    child.kill('SIGTERM');
    expect(await ended).toEqual([1, null]);
    expect(performance.now() - started).toBeLessThan(4000);
    await expectAsBefore();
  });

  test('stdin that is not to be waited for is waited for', async () => {
    const text = `{ head -c 100; sleep 0.5; cat; } | ${nonBlocking('STDIN')}`;
    await call('ADD', 'done', { call: shell(text) });
    await call('DEL', 'done', { call: shell(nonBlocking('STDIN')) });
    await expectAsBefore();
  });

  test('stdin that is never closed ends the call by itself, or at once when it is told to end', async () => {
    const told = callWithOpenStdin(node);
    await new Promise((resolve) => setTimeout(resolve, 1_000));
    const started = performance.now();
    told.child.kill('SIGTERM');
    expect(await told.end).toMatchObject({ code: 11 });
    expect(performance.now() - started).toBeLessThan(1_500);
    expect(await patient.end).toMatchObject({ code: 5 });
    await expectAsBefore();
  });
});

suite('nft', 'a conntrack that', ({ node, call, expectAsBefore }) => {
  test.each([
    { name: 'is missing', arrange: (lab: LabNode) => hidePrograms(lab, 'conntrack*') },
    { name: 'hangs', arrange: broken('exec sleep 30', ['conntrack']) },
    { name: 'fails', arrange: broken('echo "Operation failed" >&2; exit 1', ['conntrack']) },
    {
      name: 'prints garbage without end',
      arrange: broken('exec yes "udp src= dst= dport=x"', ['conntrack']),
    },
  ])('$name costs a warning and no more', async ({ arrange }) => {
    const repair = await arrange(node);
    await call('ADD', 'done', { warns: /conntrack/ }, withFlows(own));
    const added = await node.rules('v4');
    await call('DEL', 'done', { warns: /conntrack/ }, withFlows(own));
    await repair();
    await node.sh(`ln -sf /usr/sbin/conntrack ${node.toolFolder}/conntrack`);
    expect(added).toContain(sandboxChain('lab', own.id));
    await expectAsBefore();
  });
});

suite('nft', 'a conntrack that does not end,', ({ node, call, expectAsBefore }) => {
  const flows = { runtimeConfig: withFlows(own)['runtimeConfig'], timeoutSeconds: 30 };
  const told = async (verb: Verb, env: Record<string, string> = {}) => {
    const { child, end } = startCall(node, { verb, member: own, options: flows }, env);
    expect(await until(async () => (await node.run(['test', '-d', '/run/asked'])).exitCode === 0, 5000)).toBe(
      true,
    );
    const started = performance.now();
    child.kill('SIGTERM');
    const outcome = await end;
    expect(performance.now() - started).toBeLessThan(3500);
    await node.sh('rm -rf /run/asked');
    return outcome;
  };

  test('ends with a call that is told to end, which has done its work or leaves nothing', async () => {
    await broken('mkdir -p /run/asked; exec sleep 30', ['conntrack'])(node);
    const added = await told('ADD');
    expect(added, added.stderr).toMatchObject({ exitCode: 0 });
    expect(await node.rules('v4')).toContain(sandboxChain('lab', own.id));
    const deleted = await told('DEL');
    expect(deleted, deleted.stderr).toMatchObject({ exitCode: 0 });
    await expectAsBefore();
    await node.sh(`ln -sf /usr/sbin/conntrack ${node.toolFolder}/conntrack`);
    await call('DEL', 'done');
  });
});

suite('nft', 'files:', ({ node, call, expectAsBefore, survive }) => {
  test.each(stateFaults)('$name', survive);

  test.each([
    { name: 'cut off', damage: (text: string) => text.slice(0, text.length / 2) },
    { name: 'empty', damage: () => '' },
    { name: 'of a newer format', damage: (text: string) => text.replace('"format":1', '"format":99') },
    { name: 'of another sandbox', damage: (text: string) => text.replaceAll(/fault-\d/g, 'someone') },
    { name: 'no text', damage: () => '\0'.repeat(5_000) },
  ])('a record that is $name keeps neither ADD, CHECK nor DEL from their work', async ({ damage }) => {
    const damageRecord = async (): Promise<void> => {
      const path = `${node.root}/run/portmap/${sandboxChain('lab', own.id).slice('CNI-DN-'.length)}.record`;
      const text = await readFile(path, 'utf8');
      const damaged = damage(text);
      expect(damaged).not.toBe(text);
      await writeFile(path, damaged);
    };
    await call('ADD', 'done');
    await damageRecord();
    await call('CHECK', 'done');
    await call('ADD', 'done');
    expect(await faultsOf(node, [own, neighbour])).toEqual([]);
    await damageRecord();
    await call('DEL', 'done', {}, bareConf);
    await expectAsBefore();
  });
});

for (const variant of variants) {
  suite(variant, 'the system:', ({ node, call, expectAsBefore, survive }) => {
    test.each(systemFaults)('$name', survive);

    test('few open files: whatever the limit, a call does all or nothing, says so in JSON, and can be repeated', async () => {
      const ends = new Set<string>();
      for (const limit of [5, 7, 9, 11, 13, 15, 17, 20, 64]) {
        for (const verb of ['ADD', 'DEL'] as const) {
          const outcome = await node.plugin(verb, conf(), own, limited(`--nofile=${limit}`));
          ends.add(`${outcome.exitCode}`);
          const said = `${limit} files: exit ${outcome.exitCode}: ${outcome.stdout}${outcome.stderr}`;
          if (outcome.exitCode === 0) continue;
          const { code, msg } = errorOf(outcome);
          expect([5, 11, 50], said).toContain(code);
          expect(msg, said).not.toBe('');
          if (verb === 'ADD') await expectAsBefore(said);
        }
        await call('DEL', 'done');
        await expectAsBefore();
      }
      expect([...ends].toSorted()).toEqual(['0', '1']);
    });

    describe('a clock that jumps', () => {
      if (variant === 'nft')
        test('back leaves no lock of a dead call standing for longer than stated', async () => {
          // As a call leaves it that was killed before it had put its name to the lock, an hour from now.
          await mkdir(lockFolder(node));
          const soon = Date.now() / 1000 + 3600;
          await utimes(lockFolder(node), soon, soon);
          const started = performance.now();
          await node.expectPlugin('ADD', memberConf(own), own, { timeout: staleMs + 20_000 });
          expect(performance.now() - started).toBeLessThan(staleMs + 5_000);
          await call('DEL', 'done');
          await expectAsBefore();
        });

      test('ahead, and so takes the lock away from a living call, spoils neither its work nor that of the next', async () => {
        const repair = await broken(
          onChange('if mkdir /run/once 2>/dev/null; then sleep 2; fi'),
          restores,
        )(node);
        const slow = startCall(node, { verb: 'ADD', member: own });
        expect(await until(async () => (await queuedCalls(node)) === 1, 5_000)).toBe(true);
        await node.sh('for try in $(seq 100); do test -e /run/once && exit 0; sleep 0.02; done; exit 1');
        const past = Date.now() / 1000 - 3600;
        await utimes(lockFolder(node), past, past);
        const gone = startCall(node, { verb: 'DEL', member: neighbour });
        const ends = await Promise.all([slow.end, gone.end]);
        await repair();
        expect(ends.map(({ exitCode, stdout, stderr }) => (exitCode === 0 ? '' : stdout + stderr))).toEqual([
          '',
          '',
        ]);
        expect(await faultsOf(node, [own])).toEqual([]);
        await call('DEL', 'done');
        expect(await stateFiles(node)).toEqual([]);
        await rm(`${node.root}/run/once`, { recursive: true, force: true });
      });
    });
  });
}
