// The record of a sandbox: what ADD has installed for it. It helps to find things and is never proof of what the
// kernel holds: one that is missing, empty, cut off or of a newer format means "unknown".
import { readdirSync } from 'node:fs';
import * as z from 'zod/mini';
import { type Family, families } from './address.ts';
import { type Variant, variants } from './iptables.ts';
import type { AttachmentConfig } from './netconf.ts';
import { sandboxHash } from './chain.ts';
import { once } from './once.ts';
import { protocols } from './schema.ts';
import { isPresent, readState, removeState, sandboxFiles, type StateFolder, writeState } from './state.ts';

/** One attachment of a sandbox to the record's network. */
export interface Attachment {
  readonly ifname: string;
  /** The path the runtime gave; empty when it gave none. */
  readonly netns: string;
  readonly config: AttachmentConfig;
  /** Of the request that has made it. */
  readonly token?: string | undefined;
  /** The pid namespace in which a path below /proc was given. */
  readonly namespace?: string | undefined;
}

/** What is installed for one container on one network. The newest attachment comes first. */
export interface SandboxRecord {
  readonly network: string;
  readonly containerId: string;
  /** The place of the newest attachment's request among all: the greater is in front. */
  readonly order: number;
  readonly variant: Variant;
  readonly families: readonly Family[];
  /** Tables that may still hold rules from before the commit that this record was written for. */
  readonly older?: readonly { readonly variant: Variant; readonly family: Family }[] | undefined;
  readonly attachments: readonly Attachment[];
}

const format = 1;

/** The record of a sandbox; `missing` when there is no file, `unknown` when there is one that says nothing. */
export function readRecord(state: StateFolder, hash: string): SandboxRecord | 'missing' | 'unknown' {
  const path = sandboxFiles(state, hash).record;
  const text = readState(path);
  if (text === undefined) return isPresent(path) ? 'unknown' : 'missing';
  try {
    const parsed = recordSchema().safeParse(JSON.parse(text));
    if (!parsed.success) return 'unknown';
    const { format: _, ...record } = parsed.data;
    return sandboxHash(record.network, record.containerId) === hash ? record : 'unknown';
  } catch {
    return 'unknown';
  }
}

/** Every record that can be read, in no order. */
export function readRecords(state: StateFolder): SandboxRecord[] {
  return readdirSync(state.path).flatMap((name) => {
    const hash = /^([0-9a-f]{21})\.record$/.exec(name)?.[1];
    const record = hash === undefined ? 'missing' : readRecord(state, hash);
    return typeof record === 'string' ? [] : [record];
  });
}

export function writeRecord(state: StateFolder, record: SandboxRecord): void {
  const hash = sandboxHash(record.network, record.containerId);
  writeState(sandboxFiles(state, hash).record, JSON.stringify({ format, ...record }));
}

export function removeRecord(state: StateFolder, hash: string): void {
  removeState(sandboxFiles(state, hash).record);
}

const addressFields = () => ({ family: z.enum(families), text: z.string() });

/** An attachment as it stands in records and requests. */
export const attachmentSchema = once(() => {
  const interfaceAddress = z.optional(z.object({ ...addressFields(), network: z.string() }));
  return z.object({
    ifname: z.string(),
    netns: z.string(),
    config: z.object({
      mappings: z.array(
        z.object({
          hostPort: z.number(),
          containerPort: z.number(),
          protocol: z.enum(protocols),
          hostIP: z.optional(z.object(addressFields())),
        }),
      ),
      addresses: z.object({ ipv4: interfaceAddress, ipv6: interfaceAddress }),
      snat: z.boolean(),
      masqAll: z.boolean(),
      markMasqBit: z.optional(z.number()),
      externalSetMarkChain: z.optional(z.string()),
      conditions: z.object({ ipv4: z.array(z.string()), ipv6: z.array(z.string()) }),
    }),
    // In the order in which they are written, so that a record that is read and put back is the same text.
    namespace: z.optional(z.string()),
    token: z.optional(z.string()),
  });
});

const recordSchema = once(() =>
  z.object({
    format: z.literal(format),
    network: z.string(),
    containerId: z.string(),
    order: z.number(),
    variant: z.enum(variants),
    families: z.array(z.enum(families)).check(z.minLength(1)),
    older: z.optional(z.array(z.object({ variant: z.enum(variants), family: z.enum(families) }))),
    attachments: z.array(attachmentSchema()).check(z.minLength(1)),
  }),
);
