#!/usr/bin/env bash
# Fetches the newest upstream plugins that Debian carries (the suite sid), to measure against and to test with:
# unpacked into .cache/upstream, nothing is installed. Prints the path of its portmap; the package's version is in the
# file VERSION beside usr/.
#
#   scripts/upstream.sh [--suite SUITE]
#
# apt works here with a configuration of its own, in .cache/upstream/apt: the sources are the machine's own Debian
# entry with another suite, so mirrors, proxies and keys are those that the machine already trusts.
# Exits 3, saying why, where that suite cannot be had (Ubuntu, or no network): callers go on with the installed one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suite=sid
case ${1:-} in
  '') ;;
  --suite) suite=${2:?} ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
folder=$PWD/.cache/upstream
plugin=$folder/$suite/usr/lib/cni/portmap
mkdir -p "$folder"
exec 9>"$folder/lock" # one fetch at a time in one clone
flock 9
if [ -x "$plugin" ]; then echo "$plugin"; exit 0; fi

unavailable() { echo "upstream: $*" >&2; exit 3; }

# The machine's Debian entry in apt's one-line form, whichever of the two forms it is written in.
debian_entry() {
  local file
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -f "$file" ] || continue
    awk -v suite="$suite" '
      function flush() { if (uri ~ /\/debian\/?$/) { printf "deb %s%s %s main\n", key ? "[signed-by=" key "] " : "", uri, suite; done = 1 } uri = key = "" }
      /^[[:space:]]*$/ { if (!done) flush() }
      tolower($1) == "uris:" { uri = $2 }
      tolower($1) == "signed-by:" { key = $2 }
      END { if (!done) flush() }' "$file"
  done
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -f "$file" ] || continue
    sed -nE "s|^deb +(\[[^]]*\] +)?([^ ]+/debian/?) .*|deb \1\2 $suite main|p" "$file"
  done
}
entry=$(debian_entry | head -n 1)
[ -n "$entry" ] || unavailable "no Debian entry among this machine's apt sources"

apt=$folder/apt
mkdir -p "$apt"/{etc,state/lists/partial,cache/archives/partial} "$folder/$suite"
echo "$entry" > "$apt/etc/sources.list"
options=(-o "Dir::Etc::sourcelist=$apt/etc/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State=$apt/state" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root
  -o Acquire::Languages=none -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false)
apt-get "${options[@]}" -qq update >&2 || unavailable "apt-get update failed for the suite $suite"
(cd "$folder" && apt-get "${options[@]}" -qq download containernetworking-plugins >&2) ||
  unavailable "the suite $suite has no containernetworking-plugins"
dpkg-deb -f "$folder"/containernetworking-plugins_*.deb Version > "$folder/$suite/VERSION"
dpkg-deb -x "$folder"/containernetworking-plugins_*.deb "$folder/$suite"
rm -rf "$apt" "$folder"/containernetworking-plugins_*.deb
[ -x "$plugin" ] || unavailable "the package of $suite has no /usr/lib/cni/portmap"
echo "$plugin"
