// Why a request that stands alone, and was planned anew each time, is refused for good: what of it, or whose rule, is to
// blame.
import { families } from './address.ts';
import type { Budget } from './budget.ts';
import { dispatchChain, sandboxPrefix } from './chain.ts';
import { PortmapError } from './errors.ts';
import { findTools, hasLegacyTable, isLineRefused, rulesLeadingTo, variants } from './iptables.ts';
import { hashOf, type Request } from './queue.ts';

/** The error for a request that `error` has ended, with what is to blame for it where that can be told. */
export async function blame(request: Request, error: PortmapError, budget: Budget): Promise<PortmapError> {
  return request.change.verb === 'DEL' ? nameObstacle(request, error, budget) : blameNetconf(request, error);
}

// A DEL alone is refused when a rule of another program leads to the sandbox's chain.
async function nameObstacle(request: Request, error: PortmapError, budget: Budget): Promise<PortmapError> {
  if (error.code !== 'CONFLICT') return error;
  const chain = `${sandboxPrefix}${hashOf(request)}`;
  const tables = variants.flatMap((variant) => families.map((family) => ({ variant, family })));
  const rules = await Promise.all(
    tables.map(async ({ variant, family }) => {
      if (variant === 'legacy' && !hasLegacyTable(family)) return [];
      try {
        const tools = await findTools(family, variant, budget);
        const found = await rulesLeadingTo(tools, chain, dispatchChain, budget);
        return found.map((rule) => `${family} (${variant}): ${rule}`);
      } catch {
        return [];
      }
    }),
  );
  if (rules.flat().length === 0) return error;
  return new PortmapError(
    error.code,
    `${chain}: another program's rule leads to it, so it can't be removed: ${rules.flat().join('; ')}`,
    `delete that rule of the nat table, then repeat DEL; ${error.details}`,
    { cause: error },
  );
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
