// What upstream's nftables backend leaves on a node that has changed to this plugin: rules in a table of their own,
// marked with nothing but the container ID. They are removed where they are found, and never made.
import { type Budget, partOf } from './budget.ts';
import { findProgram, runProgram, searchFolders } from './program.ts';

const table = 'cni_hostport';
const chains = ['hostports', 'hostip_hostports', 'masquerading'];
const longestMs = 3000;

/**
 * Removes a container's rules from upstream's nftables table. Never fails and never speaks: at worst they stay, as
 * they did before.
 */
export async function removeUpstreamRules(containerId: string, call: Budget): Promise<void> {
  const program = findProgram('nft', searchFolders(process.env['PATH']));
  if (program === undefined) return;
  const budget = partOf(call, longestMs);
  const found = await Promise.all(
    ['ip', 'ip6'].map(async (family) => {
      const lines: string[] = [];
      const onLine = (line: string) => void lines.push(line);
      await runProgram(program, ['-a', 'list', 'table', family, table], { budget, onLine });
      return deletionsOf(family, lines, containerId);
    }),
  );
  const input = found.flat().join('\n');
  if (input !== '') await runProgram(program, ['-f', '-'], { budget, input: `${input}\n` });
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
