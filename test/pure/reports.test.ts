// The table of field reports tells the truth: every test it names exists, and no report that has tests is missing.
import { readdirSync, readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';

const folder = new URL('../', import.meta.url);
const read = (path: string): string => readFileSync(new URL(path, folder), 'utf8');

type Row = { readonly report: string; readonly tests: readonly string[]; readonly state: string };

const rows: Row[] = read('REPORTS.md')
  .split('\n')
  .map((line) => line.split('|').map((cell) => cell.trim()))
  .filter(([, report = '']) => /^[RL]\d\d$/.test(report))
  .map(([, report = '', , tests = '', state = '']) => ({
    report,
    tests: [...tests.matchAll(/`([^`]+)`/g)].map(([, name = '']) => name),
    state,
  }));

/** Says whether a test file has a name that begins so, in whichever quotes. */
function hasTest(file: string, name: string): boolean {
  const text = read(`${file}.test.ts`);
  return ["'", '"', '`'].some((mark) => text.includes(`${mark}${name}`));
}

describe('the table of field reports', () => {
  test.each(rows)('names tests that exist, and a state, for $report', ({ tests, state }) => {
    expect(tests).not.toEqual([]);
    for (const reference of tests) {
      const [, file = '', name = ''] = /^(\w+\/[\w-]+): (.+)$/.exec(reference) ?? [];
      expect(hasTest(file, name), reference).toBe(true);
    }
    expect(state).toMatch(/^(?:holds|departs|not here)\b/);
  });

  test('has every report once, in order, and every report that a test is named after', () => {
    const reports = rows.map(({ report }) => report);
    const sorted = ['R', 'L'].flatMap((kind) =>
      [...new Set(reports.filter((report) => report.startsWith(kind)))].toSorted(),
    );
    expect(reports).toEqual(sorted);
    const named = readdirSync(new URL('kernel/', folder))
      .filter((file) => /^reports-[a-z]+\.test\.ts$/.test(file))
      .flatMap((file) => [...read(`kernel/${file}`).matchAll(/['"`]([RL]\d\d)(?: and ([RL]\d\d))?: /g)])
      .flatMap(([, one, other]) => [one, other].filter((report) => report !== undefined));
    expect(new Set(named).size).toBeGreaterThan(30);
    expect([...new Set(named)].filter((report) => !reports.includes(report))).toEqual([]);
  });
});
