// From a request and what is recorded of its sandbox to the tables it touches and what they shall hold.
import { describe, expect, test } from 'vitest';
import { sandboxHash } from '../../src/chain.ts';
import type { SandboxRecord } from '../../src/record.ts';
import { tableKey, tablesOfTarget, type Target, targetOfRecord, wantedOf } from '../../src/target.ts';
import { type Call, recordOf, targetOf } from './node.ts';

const call = (ifname: string, addresses: string[], verb: Call['verb'] = 'ADD'): Call => ({
  verb,
  containerId: 'web-1',
  ifname,
  netconf: {
    cniVersion: '1.0.0',
    name: 'podnet',
    runtimeConfig: { portMappings: [{ hostPort: 8080, containerPort: 80 }] },
    prevResult: { ips: addresses.map((address) => ({ address })) },
  },
});
const v4 = call('eth0', ['10.1.0.5/16']);
const dual = call('eth0', ['10.1.0.5/16', 'fd00::5/64']);
const second = call('net1', ['10.9.0.5/24']);
const del = (ifname: string) => call(ifname, [], 'DEL');

function recorded(...calls: Call[]): SandboxRecord {
  const record = recordOf(calls);
  if (record === 'missing') throw new Error('the ADDs left no record');
  return record;
}
function known(target: Target | undefined): Target {
  if (target === undefined) throw new Error('there is nothing to do');
  return target;
}
// Which tables a target touches, and whether it wants rules there.
const shape = (target: Target | undefined) =>
  Object.fromEntries(
    tablesOfTarget(known(target))
      .map(
        (table) =>
          [
            tableKey(table),
            wantedOf(known(target), table).rules === undefined ? 'nothing' : 'rules',
          ] as const,
      )
      .toSorted(([one], [other]) => one.localeCompare(other)),
  );
const attached = (target: Target | undefined) => known(target).after?.attachments.map(({ ifname }) => ifname);
const everyTable = {
  'legacy/ipv4': 'nothing',
  'legacy/ipv6': 'nothing',
  'nft/ipv4': 'nothing',
  'nft/ipv6': 'nothing',
};

describe('ADD', () => {
  test('touches the tables of the families the container has addresses in', () => {
    expect(shape(targetOf(v4, 'missing'))).toEqual({ 'nft/ipv4': 'rules' });
    expect(shape(targetOf(dual, 'missing'))).toEqual({ 'nft/ipv4': 'rules', 'nft/ipv6': 'rules' });
  });

  test('clears the family that the sandbox no longer has', () => {
    expect(shape(targetOf(v4, recorded(dual)))).toEqual({ 'nft/ipv4': 'rules', 'nft/ipv6': 'nothing' });
  });

  test('clears the variant that the sandbox was in before the node changed to the other', () => {
    const legacy: SandboxRecord = { ...recorded(dual), variant: 'legacy' };
    expect(shape(targetOf(dual, legacy))).toEqual({
      'legacy/ipv4': 'nothing',
      'legacy/ipv6': 'nothing',
      'nft/ipv4': 'rules',
      'nft/ipv6': 'rules',
    });
  });

  test('takes the place of the same attachment and goes in front of another', () => {
    expect(attached(targetOf(v4, recorded(v4, second)))).toEqual(['eth0', 'net1']);
    expect(attached(targetOf(second, recorded(v4)))).toEqual(['net1', 'eth0']);
  });

  test('is refused the chain of another sandbox, and names it', () => {
    const stranger: SandboxRecord = { ...recorded(v4), network: 'podnetweb', containerId: '-1' };
    expect(() => targetOf(v4, stranger)).toThrow(
      /^chain CNI-DN-[0-9a-f]{21} belongs to container -1 on network podnetweb$/,
    );
  });
});

describe('DEL', () => {
  test.each(['missing', 'unknown'] as const)('looks everywhere when the record is %s', (record) => {
    expect(shape(targetOf(del('eth0'), record))).toEqual(everyTable);
    expect(known(targetOf(del('eth0'), record)).possible).toHaveLength(4);
  });

  test('clears the tables of the record, in the variant of the record', () => {
    const legacy: SandboxRecord = { ...recorded(dual), variant: 'legacy' };
    const target = targetOf(del('eth0'), legacy);
    expect(shape(target)).toEqual({ 'legacy/ipv4': 'nothing', 'legacy/ipv6': 'nothing' });
    expect(known(target).possible).toEqual([]);
  });

  test('keeps the attachments that stay', () => {
    const target = targetOf(del('eth0'), recorded(dual, second));
    expect(attached(target)).toEqual(['net1']);
    expect(shape(target)).toEqual({ 'nft/ipv4': 'rules', 'nft/ipv6': 'nothing' });
  });

  test('has nothing to do for an attachment that is not recorded, or a chain that is another sandbox’s', () => {
    expect(targetOf(del('net9'), recorded(dual, second))).toBeUndefined();
    expect(
      targetOf(del('eth0'), { ...recorded(v4), network: 'podnetweb', containerId: '-1' }),
    ).toBeUndefined();
  });

  test('takes the chain of the retired scheme along', () => {
    const hash = sandboxHash('podnet', 'web-1');
    const table = { variant: 'nft', family: 'ipv4' } as const;
    expect(wantedOf(known(targetOf(del('eth0'), 'missing')), table)).toEqual({
      chain: `CNI-DN-${hash}`,
      rules: undefined,
      keepsPlace: true,
      retired: `CNI-SN-${hash}`,
    });
  });
});

describe('a recorded sandbox', () => {
  test('gets its rules back in the variant the node has now', () => {
    const legacy: SandboxRecord = { ...recorded(v4), variant: 'legacy' };
    expect(shape(targetOfRecord(legacy, true, 'nft'))).toEqual({
      'legacy/ipv4': 'nothing',
      'nft/ipv4': 'rules',
    });
  });

  test('is removed from where it is when it is dead', () => {
    expect(shape(targetOfRecord(recorded(dual), false, 'nft'))).toEqual({
      'nft/ipv4': 'nothing',
      'nft/ipv6': 'nothing',
    });
  });
});
