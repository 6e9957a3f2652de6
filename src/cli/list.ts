// `portmap list`: who has which host port on this node.
import { families } from '../address.ts';
import { toPortmapError } from '../errors.ts';
import type { ListedMapping } from '../listing.ts';
import { listMappings } from '../listing.ts';
import { findTools } from '../iptables.ts';
import type { Budget } from '../budget.ts';
import { readRecord } from '../record.ts';
import { sandboxPrefix } from '../chain.ts';
import { openState } from '../state.ts';
import { observeNode } from '../verify.ts';

/** Every mapping in the kernel, in both families and variants, as a table or as JSON. */
export async function listNode(
  json: boolean,
  terminal: { readonly budget: Budget; readonly warn: (text: string) => void },
): Promise<string> {
  const tables = await observeNode(terminal.budget);
  await nameUnseen(tables, terminal);
  const state = openState(false);
  const rows = tables
    .flatMap(({ tools, observed }) =>
      listMappings(tools.family, observed).map((mapping) => ({ ...mapping, variant: tools.variant })),
    )
    .map((mapping) => {
      // A long comment is cut by the kernel; the record has the names whole.
      const record =
        'problem' in state ? 'missing' : readRecord(state, mapping.chain.slice(sandboxPrefix.length));
      return typeof record === 'string'
        ? mapping
        : { ...mapping, network: record.network, containerId: record.containerId };
    });
  return json ? JSON.stringify(rows.map(toJson), null, 2) : renderTable(rows.map(toCells));
}

// A family without a table may be one without programs to look with, which is not the same as no mappings.
async function nameUnseen(
  tables: Awaited<ReturnType<typeof observeNode>>,
  { budget, warn }: { readonly budget: Budget; readonly warn: (text: string) => void },
): Promise<void> {
  for (const family of families.filter((one) => !tables.some(({ tools }) => tools.family === one)))
    try {
      await findTools(family, undefined, budget);
    } catch (error) {
      if (tables.length === 0) throw error;
      warn(`${toPortmapError(error).message}: mappings of ${family} are not shown`);
    }
}

type Row = ListedMapping & { readonly variant: string };

function toJson(row: Row): Record<string, unknown> {
  const {
    protocol,
    hostAddress,
    hostPort,
    containerAddress,
    containerPort,
    network,
    containerId,
    family,
    variant,
  } = row;
  return {
    protocol,
    hostAddress,
    hostPort,
    containerAddress,
    containerPort,
    network: network ?? null,
    containerId: containerId ?? null,
    family,
    variant,
  };
}

function toCells(row: Row): string[] {
  const anywhere = row.family === 'ipv6' ? '[::]' : '0.0.0.0';
  return [
    row.protocol,
    `${row.hostAddress === '' ? anywhere : bracket(row.hostAddress)}:${row.hostPort}`,
    `${bracket(row.containerAddress)}:${row.containerPort}`,
    row.network ?? 'unknown',
    row.containerId ?? 'unknown',
    row.variant,
  ];
}

function bracket(address: string): string {
  return address.includes(':') ? `[${address}]` : address;
}

function renderTable(rows: readonly string[][]): string {
  const all = [['PROTOCOL', 'HOST', 'CONTAINER', 'NETWORK', 'CONTAINER ID', 'VARIANT'], ...rows];
  const widths = all[0]?.map((_, column) => Math.max(...all.map((row) => row[column]?.length ?? 0))) ?? [];
  return all
    .map((row) =>
      row
        .map((cell, column) => cell.padEnd(widths[column] ?? 0))
        .join('  ')
        .trimEnd(),
    )
    .join('\n');
}
