// Many calls at once, as a node makes them that comes back after a reboot: who is called, how the calls are started
// and ended, and what the tables must then hold for each sandbox.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync, readFileSync } from 'node:fs';
import { mkdir, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { sandboxChain } from './footprint.ts';
import {
  type Family,
  families,
  type LabNode,
  netconf,
  type Netconf,
  type Outcome,
  portmapBin,
  type Verb,
} from './lab.ts';

/** A sandbox with addresses that nobody answers at: only its rules count. */
export type Member = {
  readonly id: string;
  readonly netns: string;
  readonly v4: string;
  readonly v6: string;
  readonly hostPort: number;
};

/** Sandboxes 1 to `count` of a crowd; they borrow an existing network namespace. */
export function crowd(name: string, count: number, netns: string, firstPort = 20_000): Member[] {
  return Array.from({ length: count }, (_, index) => ({
    id: `${name}-${index + 1}`,
    netns,
    v4: `10.1.${100 + (index >> 8)}.${index & 255}`,
    v6: `2001:db8:1::${(0x1000 + index).toString(16)}`,
    hostPort: firstPort + index,
  }));
}

export type Call = {
  readonly verb: Verb;
  readonly member: Member;
  readonly options?: Netconf;
  /** Whether `runCrowd` calls from a pid namespace of its own. */
  readonly isApart?: boolean;
};

/** The netconf of a member: one TCP mapping in both families. */
export function memberConf(member: Member, options: Netconf = {}): Netconf {
  return netconf(member, [{ hostPort: member.hostPort, containerPort: 80, protocol: 'tcp' }], options);
}

const variables = (verb: Verb, member: Member): Record<string, string> => ({
  CNI_COMMAND: verb,
  CNI_CONTAINERID: member.id,
  CNI_NETNS: member.netns,
  CNI_IFNAME: 'eth0',
  CNI_PATH: '/opt/cni/bin',
});

const folder = '/run/crowd';

/**
 * Starts all calls from one shell, so that the first has hardly begun when the last is there, and waits for their
 * ends. `under` is a program to run that shell under. Gives the outcomes in the order of the calls.
 */
export async function runCrowd(
  node: LabNode,
  calls: readonly Call[],
  { under = [], timeout = 60_000 }: { readonly under?: readonly string[]; readonly timeout?: number } = {},
): Promise<Outcome[]> {
  const path = `${node.root}${folder}`;
  await rm(path, { recursive: true, force: true });
  await mkdir(path);
  const lines = await Promise.all(
    calls.map(async ({ verb, member, options, isApart = false }, index) => {
      await writeFile(`${path}/${index}.json`, JSON.stringify(memberConf(member, options)));
      const set = Object.entries(variables(verb, member)).map(([name, value]) => `${name}=${value}`);
      const apart = isApart ? 'unshare --pid --fork --mount-proc ' : '';
      return `{ ${set.join(' ')} ${apart}${portmapBin} <${index}.json >${index}.out 2>${index}.err; echo $? >${index}.status; } &`;
    }),
  );
  await writeFile(`${path}/all.sh`, ['cd /run/crowd', ...lines, 'wait', ''].join('\n'));
  const run = await node.run([...under, 'sh', `${folder}/all.sh`], { timeout });
  if (run.exitCode !== 0) throw new Error(`the crowd did not end: exit ${run.exitCode}: ${run.stderr}`);
  return Promise.all(
    calls.map(async (_, index) => {
      const [status, stdout, stderr] = await Promise.all(
        ['status', 'out', 'err'].map((end) => readFile(`${path}/${index}.${end}`, 'utf8')),
      );
      return { exitCode: Number(status), stdout: stdout ?? '', stderr: stderr ?? '' };
    }),
  );
}

export type Running = {
  readonly child: ChildProcess;
  /** `exitCode` is null for a call that was killed. */
  readonly end: Promise<{
    readonly exitCode: number | null;
    readonly stdout: string;
    readonly stderr: string;
    readonly milliseconds: number;
  }>;
};

/** Starts one call that the test can send signals to. */
export function startCall(
  node: LabNode,
  { verb, member, options }: Call,
  env: Readonly<Record<string, string>> = {},
): Running {
  const [file, ...args] = node.enter([portmapBin]);
  const started = performance.now();
  const child = spawn(file, args, {
    stdio: 'pipe',
    env: { PATH: `${node.toolFolder}:/usr/sbin:/usr/bin:/sbin:/bin`, ...variables(verb, member), ...env },
  });
  child.stdin.on('error', () => {});
  child.stdin.end(JSON.stringify(memberConf(member, options)));
  const collect = async (): Promise<Awaited<Running['end']>> => {
    const texts = { stdout: '', stderr: '' };
    child.stdout.setEncoding('utf8').on('data', (text: string) => (texts.stdout += text));
    child.stderr.setEncoding('utf8').on('data', (text: string) => (texts.stderr += text));
    const closed = once(child, 'close');
    const deadline = setTimeout(() => {
      texts.stderr += '\nkilled by the test after 90 s';
      child.kill('SIGKILL');
    }, 90_000);
    const [exitCode] = await closed;
    clearTimeout(deadline);
    return {
      exitCode: typeof exitCode === 'number' ? exitCode : null,
      ...texts,
      milliseconds: performance.now() - started,
    };
  };
  return { child, end: collect() };
}

/** The processes that a process has started and that still run. */
export function childrenOf(pid: number): number[] {
  try {
    return readdirSync(`/proc/${pid}/task`).flatMap((task) =>
      readFileSync(`/proc/${pid}/task/${task}/children`, 'utf8').split(' ').filter(Boolean).map(Number),
    );
  } catch {
    return [];
  }
}

/** The lines of a family's nat table that have to do with the plugin. */
export async function ownRules(node: LabNode, family: Family): Promise<string[]> {
  return (await node.rules(family)).split('\n').filter((line) => line.includes('CNI-'));
}

/**
 * What is wrong with the tables when exactly these sandboxes, each in both families, should be mapped. The shared
 * parts are there once; with no sandbox they may be missing.
 */
export async function faultsOf(node: LabNode, members: readonly Member[]): Promise<string[]> {
  const found = await Promise.all(
    families.map(async (family) => {
      const lines = await ownRules(node, family);
      const chains = lines.flatMap((line) => /^:(CNI-DN-\S+)/.exec(line)?.[1] ?? []);
      const dispatched = lines.flatMap(
        (line) =>
          /^-A CNI-HOSTPORT-DNAT .*--dports (\S+) -j (CNI-DN-\S+)$/.exec(line)?.slice(1).join(' ') ?? [],
      );
      const targets = lines.flatMap(
        (line) => /^-A (CNI-DN-\S+) .*-j DNAT --to-destination (\S+)$/.exec(line)?.slice(1).join(' ') ?? [],
      );
      const expected = members.map((member) => ({
        chain: sandboxChain('lab', member.id),
        port: member.hostPort,
        to: family === 'v4' ? `${member.v4}:80` : `[${member.v6}]:80`,
      }));
      return [
        ...differences(
          chains,
          expected.map(({ chain }) => chain),
          `${family}: chain`,
        ),
        ...differences(
          dispatched,
          expected.map(({ chain, port }) => `${port} ${chain}`),
          `${family}: dispatch line`,
        ),
        ...differences(
          targets,
          expected.map(({ chain, to }) => `${chain} ${to}`),
          `${family}: target`,
        ),
        ...[
          /^-A PREROUTING .*-j CNI-HOSTPORT-DNAT$/,
          /^-A OUTPUT .*-j CNI-HOSTPORT-DNAT$/,
          /^-A POSTROUTING .*-j CNI-HOSTPORT-MASQ$/,
          /^-A CNI-HOSTPORT-MASQ /,
          /^-A CNI-HOSTPORT-SETMARK /,
        ].flatMap((shared) => {
          const times = lines.filter((line) => shared.test(line)).length;
          return times === 1 || (times === 0 && members.length === 0)
            ? []
            : [`${family}: ${times} times ${shared.source}`];
        }),
      ];
    }),
  );
  return found.flat();
}

function differences(found: readonly string[], expected: readonly string[], what: string): string[] {
  const [have, want] = [new Set(found), new Set(expected)];
  return [
    ...expected.filter((one) => !have.has(one)).map((one) => `${what} missing: ${one}`),
    ...found.filter((one) => !want.has(one)).map((one) => `${what} left: ${one}`),
    ...found.filter((one, index) => found.indexOf(one) !== index).map((one) => `${what} twice: ${one}`),
  ];
}

/** How many calls have put their wish into the queue, or have it in work. */
export async function queuedCalls(node: LabNode): Promise<number> {
  const names = await readdir(`${node.root}/run/portmap/queue`).catch((): string[] => []);
  return names.filter((name) => /\.(request|taken)$/.test(name)).length;
}

/** Waits until something holds, for at most so many milliseconds; says whether it did. */
export async function until(holds: () => Promise<boolean> | boolean, milliseconds: number): Promise<boolean> {
  const end = performance.now() + milliseconds;
  while (performance.now() < end) {
    if (await holds()) return true;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return holds();
}

/** Numbers from 0 to 1 that are the same in every run with this seed. */
export function seededRandom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
