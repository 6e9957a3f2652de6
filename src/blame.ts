// Why a request that stands alone, and was planned anew each time, is refused for good: what of it, or whose rule, is to
// blame.
import { families } from './address.ts';
import type { Budget } from './budget.ts';
import { dispatchChain, sandboxPrefix } from './chain.ts';
import { PortmapError } from './errors.ts';
import { findTools, hasLegacyTable, isLineRefused, rulesLeadingTo, variants } from './iptables.ts';
import { hashOf, type Request } from './queue.ts';
import { type Table, tableKey } from './target.ts';

/** A rule of another program that keeps a sandbox's chain in a table from being removed. */
export interface Obstacle {
  readonly table: Table;
  readonly rule: string;
}

/** The error for a request that `error` has ended; `rules` of other programs are in its way. */
export function blame(request: Request, error: PortmapError, rules: readonly Obstacle[]): PortmapError {
  if (rules.length === 0) return blameNetconf(request, error);
  return new PortmapError(error.code, inTheWay(request, rules), `delete them; ${error.details}`, {
    cause: error,
  });
}

/** Says which rules keep a sandbox's chain from being removed. */
export function inTheWay(request: Request, rules: readonly Obstacle[]): string {
  const named = rules.map(({ table, rule }) => `${tableKey(table)}: ${rule}`).join('; ');
  return `${chainOf(request)}: rules of other programs lead to it, so it can't be removed: ${named}`;
}

/** The rules of other programs that keep a DEL from removing the sandbox's chain. */
export async function rulesInTheWay(
  request: Request,
  error: PortmapError,
  budget: Budget,
): Promise<Obstacle[]> {
  if (request.change.verb !== 'DEL' || error.code !== 'CONFLICT') return [];
  const tables = variants.flatMap((variant) => families.map((family) => ({ variant, family })));
  const found = await Promise.all(
    tables.map(async (table) => {
      const { variant, family } = table;
      if (variant === 'legacy' && !hasLegacyTable(family)) return [];
      try {
        const tools = await findTools(family, variant, budget);
        const rules = await rulesLeadingTo(tools, chainOf(request), dispatchChain, budget);
        return rules.map((rule) => ({ table, rule }));
      } catch {
        return [];
      }
    }),
  );
  return found.flat();
}

function chainOf(request: Request): string {
  return `${sandboxPrefix}${hashOf(request)}`;
}

// Where the netconf has words of its own in the rules, or the name of a chain that may lead back to the plugin's, these
// are to blame: what the kernel does not take shows in the legacy variant only as a line that failed.
function blameNetconf(request: Request, error: PortmapError): PortmapError {
  const isRefused = error.code === 'REJECTED' || isLineRefused(error);
  if (!isRefused || request.change.verb !== 'ADD') return error;
  const { conditions, externalSetMarkChain } = request.change.attachment.config;
  const family = error.message.startsWith('ip6tables') ? 'ipv6' : 'ipv4';
  const suspects = [
    ...(conditions[family].length === 0
      ? []
      : [`${family === 'ipv4' ? 'conditionsV4' : 'conditionsV6'}: ${JSON.stringify(conditions[family])}`]),
    ...(externalSetMarkChain === undefined
      ? []
      : [
          `externalSetMarkChain: ${JSON.stringify(externalSetMarkChain)} (does it lead back to ${dispatchChain}?)`,
        ]),
  ];
  const code = suspects.length === 0 ? 'REJECTED' : 'CONFIG';
  const message = [...suspects, error.message].join(': ');
  return new PortmapError(code, message, error.details, { cause: error });
}
