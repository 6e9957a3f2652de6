// A nat table in memory that reads what iptables-restore --noflush reads and prints what iptables-save prints. It
// knows iptables' grammar and its refusals, and nothing of what the plugin means by a rule. Rules are kept as they
// are spelled: the plugin writes them in the kernel's spelling, which the kernel tests prove. A character is a byte.

/** Chains and their rules; a transaction makes a new table, so that one that is refused leaves no trace. */
export type NatTable = ReadonlyMap<string, readonly string[]>;

const builtins = ['PREROUTING', 'INPUT', 'OUTPUT', 'POSTROUTING'];
const targets = new Set([
  'ACCEPT',
  'DROP',
  'RETURN',
  'DNAT',
  'SNAT',
  'MASQUERADE',
  'REDIRECT',
  'MARK',
  'LOG',
]);

export const emptyTable: NatTable = new Map(builtins.map((chain) => [chain, []]));

/** The table after `text`. Throws what iptables-restore would refuse, naming the line; nothing is then applied. */
export function restore(table: NatTable, text: string): NatTable {
  const chains = new Map([...table].map(([chain, rules]) => [chain, [...rules]]));
  const lines = text.split('\n');
  lines.forEach((line, index) => {
    const reason = apply(chains, line);
    if (reason !== '') throw new Error(`line ${index + 1} failed: ${reason}: ${line}`);
  });
  const commands = lines.filter((line) => line !== '' && !line.startsWith('#'));
  if (commands[0] !== '*nat' || commands.indexOf('COMMIT') !== commands.length - 1)
    throw new Error(`not one table with one COMMIT at its end:\n${text}`);
  return chains;
}

/** The table as iptables-save prints it: built-in chains first, then the others by name. */
export function save(table: NatTable): string {
  const own = [...table.keys()].filter((chain) => !builtins.includes(chain)).toSorted();
  const order = [...builtins, ...own];
  return `${[
    '*nat',
    ...order.map((chain) => `:${chain} ${builtins.includes(chain) ? 'ACCEPT' : '-'} [0:0]`),
    ...order.flatMap((chain) => (table.get(chain) ?? []).map((rule) => `-A ${chain} ${rule}`)),
    'COMMIT',
  ].join('\n')}\n`;
}

/** One chain as `-S CHAIN` prints it, or nothing when it is missing. */
export function list(table: NatTable, chain: string): string[] {
  const rules = table.get(chain);
  if (rules === undefined) return [];
  return [
    builtins.includes(chain) ? `-P ${chain} ACCEPT` : `-N ${chain}`,
    ...rules.map((rule) => `-A ${chain} ${rule}`),
  ];
}

/** The tokens of a line, as iptables-restore cuts it: only `"` groups and only in there a backslash escapes. */
export function tokenize(line: string): string[] {
  const tokens: string[] = [];
  let token = '';
  let isQuoted = false;
  for (let at = 0; at < line.length; at += 1) {
    const character = line[at] ?? '';
    if (isQuoted && character === '\\') {
      at += 1;
      token += line[at] ?? '';
    } else if (!isQuoted && character === '"') isQuoted = true;
    else if (character === '"' || (!isQuoted && /[ \t\n]/.test(character))) {
      if (isQuoted || token !== '') tokens.push(token);
      token = '';
      isQuoted = false;
    } else token += character;
  }
  return token === '' ? tokens : [...tokens, token];
}

// Applies one line; returns why iptables would refuse it, or nothing.
function apply(chains: Map<string, string[]>, line: string): string {
  if (/[^\0-\xff]/.test(line)) return 'not bytes';
  if (line === '' || line.startsWith('#') || line === '*nat' || line === 'COMMIT') return '';
  // iptables-restore reads so many bytes at once; what is behind them would be a line, and a command, of its own.
  if (line.length > 10_238) return 'longer than iptables-restore reads';
  const [verb = '', chain = '', ...words] = line.startsWith(':')
    ? [':', ...line.slice(1).split(' ')]
    : line.split(' ');
  const rules = chains.get(chain);
  const isBuiltin = builtins.includes(chain);
  if (verb === ':' && isBuiltin) return '';
  if (verb === ':' || verb === '-N') {
    if (verb === '-N' && rules !== undefined) return 'the chain exists';
    if (!/^[^\s!-]\S{0,27}$/.test(chain)) return 'no name for a chain';
    chains.set(chain, []);
    return '';
  }
  if (rules === undefined) return 'no such chain';
  if (verb === '-X') {
    if (isBuiltin || rules.length > 0) return 'the chain is not empty, or is built in';
    const isInUse = (rule: string) => rule.includes(chain) && jumpOf(tokenize(rule)) === chain;
    if ([...chains.values()].some((others) => others.some(isInUse))) return 'the chain is in use';
    chains.delete(chain);
    return '';
  }
  const at = verb === '-I' ? Number(words.shift()) : 0;
  const rule = words.join(' ');
  if (verb === '-D') {
    const place = placeOf(rules, rule);
    if (place < 0) return 'no such rule';
    rules.splice(place, 1);
    return '';
  }
  if (verb !== '-A' && !(verb === '-I' && at >= 1 && at <= rules.length + 1)) return 'no such command';
  const tokens = tokenize(rule);
  const target = jumpOf(tokens);
  if (!targets.has(target) && !chains.has(target)) return 'no such target';
  if (tokens.some((token) => token.length > 1023)) return 'a token is too long';
  if ((tokens[tokens.indexOf('--dports') + 1] ?? '').split(',').length > 15) return 'too many ports';
  rules.splice(verb === '-I' ? at - 1 : rules.length, 0, rule);
  return '';
}

function jumpOf(tokens: readonly string[]): string {
  return tokens.includes('-j') ? (tokens[tokens.lastIndexOf('-j') + 1] ?? '') : '';
}

// Where a rule is, however its words are quoted.
function placeOf(rules: readonly string[], rule: string): number {
  const place = rules.indexOf(rule);
  if (place >= 0) return place;
  const words = JSON.stringify(tokenize(rule));
  return rules.findIndex((other) => JSON.stringify(tokenize(other)) === words);
}
