// The CNI variables a call gets from its runtime, and which of them each verb needs. Pure.
import { PortmapError } from './errors.ts';

export const verbs = ['ADD', 'DEL', 'CHECK', 'GC', 'STATUS', 'VERSION'] as const;

export type Verb = (typeof verbs)[number];

/** The call's variables; those a verb does not need may be empty. */
export interface CniVariables {
  readonly containerId: string;
  readonly netns: string;
  readonly ifname: string;
}

type Environment = Readonly<Record<string, string | undefined>>;

const needed: Record<Exclude<Verb, 'VERSION'>, readonly string[]> = {
  ADD: ['CNI_CONTAINERID', 'CNI_NETNS', 'CNI_IFNAME', 'CNI_PATH'],
  CHECK: ['CNI_CONTAINERID', 'CNI_NETNS', 'CNI_IFNAME', 'CNI_PATH'],
  DEL: ['CNI_CONTAINERID', 'CNI_IFNAME', 'CNI_PATH'],
  GC: ['CNI_PATH'],
  STATUS: ['CNI_PATH'],
};

const validators: Record<string, (value: string) => string | undefined> = {
  CNI_CONTAINERID: (value) =>
    /^[a-zA-Z0-9][a-zA-Z0-9_.-]*$/.test(value)
      ? undefined
      : 'is not a container ID: letters, digits, "_", "." and "-", the first a letter or digit',
  CNI_IFNAME: (value) =>
    Buffer.byteLength(value) <= 15 && value !== '.' && value !== '..' && !/[/:\s]/.test(value)
      ? undefined
      : 'is not an interface name: at most 15 bytes, no "/", ":" or space, not "." or ".."',
};

/** The verb of CNI_COMMAND, or undefined for one that CNI 1.1.0 does not know. */
export function readVerb(environment: Environment): Verb | undefined {
  return verbs.find((verb) => verb === environment['CNI_COMMAND']);
}

/**
 * Reads the variables that a verb needs (SPEC 1.1.0, section 2; libcni's skel asks for CNI_PATH with every verb).
 * @throws PortmapError ENV naming all that are missing, or the one that is malformed.
 */
export function readVariables(verb: Exclude<Verb, 'VERSION'>, environment: Environment): CniVariables {
  const names = needed[verb];
  for (const name of names) {
    const value = environment[name] ?? '';
    const complaint = value === '' ? undefined : validators[name]?.(value);
    if (complaint !== undefined)
      throw new PortmapError('ENV', `${name}: ${JSON.stringify(value)} ${complaint}`);
  }
  const missing = names.filter((name) => (environment[name] ?? '') === '');
  if (missing.length > 0)
    throw new PortmapError(
      'ENV',
      `required env variables [${missing.join(',')}] missing`,
      `the container runtime sets them for ${verb}; by hand, see "At 3 a.m." in the README`,
    );
  const value = (name: string) => environment[name] ?? '';
  return { containerId: value('CNI_CONTAINERID'), netns: value('CNI_NETNS'), ifname: value('CNI_IFNAME') };
}
