// What upstream's nftables backend leaves on a node that has changed to this plugin: rules in a table of their own,
// marked with nothing but the container ID. They are removed where they are found, and never made.
import { join } from 'node:path';
import { type Budget, findProgram, graceBudget, runProgram, searchFolders } from './program.ts';
import { isPresent, type StateFolder, writeState } from './state.ts';

const table = 'cni_hostport';
const chains = ['hostports', 'hostip_hostports', 'masquerading'];
const longestMs = 3000;

/**
 * Removes a container's rules from upstream's nftables table. Never fails and never speaks: at worst they stay, as
 * they did before. Once a node is seen to have no such table, it isn't looked for again until the next boot.
 */
export async function removeUpstreamRules(
  containerId: string,
  state: StateFolder | undefined,
  call: Budget,
): Promise<void> {
  const stamp = state === undefined ? undefined : join(state.path, 'no-upstream-nftables');
  if (stamp !== undefined && isPresent(stamp)) return;
  const program = findProgram('nft', searchFolders(process.env['PATH']));
  if (program === undefined) return;
  const budget = graceBudget(Math.min(longestMs, call.remaining()));
  const found = await Promise.all(
    ['ip', 'ip6'].map(async (family) => {
      const lines: string[] = [];
      const onLine = (line: string) => void lines.push(line);
      const listed = await runProgram(program, ['-a', 'list', 'table', family, table], { budget, onLine });
      const missing = listed.exitCode === 1 && /No such file or directory/.test(listed.stderr);
      return { missing, deletions: deletionsOf(family, lines, containerId) };
    }),
  );
  const input = found.flatMap(({ deletions }) => deletions).join('\n');
  if (input !== '') await runProgram(program, ['-f', '-'], { budget, input: `${input}\n` });
  if (stamp === undefined || !found.every(({ missing }) => missing)) return;
  try {
    writeState(stamp, '');
  } catch {
    // Then it is looked for again.
  }
}

// The rules of one container by their handles, out of a listing of the table.
function deletionsOf(family: string, lines: readonly string[], containerId: string): string[] {
  let chain = '';
  return lines.flatMap((line) => {
    chain = /^\s*chain (\S+) \{/.exec(line)?.[1] ?? chain;
    const handle = line.includes(` comment "${containerId}"`) ? /# handle (\d+)$/.exec(line)?.[1] : undefined;
    return handle === undefined || !chains.includes(chain)
      ? []
      : [`delete rule ${family} ${table} ${chain} handle ${handle}`];
  });
}
