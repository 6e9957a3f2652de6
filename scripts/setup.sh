#!/usr/bin/env bash
# Makes a Debian or Ubuntu machine ready to build, test and measure: installs the Debian packages that are missing
# and the npm packages of the lock file. Does nothing, and asks the network nothing, when all is there.
#
#   scripts/setup.sh [PACKAGE...]
#
# With PACKAGEs only those Debian packages; otherwise every one in scripts/apt-packages.
# Wants root, Node.js 20 or newer and npm.
set -euo pipefail
unset CDPATH NODE_OPTIONS
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }
case ${1:-} in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; -*) fail "unknown option $1" ;; esac

[ "$(id -u)" = 0 ] || fail "this needs root, for packages and for network namespaces. Run it as root (sudo $0)."
command -v apt-get >/dev/null || fail "this script knows Debian and Ubuntu. Elsewhere install what scripts/apt-packages lists, then: npm ci"
node_major=$(node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0)
[ "$node_major" -ge 20 ] || fail "Node.js 20 or newer is needed to install the npm packages; found: $(node --version 2>/dev/null || echo none)."
command -v npm >/dev/null || fail "npm is missing. It comes with Node.js, or on Debian as the package npm."

# One setup at a time: two of them in one clone would pull node_modules from under each other.
mkdir -p .cache
exec 9>.cache/setup.lock
flock 9

if [ $# -gt 0 ]; then wanted=("$@"); else mapfile -t wanted < <(sed -E 's/#.*//; s/[[:space:]]+//g; /^$/d' scripts/apt-packages); fi
installed=" $(dpkg-query -W -f '${db:Status-Status} ${Package} ' "${wanted[@]}" 2>/dev/null || true) "
missing=()
for package in "${wanted[@]}"; do
  case $installed in *" installed $package "*) ;; *) missing+=("$package") ;; esac
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: installing ${missing[*]}"
  # RUNLEVEL: a package that brings a daemon must not start it. The lock: the machine may be updating itself.
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
  log=.cache/apt.log
  { apt-get -o DPkg::Lock::Timeout=120 -q update && apt-get -o DPkg::Lock::Timeout=120 -qy install --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 9>&- ||
    { tail -n 15 "$log" >&2; fail "apt-get could not install ${missing[*]} (whole output: $PWD/$log)"; }
  # Nor may it start with the machine, now that it was not there before: firewalld would replace the machine's rules.
  for package in "${missing[@]}"; do
    case $package in
      firewalld | containerd) systemctl disable "$package.service" >>"$log" 2>&1 || true ;;
    esac
  done
fi

# node_modules is stale when a package that npm would install is missing or has another version. Packages for
# other platforms are optional and may be missing.
fresh() {
  [ -f node_modules/.package-lock.json ] && node -e '
    const { readFileSync } = require("node:fs");
    const packages = (file) => JSON.parse(readFileSync(file, "utf8")).packages;
    const have = packages("node_modules/.package-lock.json");
    for (const [path, wanted] of Object.entries(packages("package-lock.json"))) {
      if (path === "" || (wanted.optional && !have[path])) continue;
      if (have[path]?.version !== wanted.version) process.exit(1);
    }'
}
if ! fresh; then
  echo 'setup: npm ci'
  npm ci --include=dev --include=optional --no-fund --no-audit --loglevel=error >/dev/null 9>&- || fail 'npm ci failed'
fi
unshare --net --mount true 2>/dev/null || fail 'this machine does not let root make network namespaces (in a container: run it privileged)'
