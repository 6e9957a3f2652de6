// What every verb reads of a netconf: JSON the way Go reads it, the network's name, the version to answer in, the time
// the call has. Pure, and light: most calls on a node end here, so nothing else is loaded for them.
import { PortmapError } from './errors.ts';

export const cniVersions = ['0.1.0', '0.2.0', '0.3.0', '0.3.1', '0.4.0', '1.0.0', '1.1.0'] as const;

export type CniVersion = (typeof cniVersions)[number];

/** A JSON object with its known keys in their documented spelling, nulls gone. */
export type JsonObject = Readonly<Record<string, unknown>>;

/** What every verb reads: enough to know which network is meant and which words to answer in. */
export interface NetworkConf {
  readonly cniVersion: CniVersion;
  readonly name: string;
  readonly raw: JsonObject;
}

export const defaultTimeoutSeconds = 60;

const namePattern = /^[a-zA-Z0-9][a-zA-Z0-9_.-]*$/;
// Null is a list here, not an absence: Go writes an empty list so when it was never filled.
export const attachmentKeys = ['cni.dev/valid-attachments', 'cni.dev/attachments'];
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

/** The call's time budget in seconds: `timeoutSeconds`, or the default when it is absent or no sensible time. */
export function readTimeoutSeconds(raw: JsonObject): number {
  const seconds = raw['timeoutSeconds'];
  return isTimeout(seconds) ? seconds : defaultTimeoutSeconds;
}

/** Says whether a value is a time that a call may have, in seconds. */
export function isTimeout(value: unknown): value is number {
  return typeof value === 'number' && value >= 0.1 && value <= 3600;
}

/** Says whether the call carries mappings, whatever their quality: what DEL needs to know of them. */
export function hasMappings(raw: JsonObject): boolean {
  const mappings = rawMappings(raw);
  return mappings !== undefined && (!Array.isArray(mappings) || mappings.length > 0);
}

/** `runtimeConfig.portMappings` as it came. */
export function rawMappings(raw: JsonObject): unknown {
  const runtimeConfig = raw['runtimeConfig'];
  return isObject(runtimeConfig) ? withKeys(runtimeConfig, ['portMappings'])['portMappings'] : undefined;
}

/** An object with known keys in their documented spelling and nulls dropped, as Go's decoder takes them. */
export function withKeys(object: JsonObject, keys: readonly string[]): JsonObject {
  const spelling = new Map(keys.map((key) => [key.toLowerCase(), key]));
  const entries = Object.entries(object).map(
    ([key, value]) => [spelling.get(key.toLowerCase()) ?? key, value] as const,
  );
  return Object.fromEntries(entries.filter(([key, value]) => value !== null || attachmentKeys.includes(key)));
}

export function isObject(value: unknown): value is JsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** A value as it stands in JSON, short enough for a message. */
export function show(value: unknown): string {
  const text = JSON.stringify(value) ?? 'undefined';
  return text.length > 120 ? `${text.slice(0, 117)}...` : text;
}
