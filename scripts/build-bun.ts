// Bun's part of build-sea.sh, which runs it with Bun:  build-bun.ts TEMPLATE OUTFILE
// TEMPLATE is the runtime that the executable is made from, of its own architecture.
import { build } from 'bun';

const [template, outfile] = process.argv.slice(2);
if (template === undefined || outfile === undefined) throw new Error('build-bun.ts TEMPLATE OUTFILE');

await build({
  entrypoints: ['bin/portmap.ts'],
  target: 'bun',
  minify: true,
  // Bun writes no bytecode for this code in another format.
  format: 'esm',
  bytecode: true,
  // A call loads what it needs; in one piece, all of Node's modules that any part imports are loaded at start.
  splitting: true,
  compile: {
    executablePath: template,
    outfile,
    // Code must be 200 times hotter than usual before it is compiled: a call is over before that pays, and it takes a
    // fifth of a call's processor time.
    jitPolicy: 200,
    // No file of the working directory may change the plugin.
    autoloadDotenv: false,
    autoloadBunfig: false,
    autoloadTsconfig: false,
    autoloadPackageJson: false,
  },
  plugins: [
    {
      // proper-lockfile loads it for a file system that it is not told to use, and it loads Node's streams: 5 ms.
      name: 'the file system without graceful-fs',
      setup: (bundler) => {
        bundler.onResolve({ filter: /^graceful-fs$/ }, () => ({ path: 'node:fs', external: true }));
      },
    },
  ],
});
