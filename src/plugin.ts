// The CNI side of the plugin: one verb in, one reply out. Each verb is a short script over the parts that do the
// work; every error becomes CNI's JSON here and nowhere else.
import { statSync } from 'node:fs';
import { readVariables, readVerb, type CniVariables, type Verb } from './environment.ts';
import { cniCodes, PortmapError, toPortmapError } from './errors.ts';
import { addSandbox, deleteSandbox } from './sandbox.ts';
import {
  cniVersions,
  type NetworkConf,
  readJson,
  readName,
  readTimeoutSeconds,
  readVersion,
} from './network.ts';
import type { Budget } from './budget.ts';

/** What a call gets from the world. */
export interface Call {
  readonly environment: Readonly<Record<string, string | undefined>>;
  /** Reads stdin to its end. */
  readonly readInput: () => Promise<string>;
  /** Bounds the rest of the call to so many seconds after its start. */
  readonly limit: (seconds: number) => void;
  readonly budget: Budget;
  /** Set for the DEL that takes back what an ADD of this process has made, and no more than that. */
  readonly isUndo?: boolean;
  /** Takes a warning for people. */
  readonly warn: (text: string) => void;
}

/** What goes to stdout, and the exit status. */
export interface Reply {
  readonly output: string;
  readonly status: 0 | 1;
}

/** Answers one CNI call. Never throws: a failure is the one JSON error object that CNI asks for. */
export async function answer(call: Call): Promise<Reply> {
  const seen: { version: string } = { version: cniVersions[cniVersions.length - 1] ?? '' };
  try {
    return { output: await runVerb(call, seen), status: 0 };
  } catch (error) {
    return { output: renderError(toPortmapError(error), seen.version), status: 1 };
  }
}

/** CNI's error object (SPEC 1.1.0, section 5). */
export function renderError(error: PortmapError, cniVersion: string): string {
  const { message, details } = error;
  const body = {
    cniVersion,
    code: cniCodes[error.code],
    msg: message,
    ...(details === '' ? {} : { details }),
  };
  return `${JSON.stringify(body, null, 4)}\n`;
}

async function runVerb(call: Call, seen: { version: string }): Promise<string> {
  const verb = readVerb(call.environment);
  // VERSION never looks at stdin, which may be anything.
  if (verb === 'VERSION')
    return `${JSON.stringify({ cniVersion: seen.version, supportedVersions: cniVersions })}\n`;
  const variables = verb === undefined ? undefined : readVariables(verb, call.environment);
  const raw = readJson(await call.readInput());
  if (typeof raw['cniVersion'] === 'string') seen.version = raw['cniVersion'];
  call.limit(readTimeoutSeconds(raw));
  const name = readName(raw);
  if (verb === undefined || variables === undefined)
    throw new PortmapError('ENV', `unknown CNI_COMMAND: ${call.environment['CNI_COMMAND']}`);
  const network = { name, cniVersion: readVersion(raw), raw };
  refuseEarlyVersion(verb, network);
  return perform(verb, network, variables, call);
}

async function perform(
  verb: Exclude<Verb, 'VERSION'>,
  network: NetworkConf,
  variables: CniVariables,
  call: Call,
): Promise<string> {
  switch (verb) {
    case 'ADD': {
      refuseOwnNamespace(variables, call.environment);
      const [{ readNetConf }, { renderResult }] = await Promise.all([
        import('./netconf.ts'),
        import('./result.ts'),
      ]);
      const conf = readNetConf(network, variables.ifname);
      // A result that can't be written must be known before anything is touched.
      const result = renderResult(conf);
      await addSandbox(conf, variables, call);
      return result;
    }
    case 'DEL':
      refuseOwnNamespace(variables, call.environment);
      await deleteSandbox(network, variables, call);
      return '';
    case 'CHECK': {
      const [{ readNetConf }, { checkSandbox }] = await Promise.all([
        import('./netconf.ts'),
        import('./verify.ts'),
      ]);
      await checkSandbox(readNetConf(network, variables.ifname), variables, call);
      return '';
    }
    case 'GC': {
      const { collectGarbage } = await import('./verify.ts');
      await collectGarbage(network, call);
      return '';
    }
    case 'STATUS': {
      const { reportStatus } = await import('./verify.ts');
      await reportStatus(call);
      return '';
    }
    default:
      return verb satisfies never;
  }
}

const since: Partial<Record<Verb, readonly string[]>> = {
  CHECK: cniVersions.slice(cniVersions.indexOf('0.4.0')),
  GC: ['1.1.0'],
  STATUS: ['1.1.0'],
};

function refuseEarlyVersion(verb: Verb, network: NetworkConf): void {
  const allowed = since[verb];
  if (allowed !== undefined && !allowed.includes(network.cniVersion))
    throw new PortmapError(
      'VERSION',
      `config version does not allow ${verb}: cniVersion is ${network.cniVersion}`,
      `${verb} came with ${allowed[0]}`,
    );
}

// Rules for a sandbox that is the node itself are a mistake of the caller; found out before anything is touched.
function refuseOwnNamespace(variables: CniVariables, environment: Call['environment']): void {
  if (/^(?:1|true)$/i.test(environment['CNI_NETNS_OVERRIDE'] ?? '') || variables.netns === '') return;
  try {
    const own = statSync('/proc/self/ns/net');
    const given = statSync(variables.netns);
    if (own.dev !== given.dev || own.ino !== given.ino) return;
  } catch {
    // The namespace of a dead sandbox can't be opened, and that is no fault.
    return;
  }
  throw new PortmapError(
    'NETNS',
    `CNI_NETNS: ${variables.netns} is the network namespace that portmap runs in`,
    'it must be the container’s; set CNI_NETNS_OVERRIDE=1 if this is meant',
  );
}
