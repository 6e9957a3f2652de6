// What a mapping needs of the node beside its rules: route_localnet on the way to the container, and no UDP or SCTP
// flow that still goes where an older rule sent it. Never a reason to fail: what goes wrong is a warning.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { type Address, families, isInNetwork, readAddress } from './address.ts';
import { boundAddress, mappingsOf } from './chain.ts';
import type { AttachmentConfig, PortMapping } from './netconf.ts';
import { type Budget, partOf } from './budget.ts';
import { findProgram, runProgram, searchFolders } from './program.ts';

/**
 * Lets 127.0.0.1 of the node reach the container: sets `route_localnet` on the interface that leads there. Only
 * where a mapping can be reached over loopback and its source is rewritten, and never on the interface of the
 * default route, where neighbours could then reach services bound to loopback (CVE-2020-8558). Returns warnings.
 */
export function allowLoopback(config: AttachmentConfig): string[] {
  const address = config.addresses.ipv4;
  const loopback = mappingsOf('ipv4', config).filter(isReachedOverLoopback);
  if (!config.snat || address === undefined || loopback.length === 0) return [];
  const routes = readRoutes();
  const device = routes.find(({ network }) => isInNetwork(address, network))?.device;
  if (device === undefined)
    return [`route_localnet: no route to ${address.text}: 127.0.0.1 does not reach the container`];
  if (routes.some((route) => route.network === '0.0.0.0/0' && route.device === device))
    return [
      `route_localnet: not set on ${device}, which has the default route: 127.0.0.1 does not reach the container`,
    ];
  // The slash form of the name: an interface name may hold dots.
  const path = `/proc/sys/net/ipv4/conf/${device}/route_localnet`;
  try {
    if (readFileSync(path, 'utf8').trim() !== '1') writeFileSync(path, '1');
    return [];
  } catch (error) {
    return [
      `route_localnet: ${path} can't be set: ${error instanceof Error ? error.message : String(error)}`,
    ];
  }
}

/**
 * Warns of what the kernel will never use as it is: a host address that the node does not have, a network namespace that
 * is not there. Neither is an error, for either may come later.
 */
export function doubtsOf(config: AttachmentConfig, netns: string): string[] {
  const bound = config.mappings.flatMap((mapping) => boundAddress(mapping) ?? []);
  const foreign = bound.length === 0 ? [] : bound.filter((address) => !isLocal(address));
  return [
    ...new Set(
      foreign.map(
        ({ text }) =>
          `hostIP: ${text} is no address of this node: the mapping has no effect until it becomes one`,
      ),
    ),
    ...(netns === '' || existsSync(netns)
      ? []
      : [
          `CNI_NETNS: ${netns} does not exist: the container counts as dead, and its mappings may be removed`,
        ]),
  ];
}

function isReachedOverLoopback(mapping: PortMapping): boolean {
  const bound = boundAddress(mapping);
  return bound === undefined || isInNetwork(bound, '127.0.0.0/8');
}

interface Route {
  readonly device: string;
  readonly network: string;
}

// The main table's IPv4 routes, the longest prefix first.
function readRoutes(): Route[] {
  const lines = readText('/proc/net/route').split('\n').slice(1);
  const routes = lines.flatMap((line) => {
    const [device, destination, , flags, , , metric, mask] = line.split('\t');
    // Bit 0: the route is up; bit 9: it refuses.
    if (device === undefined || destination === undefined || mask === undefined) return [];
    if ((Number.parseInt(flags ?? '', 16) & 0x201) !== 1) return [];
    const prefix = dotted(mask)
      .split('.')
      .reduce((sum, part) => sum + (Number(part).toString(2).match(/1/g)?.length ?? 0), 0);
    return [{ device, network: `${dotted(destination)}/${prefix}`, prefix, metric: Number(metric) }];
  });
  return routes.toSorted((one, other) => other.prefix - one.prefix || one.metric - other.metric);
}

// Hexadecimal in the byte order of this machine; both that are built for are little-endian.
function dotted(hex: string): string {
  return (hex.match(/../g) ?? [])
    .toReversed()
    .map((byte) => Number.parseInt(byte, 16))
    .join('.');
}

/** Which flows are stale: after ADD those that do not lead to the new container, after DEL those that lead to the old. */
export type Staleness = 'not to this container' | 'to this container';

/**
 * Deletes the UDP and SCTP flows of these mappings that an older rule, or none, has sent elsewhere: exactly those to
 * the mapping's own host address and port (reports R05, R06, R10). Returns warnings.
 */
export async function dropStaleFlows(
  config: Pick<AttachmentConfig, 'mappings' | 'addresses'>,
  staleness: Staleness,
  call: Budget,
): Promise<string[]> {
  const jobs = families.flatMap((family) =>
    (['udp', 'sctp'] as const).flatMap((protocol) => {
      const address = config.addresses[family];
      const mappings = mappingsOf(family, { ...noRules, ...config }).filter(
        (mapping) => mapping.protocol === protocol,
      );
      return address === undefined || mappings.length === 0 ? [] : [{ family, protocol, address, mappings }];
    }),
  );
  if (jobs.length === 0) return [];
  const program = findProgram('conntrack', searchFolders(process.env['PATH']));
  if (program === undefined)
    return [
      'conntrack: not found: clients that keep sending from one port may go on reaching the former target; install the conntrack package',
    ];
  // Flows are worth a moment, not the whole budget: the mapping itself stands.
  const budget = partOf(call, conntrackMs);
  const warnings = await Promise.all(
    jobs.map(async ({ family, protocol, address, mappings }) => {
      const base = ['-p', protocol, '-f', family];
      const stale = new Map<string, string[]>();
      const ports = new Set(mappings.map(({ hostPort }) => hostPort));
      const listed = await runProgram(program, ['-L', ...base], {
        budget,
        onLine: (line) => {
          // Of a node's million flows few are to these ports.
          if (!ports.has(Number.parseInt(line.slice(line.indexOf(' dport=') + 7), 10))) return;
          const flow = readFlow(line);
          if (flow === undefined || !isStale(flow, mappings, address, staleness)) return;
          const argv = [
            '-d',
            flow.to,
            '--dport',
            String(flow.port),
            '-r',
            flow.replyFrom,
            '--reply-port-src',
            String(flow.replyPort),
          ];
          stale.set(argv.join(' '), argv);
        },
      });
      if (listed.exitCode !== 0) return [`conntrack: ${listed.failure ?? listed.stderr.trim()}`];
      const problems: string[] = [];
      for (const argv of stale.values()) {
        const deleted = await runProgram(program, ['-D', ...base, ...argv], { budget });
        // Exit status 1 with "0 flow entries": the flow has ended by itself.
        if (deleted.exitCode !== 0 && !deleted.stderr.includes(' 0 flow entries'))
          problems.push(`conntrack: ${deleted.failure ?? deleted.stderr.trim()}`);
      }
      return problems;
    }),
  );
  return warnings.flat();
}

const conntrackMs = 5000;
const noRules = { snat: true, masqAll: false, conditions: { ipv4: [], ipv6: [] } };

interface Flow {
  readonly to: string;
  readonly port: number;
  readonly replyFrom: string;
  readonly replyPort: number;
}

function readFlow(line: string): Flow | undefined {
  const addresses = [...line.matchAll(/\b(src|dst|sport|dport)=(\S+)/g)];
  const values = (key: string) =>
    addresses.filter((match) => match[1] === key).map((match) => match[2] ?? '');
  const [to, replyFrom] = [values('dst')[0], values('src')[1]];
  const [port, replyPort] = [values('dport')[0], values('sport')[1]];
  if (to === undefined || replyFrom === undefined || port === undefined || replyPort === undefined)
    return undefined;
  return { to, port: Number(port), replyFrom, replyPort: Number(replyPort) };
}

function isStale(
  flow: Flow,
  mappings: readonly PortMapping[],
  container: Address,
  staleness: Staleness,
): boolean {
  const to = readAddress(flow.to);
  return mappings.some((mapping) => {
    if (mapping.hostPort !== flow.port) return false;
    const bound = boundAddress(mapping);
    const isOurs = bound === undefined ? to !== undefined && isLocal(to) : bound.text === to?.text;
    const leadsHere =
      readAddress(flow.replyFrom)?.text === container.text && flow.replyPort === mapping.containerPort;
    return staleness === 'to this container' ? leadsHere : isOurs && !leadsHere;
  });
}

function isLocal(address: Address): boolean {
  if (address.family === 'ipv4' && isInNetwork(address, '127.0.0.0/8')) return true;
  return localAddresses().some((own) => own.text === address.text);
}

/** The addresses of this node's interfaces that are up. */
export function localAddresses(): Address[] {
  // Few calls need it.
  const { networkInterfaces } = process.getBuiltinModule('node:os');
  return Object.values(networkInterfaces())
    .flatMap((own) => own ?? [])
    .flatMap(({ address }) => readAddress(address.replace(/%.*/, '')) ?? []);
}

function readText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}
