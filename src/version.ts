// What this executable calls itself.
import manifest from '../package.json' with { type: 'json' };
import { cniVersions } from './network.ts';

export const version: string = manifest.version;

/** What the plugin says of itself without a command; other programs read the name and the version out of it. */
export function aboutText(): string {
  return `CNI portmap plugin v${version}\nCNI protocol versions supported: ${cniVersions.join(', ')}\n`;
}
