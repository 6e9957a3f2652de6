// The variables a call needs, verb by verb, and what is said of those that are missing or malformed.
import { describe, expect, test } from 'vitest';
import { readVariables, readVerb, verbs } from '../../src/environment.ts';
import { PortmapError } from '../../src/errors.ts';

const full = {
  CNI_CONTAINERID: 'c1',
  CNI_NETNS: '/run/netns/c1',
  CNI_IFNAME: 'eth0',
  CNI_PATH: '/opt/cni/bin',
};
type Verb = Parameters<typeof readVariables>[0];

function complaint(verb: Verb, environment: Readonly<Record<string, string>>): string {
  try {
    readVariables(verb, environment);
  } catch (error) {
    return error instanceof PortmapError ? `${error.code} ${error.message}` : String(error);
  }
  return 'none';
}

test.each([...verbs, undefined] as const)('knows the verb %s', (verb) => {
  expect(readVerb(verb === undefined ? {} : { CNI_COMMAND: verb })).toBe(verb);
});

test.each(['add', 'ADD ', 'UPDATE', '', 'toString'])('knows no verb "%s"', (CNI_COMMAND) => {
  expect(readVerb({ CNI_COMMAND })).toBeUndefined();
});

describe('variables that are missing', () => {
  test.each<[Verb, string]>([
    ['ADD', 'CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH'],
    ['CHECK', 'CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH'],
    ['DEL', 'CNI_CONTAINERID,CNI_IFNAME,CNI_PATH'],
    ['GC', 'CNI_PATH'],
    ['STATUS', 'CNI_PATH'],
  ])('%s names all that it needs, and empty ones count as missing', (verb, names) => {
    expect(complaint(verb, {})).toBe(`ENV required env variables [${names}] missing`);
    const empty = Object.fromEntries(Object.keys(full).map((name) => [name, '']));
    expect(complaint(verb, empty)).toBe(`ENV required env variables [${names}] missing`);
    expect(complaint(verb, full)).toBe('none');
    for (const name of names.split(','))
      expect(complaint(verb, { ...full, [name]: '' })).toBe(`ENV required env variables [${name}] missing`);
  });

  test('DEL goes without the network namespace, which is gone with a dead pod', () => {
    const { CNI_NETNS: _, ...rest } = full;
    expect(readVariables('DEL', rest)).toEqual({ containerId: 'c1', netns: '', ifname: 'eth0' });
  });

  test('GC and STATUS go without a container', () => {
    expect(readVariables('GC', { CNI_PATH: '/x' })).toEqual({ containerId: '', netns: '', ifname: '' });
  });
});

describe('variables that are malformed', () => {
  test.each(['-c', '.c', '_c', 'c 1', 'c/1', 'c\n', 'c"', 'ç', 'c$(id)'])(
    'container ID %j',
    (CNI_CONTAINERID) => {
      const message = `ENV CNI_CONTAINERID: ${JSON.stringify(CNI_CONTAINERID)} is not a container ID`;
      for (const verb of ['ADD', 'CHECK', 'DEL'] as const)
        expect(complaint(verb, { ...full, CNI_CONTAINERID })).toContain(message);
    },
  );

  test.each(['.', '..', 'a/b', 'a:b', 'a b', 'a\tb', 'sixteencharacter'])(
    'interface name %j',
    (CNI_IFNAME) => {
      const message = `ENV CNI_IFNAME: ${JSON.stringify(CNI_IFNAME)} is not an interface name`;
      for (const verb of ['ADD', 'CHECK', 'DEL'] as const)
        expect(complaint(verb, { ...full, CNI_IFNAME })).toContain(message);
    },
  );

  test('an interface name longer than the kernel has bytes for', () => {
    expect(complaint('ADD', { ...full, CNI_IFNAME: 'é'.repeat(8) })).toContain('CNI_IFNAME: "éééééééé"');
  });

  test.each([
    ['CNI_CONTAINERID', 'a'],
    ['CNI_CONTAINERID', '0A_.-z'],
    ['CNI_CONTAINERID', 'k8s.io-'.padEnd(200, 'x')],
    ['CNI_IFNAME', 'fifteen_charact'],
    ['CNI_IFNAME', '...'],
    ['CNI_IFNAME', 'eth0.100@x'],
  ])('%s may be %s', (name, value) => {
    expect(complaint('ADD', { ...full, [name]: value })).toBe('none');
  });

  test('are named before those that are missing, and only where the verb needs them', () => {
    expect(complaint('ADD', { CNI_CONTAINERID: '-' })).toContain('CNI_CONTAINERID: "-" is not');
    expect(complaint('STATUS', { CNI_PATH: '/x', CNI_CONTAINERID: '-', CNI_IFNAME: 'a/b' })).toBe('none');
  });
});
