#!/usr/bin/env bash
# Puts several iptables versions side by side, without installing any of them.
#
#   scripts/iptables-versions.sh [SUITE...]
#
# The default suites are bookworm, trixie and unstable. For each one, its iptables with all libraries down to libc
# is unpacked into .cache/iptables/VERSION/root, and two folders to put first in PATH are made beside it:
#   .cache/iptables/VERSION/nft       iptables, ip6tables, their -save and -restore are the nft variant
#   .cache/iptables/VERSION/legacy    the same names are the legacy variant
# Both hold the explicit names too (iptables-nft-restore, ip6tables-legacy-save, ...). A suite that was unpacked
# before is not fetched again: delete .cache/iptables to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1-} in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
suites=("$@")
[ $# -gt 0 ] || suites=(bookworm trixie unstable)
cache=$PWD/.cache/iptables
mkdir -p "$cache"

# Every suite comes from where this machine takes its own release.
archive() {
  local codename
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $codename" 'Component: main' | sed -n 1p
}

# apt-get with a configuration, lists and an empty package database of the suite's own: it sees nothing of the
# machine's packages, so what iptables depends on includes libc.
suite_apt() {
  local apt=$cache/apt/$suite
  apt-get -qq -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
    -o Dir::State="$apt/state" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
    -o APT::Sandbox::User=root -o APT::Install-Recommends=false \
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false "$@"
}

# Unpacks one suite, and says in the file .../apt/SUITE/version that it is done and under which name.
fetch() {
  local suite=$1 apt=$cache/apt/$1 keys=/usr/share/keyrings/debian-archive-keyring.gpg packages version package
  rm -rf "$apt"
  mkdir -p "$apt"/{state/lists/partial,cache/archives/partial,packages,unpacked/root}
  : > "$apt/status"
  echo "deb [signed-by=$keys] $uri $suite main" > "$apt/sources.list"
  suite_apt update
  mapfile -t packages < <(suite_apt --simulate install iptables | awk '$1 == "Inst" { print $2 }')
  (cd "$apt/packages" && suite_apt download "${packages[@]}")
  for package in "$apt"/packages/*.deb; do dpkg-deb -x "$package" "$apt/unpacked/root"; done
  version=$(dpkg-deb -f "$apt"/packages/iptables_*.deb Version | sed 's/-[^-]*$//')
  rm -rf "${cache:?}/$version"
  mv "$apt/unpacked" "$cache/$version"
  rm -rf "$apt"/{packages,cache,state}
  echo "$version" > "$apt/version"
}

# One script for each multi-call program, named as Debian names the program, so that an entry's real path tells its
# variant here as it does there. The suite's own loader runs it: its libc may be newer than the machine's.
write_programs() {
  local folder=$1 loader extensions libraries variant family suffix
  loader=$(find "$folder/root" -name 'ld-linux-*.so.*' -type f | head -n 1)
  extensions=$(find "$folder/root" -type d -name xtables | head -n 1)
  libraries=$(find "$folder/root" -name 'lib*.so.*' -printf '%h\n' | sort -u | paste -s -d :)
  mkdir -p "$folder/bin"
  for variant in nft legacy; do
    cat > "$folder/bin/xtables-$variant-multi" <<PROGRAM
#!/bin/sh
XTABLES_LIBDIR="$extensions" exec "$loader" --library-path "$libraries" --argv0 "\${0##*/}" \\
  "$folder/root/usr/sbin/xtables-$variant-multi" "\$@"
PROGRAM
    chmod 755 "$folder/bin/xtables-$variant-multi"
  done
  for default in nft legacy; do
    mkdir -p "$folder/$default"
    for family in iptables ip6tables; do
      for suffix in '' -save -restore; do
        ln -sfn "../bin/xtables-$default-multi" "$folder/$default/$family$suffix"
        for variant in nft legacy; do
          ln -sfn "../bin/xtables-$variant-multi" "$folder/$default/$family-$variant$suffix"
        done
      done
    done
  done
}

# One run at a time in one checkout.
exec 9> "$cache/lock"
flock 9
uri=$(archive)
[ -n "$uri" ] || { echo "iptables-versions: apt has no source for this machine's own release" >&2; exit 1; }
fetching=()
for suite in "${suites[@]}"; do
  [ -e "$cache/apt/$suite/version" ] && continue
  fetch "$suite" 9>&- &
  fetching+=($!)
done
failed=0
for pid in "${fetching[@]}"; do wait "$pid" || failed=1; done
[ $failed = 0 ] || { echo 'iptables-versions: not every suite could be fetched' >&2; exit 1; }
for suite in "${suites[@]}"; do
  version=$(cat "$cache/apt/$suite/version")
  # Written every time: the paths in them are this checkout's.
  write_programs "$cache/$version"
  for variant in nft legacy; do echo "$suite: $("$cache/$version/$variant/iptables" --version)"; done
done
