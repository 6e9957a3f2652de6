// The releases of iptables that scripts/iptables-versions.sh puts side by side, each in both variants.
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { variants } from './lab.ts';

const project = (path: string): string => fileURLToPath(new URL(`../${path}`, import.meta.url));

// Prints `bookworm: iptables v1.8.9 (nf_tables)`, a line each suite and variant; fetches what is not there yet.
const unpacked = execFileSync(project('scripts/iptables-versions.sh'), {
  encoding: 'utf8',
  timeout: 240_000,
});
const versions = [...new Set([...unpacked.matchAll(/ v([0-9.]+) /g)].map(([, version = '']) => version))];

/** Every release in every variant. */
export const cells = versions.flatMap((version) => variants.map((variant) => ({ version, variant })));

/** Where a release was unpacked. */
export const folderOf = (version: string): string => project(`.cache/iptables/${version}`);
