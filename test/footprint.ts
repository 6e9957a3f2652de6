// What the plugin leaves on a node: rules in the nat tables and files in its state folder. How a test reads them, and
// how it gets back to a node that has never seen the plugin.
import { createHash } from 'node:crypto';
import { readdir } from 'node:fs/promises';
import { expect } from 'vitest';
import {
  addresses,
  families,
  type Family,
  type LabNode,
  type Outcome,
  type PortMapping,
  type Variant,
} from './lab.ts';

/** A netconf with nothing in it that DEL could do without. */
export const bareConf = { cniVersion: '1.0.0', name: 'lab', type: 'portmap' };

/** One mapping to container port 80. */
export const port = (hostPort: number, protocol = 'tcp', hostIP?: string): PortMapping => ({
  hostPort,
  containerPort: 80,
  protocol,
  ...(hostIP === undefined ? {} : { hostIP }),
});

/** The chain of a sandbox: upstream's name for it. */
export const sandboxChain = (network: string, id: string): string =>
  `CNI-DN-${createHash('sha512').update(`${network}${id}`).digest('hex').slice(0, 21)}`;

/** A rule of somebody else, so that a table is never just empty. */
export const foreignRule = '-A PREROUTING -p tcp -m tcp --dport 7 -j ACCEPT';

/** Empties the nat tables of the node's variant but for one foreign rule, and forgets every sandbox. */
export async function wipe(node: LabNode): Promise<void> {
  await node.sh(
    'cat > /run/wiped; iptables-restore < /run/wiped; ip6tables-restore < /run/wiped; rm -rf /run/portmap',
    {
      input: `*nat\n${foreignRule}\nCOMMIT\n`,
    },
  );
}

/** What the state folder holds on sandboxes; what it notes of the node as a whole may stay. */
export async function stateFiles(node: LabNode): Promise<string[]> {
  const found = await readdir(`${node.root}/run/portmap`, { recursive: true }).catch((): string[] => []);
  return found.filter((name) => !/^(?:queue|status-\S+)$/.test(name)).toSorted();
}

/** The rules of one chain, without its name. */
export async function chainRules(node: LabNode, family: Family, chain: string): Promise<string[]> {
  const start = `-A ${chain} `;
  return (await node.rules(family))
    .split('\n')
    .flatMap((line) => (line.startsWith(start) ? line.slice(start.length) : []));
}

/** The one JSON error that a failed call prints. */
export function errorOf({ exitCode, stdout, stderr }: Outcome): {
  code: number;
  msg: string;
  details?: string;
} {
  expect(exitCode, `${stdout}${stderr}`).toBe(1);
  return JSON.parse(stdout);
}

export const count = (text: string, pattern: RegExp): number => [...text.matchAll(pattern)].length;

/** Keeps the xtables lock, which only the legacy variant knows, until the returned function is called. */
export async function holdXtablesLock(node: LabNode): Promise<() => void> {
  const holder = node.start(['flock', '--no-fork', '/run/xtables.lock', 'sleep', '30']);
  await node.sh(
    'for try in $(seq 100); do flock -n /run/xtables.lock true || exit 0; sleep 0.02; done; exit 1',
  );
  return () => holder.kill('SIGKILL');
}

/**
 * Puts a script in front of an iptables-restore that hands on its input line by line, and whose file tells the variant,
 * as that of iptables' own programs does. It does as `before` says when a commit that changes something is to be handed
 * on, and as `after` says when the program has ended. `unwrapTool` removes it.
 */
export async function wrapRestore(
  node: LabNode,
  {
    variant,
    tool,
    before = ':',
    after = ':',
  }: {
    readonly variant: Variant;
    readonly tool: string;
    readonly before?: string;
    readonly after?: string;
  },
): Promise<void> {
  const script = `/run/wrapped/${tool}-${variant}-script`;
  const real = `/run/wrapped/${tool}`;
  await node.sh(
    `mkdir -p /run/wrapped; ln -sf /usr/sbin/xtables-${variant}-multi ${real}; cat > ${script}; chmod 755 ${script}; ln -sf ${script} ${node.toolFolder}/${tool}`,
    {
      input: `#!/bin/bash
        isChange=
        while IFS= read -r line; do
          case $line in '*nat') isChange= ;; '-A '* | '-D '* | '-X '*) isChange=1 ;; esac
          if [ "$line" = COMMIT ] && [ -n "$isChange" ]; then ${before}; fi
          printf '%s\\n' "$line"
        done | ${real} "$@"
        status=\${PIPESTATUS[1]}
        if [ "$status" = 0 ]; then ${after}; fi
        exit "$status"
      `,
    },
  );
}

/**
 * Takes the system's programs that match a shell pattern away from the node, all but those it is left through
 * (`iptables-nft` for one is such a program as well). Returns the function that puts them back.
 */
export async function hidePrograms(node: LabNode, pattern: string): Promise<() => Promise<void>> {
  // A bind mount over one program would hide the file that all of them lead to.
  await node.sh(`
    mkdir -p /run/sbin /run/hidden
    mount --bind /usr/sbin /run/sbin
    mount -t tmpfs sbin /usr/sbin
    ln -s /run/sbin/* /usr/sbin/
    cd /usr/sbin && rm -f ${pattern}
    cd ${node.toolFolder} && for tool in ${pattern}; do if [ -e $tool ]; then mv $tool /run/hidden/; fi; done`);
  return async () => {
    await node.sh(`
      umount /usr/sbin
      umount /run/sbin
      if [ -n "$(ls /run/hidden)" ]; then mv /run/hidden/* ${node.toolFolder}/; fi`);
  };
}

/** Who answers a client on a tcp host port of the node, by family. */
export async function answers(node: LabNode, hostPort: number): Promise<(string | undefined)[]> {
  const asked = families.map((family) =>
    node.probe('client', {
      protocol: 'tcp',
      address: addresses.node[family],
      port: hostPort,
      timeout: 2_000,
    }),
  );
  return (await Promise.all(asked)).map((answer) => answer?.name);
}

/** Fails when anything of any sandbox is left, in the rules or in the state folder. */
export async function expectNoSandbox(node: LabNode): Promise<void> {
  const rules = await node.allRules();
  expect(rules).not.toMatch(/CNI-DN-|-A CNI-HOSTPORT-DNAT/);
  expect(await stateFiles(node), rules).toEqual([]);
}

/** A script for both families, in which `$t` is iptables on the family's nat table. */
export const forBoth = (script: string): string =>
  `for t in "iptables -t nat" "ip6tables -t nat"; do ${script}; done`;

/** All cases on nft, the first on legacy: for what is decided before any iptables is asked. */
export const fewerOnLegacy = <T>(variant: Variant, cases: readonly T[], kept = 1): readonly T[] =>
  variant === 'nft' ? cases : cases.slice(0, kept);
