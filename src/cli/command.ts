// The commands for people, over yargs. Loaded only when there are arguments and no CNI_COMMAND.
import yargs from 'yargs';
import type { Budget } from '../budget.ts';
import { PortmapError, toPortmapError } from '../errors.ts';
import { version } from '../version.ts';
import { listNode } from './list.ts';
import { planChange } from './plan.ts';
import { reapplyRecords } from './reapply.ts';

/** What a command gets from the world. */
export interface Terminal {
  readonly budget: Budget;
  readonly warn: (text: string) => void;
  /** Says why a command failed. */
  readonly fail: (text: string) => void;
  readonly readInput: () => Promise<string>;
  /** Prints a result. Rejects with a PortmapError when that is not possible. */
  readonly print: (text: string) => Promise<void>;
}

/** Runs the command line; returns the exit status. */
export async function runCommand(argv: readonly string[], terminal: Terminal): Promise<number> {
  const line = (text: string) => terminal.print(`${text}\n`);
  const parser = yargs([...argv])
    .scriptName('portmap')
    .usage(
      'CNI plugin that maps host ports to containers.\n\nA container runtime calls it with CNI_COMMAND set and the netconf on stdin. By hand:\n\n  $0 <command>',
    )
    .command(
      'list',
      'print every port mapping on this node, upstream’s too',
      (command) =>
        command.option('json', { type: 'boolean', default: false, describe: 'print a JSON array' }),
      async ({ json }) => line(await listNode(json, terminal)),
    )
    .command(
      'plan <verb>',
      'print the transactions that ADD or DEL would commit; changes nothing',
      (command) =>
        command
          .positional('verb', {
            choices: ['add', 'del'] as const,
            demandOption: true,
            describe: 'the netconf is read from stdin',
          })
          .option('container-id', {
            type: 'string',
            default: process.env['CNI_CONTAINERID'] ?? '',
            describe: 'as CNI_CONTAINERID',
          })
          .option('netns', {
            type: 'string',
            default: process.env['CNI_NETNS'] ?? '',
            describe: 'as CNI_NETNS',
          })
          .option('ifname', {
            type: 'string',
            default: process.env['CNI_IFNAME'] ?? 'eth0',
            describe: 'as CNI_IFNAME',
          }),
      async ({ verb, containerId, netns, ifname }) =>
        line(await planChange(verb, { containerId, netns, ifname }, terminal)),
    )
    .command(
      'reapply',
      'put back the rules of every live recorded sandbox, drop those of dead ones',
      {},
      async () => line(await reapplyRecords(terminal)),
    )
    .demandCommand(1, 'name a command')
    .strict()
    .version(version)
    .alias('version', 'v')
    .help()
    .alias('help', 'h')
    .wrap(100)
    .exitProcess(false)
    .fail((message, error) => {
      throw error ?? new PortmapError('CONFIG', message, 'see portmap --help');
    });
  try {
    await parser.parseAsync();
    return 0;
  } catch (error) {
    const { message, details } = toPortmapError(error);
    terminal.fail(details === '' ? message : `${message}\n  ${details}`);
    return 1;
  }
}
