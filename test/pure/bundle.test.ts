// What the executable is made of, and what of it a call loads: the build's own account, from the bundler that the
// Node.js build uses.
import { build, type Metafile } from 'esbuild';
import { isBuiltin } from 'node:module';
import { fileURLToPath } from 'node:url';
import { expect, test } from 'vitest';

const entry = 'bin/portmap.ts';
const { metafile } = await build({
  absWorkingDir: fileURLToPath(new URL('../..', import.meta.url)),
  entryPoints: [entry],
  bundle: true,
  platform: 'node',
  alias: { 'graceful-fs': 'node:fs' },
  format: 'esm',
  target: 'node26',
  minifySyntax: true,
  write: false,
  metafile: true,
  outfile: 'portmap.mjs',
});

const packageOf = (path: string) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1];
const packagesOf = (paths: Iterable<string>) =>
  [...new Set([...paths].flatMap((path) => packageOf(path) ?? []))].toSorted();
type Import = Metafile['inputs'][string]['imports'][number];

// Every module that a module brings with it, along imports that `follow` agrees to.
function reach(from: string, follow: (edge: Import) => boolean): Set<string> {
  const reached = new Set<string>();
  const pending = [from];
  for (let path = pending.pop(); path !== undefined; path = pending.pop()) {
    if (reached.has(path)) continue;
    reached.add(path);
    for (const edge of metafile.inputs[path]?.imports ?? [])
      if (edge.external !== true && follow(edge)) pending.push(edge.path);
  }
  return reached;
}
const isStatic = (edge: Import) => edge.kind !== 'dynamic-import';

test('the packages in the bundle are the four dependencies and what they need', () => {
  expect(packagesOf(Object.keys(metafile.inputs))).toMatchInlineSnapshot(`
    [
      "@sec-ant/readable-stream",
      "@sindresorhus/merge-streams",
      "ansi-regex",
      "ansi-styles",
      "cliui",
      "emoji-regex",
      "escalade",
      "execa",
      "figures",
      "get-caller-file",
      "get-east-asian-width",
      "get-stream",
      "human-signals",
      "is-plain-obj",
      "is-stream",
      "is-unicode-supported",
      "npm-run-path",
      "parse-ms",
      "path-key",
      "pretty-ms",
      "proper-lockfile",
      "retry",
      "signal-exit",
      "string-width",
      "strip-ansi",
      "strip-final-newline",
      "unicorn-magic",
      "which-command",
      "wrap-ansi",
      "y18n",
      "yargs",
      "yargs-parser",
      "yoctocolors",
      "zod",
    ]
  `);
});

test('nothing is left to be found at run time but what Node.js itself has', () => {
  const left = Object.values(metafile.inputs).flatMap(({ imports }) =>
    imports.filter(({ external }) => external),
  );
  expect(left.map(({ path }) => path).filter((path) => !isBuiltin(path))).toEqual([]);
});

test('a call that has nothing to do loads no package and no part of the plugin that touches the node', () => {
  const loaded = reach(entry, isStatic);
  expect(packagesOf(loaded)).toEqual([]);
  for (const module of [
    'program',
    'iptables',
    'lock',
    'queue',
    'commit',
    'batch',
    'verify',
    'host',
    'netconf',
  ])
    expect([...loaded]).not.toContain(`src/${module}.ts`);
});

test('yargs is loaded for the commands alone, by a dynamic import', () => {
  const commands = [...reach(entry, () => true)].filter((path) => path.startsWith('src/cli/'));
  expect(commands).toContain('src/cli/command.ts');
  // However far the imports of a CNI call are followed, loaded later or at once, yargs is not among them.
  const ofCalls = reach(entry, ({ path }) => !path.startsWith('src/cli/'));
  expect(packagesOf(ofCalls)).not.toContain('yargs');
  expect(packagesOf(ofCalls)).toEqual(expect.arrayContaining(['execa', 'proper-lockfile', 'zod']));
  const doors = Object.values(metafile.inputs).flatMap(({ imports }) =>
    imports.filter(({ path }) => path === 'src/cli/command.ts'),
  );
  expect(doors.map(({ kind }) => kind)).toEqual(['dynamic-import']);
});

const users = (name: string) =>
  Object.entries(metafile.inputs).flatMap(([path, { imports }]) =>
    packageOf(path) === undefined
      ? imports.filter((edge) => packageOf(edge.path) === name).map(({ kind }) => `${path} ${kind}`)
      : [],
  );
test('execa and the lock are loaded by the two modules that use them, when they do', () => {
  expect(users('execa')).toEqual(['src/runtime/node.ts dynamic-import']);
  expect(users('proper-lockfile')).toEqual(['src/lock.ts dynamic-import']);
});

test('zod comes in its small form, without the languages it can complain in', () => {
  const shipped = Object.values(metafile.outputs).flatMap(({ inputs }) =>
    Object.entries(inputs).flatMap(([path, { bytesInOutput }]) => (bytesInOutput > 0 ? [path] : [])),
  );
  expect(shipped.filter((path) => /zod\/.*\/locales\/(?!index\.js)/.test(path))).toEqual([]);
  expect(shipped.filter((path) => /zod\/v4\/classic\//.test(path))).toEqual([]);
});

test('the whole is under 900 kB', () => {
  const [bundle] = Object.values(metafile.outputs);
  expect(bundle?.bytes).toBeGreaterThan(100_000);
  expect(bundle?.bytes).toBeLessThan(900_000);
});
