// CHECK, GC and STATUS: verbs that look at the node as it is.
import { join } from 'node:path';
import { statSync } from 'node:fs';
import { families, type Family } from './address.ts';
import { checkRules, type Verdict } from './check.ts';
import {
  dispatchChain,
  familiesOf,
  mappingsOf,
  overlaps,
  sandboxHash,
  sandboxPrefix,
  sandboxRules,
  dispatchJump,
} from './chain.ts';
import { commitTogether } from './commit.ts';
import type { CniVariables } from './environment.ts';
import { PortmapError, toPortmapError } from './errors.ts';
import { localAddresses } from './host.ts';
import {
  findTools,
  hasLegacyTable,
  observe,
  observeMore,
  type Tools,
  type Variant,
  variants,
} from './iptables.ts';
import { readDispatch } from './listing.ts';
import { withLockIfPossible } from './lock.ts';
import { describeMapping, type NetConf, readValidAttachments } from './netconf.ts';
import type { NetworkConf } from './network.ts';
import type { Budget } from './budget.ts';
import { newRequest } from './queue.ts';
import { type Attachment, readRecord, readRecords } from './record.ts';
import type { Ruleset } from './restore.ts';
import { isDead } from './rival.ts';
import type { Surroundings } from './change.ts';
import { openState, sandboxFiles, type StateFolder, writeState } from './state.ts';

/**
 * Proves that packets for the attachment's mappings reach the container. Changes nothing.
 * @throws PortmapError CHECK naming every piece that is missing, wrong, misplaced or shadowed.
 */
export async function checkSandbox(
  conf: NetConf,
  variables: CniVariables,
  call: Surroundings,
): Promise<void> {
  const wanted = familiesOf(conf.attachment);
  if (wanted.length === 0) return;
  const state = openState(false);
  const look = () => checkTables(conf, variables, 'problem' in state ? undefined : state, call.budget);
  const record =
    'problem' in state
      ? undefined
      : sandboxFiles(state, sandboxHash(conf.name, variables.containerId)).record;
  const onProblem = (problem: string) => call.warn(`state folder: ${problem}; looking without a lock`);
  const findings =
    record === undefined ? await look() : await withLockIfPossible(record, call.budget, onProblem, look);
  if (findings.length > 0) throw new PortmapError('CHECK', findings.join('; '), adviceFor(findings));
}

const isTaken = (finding: string): boolean => finding.includes(': an earlier rule takes ');
const isContainers = (finding: string): boolean => finding.includes(` -j ${sandboxPrefix}`);

// What to do about these findings, each kind once.
function adviceFor(findings: readonly string[]): string {
  const taken = findings.filter(isTaken);
  return [
    ...(findings.every(isTaken)
      ? []
      : [
          'another program changed the nat table, or an ADD was lost: any ADD repairs the shared chains, "portmap reapply" puts back the sandbox’s own',
        ]),
    ...(taken.some(isContainers)
      ? [
          'another container has the port, and "portmap list" shows which: stop it, or map another port; if it is gone already, "portmap reapply" removes it',
        ]
      : []),
    ...(taken.some((finding) => !isContainers(finding))
      ? ['another program’s rule comes first: remove or narrow it, or map another port']
      : []),
  ].join('. ');
}

async function checkTables(
  conf: NetConf,
  variables: CniVariables,
  state: StateFolder | undefined,
  budget: Budget,
): Promise<string[]> {
  const { containerId, ifname, netns } = variables;
  const record = state === undefined ? 'missing' : readRecord(state, sandboxHash(conf.name, containerId));
  const others = typeof record === 'string' ? [] : record.attachments;
  const own: Attachment = { ifname, netns, config: conf.attachment };
  // In the order ADD gave them; an attachment that was never recorded stands alone or first.
  const known = others.some((other) => other.ifname === ifname);
  const attachments = known
    ? others.map((other) => (other.ifname === ifname ? own : other))
    : [own, ...others];
  const variant = typeof record === 'string' ? undefined : record.variant;
  const local = localAddresses();
  const answers = await Promise.all(
    familiesOf(conf.attachment).map(async (family) => {
      const configs = attachments.map(({ config }) => config);
      const wanted = sandboxRules(family, conf.name, containerId, configs);
      if (wanted === undefined) return [];
      const tools = await findTools(family, variant, budget);
      const asked = [
        dispatchChain,
        ...wanted.marks.map(({ name }) => name),
        ...wanted.external,
        wanted.chain.name,
      ];
      const findings = await judge(tools, asked, budget, (observed) =>
        checkRules({ family, observed, local }, wanted, configs),
      );
      const earlier = attachments.slice(0, attachments.indexOf(own));
      const covered = earlier.flatMap((other) =>
        mappingsOf(family, conf.attachment)
          .filter((mapping) => mappingsOf(family, other.config).some((taken) => overlaps(mapping, taken)))
          .map(
            (mapping) =>
              `${family}: ${describeMapping(mapping)}: interface ${other.ifname} of this container takes its traffic`,
          ),
      );
      const pieces = findings.map((finding) => `${family}: ${finding}`);
      return [...pieces, ...covered];
    }),
  );
  return answers.flat();
}

// kube-proxy's way to an endpoint is five chains long. What is deeper than this is not looked for.
const maxRounds = 8;

// Other programs' chains are read only where the sandbox's packets may pass, and which these are, the one in front tells.
async function judge(
  tools: Tools,
  asked: readonly string[],
  budget: Budget,
  check: (observed: Ruleset) => Verdict,
): Promise<readonly string[]> {
  let observed = await observe(tools, asked, budget);
  let verdict = check(observed);
  for (let round = 0; round < maxRounds && verdict.unread.length > 0; round += 1) {
    observed = await observeMore(tools, observed, verdict.unread, budget);
    verdict = check(observed);
  }
  return verdict.findings;
}

/** Every table of the node that can be read and may hold mappings, with all chains that have to do with them. */
export async function observeNode(budget: Budget): Promise<{ tools: Tools; observed: Ruleset }[]> {
  const tables = variants.flatMap((variant) => families.map((family) => ({ variant, family })));
  const found = await Promise.all(
    tables.map(async ({ variant, family }) => {
      if (variant === 'legacy' && !hasLegacyTable(family)) return [];
      try {
        const tools = await findTools(family, variant, budget);
        const seen = await observe(tools, [dispatchChain], budget);
        const chains = readDispatch(seen).map(({ chain }) => chain);
        return [{ tools, observed: await observeMore(tools, seen, chains, budget) }];
      } catch (error) {
        // No programs for a table, or no such table: whoever has made it would have both. One that may not be read may hold any.
        const { code, isUncertain } = toPortmapError(error);
        if (code === 'UNAVAILABLE' && !isUncertain) return [];
        throw error;
      }
    }),
  );
  return found.flat();
}

/**
 * Removes every attachment of this network that is not in the netconf's list of live ones: those with a record, and
 * those the kernel holds under the network's name, upstream's too. Other networks are left alone (SPEC 1.1.0, GC).
 * @throws PortmapError CONFIG without a list; BUSY naming what could not be removed, after the rest was.
 */
export async function collectGarbage(network: NetworkConf, call: Surroundings): Promise<void> {
  const valid = readValidAttachments(network);
  const isValid = (containerId: string, ifname?: string) =>
    valid.some((one) => one.containerID === containerId && (ifname === undefined || one.ifname === ifname));
  const state = openState(true);
  const folder = 'problem' in state ? undefined : state;
  const tables = await observeNode(call.budget);
  const makeRequests = () => {
    const records =
      folder === undefined ? [] : readRecords(folder).filter((record) => record.network === network.name);
    const recorded = new Set(records.map(({ containerId }) => containerId));
    const stale = records.flatMap(({ containerId, attachments }) =>
      attachments
        .filter(({ ifname }) => !isValid(containerId, ifname))
        .map(({ ifname }) => ({ containerId, ifname })),
    );
    const leaked = leakedContainers(network.name, tables).filter(
      (containerId) => !recorded.has(containerId) && !isValid(containerId),
    );
    return [...stale, ...leaked.map((containerId) => ({ containerId, ifname: '' }))].map(
      ({ containerId, ifname }) => newRequest(network.name, containerId, { verb: 'DEL', ifname }),
    );
  };
  const answers = await commitTogether(makeRequests, folder, call);
  for (const warning of answers.flatMap(({ warnings }) => warnings)) call.warn(warning);
  const problems = answers.flatMap(({ error }) => (error === undefined ? [] : [error.message]));
  if (problems.length > 0)
    throw new PortmapError('BUSY', `rules may be left: ${problems.join('; ')}`, 'repeat GC');
}

// The containers whose chains the kernel holds under a network's name, by the comments of the lines that lead there.
function leakedContainers(network: string, tables: readonly { readonly observed: Ruleset }[]): string[] {
  const lines = tables.flatMap(({ observed }) => readDispatch(observed));
  const found = lines.flatMap(({ chain, containerId, ...line }) =>
    line.network === network &&
    containerId !== undefined &&
    chain === `${sandboxPrefix}${sandboxHash(network, containerId)}`
      ? [containerId]
      : [],
  );
  return [...new Set(found)];
}

/**
 * Says whether an ADD could be served now. Never takes the xtables lock.
 * @throws PortmapError UNAVAILABLE without usable iptables; DEGRADED when mappings are installed or recorded, but the
 * jumps to them are gone, so that no packet reaches them (SPEC 1.1.0, STATUS: 50 and 51).
 */
export async function reportStatus(call: Surroundings): Promise<void> {
  const ready = await Promise.allSettled(families.map((family) => probeTable(family, call.budget)));
  const [first, ...rest] = ready.flatMap((result) =>
    result.status === 'rejected' ? [toPortmapError(result.reason)] : [],
  );
  if (first !== undefined && rest.length > 0)
    throw new PortmapError('UNAVAILABLE', first.message, first.details);
  if (first !== undefined) call.warn(`${first.message}: only one address family can be served`);
  const state = openState(true);
  if ('problem' in state) call.warn(`state folder: ${state.problem ?? 'missing'}`);
  const missing = ready.flatMap((result) => (result.status === 'fulfilled' ? result.value : []));
  if (missing.length > 0)
    throw new PortmapError(
      'DEGRADED',
      `the jumps to the mappings of live containers are gone: ${missing.join('; ')}`,
      'a firewall reload removed them; "portmap reapply" puts all mappings back',
    );
}

const deepLookMs = 60_000;

async function probeTable(family: Family, budget: Budget): Promise<string[]> {
  const tools = await findTools(family, undefined, budget);
  // On legacy a read is a copy of the whole table, too much for a question that is asked every five seconds.
  if (tools.variant === 'legacy' && hasLegacyTable(family) && !isLookDue(family)) return [];
  const observed = await observe(tools, [dispatchChain], budget);
  const missing = (['PREROUTING', 'OUTPUT'] as const).filter(
    (chain) => observed.chains.get(chain)?.includes(dispatchJump) !== true,
  );
  // A node without mappings needs no jumps; a sick one is looked at each time.
  if (missing.length > 0 && (readDispatch(observed).length > 0 || isRecorded(family, tools.variant)))
    return missing.map((chain) => `${family}: ${chain} has no jump to ${dispatchChain}`);
  noteLook(family);
  return [];
}

// Says whether a live sandbox has mappings in this table by its record.
function isRecorded(family: Family, variant: Variant): boolean {
  const state = openState(false);
  return (
    !('problem' in state) &&
    readRecords(state).some(
      (record) => record.variant === variant && record.families.includes(family) && !isDead(record),
    )
  );
}

// A stamp in the state folder spaces the looks of all processes at a healthy table; without a folder every call looks.
function isLookDue(family: Family): boolean {
  const stamp = stampFile(family);
  try {
    return stamp === undefined || Date.now() - statSync(stamp).mtimeMs >= deepLookMs;
  } catch {
    return true;
  }
}

function noteLook(family: Family): void {
  const stamp = stampFile(family);
  try {
    if (stamp !== undefined) writeState(stamp, '');
  } catch {
    // Then the next call looks again.
  }
}

function stampFile(family: Family): string | undefined {
  const state = openState(false);
  return 'problem' in state ? undefined : join(state.path, `status-${family}`);
}
