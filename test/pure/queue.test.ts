// The queue folder as several calls see it, some of them from another pid namespace: no answer is lost, and a missing
// one is never taken for "done".
import { mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { PortmapError } from '../../src/errors.ts';
import { processName, uptimeMs } from '../../src/process.ts';
import { claim, enqueue, finish, newRequest, readAnswer, type Request } from '../../src/queue.ts';
import type { StateFolder } from '../../src/state.ts';

let state: StateFolder;

beforeEach(() => {
  const path = mkdtempSync(join(tmpdir(), 'portmap-queue-'));
  state = { path, queue: join(path, 'queue') };
  mkdirSync(state.queue);
});
afterEach(() => rmSync(state.path, { recursive: true, force: true }));

const ticksPerSecond = 100;

/** A DEL of a process that this one can't see, started so many seconds ago. */
function foreignRequest(secondsAgo: number): Request {
  const started = Math.round((uptimeMs() / 1000 - secondsAgo) * ticksPerSecond);
  const owner = { pid: 999_999_999, started: String(started), namespace: 'pid:[1]' };
  return { ...ownRequest('foreign'), token: processName(owner), owner };
}

const ownRequest = (containerId: string): Request =>
  newRequest('lab', containerId, { verb: 'DEL', ifname: 'eth0' });

const refusal = new PortmapError('CONFIG', 'a field', 'a hint');

test('an error for a waiter of another pid namespace is still there when others have come and gone', () => {
  const request = foreignRequest(1);
  enqueue(state, request);
  expect(claim(state)).toEqual([request]);
  finish(state, request, { warnings: [], error: refusal });
  enqueue(state, ownRequest('next'));
  claim(state);
  expect(readAnswer(state, request).error).toMatchObject({ code: 'CONFIG', message: 'a field' });
});

test('what a process of another pid namespace has left is removed when no call can last that long', () => {
  const request = foreignRequest(2 * 3600);
  writeFileSync(join(state.queue, `4e6bdc8a1ffad73cae4c1.${request.token}.result`), '{}');
  writeFileSync(join(state.path, `4e6bdc8a1ffad73cae4c1.record.${request.token}.new`), '{}');
  claim(state);
  expect(readdirSync(state.queue)).toEqual([]);
  expect(readdirSync(state.path)).toEqual(['queue']);
});

test('a request that was done without a word is answered so, and one whose answer is gone is not', () => {
  const request = ownRequest('mine');
  enqueue(state, request);
  claim(state);
  finish(state, request, { warnings: [] });
  expect(readAnswer(state, request)).toEqual({ warnings: [] });
  expect(readdirSync(state.queue)).toEqual([]);
  expect(readAnswer(state, request).error).toMatchObject({ code: 'BUSY' });
});

test('warnings and an error come through as they were', () => {
  const request = ownRequest('mine');
  enqueue(state, request);
  claim(state);
  finish(state, request, { warnings: ['one', 'two'], error: refusal });
  expect(readAnswer(state, request)).toMatchObject({ warnings: ['one', 'two'], error: { code: 'CONFIG' } });
});

test('a folder in the place of a request, or of one that is taken, is no obstacle', () => {
  const request = ownRequest('mine');
  enqueue(state, request);
  const [name = ''] = readdirSync(state.queue);
  mkdirSync(join(state.queue, name.replace('.request', '.taken')));
  mkdirSync(join(state.queue, '4e6bdc8a1ffad73cae4c1.request', 'deep'), { recursive: true });
  expect(claim(state)).toEqual([request]);
  finish(state, request, { warnings: [] });
  readAnswer(state, request);
  expect(readdirSync(state.queue)).toEqual([]);
});
