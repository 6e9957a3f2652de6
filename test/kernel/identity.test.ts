// What iptables prints of a nat table comes out of the plugin's parser as it went in: tables that hold the rules of
// kube-proxy, Docker, firewalld, upstream, and one of every kind, put into the kernel and taken from it by every iptables
// of scripts/iptables-versions.sh, in both variants and families.
//
// What is printed is a transaction that makes the table anew. It is also given to iptables in another, empty network
// namespace, where it must make the same table.
import { readFile, writeFile } from 'node:fs/promises';
import { dirname } from 'node:path';
import * as fc from 'fast-check';
import { afterEach, describe, expect, test } from 'vitest';
import { renderListing, renderTransaction, type Ruleset, rulesetReader } from '../../src/restore.ts';
import { families, type Family, type Machine, newestUpstreamBin, openMachine } from '../lab.ts';
import { cells, folderOf } from '../versions.ts';
import {
  bareRule,
  dockerTable,
  kubeProxyTable,
  makeOddSets,
  type OddRule,
  oddRules,
  oddTable,
} from '../shapes.ts';

describe.each(cells)('iptables $version, $variant', ({ version, variant }) => {
  let machine: Machine | undefined;
  afterEach(async () => {
    await machine?.close();
    machine = undefined;
  });
  const open = async (): Promise<Machine> => {
    machine = await openMachine({ variant, tools: `${folderOf(version)}/bin` });
    await machine.sh(`ip netns add copy; ${makeOddSets}`);
    await machine.sh(makeOddSets, { netns: 'copy' });
    return machine;
  };

  const sources: Record<string, (lab: Machine) => Promise<void>> = {
    'kube-proxy': (lab) => loadBoth(lab, kubeProxyTable),
    Docker: (lab) => loadBoth(lab, dockerTable),
    'rules of every kind': (lab) => loadBoth(lab, (family) => oddTable(oddRules(family))),
    firewalld: runFirewalld,
    upstream: runUpstream,
  };
  test.each(Object.keys(sources))('the tables of %s are printed as they were read', async (source) => {
    const lab = await open();
    await sources[source]?.(lab);
    await Promise.all(
      families.map(async (family) => {
        const saved = await expectIdentity(lab, family);
        // Otherwise an empty table would do.
        expect(saved.match(/^-A /gm)?.length, saved).toBeGreaterThan(5);
      }),
    );
  });

  test('so is a rule with neither a match nor a target', async () => {
    const lab = await open();
    await loadBoth(lab, () => oddTable([bareRule]));
    await Promise.all(families.map((family) => expectIdentity(lab, family)));
  });

  test('so are any of their rules, in any order and with any comment', async () => {
    const lab = await open();
    await fc.assert(
      fc.asyncProperty(anyRules('v4'), anyRules('v6'), async (v4, v6) => {
        const rules = { v4, v6 };
        await loadBoth(lab, (family) => oddTable(rules[family]));
        await Promise.all(families.map((family) => expectIdentity(lab, family)));
      }),
      { numRuns: 12 },
    );
  });
});

/** Some of the odd rules, each by chance with one comment more. */
const anyRules = (family: Family): fc.Arbitrary<OddRule[]> => {
  const comment = fc.oneof(
    fc.string({ unit: 'grapheme' }),
    fc.string({ unit: 'binary' }),
    fc.string({ unit: fc.constantFrom('"', '\\', "'", ' ', '-', 'j', '#', '\t', '$'), maxLength: 300 }),
  );
  const commented = fc.tuple(fc.constantFrom(...oddRules(family)), fc.option(comment)).map(([odd, text]) => ({
    ...odd,
    rule: text === null ? odd.rule : `-m comment --comment ${word(text)} ${odd.rule}`,
  }));
  return fc.array(commented, { maxLength: 30 });
};

/** A comment as a word of a line for iptables-restore: one line, and as many bytes as the kernel keeps. */
function word(text: string): string {
  const bytes = Buffer.from(text.replaceAll(/[\0\n]/g, '_'), 'utf8').subarray(0, 255);
  return `"${bytes.toString('latin1').replaceAll(/["\\]/g, String.raw`\$&`)}"`;
}

/** Fails where reading what iptables prints of a table and printing it again changes anything. Gives what it prints. */
async function expectIdentity(lab: Machine, family: Family): Promise<string> {
  const saved = await save(lab, family);
  const chains = [...saved.matchAll(/^:(\S+)/gm)].map(([, chain = '']) => chain);
  const printed = print(read(saved, chains));
  expect(printed, saved).toBe(withoutState(saved));

  const request = await put(lab, family, renderListing(chains));
  const listing = await take(lab, `${restoreOf(family)} -w 10 --noflush < ${request}`, family);
  expect(print(read(listing, chains)), listing).toBe(printed);

  await load(lab, family, printed, 'copy');
  expect(withoutState(await save(lab, family, 'copy')), saved).toBe(printed);
  return saved;
}

/** A save without its remarks, its counters and the policies of the built-in chains, in the words of a transaction. */
function withoutState(saved: string): string {
  return saved.replaceAll(/^#.*\n|^:\S+ ACCEPT .*\n/gm, '').replaceAll(/^:(\S+) - \[\d+:\d+\]$/gm, '-N $1');
}

function read(text: string, chains: readonly string[]): Ruleset {
  const reader = rulesetReader(new Set(chains));
  for (const line of text.split('\n')) reader.read(line);
  return reader.ruleset(chains);
}

/** The transaction that makes a table like this of an empty one. */
function print({ chains }: Ruleset): string {
  const own = [...chains.keys()].filter((chain) => !builtins.has(chain));
  return renderTransaction([
    ...own.map((chain) => ({ do: 'new' as const, chain })),
    ...[...chains].flatMap(([chain, rules]) => rules.map((rule) => ({ do: 'append' as const, chain, rule }))),
  ]);
}

const builtins = new Set(['PREROUTING', 'INPUT', 'OUTPUT', 'POSTROUTING']);

const saveOf = (family: Family): string => `${family === 'v4' ? 'iptables' : 'ip6tables'}-save -t nat`;
const restoreOf = (family: Family): string => `${family === 'v4' ? 'iptables' : 'ip6tables'}-restore`;

// Through files and as bytes: the kernel keeps comments that are no text in any encoding.
async function take(lab: Machine, command: string, family: Family, netns?: string): Promise<string> {
  await lab.sh(`${command} > /run/${family}.out`, netns === undefined ? {} : { netns });
  return readFile(`${lab.root}/run/${family}.out`, 'latin1');
}

async function put(lab: Machine, family: Family, text: string): Promise<string> {
  await writeFile(`${lab.root}/run/${family}.in`, text, 'latin1');
  return `/run/${family}.in`;
}

const save = (lab: Machine, family: Family, netns?: string): Promise<string> =>
  take(lab, saveOf(family), family, netns);

/** Makes this the whole table. */
async function load(lab: Machine, family: Family, text: string, netns?: string): Promise<void> {
  const path = await put(lab, family, text);
  await lab.sh(`${restoreOf(family)} -w 10 --counters < ${path}`, netns === undefined ? {} : { netns });
}

async function loadBoth(lab: Machine, table: (family: Family) => string): Promise<void> {
  await Promise.all(families.map((family) => load(lab, family, table(family))));
}

/**
 * The real firewalld, on a bus of the machine's own and with the iptables of the cell: a zone with forwarded ports,
 * masquerading and rich rules, one that is chosen by a set of addresses, a policy, and direct rules.
 */
async function runFirewalld(lab: Machine): Promise<void> {
  const files: Record<string, string> = {
    'firewalld.conf': 'DefaultZone=public\nFirewallBackend=iptables\nCleanupOnExit=no\nIPv6_rpfilter=no\n',
    'ipsets/friends.xml': '<ipset type="hash:net"><entry>192.0.2.0/24</entry></ipset>',
    'zones/public.xml': `<zone>
      <interface name="ext0"/>
      <masquerade/>
      <forward-port port="8080" protocol="tcp" to-port="80" to-addr="10.1.0.2"/>
      <forward-port port="5300-5310" protocol="udp" to-port="53"/>
      <rule family="ipv4" priority="-5"><source address="192.0.2.0/24" invert="true"/>
        <forward-port port="8081" protocol="tcp" to-port="81" to-addr="10.1.0.3"/></rule>
      <rule family="ipv6"><destination address="2001:db8:3::/64"/>
        <forward-port port="8082" protocol="tcp" to-port="82" to-addr="2001:db8:1::2"/></rule>
      <rule family="ipv4"><source address="10.1.0.0/16"/><masquerade/></rule>
    </zone>`,
    'zones/friends.xml': `<zone target="ACCEPT">
      <source ipset="friends"/><source address="2001:db8:2::/64"/>
      <forward-port port="2222" protocol="tcp" to-port="22"/>
    </zone>`,
    'policies/outwards.xml': `<policy target="CONTINUE">
      <ingress-zone name="friends"/><egress-zone name="ANY"/><masquerade/>
    </policy>`,
    'direct.xml': `<direct>
      <chain ipv="ipv4" table="nat" chain="blocked"/>
      <rule ipv="ipv4" table="nat" chain="PREROUTING" priority="0">-p tcp --dport 25 -j blocked</rule>
      <rule ipv="ipv4" table="nat" chain="blocked" priority="0">-m comment --comment "no mail here" -j RETURN</rule>
      <passthrough ipv="ipv6">-t nat -A POSTROUTING -o ext0 -j MASQUERADE --random-fully</passthrough>
    </direct>`,
  };
  // firewalld names its iptables by their full paths, which lead through the folder of alternatives.
  await lab.sh(`
    cp -a /etc/alternatives /run/alternatives
    for tool in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
      ln -sfn ${lab.toolFolder}/$tool /run/alternatives/$tool
    done
    mount --bind /run/alternatives /etc/alternatives
    mkdir -p /run/dbus /run/firewalld/zones /run/firewalld/ipsets /run/firewalld/policies`);
  for (const [name, text] of Object.entries(files))
    await writeFile(`${lab.root}/run/firewalld/${name}`, text);
  lab.start(['sh', '-c', 'exec dbus-daemon --system --nofork --nopidfile --nosyslog 2>/dev/null']);
  await lab.sh(
    'for try in $(seq 200); do [ -S /run/dbus/system_bus_socket ] && exit 0; sleep 0.02; done; exit 1',
  );
  lab.start([
    'sh',
    '-c',
    'exec firewalld --nofork --nopid --system-config /run/firewalld --log-target console > /run/firewalld.log 2>&1',
  ]);
  const state = await lab.run([
    'sh',
    '-c',
    'for try in $(seq 100); do firewall-cmd --state && exit 0; sleep 0.1; done',
  ]);
  const log = await readFile(`${lab.root}/run/firewalld.log`, 'utf8');
  expect(state.stdout, state.stderr + log).toContain('running');
  expect(log).not.toMatch(/ERROR/);
  await lab.sh('ipset create friends hash:net', { netns: 'copy' });
}

/** A pod of upstream's bridge and portmap plugins, both families, with ipMasq. */
async function runUpstream(lab: Machine): Promise<void> {
  const folder = dirname(newestUpstreamBin);
  const call = async (plugin: string, conf: Record<string, unknown>): Promise<Record<string, unknown>> => {
    const outcome = await lab.run([`${folder}/${plugin}`], {
      input: JSON.stringify({ cniVersion: '1.0.0', name: 'web', type: plugin, ...conf }),
      env: {
        PATH: `${lab.toolFolder}:/usr/sbin:/usr/bin:/sbin:/bin`,
        CNI_COMMAND: 'ADD',
        CNI_CONTAINERID: 'web-1',
        CNI_NETNS: '/run/netns/pod',
        CNI_IFNAME: 'eth0',
        CNI_PATH: folder,
      },
    });
    expect(outcome.exitCode, outcome.stdout + outcome.stderr).toBe(0);
    return JSON.parse(outcome.stdout);
  };
  await lab.sh('ip netns add pod');
  const ranges = [[{ subnet: '10.88.0.0/16' }], [{ subnet: 'fd00:88::/64' }]];
  const prevResult = await call('bridge', {
    bridge: 'cni0',
    isGateway: true,
    ipMasq: true,
    ipam: { type: 'host-local', ranges, routes: [{ dst: '0.0.0.0/0' }, { dst: '::/0' }] },
  });
  await call('portmap', {
    prevResult,
    runtimeConfig: {
      portMappings: [
        { hostPort: 8080, containerPort: 80, protocol: 'tcp' },
        { hostPort: 5300, containerPort: 53, protocol: 'udp' },
      ],
    },
  });
}
