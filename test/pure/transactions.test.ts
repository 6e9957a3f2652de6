// Golden transactions: every case of cases/ comes to exactly the text that is kept beside it. The kernel layer gives
// the same cases to the real iptables.
import { describe, expect, test } from 'vitest';
import { families } from '../../src/address.ts';
import { cniCodes, PortmapError } from '../../src/errors.ts';
import { renderTransaction } from '../../src/restore.ts';
import { type Case, caseNames, openCase, shortNames } from './case.ts';
import { restore, save } from './ruleset.ts';

test('there are cases', () => {
  expect(caseNames.length).toBeGreaterThanOrEqual(50);
});

describe.each(caseNames)('%s', (name) => {
  const one = openCase(name);

  test(one.title, async () => {
    const outputs = outcome(one);
    for (const [file, text] of outputs)
      await expect(text, `${name}/${file}`).toMatchFileSnapshot(one.path(file));
    expect(one.golden, 'files of the case; what was missing is written now').toEqual(
      [...outputs.keys()].toSorted(),
    );
  });

  test('iptables would take the transaction, and a repeated call changes nothing', () => {
    for (const family of families) {
      const before = one.tableBefore(family);
      if (one.golden.includes('error.json')) {
        expect(() => one.transaction(family, before)).toThrow(PortmapError);
        continue;
      }
      const once = restore(before, renderTransaction(one.transaction(family, before)));
      const twice = restore(once, renderTransaction(one.transaction(family, once)));
      expect(save(twice)).toBe(save(once));
    }
  });
});

function outcome(one: Case): Map<string, string> {
  const outputs = new Map<string, string>();
  try {
    for (const family of families) {
      const transaction = one.transaction(family, one.tableBefore(family));
      if (transaction.length > 0)
        outputs.set(`plan.${shortNames[family]}.restore`, renderTransaction(transaction));
    }
  } catch (error) {
    if (!(error instanceof PortmapError)) throw error;
    const { code, message, details } = error;
    const body = { code, cniCode: cniCodes[code], message, details };
    return new Map([['error.json', `${JSON.stringify(body, null, 2)}\n`]]);
  }
  return outputs;
}
