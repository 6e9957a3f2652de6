// The conditions of a netconf, and the lines of the dispatch chain that may come from them. Pure.
import { type Address, isInNetwork, readInterfaceAddress } from './address.ts';
import { type DispatchLine, readDispatchLine } from './listing.ts';
import { tokens } from './restore.ts';

/** Every choice of one value for each option that has a comma list. */
export function alternativesOf(named: Conditions['named']): Conditions['named'][] {
  return named.reduce<Conditions['named'][]>(
    (before, one) =>
      before.flatMap((chosen) => one.value.split(',').map((value) => [...chosen, { ...one, value }])),
    [[]],
  );
}

/** Says whether a line of the dispatch chain leads a port of `line` on, for one choice of values. */
export function serves(
  rule: string,
  line: DispatchLine,
  port: number,
  alternative: Conditions['named'],
): boolean {
  const found = readDispatchLine(rule);
  const { named } = readConditions(tokens(rule));
  return (
    found?.protocol === line.protocol &&
    found.ports.includes(port) &&
    alternative.every(({ option, value }) =>
      named.some((one) => one.option === option && one.value === value),
    )
  );
}

// Options whose values iptables respells; a comma list becomes a rule for each value.
const respelled = new Map([
  ['-s', '-s'],
  ['--source', '-s'],
  ['--src', '-s'],
  ['-d', '-d'],
  ['--destination', '-d'],
  ['--dst', '-d'],
  ['-i', '-i'],
  ['--in-interface', '-i'],
]);

/**
 * Says whether a line of the dispatch chain may come from these conditions: the same addresses and interfaces, and
 * other matches where, and only where, the netconf has some.
 */
export function isSameCondition(rule: string, words: readonly string[]): boolean {
  const found = readConditions(tokens(rule));
  const meant = readConditions(words);
  const fits = found.named.every(({ option, value, negated }) =>
    meant.named.some(
      (other) =>
        other.option === option && other.negated === negated && other.value.split(',').includes(value),
    ),
  );
  const complete = meant.named.every(({ option }) => found.named.some((other) => other.option === option));
  return fits && complete && found.others > 0 === meant.others > 0;
}

/** Conditions as far as iptables respells them, and the number of all other words. */
export interface Conditions {
  readonly named: readonly { readonly option: string; readonly value: string; readonly negated: boolean }[];
  readonly others: number;
}

/** Reads the conditions of a netconf, or those of a line without what every line has. */
export function readConditions(words: readonly string[]): Conditions {
  const named: { option: string; value: string; negated: boolean }[] = [];
  let others = 0;
  for (let index = 0; index < words.length; index += 1) {
    const word = words[index] ?? '';
    const option = respelled.get(word);
    // Ours in every line, whatever the netconf says.
    if (['-p', '-j', '--comment', '--dports'].includes(word)) index += 1;
    else if (word === '-m' && ['comment', 'multiport', 'tcp', 'udp', 'sctp'].includes(words[index + 1] ?? ''))
      index += 1;
    else if (option !== undefined) {
      const value = (words[index + 1] ?? '')
        .split(',')
        .map(canonicalNetwork)
        .filter((text) => !text.endsWith('/0') && text !== '+')
        .join(',');
      if (value !== '') named.push({ option, value, negated: words[index - 1] === '!' });
      index += 1;
    } else if (word !== '!') others += 1;
  }
  return { named, others };
}

function canonicalNetwork(text: string): string {
  const dotted = /^(.*)\/(\d+\.\d+\.\d+\.\d+)$/.exec(text);
  const prefix = dotted?.[2]
    ?.split('.')
    .map((part) => Number(part).toString(2).replaceAll('0', '').length)
    .reduce((sum, bits) => sum + bits, 0);
  const full = dotted === null ? text : `${dotted[1]}/${prefix}`;
  const withPrefix = full.includes('/') ? full : `${full}/${full.includes(':') ? 128 : 32}`;
  return readInterfaceAddress(withPrefix)?.network ?? text;
}

/** Says whether conditions leave packets to this address in. Those that ask nothing of the destination do. */
export function admits({ named }: Conditions, address: Address): boolean {
  return named
    .filter(({ option }) => option === '-d')
    .every(
      ({ value, negated }) => value.split(',').some((network) => isInNetwork(address, network)) !== negated,
    );
}

/** Says whether conditions ask anything but the destination. */
export function asksMore({ named, others }: Conditions): boolean {
  return others > 0 || named.some(({ option }) => option !== '-d');
}
