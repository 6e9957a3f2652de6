// The documents say what is there: every option and error code has its row, examples are what the plugin takes, every
// source file has its line, and no link leads nowhere.
import { existsSync, globSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { describe, expect, test } from 'vitest';
import * as z from 'zod/mini';
import { cniCodes, errorCodes } from '../../src/errors.ts';
import { defaultTimeoutSeconds } from '../../src/network.ts';
import { staleMs } from '../../src/lock.ts';
import { mappingSchema, settingSchemas } from '../../src/schema.ts';
import { version } from '../../src/version.ts';

const root = new URL('../../', import.meta.url);
const read = (name: string): string => readFileSync(new URL(name, root), 'utf8');
const readme = read('README.md');

/** The cells of all table rows, without the padding. */
const rows = readme
  .split('\n')
  .filter((line) => line.startsWith('|'))
  .map((line) => line.split(/(?<!\\)\|/).map((cell) => cell.trim()));
const rowOf = (first: string): readonly string[] => {
  const found = rows.filter((cells) => cells[1] === first);
  expect(found, `rows of the README that begin with ${first}`).toHaveLength(1);
  return found[0] ?? [];
};
const blocks = (language: string): string[] =>
  [...readme.matchAll(/^```(\w+)\n(.*?)^```$/gms)].flatMap((match) =>
    match[1] === language ? [match[2] ?? ''] : [],
  );
/** The last cell of a row holds `"key": value`. */
const exampleOf = (cells: readonly string[]): Record<string, unknown> =>
  z.parse(z.record(z.string(), z.unknown()), JSON.parse(`{${(cells.at(-2) ?? '').replaceAll('`', '')}}`));

describe('README', () => {
  test.each(Object.entries(settingSchemas))('has the option %s, and an example it takes', (key, schema) => {
    const example = exampleOf(rowOf(`\`${key}\``));
    expect(Object.keys(example)).toEqual([key]);
    const parsed = schema().safeParse(example[key]);
    expect(parsed.success, `${JSON.stringify(example)}: ${parsed.error?.issues[0]?.message}`).toBe(true);
  });

  test.each(Object.keys(mappingSchema().shape))(
    'has the field %s of a port mapping, and an example it takes',
    (key) => {
      const example = { hostPort: 1, containerPort: 1, ...exampleOf(rowOf(`\`${key}\``)) };
      expect(Object.keys(example)).toContain(key);
      const parsed = mappingSchema().safeParse(example);
      expect(parsed.success, `${JSON.stringify(example)}: ${parsed.error?.issues[0]?.message}`).toBe(true);
    },
  );

  test.each(errorCodes)('has the error %s in the row of its code', (name) => {
    expect(rowOf(String(cniCodes[name]))[2]).toContain(`\`${name}\``);
  });

  test('has no error code that the plugin lacks', () => {
    const numbers = rows.map((cells) => cells[1] ?? '').filter((cell) => /^\d+$/.test(cell));
    expect(numbers.toSorted()).toEqual([...new Set(Object.values(cniCodes).map(String))].toSorted());
  });

  test('names the defaults that the plugin has', () => {
    expect(rowOf('`timeoutSeconds`')[3]).toBe(`\`${defaultTimeoutSeconds}\``);
    expect(readme).toContain(`${staleMs / 1000} s`);
  });

  test('has JSON that parses, and a conflist with portmap last', () => {
    const documents = blocks('json').map((text): unknown => JSON.parse(text));
    const conflist = z.object({
      cniVersion: z.string(),
      name: z.string(),
      plugins: z.array(z.looseObject({ type: z.string(), capabilities: z.optional(z.unknown()) })),
    });
    const found = documents.flatMap((document) => conflist.safeParse(document).data ?? []);
    expect(found).toHaveLength(1);
    expect(found[0]?.plugins.at(-1)).toEqual({ type: 'portmap', capabilities: { portMappings: true } });
  });
});

describe.each(['README.md', 'CONTRIBUTING.md', 'CHANGELOG.md'])('%s', (name) => {
  test('has no link that leads nowhere', () => {
    const text = read(name);
    const anchors = [...text.matchAll(/^#+ (.*)$/gm)].map(
      (match) =>
        `#${(match[1] ?? '')
          .toLowerCase()
          .replaceAll(/[^\w\s-]/g, '')
          .replaceAll(' ', '-')}`,
    );
    const broken = [...text.matchAll(/\]\(([^)]+)\)/g)]
      .map((match) => match[1] ?? '')
      .filter((link) => !/^https?:/.test(link))
      .filter((link) =>
        link.startsWith('#')
          ? !anchors.includes(link)
          : !existsSync(fileURLToPath(new URL(link.replace(/#.*/, ''), root))),
      );
    expect(broken).toEqual([]);
  });
});

describe('the layout in CONTRIBUTING', () => {
  const listed = [...read('CONTRIBUTING.md').matchAll(/^\| `((?:bin|src)\/[^`]+)`/gm)].map(
    (match) => match[1] ?? '',
  );

  test('has a line for every source file, and for no other', () => {
    const files = globSync(['bin/*.ts', 'src/**/*.ts'], { cwd: fileURLToPath(root) });
    expect(listed.toSorted()).toEqual(files.toSorted());
  });

  test('has every file above those that it imports', () => {
    const wrong = listed.flatMap((file, place) =>
      [...read(file).matchAll(/(?:from |import\()'(\.[^']*\.ts)'/g)]
        .map((match) => new URL(match[1] ?? '', new URL(file, root)).href.slice(root.href.length))
        .filter((imported) => listed.slice(0, place + 1).includes(imported))
        .map((imported) => `${file} imports ${imported}`),
    );
    expect(wrong).toEqual([]);
  });
});

test('CHANGELOG begins with the version of package.json', () => {
  expect(/^## (\S+)/m.exec(read('CHANGELOG.md'))?.[1]).toBe(version);
});
