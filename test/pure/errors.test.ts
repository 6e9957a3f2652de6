// The codes that runtimes act on. They are part of the plugin's interface: a change here is a change for users.
import { expect, test } from 'vitest';
import { cniCodes, errorCodes, PortmapError, toPortmapError } from '../../src/errors.ts';
import { renderError } from '../../src/plugin.ts';

test('every kind of failure has its CNI code', () => {
  expect(cniCodes).toMatchInlineSnapshot(`
    {
      "BUSY": 11,
      "CHAIN_TAKEN": 103,
      "CHECK": 101,
      "CONFIG": 7,
      "CONFLICT": 11,
      "DECODE": 6,
      "DEGRADED": 51,
      "ENV": 4,
      "INTERNAL": 999,
      "IO": 5,
      "NETNS": 8,
      "PORT_TAKEN": 100,
      "REJECTED": 102,
      "UNAVAILABLE": 50,
      "VERSION": 1,
    }
  `);
  expect(Object.keys(cniCodes)).toEqual([...errorCodes]);
});

test('codes below 100 are only those that the specification has given a meaning', () => {
  const own = Object.values(cniCodes).filter((code) => code < 100);
  expect([...new Set(own)].toSorted((one, other) => one - other)).toEqual([1, 4, 5, 6, 7, 8, 11, 50, 51]);
});

test('an error is one JSON object with version, code, message, and details where there are some', () => {
  const text = renderError(new PortmapError('CONFIG', 'name: "x y"', 'a\nb'), '0.4.0');
  expect(text.endsWith('}\n')).toBe(true);
  expect(JSON.parse(text)).toEqual({ cniVersion: '0.4.0', code: 7, msg: 'name: "x y"', details: 'a\nb' });
  expect(JSON.parse(renderError(new PortmapError('BUSY', 'm'), '1.1.0'))).toEqual({
    cniVersion: '1.1.0',
    code: 11,
    msg: 'm',
  });
});

test.each([
  ['an Error', new TypeError('boom'), 'unexpected failure: boom'],
  ['text', 'boom', 'unexpected failure: boom'],
  ['nothing', undefined, 'unexpected failure: undefined'],
])('%s that nobody expected is a fault of the plugin, and keeps its cause', (_, thrown, message) => {
  const error = toPortmapError(thrown);
  expect([error.code, error.message, error.cause]).toEqual(['INTERNAL', message, thrown]);
});

test('a PortmapError stays what it is', () => {
  const error = new PortmapError('NETNS', 'x');
  expect(toPortmapError(error)).toBe(error);
});
