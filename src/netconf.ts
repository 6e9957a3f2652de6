// From a netconf to a complete, read-only configuration of an attachment. Pure. ADD and CHECK read everything
// strictly; DEL takes what makes sense, so that a netconf that went bad after its ADD can still be torn down.
import type * as z from 'zod/mini';
import { type Address, type Family, isUnspecified, readAddress } from './address.ts';
import { PortmapError } from './errors.ts';
import {
  attachmentKeys,
  isObject,
  type JsonObject,
  type NetworkConf,
  rawMappings,
  show,
  withKeys,
} from './network.ts';
import { type ContainerAddresses, readAddresses } from './result.ts';
import { attachmentsSchema, type MappingEntry, mappingSchema, protocols, settingSchemas } from './schema.ts';

export type Protocol = (typeof protocols)[number];

/** One entry of `runtimeConfig.portMappings`. Without `hostIP` it maps every local address of both families. */
export interface PortMapping {
  readonly hostPort: number;
  readonly containerPort: number;
  readonly protocol: Protocol;
  readonly hostIP?: Address | undefined;
}

/** Everything of one attachment that its rules depend on. */
export interface AttachmentConfig {
  readonly mappings: readonly PortMapping[];
  readonly addresses: ContainerAddresses;
  readonly snat: boolean;
  readonly masqAll: boolean;
  readonly markMasqBit?: number | undefined;
  readonly externalSetMarkChain?: string | undefined;
  readonly conditions: Record<Family, readonly string[]>;
}

/** A complete configuration for ADD and CHECK. */
export interface NetConf extends NetworkConf {
  readonly attachment: AttachmentConfig;
  readonly prevResult: JsonObject;
  readonly onConflict: 'warn' | 'fail';
  readonly warnings: readonly string[];
}

/** One live attachment in the list that GC gets. */
export interface ValidAttachment {
  readonly containerID: string;
  readonly ifname: string;
}

const mappingKeys = ['hostPort', 'containerPort', 'protocol', 'hostIP'];
/**
 * Reads the whole netconf for ADD and CHECK of the interface `ifname`.
 * @throws PortmapError CONFIG naming the field and the value.
 */
export function readNetConf(network: NetworkConf, ifname: string): NetConf {
  const { raw } = network;
  const settings = readSettings(raw);
  if (settings.markMasqBit !== undefined && settings.externalSetMarkChain !== undefined)
    throw new PortmapError(
      'CONFIG',
      `markMasqBit: ${settings.markMasqBit} and externalSetMarkChain: ${show(settings.externalSetMarkChain)} exclude each other`,
      'remove one of the two from the netconf',
    );
  const mappings = uniqueMappings(readMappings(raw));
  const prevResult = raw['prevResult'];
  if (!isObject(prevResult))
    throw new PortmapError(
      'CONFIG',
      prevResult === undefined ? 'prevResult: missing' : `prevResult: ${show(prevResult)} is not an object`,
      'portmap must be called as a chained plugin, after one that gives the container an address',
    );
  const addresses = readAddresses(prevResult, network.cniVersion, ifname);
  const attachment = {
    mappings,
    addresses,
    snat: settings.snat,
    masqAll: settings.masqAll,
    markMasqBit: settings.markMasqBit,
    externalSetMarkChain: settings.externalSetMarkChain,
    conditions: { ipv4: settings.conditionsV4, ipv6: settings.conditionsV6 },
  };
  if (mappings.length > 0 && addresses.ipv4 === undefined && addresses.ipv6 === undefined)
    throw new PortmapError(
      'CONFIG',
      `prevResult: no address for interface ${ifname}, so ${mappings.length} port mapping(s) can't be made`,
      'the plugin before portmap in the list must give the container an address on this interface',
    );
  return {
    ...network,
    attachment,
    prevResult,
    onConflict: settings.onConflict,
    warnings: mappings.length > 0 ? configWarnings(attachment) : [],
  };
}

/**
 * Reads what can be read of a netconf on DEL: mappings and addresses that make sense, for the clean-up of UDP flows.
 * Never throws.
 */
export function readRemnants(
  network: NetworkConf,
  ifname: string,
): Pick<AttachmentConfig, 'mappings' | 'addresses'> {
  const list = rawMappings(network.raw);
  const mappings = (Array.isArray(list) ? list : []).flatMap((entry) => {
    const parsed = mappingSchema().safeParse(isObject(entry) ? withKeys(entry, mappingKeys) : entry);
    return parsed.success ? [toMapping(parsed.data)] : [];
  });
  try {
    const prevResult = network.raw['prevResult'];
    return {
      mappings,
      addresses: isObject(prevResult) ? readAddresses(prevResult, network.cniVersion, ifname) : {},
    };
  } catch {
    return { mappings, addresses: {} };
  }
}

/**
 * Reads the attachments that GC must spare. `cni.dev/attachments` is the name an early libcni used.
 * @throws PortmapError CONFIG when the list is absent or malformed: absence is ambiguous, so nothing may be deleted.
 */
export function readValidAttachments(network: NetworkConf): readonly ValidAttachment[] {
  const given = attachmentKeys.filter((candidate) => network.raw[candidate] !== undefined);
  const key = given.find((candidate) => network.raw[candidate] !== null) ?? given[0];
  if (key === undefined)
    throw new PortmapError(
      'CONFIG',
      'cni.dev/valid-attachments: missing, so nothing was deleted',
      'GC needs the list of attachments that are alive; an empty list removes all of the network',
    );
  const value = network.raw[key] ?? [];
  const list: unknown = Array.isArray(value)
    ? value.map((entry: unknown) => (isObject(entry) ? withKeys(entry, ['containerID', 'ifname']) : entry))
    : value;
  return parse(attachmentsSchema(), list, key);
}

// A setting that is not there costs nothing: its schema is not even made.
function readSettings(raw: JsonObject) {
  const read = <T>(key: keyof typeof settings, schema: () => z.ZodMiniType<T>) =>
    raw[key] === undefined ? undefined : parse(schema(), raw[key], key);
  const settings = settingSchemas;
  read('backend', settings.backend);
  read('timeoutSeconds', settings.timeoutSeconds);
  return {
    snat: read('snat', settings.snat) ?? true,
    masqAll: read('masqAll', settings.masqAll) ?? false,
    markMasqBit: read('markMasqBit', settings.markMasqBit),
    externalSetMarkChain: read('externalSetMarkChain', settings.externalSetMarkChain),
    conditionsV4: read('conditionsV4', settings.conditionsV4) ?? [],
    conditionsV6: read('conditionsV6', settings.conditionsV6) ?? [],
    onConflict: read('onConflict', settings.onConflict) ?? 'warn',
  };
}

function readMappings(raw: JsonObject): PortMapping[] {
  const runtimeConfig = raw['runtimeConfig'];
  if (runtimeConfig !== undefined && !isObject(runtimeConfig))
    throw new PortmapError('CONFIG', `runtimeConfig: ${show(runtimeConfig)} is not an object`);
  const list = rawMappings(raw) ?? [];
  if (!Array.isArray(list))
    throw new PortmapError(
      'CONFIG',
      `runtimeConfig.portMappings: ${show(list)} is not a list of port mappings`,
    );
  return list.map((entry: unknown, index) => {
    const folded = isObject(entry) ? withKeys(entry, mappingKeys) : entry;
    return toMapping(parse(mappingSchema(), folded, `runtimeConfig.portMappings[${index}]`));
  });
}

function toMapping(entry: MappingEntry): PortMapping {
  const { hostPort, containerPort } = entry;
  return {
    hostPort,
    containerPort,
    protocol: toProtocol(entry.protocol),
    hostIP: readAddress(entry.hostIP ?? ''),
  };
}

// Docker's word for a mapping without a protocol is tcp, and so it is of every runtime that leaves it out.
function toProtocol(text = ''): Protocol {
  return protocols.find((protocol) => protocol === text.toLowerCase()) ?? 'tcp';
}

function uniqueMappings(mappings: readonly PortMapping[]): PortMapping[] {
  return [...new Map(mappings.map((mapping) => [describeMapping(mapping), mapping])).values()];
}

/** A mapping in the way people write it: `198.51.100.1:8080->80/tcp`. */
export function describeMapping(mapping: PortMapping): string {
  const host =
    mapping.hostIP === undefined
      ? ''
      : mapping.hostIP.family === 'ipv6'
        ? `[${mapping.hostIP.text}]:`
        : `${mapping.hostIP.text}:`;
  return `${host}${mapping.hostPort}->${mapping.containerPort}/${mapping.protocol}`;
}

function configWarnings(attachment: AttachmentConfig): string[] {
  const { mappings, addresses } = attachment;
  const unmapped = mappings.filter(
    (mapping) => mapping.hostIP !== undefined && addresses[mapping.hostIP.family] === undefined,
  );
  const loopback6 = mappings.filter(
    (mapping) => mapping.hostIP?.text === '::1' && addresses.ipv6 !== undefined,
  );
  const byPort = new Map<string, PortMapping[]>();
  const shadowed = mappings.filter((mapping) => {
    const key = `${mapping.protocol} ${mapping.hostPort}`;
    const earlier = byPort.get(key) ?? [];
    byPort.set(key, [...earlier, mapping]);
    return earlier.some((other) => covers(other, mapping));
  });
  return [
    ...unmapped.map(
      (mapping) =>
        `${describeMapping(mapping)}: not mapped: the container has no ${mapping.hostIP?.family === 'ipv6' ? 'IPv6' : 'IPv4'} address on this interface`,
    ),
    ...loopback6.map(
      (mapping) =>
        `${describeMapping(mapping)}: not mapped: the kernel routes no packet from ::1 to a container; use another host address`,
    ),
    ...shadowed.map(
      (mapping) =>
        `${describeMapping(mapping)}: an earlier entry of this request has the same host port and takes its traffic`,
    ),
    ...(attachment.masqAll && !attachment.snat ? ['masqAll: has no effect because snat is false'] : []),
  ];
}

// Says whether an earlier entry of the same port and protocol takes every packet that a later one is for.
function covers({ hostIP }: PortMapping, later: PortMapping): boolean {
  if (hostIP === undefined || hostIP.text === later.hostIP?.text) return true;
  return isUnspecified(hostIP) && hostIP.family === later.hostIP?.family;
}

function parse<T>(schema: z.ZodMiniType<T>, value: unknown, path: string): T {
  const parsed = schema.safeParse(value);
  if (parsed.success) return parsed.data;
  throw schemaError(parsed.error, value, path);
}

// The first complaint of a schema as one message: where, what was found, what was wanted.
function schemaError(error: z.core.$ZodError, input: unknown, base: string): PortmapError {
  const issue = error.issues[0];
  let value = input;
  let path = base;
  for (const key of issue?.path ?? []) {
    path += typeof key === 'number' ? `[${key}]` : path === '' ? String(key) : `.${String(key)}`;
    value =
      Array.isArray(value) && typeof key === 'number'
        ? value[key]
        : isObject(value)
          ? value[String(key)]
          : undefined;
  }
  const complaint = issue?.message ?? 'is invalid';
  const text =
    value === undefined
      ? `missing: it ${complaint.replace(/^is not/, 'must be')}`
      : `${show(value)} ${complaint}`;
  return new PortmapError('CONFIG', `${path}: ${text}`);
}
