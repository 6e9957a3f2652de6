// The benchmark: our executable beside the real upstream plugin, in one run, as root.
//
//   npm run bench -- [--only STAGE,...] [--variant nft|legacy] [--quick]
//
// Writes bench/results.md, which the README quotes, and bench/results.json, from which a run of a few stages keeps the
// others. With --quick it measures little and writes to .cache/bench instead. PORTMAP_BIN and UPSTREAM_BIN name other
// executables.
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { cpus, loadavg, release, totalmem } from 'node:os';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import * as z from 'zod';
import { findings } from './measure.ts';
import { measured, renderReport, type Measured } from './report.ts';
import { stageNames, type Order, type StageName } from './stage.ts';
import type { Variant } from './node.ts';

const root = fileURLToPath(new URL('..', import.meta.url)).replace(/\/$/, '');
const { values: wanted } = parseArgs({
  options: {
    only: { type: 'string' },
    variant: { type: 'string' },
    quick: { type: 'boolean', default: false },
    help: { type: 'boolean', default: false },
  },
});
if (wanted.help) {
  process.stdout.write(`npm run bench -- [--only STAGE,...] [--variant nft|legacy] [--quick]
  stages: ${stageNames.options.join(', ')}
  --quick measures little, and writes to .cache/bench instead of bench/results.md\n`);
  process.exit(0);
}
const only = z.array(stageNames).parse(wanted.only?.split(',') ?? stageNames.options);
const variants = z.array(z.enum(['nft', 'legacy'])).parse(wanted.variant?.split(',') ?? ['nft', 'legacy']);

const output = (file: string, ...args: string[]): string =>
  execFileSync(file, args, { encoding: 'utf8' }).trim();

/** The newest upstream plugin that can be had: Debian unstable's, else the one that is installed. */
function findUpstream(): { path: string; version: string } {
  const named = process.env['UPSTREAM_BIN'];
  if (named !== undefined) return { path: named, version: named };
  const fetched = spawnSync(`${root}/scripts/upstream.sh`, [], {
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const path = fetched.stdout.trim();
  if (fetched.status === 0)
    return { path, version: readFileSync(path.replace('usr/lib/cni/portmap', 'VERSION'), 'utf8').trim() };
  const version = output('dpkg-query', '-W', '-f', '${Version}', 'containernetworking-plugins');
  return { path: '/usr/lib/cni/portmap', version };
}

// A stage runs on the runtime inside our executable, because that one starts programs as container runtimes do, with
// vfork: Node.js copies its own page tables first, which adds 2 ms to every call that is measured.
const stageRuntime = `${root}/dist/portmap`;

function runStage(order: Order): Measured['findings'] {
  const started = Date.now();
  process.stderr.write(`bench: ${order.stage}, ${order.variant} `);
  const namespaces = ['--net', '--mount', '--pid', '--fork', '--kill-child', '--mount-proc'];
  const outcome = spawnSync(
    'unshare',
    namespaces.concat(stageRuntime, `${root}/bench/stage.ts`, JSON.stringify(order)),
    {
      env: { ...process.env, BUN_BE_BUN: '1' },
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'inherit'],
      maxBuffer: 64 * 1024 * 1024,
    },
  );
  if (outcome.status !== 0) throw new Error(`the stage ${order.stage} in ${order.variant} failed`);
  process.stderr.write(`${Math.round((Date.now() - started) / 1_000)} s\n`);
  return findings.parse(JSON.parse(outcome.stdout));
}

// What a stage measures that has no variant, or only one.
const inVariant = (stage: StageName, variant: Variant): boolean =>
  stage === 'memory' ? variant === 'legacy' : stage === 'idle' ? variant === 'nft' : true;

const ours = process.env['PORTMAP_BIN'] ?? stageRuntime;
for (const needed of [ours, stageRuntime])
  if (!existsSync(needed)) throw new Error(`${needed} is missing: npm run build`);
const busy = loadavg()[0] ?? 0;
if (busy > 0.7)
  process.stderr.write(`bench: the machine is busy (load ${busy.toFixed(1)}): ratios suffer, times more\n`);
const upstream = findUpstream();
const commit = output('git', '-C', root, 'describe', '--always', '--dirty', '--exclude', '*');
const machine = [
  `${cpus().length} x ${cpus()[0]?.model ?? 'unknown processor'}`,
  `${Math.round(totalmem() / 2 ** 30)} GB`,
  `Linux ${release()}`,
  output('iptables', '--version').replace(/ \(.*/, ''),
].join(', ');

const folder = wanted.quick ? `${root}/.cache/bench` : `${root}/bench`;
mkdirSync(folder, { recursive: true });
const store = `${folder}/results.json`;
const known = existsSync(store) ? z.array(measured).parse(JSON.parse(readFileSync(store, 'utf8'))) : [];
const results = new Map(known.map((result) => [`${result.stage} ${result.variant}`, result]));
let failed = false;
for (const stage of only)
  for (const variant of variants) {
    if (!inVariant(stage, variant)) continue;
    try {
      const found = runStage({
        stage,
        variant,
        quick: wanted.quick,
        ours,
        upstream: upstream.path,
        node: process.execPath,
      });
      results.set(`${stage} ${variant}`, {
        stage,
        variant,
        date: new Date().toISOString().slice(0, 10),
        commit,
        upstream: upstream.version,
        machine,
        findings: found,
      });
    } catch (error) {
      failed = true;
      process.stderr.write(`bench: ${error instanceof Error ? error.message : String(error)}\n`);
    }
  }

const order = stageNames.options;
const sorted = [...results.values()].toSorted(
  (a, b) => order.indexOf(a.stage) - order.indexOf(b.stage) || b.variant.localeCompare(a.variant),
);
writeFileSync(store, `${JSON.stringify(sorted, null, 1)}\n`);
writeFileSync(`${folder}/results.md`, renderReport(sorted));
execFileSync(`${root}/node_modules/.bin/prettier`, ['--write', store, `${folder}/results.md`], {
  stdio: 'ignore',
});
process.stdout.write(readFileSync(`${folder}/results.md`));
process.stderr.write(`\nbench: written to ${folder}/results.md\n`);
if (failed) process.exitCode = 1;
