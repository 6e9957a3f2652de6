// What a node must hold after any sequence of calls, in few words and without the plugin's own code: an attachment has
// its rules, the newest sandbox is asked first, and nothing else is there. A killed call leaves more than one state
// that is right, so what is known of a node are the worlds it may be in; each look at the kernel rules some of them out.
import { sandboxChain } from './footprint.ts';
import { families, type Family } from './lab.ts';

export type Mapping = {
  readonly hostPort: number;
  readonly protocol: 'tcp' | 'udp';
  readonly hostIP?: string;
};
/** One interface of one container on one network, and where its mappings lead. */
export type Attachment = {
  readonly network: string;
  readonly container: string;
  readonly ifname: string;
  readonly addresses: Readonly<Record<Family, string>>;
  readonly mappings: readonly Mapping[];
};
/** What a container has on a network. The newest attachment comes first. */
type Sandbox = { readonly order: number; readonly attachments: readonly Attachment[] };

type Table = {
  /** Whether somebody else's rule and our jumps are still in the built-in chains. */
  readonly foreign: boolean;
  readonly jumps: boolean;
  readonly shared: 'missing' | 'flushed' | 'whole';
  /** By the name of its chain, what is installed of a sandbox. */
  readonly installed: ReadonlyMap<string, Sandbox | 'flushed'>;
};
export type World = {
  readonly tables: Readonly<Record<Family, Table>>;
  /** By the name of its chain, what a sandbox has been given. */
  readonly given: ReadonlyMap<string, Sandbox>;
  /** DELs of killed callers, for the next call that commits. */
  readonly pending: readonly Attachment[];
  /** Containers whose network namespace is gone. */
  readonly dead: ReadonlySet<string>;
};

const untouched: Table = { foreign: true, jumps: false, shared: 'missing', installed: new Map() };
/** A node that the plugin has never seen, with one rule of somebody else. */
export const freshWorld: World = {
  tables: { v4: untouched, v6: untouched },
  given: new Map(),
  pending: [],
  dead: new Set(),
};

const dispatchChain = 'CNI-HOSTPORT-DNAT';
const chainOf = ({ network, container }: Pick<Attachment, 'network' | 'container'>): string =>
  sandboxChain(network, container);
const isSame = (one: Attachment, other: Attachment): boolean =>
  chainOf(one) === chainOf(other) && one.ifname === other.ifname;

// ---------------------------------------------------------------------------------------------------------------
// Calls

/** ADD: `order` is greater than that of every ADD before. */
export function add(world: World, attachment: Attachment, order: number): World {
  const settled = finishPending(world, attachment);
  const free = [...settled.given.values()]
    .filter((rival) => isDead(settled, rival) && shadows(settled, rival, attachment))
    .reduce((before, rival) => install(before, nameOf(rival), undefined), settled);
  const others = attachmentsOf(free, attachment).filter((other) => !isSame(other, attachment));
  return install(free, chainOf(attachment), { order, attachments: [attachment, ...others] });
}

export function del(world: World, attachment: Attachment): World {
  return remove(finishPending(world, attachment), [attachment]);
}

/** A DEL that names no mappings, or an ADD of none: for a sandbox that has nothing it need not look at anything. */
export function delIfKnown(world: World, attachment: Attachment): World[] {
  const all = del(world, attachment);
  return world.given.has(chainOf(attachment)) ? [all] : [world, all];
}

/** GC of a network: whatever is not in its list goes. The list does not know networks. */
export function collect(
  world: World,
  network: string,
  valid: readonly Pick<Attachment, 'container' | 'ifname'>[],
): World[] {
  const isStale = ({ container, ifname, ...one }: Attachment): boolean =>
    one.network === network &&
    !valid.some((other) => other.container === container && other.ifname === ifname);
  // What goes of one sandbox goes at once.
  const rest = [...world.given.values()].reduce(
    (before, { attachments }) => remove(before, attachments.filter(isStale)),
    world,
  );
  return mayFinish(rest);
}

/** `portmap reapply`: the living have their rules again, the dead are forgotten. */
export function reapply(world: World): World[] {
  const whole = [...world.given.values()].reduce(
    (before, sandbox) => install(before, nameOf(sandbox), isDead(world, sandbox) ? undefined : sandbox),
    world,
  );
  return mayFinish(whole);
}

/** CHECK: whether packets for every mapping of the attachment reach it. */
export function isWhole(world: World, attachment: Attachment): boolean {
  const name = chainOf(attachment);
  const known = attachmentsOf(world, attachment);
  const isKnown = known.some((one) => isSame(one, attachment));
  const needed = isKnown
    ? known.map((one) => (isSame(one, attachment) ? attachment : one))
    : [attachment, ...known];
  const newer = needed.slice(0, needed.indexOf(attachment));
  return families.every((family) => {
    const mappings = mappingsOf(family, attachment);
    if (mappings.length === 0) return true;
    const table = world.tables[family];
    const own = table.installed.get(name);
    if (own === undefined || own === 'flushed' || !table.jumps || table.shared !== 'whole') return false;
    const inFront = [...table.installed].flatMap(([other, sandbox]) =>
      other !== name && sandbox !== 'flushed' && sandbox.order > own.order ? sandbox.attachments : [],
    );
    return (
      chainRules(family, own.attachments).join() === chainRules(family, needed).join() &&
      !needed.some((one) => inFront.some((other) => overlap(family, one, other))) &&
      !newer.some((other) => overlap(family, attachment, other))
    );
  });
}

/** What an ADD or a DEL that was killed may leave of its way from one world to another. */
export function halfway(before: World, after: World, attachment: Attachment, verb: 'ADD' | 'DEL'): World[] {
  const others = before.pending.filter((one) => chainOf(one) !== chainOf(attachment));
  const asked = { ...before, pending: verb === 'DEL' ? [...others, attachment] : others };
  // That a sandbox has something is noted before it has it, that it has something no more is noted afterwards.
  const given = verb === 'DEL' ? before.given : new Map([...before.given, ...after.given]);
  const mixed = [before, after].flatMap((v4) =>
    [before, after].map((v6) => ({ ...asked, given, tables: { v4: v4.tables.v4, v6: v6.tables.v6 } })),
  );
  return [before, asked, ...mixed, after];
}

// ---------------------------------------------------------------------------------------------------------------
// What others do

export function flush(world: World, which: 'everything' | 'built-in chains'): World {
  const flushed = (table: Table): Table => ({
    foreign: false,
    jumps: false,
    ...(which === 'everything'
      ? {
          shared: table.shared === 'missing' ? 'missing' : 'flushed',
          installed: new Map([...table.installed.keys()].map((name) => [name, 'flushed'])),
        }
      : { shared: table.shared, installed: table.installed }),
  });
  return { ...world, tables: { v4: flushed(world.tables.v4), v6: flushed(world.tables.v6) } };
}

export function withNamespace(world: World, container: string, isThere: boolean): World {
  const others = [...world.dead].filter((one) => one !== container);
  return { ...world, dead: new Set(isThere ? others : [...others, container]) };
}

// ---------------------------------------------------------------------------------------------------------------
// Their parts

const nameOf = ({ attachments: [first] }: Sandbox): string => (first === undefined ? '' : chainOf(first));
const isDead = (world: World, { attachments }: Sandbox): boolean =>
  attachments.every(({ container }) => world.dead.has(container));
const attachmentsOf = (world: World, one: Attachment): readonly Attachment[] =>
  world.given.get(chainOf(one))?.attachments ?? [];

// A call for the same sandbox takes the place of one that waits; the others are done on the way.
function finishPending(world: World, own: Attachment): World {
  const others = world.pending.filter((one) => chainOf(one) !== chainOf(own));
  return { ...others.reduce((before, one) => remove(before, [one]), world), pending: [] };
}

// GC and reapply go past the calls that wait; they may do as those do.
function mayFinish(world: World): World[] {
  const finished = world.pending.reduce((before, one) => remove(before, [one]), world);
  return [world, { ...finished, pending: [] }];
}

// Attachments of one sandbox. A killed ADD may have left rules of one that nobody has noted.
function remove(world: World, attachments: readonly Attachment[]): World {
  const [first] = attachments;
  if (first === undefined) return world;
  const name = chainOf(first);
  const isGone = (one: Attachment) => attachments.some((other) => isSame(one, other));
  const given = world.given.get(name);
  const installed = families.map((family) => world.tables[family].installed.get(name));
  const isThere = [given, ...installed].some(
    (sandbox) => sandbox !== undefined && sandbox !== 'flushed' && sandbox.attachments.some(isGone),
  );
  if (!isThere) return world;
  const rest = (given?.attachments ?? []).filter((one) => !isGone(one));
  return install(
    world,
    name,
    given === undefined || rest.length === 0 ? undefined : { ...given, attachments: rest },
  );
}

// Gives a sandbox exactly this, in both families.
function install(world: World, name: string, sandbox: Sandbox | undefined): World {
  const installIn = (family: Family): Table => {
    const { [family]: table } = world.tables;
    const installed = new Map(table.installed);
    installed.delete(name);
    if (sandbox === undefined || !sandbox.attachments.some((one) => mappingsOf(family, one).length > 0))
      return { ...table, installed };
    return { ...table, jumps: true, shared: 'whole', installed: installed.set(name, sandbox) };
  };
  const given = new Map(world.given);
  if (sandbox === undefined) given.delete(name);
  else given.set(name, sandbox);
  return { ...world, given, tables: { v4: installIn('v4'), v6: installIn('v6') } };
}

// Says whether the kernel would lead packets for a new attachment to another sandbox.
function shadows(world: World, rival: Sandbox, attachment: Attachment): boolean {
  const name = nameOf(rival);
  return (
    name !== chainOf(attachment) &&
    families.some(
      (family) =>
        (world.tables[family].installed.get(name) ?? 'flushed') !== 'flushed' &&
        rival.attachments.some((one) => overlap(family, one, attachment)),
    )
  );
}

const mappingsOf = (family: Family, { mappings }: Attachment): Mapping[] =>
  mappings.filter(({ hostIP }) => hostIP === undefined || hostIP.includes(':') === (family === 'v6'));

const overlap = (family: Family, one: Attachment, other: Attachment): boolean =>
  mappingsOf(family, one).some((here) =>
    mappingsOf(family, other).some(
      (there) =>
        here.protocol === there.protocol &&
        here.hostPort === there.hostPort &&
        (here.hostIP ?? there.hostIP) === (there.hostIP ?? here.hostIP),
    ),
  );

// ---------------------------------------------------------------------------------------------------------------
// Text

/** A family's nat table as `readTable` gives it. */
export function printTable(family: Family, { foreign, jumps, shared, installed }: Table): string {
  const jump = jumps ? [`-m addrtype --dst-type LOCAL -j ${dispatchChain}`] : [];
  const inOrder = [...installed.values()]
    .filter((sandbox) => sandbox !== 'flushed')
    .toSorted((one, other) => other.order - one.order);
  const rules = (...lines: string[]): string[] => (shared === 'whole' ? lines : []);
  const chains: Record<string, readonly string[]> = {
    PREROUTING: [...(foreign ? ['-p tcp -m tcp --dport 7 -j ACCEPT'] : []), ...jump],
    OUTPUT: jump,
    POSTROUTING: jumps
      ? ['-m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ']
      : [],
    ...(shared === 'missing'
      ? {}
      : {
          [dispatchChain]: inOrder.flatMap((sandbox) => dispatchLines(family, sandbox)),
          'CNI-HOSTPORT-MASQ': rules('-m mark --mark 0x2000/0x2000 -j MASQUERADE'),
          'CNI-HOSTPORT-SETMARK': rules(
            '-m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000',
          ),
        }),
    ...Object.fromEntries(
      [...installed].map(([name, sandbox]) => [
        name,
        sandbox === 'flushed' ? [] : chainRules(family, sandbox.attachments),
      ]),
    ),
  };
  return textOf(new Map(Object.entries(chains)));
}

/** What iptables-save prints, by chain; the order in which it names the chains says nothing. */
export function readTable(save: string): string {
  const chains = new Map<string, string[]>();
  for (const line of save.split('\n')) {
    const [, chain = '', rule] = /^:(\S+)/.exec(line) ?? /^-A (\S+) (.*)$/.exec(line) ?? [];
    if (chain === '') continue;
    const rules = chains.get(chain) ?? [];
    chains.set(chain, rule === undefined ? rules : [...rules, rule]);
  }
  return textOf(chains);
}

// Which empty built-in chains are there, each iptables decides for itself.
function textOf(chains: ReadonlyMap<string, readonly string[]>): string {
  return [...chains]
    .filter(([chain, rules]) => rules.length > 0 || chain.startsWith('CNI-'))
    .toSorted(([one], [other]) => (one < other ? -1 : 1))
    .flatMap(([chain, rules]) => [`${chain}:`, ...sorted(rules).map((rule) => `  ${rule}`)])
    .join('\n');
}

const target = (rule: string | undefined): string | undefined => / -j (CNI-DN-\S+)$/.exec(rule ?? '')?.[1];

// The lines that lead to one sandbox are for different packets: their order among themselves means nothing.
function sorted(rules: readonly string[]): string[] {
  const runs: string[][] = [];
  for (const rule of rules) {
    const run = runs.at(-1);
    if (run !== undefined && target(rule) !== undefined && target(rule) === target(run[0])) run.push(rule);
    else runs.push([rule]);
  }
  return runs.flatMap((run) => run.toSorted());
}

function dispatchLines(family: Family, { attachments }: Sandbox): string[] {
  const lines = attachments.flatMap((attachment) =>
    (['tcp', 'udp'] as const).flatMap((protocol) => {
      const ports = mappingsOf(family, attachment)
        .filter((mapping) => mapping.protocol === protocol)
        .map(({ hostPort }) => hostPort);
      const { network, container } = attachment;
      return ports.length === 0
        ? []
        : [
            `-p ${protocol} -m comment --comment "dnat name: \\"${network}\\" id: \\"${container}\\"" -m multiport --dports ${ports.join(',')} -j ${chainOf(attachment)}`,
          ];
    }),
  );
  // Two interfaces with the same ports share a line.
  return [...new Set(lines)];
}

function chainRules(family: Family, attachments: readonly Attachment[]): string[] {
  return attachments.flatMap((attachment) => attachmentRules(family, attachment));
}

function attachmentRules(family: Family, attachment: Attachment): string[] {
  const sources = family === 'v4' ? ['10.1.0.0/16', '127.0.0.1/32'] : ['2001:db8:1::/64'];
  const address = family === 'v4' ? attachment.addresses.v4 : `[${attachment.addresses.v6}]`;
  return mappingsOf(family, attachment).flatMap(({ hostPort, protocol, hostIP }) => {
    const to = hostIP === undefined ? '' : `-d ${hostIP}/${family === 'v4' ? 32 : 128} `;
    const match = `-p ${protocol} -m ${protocol} --dport ${hostPort}`;
    return [
      ...sources.map((source) => `-s ${source} ${to}${match} -j CNI-HOSTPORT-SETMARK`),
      `${to}${match} -j DNAT --to-destination ${address}:80`,
    ];
  });
}
