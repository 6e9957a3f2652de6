// From the bytes on stdin to a complete, read-only configuration. Pure: it knows CNI's words and Go's way of
// reading JSON, and nothing of the kernel. ADD and CHECK read everything strictly; DEL, GC and STATUS read no more
// than they need, so that a netconf that went bad after its ADD can still be torn down.
import * as z from 'zod/mini';
import {
  type Address,
  type Family,
  type InterfaceAddress,
  readAddress,
  readInterfaceAddress,
} from './address.ts';
import { PortmapError } from './errors.ts';

export const cniVersions = ['0.1.0', '0.2.0', '0.3.0', '0.3.1', '0.4.0', '1.0.0', '1.1.0'] as const;

export type CniVersion = (typeof cniVersions)[number];

export type Protocol = 'tcp' | 'udp' | 'sctp';

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
  readonly addresses: { readonly [F in Family]?: InterfaceAddress | undefined };
  readonly snat: boolean;
  readonly masqAll: boolean;
  readonly markMasqBit?: number | undefined;
  readonly externalSetMarkChain?: string | undefined;
  readonly conditions: Record<Family, readonly string[]>;
}

/** A JSON object with its known keys in their documented spelling, nulls gone. */
export type JsonObject = Readonly<Record<string, unknown>>;

/** What every verb reads: enough to know which network is meant and which words to answer in. */
export interface NetworkConf {
  readonly cniVersion: CniVersion;
  readonly name: string;
  readonly raw: JsonObject;
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

export const defaultTimeoutSeconds = 60;

const namePattern = /^[a-zA-Z0-9][a-zA-Z0-9_.-]*$/;
const resultFamilies: readonly (readonly string[])[] = [
  ['', '0.1.0', '0.2.0'],
  ['0.3.0', '0.3.1', '0.4.0'],
  ['1.0.0', '1.1.0'],
];

// Null is a list here, not an absence: Go writes an empty list so when it was never filled.
const attachmentKeys = ['cni.dev/valid-attachments', 'cni.dev/attachments'];
const netconfKeys = [
  'cniVersion',
  'name',
  'snat',
  'masqAll',
  'markMasqBit',
  'externalSetMarkChain',
  'conditionsV4',
  'conditionsV6',
  'backend',
  'onConflict',
  'timeoutSeconds',
  'runtimeConfig',
  'prevResult',
  ...attachmentKeys,
];
const mappingKeys = ['hostPort', 'containerPort', 'protocol', 'hostIP'];
const resultKeys = [
  'cniVersion',
  'interfaces',
  'ips',
  'ip4',
  'ip6',
  'name',
  'sandbox',
  'interface',
  'address',
  'ip',
];

/**
 * Reads the JSON object that every verb gets on stdin. Keys are taken in any case and the last duplicate wins, as
 * Go's decoder does it (containerd and Nomad send `HostPort`).
 * @throws PortmapError DECODE when the text is no JSON object.
 */
export function readJson(text: string): JsonObject {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    const reason =
      text.trim() === '' ? 'stdin is empty' : error instanceof Error ? error.message : String(error);
    throw new PortmapError(
      'DECODE',
      `netconf: not JSON: ${reason}`,
      'the runtime passes the network configuration on stdin',
    );
  }
  if (!isObject(value)) throw new PortmapError('DECODE', `netconf: ${show(value)} is not a JSON object`);
  return withKeys(value, netconfKeys);
}

/**
 * Reads the network's name.
 * @throws PortmapError CONFIG when it is missing or malformed (SPEC 1.1.0, section 1: letters, digits, `_`, `.`, `-`).
 */
export function readName(raw: JsonObject): string {
  const name = raw['name'];
  if (name === undefined || name === '')
    throw new PortmapError('CONFIG', 'missing network name', 'name: set it in the netconf');
  if (typeof name !== 'string' || !namePattern.test(name))
    throw new PortmapError(
      'CONFIG',
      `name: ${show(name)} is not a network name`,
      `it must match ${namePattern.source}`,
    );
  return name;
}

/**
 * Reads the version to answer in; a netconf without one is 0.1.0.
 * @throws PortmapError VERSION when it is not one of `cniVersions`.
 */
export function readVersion(raw: JsonObject): CniVersion {
  const version = raw['cniVersion'] ?? '0.1.0';
  const known = cniVersions.find((candidate) => candidate === (version === '' ? '0.1.0' : version));
  if (known === undefined)
    throw new PortmapError(
      'VERSION',
      `incompatible CNI versions: cniVersion ${show(version)} is not supported`,
      `config is ${show(version)}, plugin supports ${JSON.stringify(cniVersions)}`,
    );
  return known;
}

/** The call's time budget in seconds: `timeoutSeconds`, or the default when it is absent or no positive number. */
export function readTimeoutSeconds(raw: JsonObject): number {
  const parsed = timeoutSchema.safeParse(raw['timeoutSeconds']);
  return parsed.success ? (parsed.data ?? defaultTimeoutSeconds) : defaultTimeoutSeconds;
}

/** Says whether the call carries mappings, whatever their quality: what DEL needs to know of them. */
export function hasMappings(raw: JsonObject): boolean {
  const mappings = rawMappings(raw);
  return mappings !== undefined && (!Array.isArray(mappings) || mappings.length > 0);
}

/**
 * Reads the whole netconf for ADD and CHECK of the interface `ifname`.
 * @throws PortmapError CONFIG naming the field and the value.
 */
export function readNetConf(network: NetworkConf, ifname: string): NetConf {
  const { raw } = network;
  const parsed = settingsSchema.safeParse(raw);
  if (!parsed.success) throw schemaError(parsed.error, raw, '');
  const settings = parsed.data;
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

/** The result ADD prints: prevResult as it came, in the netconf's version (SPEC 1.1.0, section 5). */
export function renderResult(conf: NetConf): string {
  return `${JSON.stringify({ ...conf.prevResult, cniVersion: conf.cniVersion }, null, 4)}\n`;
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
    const parsed = mappingSchema.safeParse(isObject(entry) ? withKeys(entry, mappingKeys) : entry);
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
  const key = attachmentKeys.find((candidate) => network.raw[candidate] !== undefined);
  if (key === undefined)
    throw new PortmapError(
      'CONFIG',
      'cni.dev/valid-attachments: missing, so nothing was deleted',
      'GC needs the list of attachments that are alive; an empty list removes all of the network',
    );
  const parsed = attachmentsSchema.safeParse(network.raw[key] ?? []);
  if (!parsed.success) throw schemaError(parsed.error, network.raw[key], key);
  return parsed.data;
}

const message = (what: string) => ({ error: what });
const isPort = message('is not a port: a whole number from 1 to 65535');
const isFlag = message('is not true or false');
const isText = message('is not text');

const portSchema = z.number(isPort).check(z.int(isPort), z.minimum(1, isPort), z.maximum(65535, isPort));

const mappingSchema = z.object(
  {
    hostPort: portSchema,
    containerPort: portSchema,
    protocol: z._default(
      z.pipe(
        z.pipe(
          z.string(message('is not a protocol: tcp, udp or sctp')),
          z.transform((text) => (text === '' ? 'tcp' : text.toLowerCase())),
        ),
        z.enum(['tcp', 'udp', 'sctp'], message('is not a protocol: tcp, udp or sctp')),
      ),
      'tcp',
    ),
    hostIP: z.optional(
      z.string(isText).check(
        z.refine((text) => text === '' || readAddress(text) !== undefined, {
          error: 'is not an IP address (names, zones and prefix lengths are not taken)',
        }),
      ),
    ),
  },
  message('is not an object'),
);

const conditionsSchema = z._default(
  z
    .array(
      z.string(message('is not text: one word of the iptables rule')).check(
        z.minLength(1, message('is empty: give one word of the iptables rule')),
        // Each word is one token of a line for iptables-restore, whose lines are cut at 10240 bytes and tokens at 1024.
        z.maxLength(250, message('is longer than 250 characters')),
        z.refine((text) => !/[\0\n\r]/.test(text), { error: 'holds a line break or NUL' }),
        z.refine((text) => text.isWellFormed(), { error: 'is not well-formed Unicode' }),
        z.refine((text) => !/^-.*\s/.test(text), {
          error: 'holds several words: give each word of the rule as an element',
        }),
      ),
      message('is not a list of words of an iptables rule'),
    )
    .check(
      z.maxLength(60, message('has more than 60 words')),
      z.refine((words) => words.length === 0 || /^[-!]/.test(words[0] ?? ''), {
        error: 'does not start with an iptables option or "!": nftables syntax is not taken',
      }),
    ),
  [],
);

const isMarkBit = message('is not a mark bit: a whole number from 0 to 31');
const isTimeout = message('is not a time in seconds: a number from 0.1 to 3600');
const timeoutSchema = z.optional(
  z.number(isTimeout).check(z.minimum(0.1, isTimeout), z.maximum(3600, isTimeout)),
);

const settingsSchema = z.object({
  snat: z._default(z.boolean(isFlag), true),
  masqAll: z._default(z.boolean(isFlag), false),
  markMasqBit: z.optional(
    z.number(isMarkBit).check(z.int(isMarkBit), z.minimum(0, isMarkBit), z.maximum(31, isMarkBit)),
  ),
  externalSetMarkChain: z.optional(
    z
      .string(isText)
      .check(
        z.regex(
          /^[^\s\0"\\!:-][^\s\0"\\]{0,27}$/,
          message('is not the name of a chain: 1 to 28 characters without spaces'),
        ),
      ),
  ),
  conditionsV4: conditionsSchema,
  conditionsV6: conditionsSchema,
  backend: z.optional(
    z.enum(['iptables', ''], message('is not a backend of this plugin: only "iptables" is')),
  ),
  onConflict: z._default(z.enum(['warn', 'fail'], message('is neither "warn" nor "fail"')), 'warn'),
  timeoutSeconds: timeoutSchema,
});

const attachmentsSchema = z.array(
  z.pipe(
    z.transform((value) => (isObject(value) ? withKeys(value, ['containerID', 'ifname']) : value)),
    z.object({ containerID: z.string(isText), ifname: z.string(isText) }, message('is not an attachment')),
  ),
  message('is not a list of attachments'),
);

function rawMappings(raw: JsonObject): unknown {
  const runtimeConfig = raw['runtimeConfig'];
  return isObject(runtimeConfig) ? withKeys(runtimeConfig, ['portMappings'])['portMappings'] : undefined;
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
    const parsed = mappingSchema.safeParse(folded);
    if (!parsed.success) throw schemaError(parsed.error, folded, `runtimeConfig.portMappings[${index}]`);
    return toMapping(parsed.data);
  });
}

function toMapping(entry: z.infer<typeof mappingSchema>): PortMapping {
  const { hostPort, containerPort, protocol } = entry;
  return { hostPort, containerPort, protocol, hostIP: readAddress(entry.hostIP ?? '') };
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

// The container's address per family: the first that is not known to belong to another interface. An `interface`
// that points nowhere counts as none, as upstream reads it.
function readAddresses(
  prevResult: JsonObject,
  version: CniVersion,
  ifname: string,
): AttachmentConfig['addresses'] {
  const result = withKeys(prevResult, resultKeys);
  const resultVersion = result['cniVersion'] ?? version;
  const family = resultFamilies.find((candidates) => candidates.includes(version));
  if (typeof resultVersion !== 'string' || family?.includes(resultVersion) !== true)
    throw new PortmapError(
      'CONFIG',
      `prevResult.cniVersion: ${show(resultVersion)} does not go with cniVersion ${show(version)}`,
      `results of that version carry one of ${JSON.stringify(family)}`,
    );
  const found =
    version === '0.1.0' || version === '0.2.0' ? singleAddresses(result) : listedAddresses(result, ifname);
  const addresses: Partial<Record<Family, InterfaceAddress>> = {};
  for (const { text, path } of found) {
    const address = typeof text === 'string' ? readInterfaceAddress(text) : undefined;
    if (address === undefined)
      throw new PortmapError(
        'CONFIG',
        `${path}: ${show(text)} is not an IP address with a prefix length`,
        'as in 10.1.0.5/16',
      );
    addresses[address.family] ??= address;
  }
  return addresses;
}

function singleAddresses(result: JsonObject): { text: unknown; path: string }[] {
  return ['ip4', 'ip6'].flatMap((key) => {
    const part = result[key];
    return isObject(part) ? [{ text: withKeys(part, resultKeys)['ip'], path: `prevResult.${key}.ip` }] : [];
  });
}

function listedAddresses(result: JsonObject, ifname: string): { text: unknown; path: string }[] {
  const interfaces = Array.isArray(result['interfaces']) ? result['interfaces'] : [];
  const ips: unknown = result['ips'] ?? [];
  if (!Array.isArray(ips)) throw new PortmapError('CONFIG', `prevResult.ips: ${show(ips)} is not a list`);
  return ips.flatMap((entry: unknown, index) => {
    if (!isObject(entry))
      throw new PortmapError('CONFIG', `prevResult.ips[${index}]: ${show(entry)} is not an object`);
    const ip = withKeys(entry, resultKeys);
    const owner: unknown = typeof ip['interface'] === 'number' ? interfaces[ip['interface']] : undefined;
    if (isObject(owner)) {
      const { name, sandbox } = withKeys(owner, resultKeys);
      if (name !== ifname || sandbox === undefined || sandbox === '') return [];
    }
    return [{ text: ip['address'], path: `prevResult.ips[${index}].address` }];
  });
}

function configWarnings(attachment: AttachmentConfig): string[] {
  const { mappings, addresses } = attachment;
  const unmapped = mappings.filter(
    (mapping) => mapping.hostIP !== undefined && addresses[mapping.hostIP.family] === undefined,
  );
  const loopback6 = mappings.filter(
    (mapping) => mapping.hostIP?.text === '::1' && addresses.ipv6 !== undefined,
  );
  const seen = new Map<string, PortMapping>();
  const shadowed = mappings.filter((mapping) => {
    const key = `${mapping.protocol} ${mapping.hostIP?.text ?? ''} ${mapping.hostPort}`;
    if (seen.has(key)) return true;
    seen.set(key, mapping);
    return false;
  });
  return [
    ...unmapped.map(
      (mapping) =>
        `${describeMapping(mapping)}: not mapped: the container has no ${mapping.hostIP?.family === 'ipv6' ? 'IPv6' : 'IPv4'} address on this interface`,
    ),
    ...loopback6.map(
      (mapping) =>
        `${describeMapping(mapping)}: the kernel routes no packet from ::1 to a container; use another host address`,
    ),
    ...shadowed.map(
      (mapping) =>
        `${describeMapping(mapping)}: an earlier entry of this request has the same host port and takes its traffic`,
    ),
    ...(attachment.masqAll && !attachment.snat ? ['masqAll: has no effect because snat is false'] : []),
  ];
}

// Known keys in their documented spelling, nulls dropped; Go's decoder takes keys in any case and null as unset.
function withKeys(object: JsonObject, keys: readonly string[]): JsonObject {
  const spelling = new Map(keys.map((key) => [key.toLowerCase(), key]));
  const entries = Object.entries(object).map(
    ([key, value]) => [spelling.get(key.toLowerCase()) ?? key, value] as const,
  );
  return Object.fromEntries(entries.filter(([key, value]) => value !== null || attachmentKeys.includes(key)));
}

function isObject(value: unknown): value is JsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
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
  return new PortmapError(
    'CONFIG',
    `${path}: ${value === undefined ? 'missing' : show(value)} ${issue?.message ?? 'is invalid'}`,
  );
}

function show(value: unknown): string {
  const text = JSON.stringify(value) ?? 'undefined';
  return text.length > 120 ? `${text.slice(0, 117)}...` : text;
}
