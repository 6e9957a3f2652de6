// Who else has a host port: another sandbox whose lines would shadow, or be shadowed by, a new mapping.
import { statSync } from 'node:fs';
import type { Family } from './address.ts';
import { mappingsOf, overlaps, sandboxPrefix } from './chain.ts';
import { systemCode } from './errors.ts';
import { contested, type DispatchLine, readDispatch, rivalLines } from './listing.ts';
import { describeMapping, type PortMapping } from './netconf.ts';
import { processId } from './process.ts';
import type { SandboxRecord } from './record.ts';
import type { Ruleset } from './restore.ts';

/** Another sandbox with a mapping for the same packets. */
export interface Rival {
  readonly chain: string;
  /** Its record, when it is proved that all of its attachments are gone. */
  readonly dead: SandboxRecord | undefined;
  /** Whose it is and what it takes, for people. */
  readonly description: string;
}

/**
 * The sandboxes that contend for the host ports of `mappings` in one observed table. `recordOf` gives the record
 * behind a chain; a chain without one is of unknown owner, and unknown is never taken for dead. `dispatch` is what
 * `observed` holds of the dispatch chain, for those who ask for many sandboxes.
 */
export function findRivals(
  family: Family,
  observed: Ruleset,
  ownChain: string,
  mappings: readonly PortMapping[],
  recordOf: (hash: string) => SandboxRecord | undefined,
  dispatch: readonly DispatchLine[] = readDispatch(observed),
): Rival[] {
  const lines = new Map(
    rivalLines(dispatch, ownChain, mappings).map((line) => [
      `${line.chain} ${line.protocol} ${line.ports.join()}`,
      line,
    ]),
  );
  const rivals = new Map<string, Rival>();
  for (const line of lines.values()) {
    if (rivals.has(line.chain)) continue;
    const record = recordOf(line.chain.slice(sandboxPrefix.length));
    const taken =
      record === undefined
        ? contested(family, observed, line, mappings)
        : contestedBy(family, record, mappings);
    if (taken.length > 0) rivals.set(line.chain, describeRival(line, record, taken));
  }
  return [...rivals.values()];
}

/** The mappings that a sandbox with this record takes packets of. */
export function contestedBy(
  family: Family,
  record: SandboxRecord,
  mappings: readonly PortMapping[],
): PortMapping[] {
  const theirs = record.attachments.flatMap(({ config }) => mappingsOf(family, config));
  return mappings.filter((mapping) => theirs.some((other) => overlaps(mapping, other)));
}

/** Says whether every network namespace of a sandbox is provably gone: the path that its ADD was given is not there. */
export function isDead(record: SandboxRecord): boolean {
  return record.attachments.every(
    ({ netns, namespace }) => netns !== '' && isSeenAlike(netns, namespace) && isGone(netns),
  );
}

// A path below /proc is another process's, or nobody's, in another pid namespace.
function isSeenAlike(netns: string, namespace: string | undefined): boolean {
  return !netns.startsWith('/proc/') || namespace === processId('self')?.namespace;
}

function isGone(path: string): boolean {
  try {
    statSync(path);
    return false;
  } catch (error) {
    return systemCode(error) === 'ENOENT';
  }
}

function describeRival(
  line: DispatchLine,
  record: SandboxRecord | undefined,
  taken: readonly PortMapping[],
): Rival {
  const container = record?.containerId ?? line.containerId ?? 'unknown';
  const network = record?.network ?? line.network ?? 'unknown';
  const what = taken.map((mapping) => describeMapping(mapping)).join(', ');
  return {
    chain: line.chain,
    dead: record !== undefined && isDead(record) ? record : undefined,
    description: `${what}: host port already mapped for container ${container} on network ${network} (chain ${line.chain})`,
  };
}
