// From a request and the record of its sandbox to what the sandbox shall be and which tables that touches. Pure.
import type { Family } from './address.ts';
import { familiesOf, retiredPrefix, sandboxHash, sandboxPrefix, sandboxRules } from './chain.ts';
import { PortmapError } from './errors.ts';
import type { Variant } from './iptables.ts';
import { hashOf, type Request } from './queue.ts';
import type { Attachment, SandboxRecord } from './record.ts';
import type { Wanted } from './restore.ts';

/** One family's nat table in one variant. */
export interface Table {
  readonly variant: Variant;
  readonly family: Family;
}

/** What a sandbox shall be after the commit, and what it was. */
export interface Target {
  readonly hash: string;
  readonly before: SandboxRecord | undefined;
  /** Undefined: nothing of the sandbox shall be left. */
  readonly after: SandboxRecord | undefined;
  /** Tables that hold, or may hold, rules that have to go. */
  readonly old: readonly Table[];
  /** Tables in which it isn't known that there are rules: one that can't be read has none. */
  readonly possible: readonly Table[];
  /** What asked for it; undefined for a dead owner that is evicted. */
  readonly request: Request | undefined;
}

/**
 * The target of a request. `variant` is the one new rules go to. Undefined: nothing is to be done.
 * @throws PortmapError CHAIN_TAKEN when another sandbox has the same chain name (network and container ID are joined
 * without a separator in upstream's scheme).
 */
export function targetOfRequest(
  request: Request,
  record: SandboxRecord | 'missing' | 'unknown',
  variant: Variant,
): Target | undefined {
  const { network, containerId, change } = request;
  const hash = hashOf(request);
  const before = typeof record === 'string' ? undefined : record;
  const isOther = before !== undefined && (before.network !== network || before.containerId !== containerId);
  if (change.verb === 'ADD') {
    if (isOther) throw chainTaken(hash, before);
    const others = before?.attachments.filter(({ ifname }) => ifname !== change.attachment.ifname) ?? [];
    const after = recordOf(request, variant, [change.attachment, ...others]);
    return { hash, before, after, old: tablesOf(before), possible: [], request };
  }
  if (isOther) return undefined;
  if (before === undefined) return { hash, before, after: undefined, old: [], possible: everyTable, request };
  const { ifname: gone, of } = change;
  if (!before.attachments.some(({ ifname, token }) => ifname === gone && (of === undefined || of === token)))
    return undefined;
  const rest = before.attachments.filter(({ ifname }) => ifname !== change.ifname);
  const after = rest.length === 0 ? undefined : recordOf(before, before.variant, rest);
  return { hash, before, after, old: tablesOf(before), possible: [], request };
}

/** The error for a sandbox whose chain name is another's already. */
export function chainTaken(
  hash: string,
  owner: { readonly network: string; readonly containerId: string },
): PortmapError {
  return new PortmapError(
    'CHAIN_TAKEN',
    `chain ${sandboxPrefix}${hash} belongs to container ${owner.containerId} on network ${owner.network}`,
    'network name and container ID are joined in the name of the chain; use another network name',
  );
}

/** The target that puts a recorded sandbox's rules back, or removes them. */
export function targetOfRecord(record: SandboxRecord, keep: boolean, variant: Variant): Target {
  const after = keep ? recordOf(record, variant, record.attachments) : undefined;
  const hash = sandboxHash(record.network, record.containerId);
  return { hash, before: record, after, old: tablesOf(record), possible: [], request: undefined };
}

/** Says whether a target gets nothing new: not from its own request, nor from an earlier one of the same batch. */
export function onlyLoses({ request, before, after }: Target): boolean {
  return request?.change.verb === 'DEL' && after?.order === before?.order;
}

/** The tables a target needs to have read and written. */
export function tablesOfTarget(target: Target): Table[] {
  const all = [...tablesOf(target.after), ...target.old, ...target.possible];
  return [...new Map(all.map((table) => [tableKey(table), table])).values()];
}

/** What a target wants of one table. */
export function wantedOf(target: Target, table: Table): Wanted {
  const { after, hash } = target;
  const rules =
    after?.variant === table.variant
      ? sandboxRules(
          table.family,
          after.network,
          after.containerId,
          after.attachments.map(({ config }) => config),
        )
      : undefined;
  return {
    chain: `${sandboxPrefix}${hash}`,
    rules,
    keepsPlace: onlyLoses(target),
    retired: rules === undefined ? `${retiredPrefix}${hash}` : undefined,
  };
}

export function tableKey(table: Table): string {
  return `${table.variant}/${table.family}`;
}

/** The tables a record's rules are in. */
export function tablesOf(record: SandboxRecord | undefined): Table[] {
  if (record === undefined) return [];
  const { variant, families, older = [] } = record;
  return [...families.map((family) => ({ variant, family })), ...older];
}

const everyTable: readonly Table[] = [
  { variant: 'nft', family: 'ipv4' },
  { variant: 'nft', family: 'ipv6' },
  { variant: 'legacy', family: 'ipv4' },
  { variant: 'legacy', family: 'ipv6' },
];

function recordOf(
  sandbox: Pick<SandboxRecord, 'network' | 'containerId' | 'order'>,
  variant: Variant,
  attachments: readonly Attachment[],
): SandboxRecord {
  const { network, containerId, order } = sandbox;
  const families = [...new Set(attachments.flatMap(({ config }) => familiesOf(config)))];
  return { network, containerId, order, variant, families, attachments };
}
