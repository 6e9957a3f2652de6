// What the fields of a netconf may hold, as zod schemas. Each is made on first use: making them all takes longer than
// reading a netconf, and most netconfs use few.
import * as z from 'zod/mini';
import { readAddress, readInterfaceAddress } from './address.ts';
import { isTimeout } from './network.ts';
import { once } from './once.ts';

export const protocols = ['tcp', 'udp', 'sctp'] as const;

const message = (what: string) => ({ error: what });

const flag = () => z.boolean(message('is not true or false'));
const text = () => z.string(message('is not text'));

function wholeNumber(first: number, last: number, what: string) {
  const wrong = message(`is not ${what}: a whole number from ${first} to ${last}`);
  return z.number(wrong).check(z.int(wrong), z.minimum(first, wrong), z.maximum(last, wrong));
}

/** One entry of `runtimeConfig.portMappings`, its keys in their documented spelling. */
export const mappingSchema = once(() => {
  const isProtocol = message('is not a protocol: tcp, udp or sctp');
  const port = wholeNumber(1, 65535, 'a port');
  return z.object(
    {
      hostPort: port,
      containerPort: port,
      protocol: z.optional(
        z
          .string(isProtocol)
          .check(z.refine((word) => ['', ...protocols].includes(word.toLowerCase()), isProtocol)),
      ),
      hostIP: z.optional(
        text().check(
          z.refine((address) => address === '' || readAddress(address) !== undefined, {
            error: 'is not an IP address (names, zones and prefix lengths are not taken)',
          }),
        ),
      ),
    },
    message('is not an object'),
  );
});

export type MappingEntry = z.infer<ReturnType<typeof mappingSchema>>;

const conditions = () =>
  z
    .array(
      z.string(message('is not text: one word of the iptables rule')).check(
        z.minLength(1, message('is empty: give one word of the iptables rule')),
        // iptables-restore cuts lines at 10240 bytes and tokens at 1024: 60 words of 250 characters, and no more than
        // 4000 in all, are sure to fit beside the rest of the rule.
        z.maxLength(250, message('is longer than 250 characters')),
        z.refine((word) => !/[\0\n\r]/.test(word), message('holds a line break or NUL')),
        z.refine((word) => word.isWellFormed(), message('is not well-formed Unicode')),
        z.refine(
          (word) => !/^-.*\s/.test(word),
          message('holds several words: give each word of the rule as an element'),
        ),
      ),
      message('is not a list of words of an iptables rule'),
    )
    .check(
      z.maxLength(60, message('has more than 60 words')),
      z.refine((words) => Buffer.byteLength(words.join(' ')) <= 4000, message('is longer than 4000 bytes')),
      z.refine(
        (words) => words.length === 0 || /^[-!]/.test(words[0] ?? ''),
        message('does not start with an iptables option or "!": nftables syntax is not taken'),
      ),
      z.refine(
        (words) => words.every(isMatchOption),
        message('holds an option that is no condition of a rule'),
      ),
      z.refine((words) => words.every((_, index) => isAddressGood(words, index)), {
        error: 'holds an address that is none (names are not looked up)',
      }),
    );

// Options of iptables that are commands, or end or change the run: `--help` ends iptables-restore with success before
// anything is committed. getopt takes any unambiguous start of a long option for the whole.
const commands = [
  'append',
  'check',
  'delete',
  'delete-chain',
  'exact',
  'flush',
  'goto',
  'help',
  'insert',
  'ipv4',
  'ipv6',
  'jump',
  'line-numbers',
  'list',
  'list-rules',
  'modprobe',
  'new-chain',
  'noflush',
  'numeric',
  'policy',
  'rename-chain',
  'replace',
  'set-counters',
  'table',
  'verbose',
  'version',
  'wait',
  'wait-interval',
  'zero',
];
// Options of matches that are also the start of one of these.
const matchOptions = ['mode', 'pol', 'set'];

function isMatchOption(word: string): boolean {
  const long = /^--([^=]*)/.exec(word)?.[1];
  if (long !== undefined)
    return matchOptions.includes(long) || !commands.some((command) => command.startsWith(long));
  // Short options that match; more letters in one word would hide another option, or a value.
  return !word.startsWith('-') || /^-[sdiopmf]$/.test(word);
}

const addressOptions = ['-s', '--source', '--src', '-d', '--destination', '--dst'];

function isAddressGood(words: readonly string[], index: number): boolean {
  if (!addressOptions.includes(words[index] ?? '')) return true;
  return (words[index + 1] ?? '').split(',').every((part) => {
    const [address = '', prefix, more] = part.split('/');
    const found = readAddress(address);
    if (found === undefined || more !== undefined) return false;
    if (prefix === undefined) return true;
    return (
      readInterfaceAddress(part) !== undefined ||
      (found.family === 'ipv4' && readAddress(prefix)?.family === 'ipv4')
    );
  });
}

/** The settings of a netconf, by key. */
export const settingSchemas = {
  snat: flag,
  masqAll: flag,
  markMasqBit: () => wholeNumber(0, 31, 'a mark bit'),
  externalSetMarkChain: () =>
    text().check(
      z.regex(
        /^[^\s\0"\\!:-][^\s\0"\\]{0,27}$/,
        message('is not the name of a chain: 1 to 28 characters without spaces'),
      ),
      z.refine(
        (name) => !['PREROUTING', 'INPUT', 'FORWARD', 'OUTPUT', 'POSTROUTING'].includes(name),
        message('is a built-in chain, to which no rule can jump'),
      ),
      z.refine(
        (name) => !/^CNI-(?:HOSTPORT-DNAT$|DN-)/.test(name),
        message('is a chain of port mappings, which would lead to itself'),
      ),
    ),
  conditionsV4: conditions,
  conditionsV6: conditions,
  backend: () => z.enum(['iptables', ''], message('is not a backend of this plugin: only "iptables" is')),
  onConflict: () => z.enum(['warn', 'fail'], message('is neither "warn" nor "fail"')),
  timeoutSeconds: () =>
    z.unknown().check(z.refine(isTimeout, message('is not a time in seconds: a number from 0.1 to 3600'))),
};

/** The attachments that GC must spare. */
export const attachmentsSchema = once(() =>
  z.array(
    z.object({ containerID: text(), ifname: text() }, message('is not an attachment')),
    message('is not a list of attachments'),
  ),
);
