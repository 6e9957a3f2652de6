// One run of iptables-restore that shows chains, waits for what is to be done with them, and does it: a process less than
// to read and to commit apart, and in the legacy variant a copy of the whole table less.
//
// The two variants differ in when they look. The legacy one copies the table, under the xtables lock, when it reads
// `*nat`, and holds both until its COMMIT. The nft one does all at a COMMIT, so what it shows is a part of its own.
import type { Budget } from './budget.ts';
import { failure, lockWait, type Tools } from './iptables.ts';
import { type Outcome, runProgram, type Stdin } from './program.ts';
import { renderListing, type Ruleset, rulesetReader } from './restore.ts';

/** A run that is not over yet. */
export interface Session {
  /**
   * The rules of these chains. Undefined: one of them is missing or can't be shown, and the run is over.
   * @throws PortmapError BUSY (the xtables lock) or UNAVAILABLE, as a commit does.
   */
  readonly list: (chains: readonly string[]) => Promise<Ruleset | undefined>;
  /**
   * Commits a transaction and ends the run. `onStart` gets the number of the process before that has the text.
   * @throws PortmapError as `commit` of iptables.ts does.
   */
  readonly commit: (text: string, onStart: (pid: number) => void) => Promise<void>;
  /** Ends the run, with nothing changed, if it is not over. */
  readonly close: () => Promise<void>;
}

// Printed behind what is asked for: when this comes through, that has.
const mark = '-L OUTPUT -n\n';
const markStart = 'Chain OUTPUT ';
// What iptables prints to a pipe it may keep: the legacy variant does not, the nft variant does until the next part that
// lists something. If any does for longer, it is until a buffer of 4 KiB or so is full.
const nextPart = '*nat\n-S OUTPUT\nCOMMIT\n';
const filler = '-L OUTPUT -n -v --line-numbers\n'.repeat(40);
const firstWaitMs = 50;

/** Starts a run. */
export function openSession(tools: Tools, budget: Budget): Session {
  const started = Promise.withResolvers<{ readonly stdin: Stdin; readonly pid: number }>();
  let onLine: ((line: string) => void) | undefined;
  let sent = '';
  const isNft = tools.variant === 'nft';
  const outcome = runProgram(tools.restore, ['--noflush', ...lockWait(tools, budget)], {
    budget,
    input: (stdin, pid) => started.resolve({ stdin, pid }),
    onLine: (line) => onLine?.(line),
  });
  const say = async (text: string): Promise<void> => {
    const ready = await Promise.race([started.promise, outcome]);
    if ('stdin' in ready) ready.stdin.write(text);
    sent += text;
  };
  // What the legacy variant was told last is still open.
  const isOpen = () => !isNft && sent !== '';
  const part = (text: string) => (isOpen() ? text.slice(text.indexOf('\n') + 1) : text);

  return {
    list: async (chains) => {
      const reader = rulesetReader(new Set(chains));
      const shown = Promise.withResolvers<'shown'>();
      let hasBegun = false;
      onLine = (line) => {
        hasBegun ||= line.startsWith('-');
        if (hasBegun && line.startsWith(markStart)) shown.resolve('shown');
        else reader.read(line);
      };
      const text = part(renderListing(chains, '')) + mark;
      await say(isNft ? `${text}COMMIT\n${nextPart}` : text);
      for (let wait = firstWaitMs; ; wait *= 2) {
        const seen = await Promise.race([shown.promise, outcome, pause(wait)]);
        if (seen === 'shown') return reader.ruleset(chains);
        if (seen !== undefined) return explain(tools, seen, sent);
        await say(isNft ? `*nat\n${filler}COMMIT\n` : filler);
      }
    },
    commit: async (text, onStart) => {
      const ready = await Promise.race([started.promise, outcome]);
      if ('stdin' in ready) {
        onStart(ready.pid);
        await say(part(text));
        ready.stdin.end();
      }
      const result = await outcome;
      if (result.exitCode !== 0) throw failure(tools.restore, result, tools, sent);
    },
    close: async () => {
      const ready = await Promise.race([started.promise, outcome]);
      if ('stdin' in ready) ready.stdin.end();
      await outcome;
    },
  };
}

// A run that ended before it had shown all: mostly with the first chain that is missing.
function explain(tools: Tools, outcome: Outcome, sent: string): undefined {
  if (outcome.exitCode === 1) return undefined;
  throw failure(tools.restore, outcome, tools, sent);
}

function pause(milliseconds: number): Promise<undefined> {
  return new Promise((resolve) => setTimeout(() => resolve(undefined), milliseconds));
}
