// Addresses come in many spellings and go out in one: the kernel's.
import * as fc from 'fast-check';
import { BlockList, isIP, SocketAddress } from 'node:net';
import { describe, expect, test } from 'vitest';
import {
  hostCidr,
  isInNetwork,
  isUnspecified,
  maskAddress,
  readAddress,
  readInterfaceAddress,
} from '../../src/address.ts';

const groups = fc.array(fc.oneof(fc.constant(0), fc.integer({ min: 0, max: 0xffff })), {
  minLength: 8,
  maxLength: 8,
});
const v6 = fc.oneof(
  fc.ipV6(),
  groups.map((numbers) =>
    numbers.map((number) => number.toString(16).padStart(4, '0').toUpperCase()).join(':'),
  ),
);

function isAny(text: string): boolean {
  const address = readAddress(text);
  return address !== undefined && isUnspecified(address);
}

describe('one address', () => {
  test.each([
    ['10.1.0.5', 'ipv4', '10.1.0.5'],
    ['::ffff:10.1.0.5', 'ipv4', '10.1.0.5'],
    ['::FFFF:0A01:0005', 'ipv4', '10.1.0.5'],
    ['0:0:0:0:0:ffff:10.1.0.5', 'ipv4', '10.1.0.5'],
    ['2001:DB8:0:0:0:0:0:1', 'ipv6', '2001:db8::1'],
    ['2001:0db8::0001', 'ipv6', '2001:db8::1'],
    ['2001:db8:0:0:1:0:0:1', 'ipv6', '2001:db8::1:0:0:1'],
    ['2001:db8:0:1:0:0:0:1', 'ipv6', '2001:db8:0:1::1'],
    ['2001:db8:0:1:1:1:1:1', 'ipv6', '2001:db8:0:1:1:1:1:1'],
    ['64:ff9b::192.0.2.1', 'ipv6', '64:ff9b::c000:201'],
    ['::192.0.2.1', 'ipv6', '::192.0.2.1'],
    ['0:0:0:0:0:0:0:0', 'ipv6', '::'],
    ['::1', 'ipv6', '::1'],
    ['fe80::', 'ipv6', 'fe80::'],
  ])('%s is %s %s', (text, family, canonical) => {
    expect(readAddress(text)).toEqual({ family, text: canonical });
  });

  test.each([
    '',
    'localhost',
    '1',
    '127.1',
    '010.0.0.1',
    '0x7f.0.0.1',
    '1.2.3.4/32',
    '1.2.3.4 ',
    '[::1]',
    'fe80::1%eth0',
    '::1::',
    ':::',
    '1:2:3:4:5:6:7',
    '::ffff:1.2.3',
  ])('%j is none', (text) => {
    expect(readAddress(text)).toBeUndefined();
  });

  test('is spelled as the C library spells it, and a second reading changes nothing', () => {
    fc.assert(
      fc.property(fc.oneof(v6, fc.ipV4()), (text) => {
        const address = readAddress(text);
        expect(address).toBeDefined();
        if (address === undefined) return;
        const { family } = address;
        expect(address.text).toBe(new SocketAddress({ address: address.text, family }).address);
        expect(readAddress(address.text)).toEqual(address);
        const same = new BlockList();
        same.addAddress(address.text, family);
        expect(same.check(text, isIP(text) === 4 ? 'ipv4' : 'ipv6')).toBe(true);
      }),
      { numRuns: 500 },
    );
  });

  test('any other text is never taken for one', () => {
    fc.assert(
      fc.property(fc.string({ unit: fc.constantFrom(...'0123456789abcdef:./%x '.split('')) }), (text) => {
        expect(readAddress(text) !== undefined).toBe(isIP(text) !== 0 && !text.includes('%'));
      }),
      { numRuns: 2000 },
    );
  });

  test('is the unspecified one of its family or not', () => {
    expect(['0.0.0.0', '::', '0:0::0', '::ffff:0.0.0.0'].map(isAny)).toEqual([true, true, true, true]);
    expect(['0.0.0.1', '::1', '127.0.0.1'].map(isAny)).toEqual([false, false, false]);
  });
});

describe('an address with a prefix length', () => {
  test.each([
    ['10.1.0.5/16', '10.1.0.5', '10.1.0.0/16'],
    ['10.1.2.3/32', '10.1.2.3', '10.1.2.3/32'],
    ['10.1.2.3/0', '10.1.2.3', '0.0.0.0/0'],
    ['192.0.2.255/25', '192.0.2.255', '192.0.2.128/25'],
    ['FD00:10:1:0::5/64', 'fd00:10:1::5', 'fd00:10:1::/64'],
    ['2001:db8:ffff::1/33', '2001:db8:ffff::1', '2001:db8:8000::/33'],
    ['fd00::5/128', 'fd00::5', 'fd00::5/128'],
    ['fd00::5/0', 'fd00::5', '::/0'],
  ])('%s is %s in %s', (text, address, network) => {
    expect(readInterfaceAddress(text)).toMatchObject({ text: address, network });
  });

  test.each([
    '10.1.0.5',
    '10.1.0.5/',
    '10.1.0.5/33',
    '10.1.0.5/-1',
    '10.1.0.5/1e1',
    '10.1.0.5/16/16',
    '10.1.0.5/255.255.0.0',
    'fd00::5/129',
    '/16',
    'x/16',
  ])('%j is none', (text) => {
    expect(readInterfaceAddress(text)).toBeUndefined();
  });

  test('lies in the network it is said to lie in, and that has no host bits', () => {
    const cidr = fc.oneof(
      fc.tuple(fc.ipV4(), fc.integer({ min: 0, max: 32 })),
      fc.tuple(v6, fc.integer({ min: 0, max: 128 })).filter(([text]) => readAddress(text)?.family === 'ipv6'),
    );
    fc.assert(
      fc.property(cidr, cidr, ([text, prefix], [other]) => {
        const address = readInterfaceAddress(`${text}/${prefix}`);
        if (address === undefined) throw new Error(`${text}/${prefix} was not read`);
        const { family, network } = address;
        const base = network.slice(0, network.indexOf('/'));
        expect(maskAddress({ family, text: base }, prefix)).toBe(base);
        const range = new BlockList();
        range.addSubnet(text, prefix, family);
        for (const one of [readAddress(text), readAddress(other)])
          if (one?.family === family) expect(isInNetwork(one, network)).toBe(range.check(one.text, family));
      }),
      { numRuns: 500 },
    );
  });

  test('of one host is what iptables prints for it', () => {
    expect(hostCidr({ family: 'ipv4', text: '192.0.2.1' })).toBe('192.0.2.1/32');
    expect(hostCidr({ family: 'ipv6', text: 'fd00::5' })).toBe('fd00::5/128');
  });
});
