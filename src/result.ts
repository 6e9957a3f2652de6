// prevResult: which addresses the container has, and the result that ADD prints. Pure.
import { type Family, type InterfaceAddress, readInterfaceAddress } from './address.ts';
import { PortmapError } from './errors.ts';
import { type CniVersion, isObject, type JsonObject, show, withKeys } from './network.ts';

/** The container's address in each family that it has one in. */
export type ContainerAddresses = { readonly [F in Family]?: InterfaceAddress | undefined };

const resultFamilies: readonly (readonly string[])[] = [
  ['', '0.1.0', '0.2.0'],
  ['0.3.0', '0.3.1', '0.4.0'],
  ['1.0.0', '1.1.0'],
];

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

/** The result ADD prints: prevResult as it came, in the netconf's version (SPEC 1.1.0, section 5). */
export function renderResult(conf: {
  readonly prevResult: JsonObject;
  readonly cniVersion: CniVersion;
}): string {
  return `${JSON.stringify({ ...conf.prevResult, cniVersion: conf.cniVersion }, null, 4)}\n`;
}

/**
 * Reads the container's address per family: the first that is not known to belong to another interface. An
 * `interface` that points nowhere counts as none, as upstream reads it.
 * @throws PortmapError CONFIG when the result is of another version or holds no addresses where it should.
 */
export function readAddresses(
  prevResult: JsonObject,
  version: CniVersion,
  ifname: string,
): ContainerAddresses {
  const result = withKeys(prevResult, resultKeys);
  const resultVersion = result['cniVersion'] ?? version;
  const family = resultFamilies.find((candidates) => candidates.includes(version));
  if (typeof resultVersion !== 'string' || family?.includes(resultVersion) !== true)
    throw new PortmapError(
      'CONFIG',
      `prevResult.cniVersion: ${show(resultVersion)} does not go with cniVersion ${show(version)}`,
      `results of that version carry one of ${JSON.stringify(family)}; a netconf without cniVersion is of version 0.1.0`,
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
