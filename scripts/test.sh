#!/usr/bin/env bash
# Everything that must hold: builds both executables, checks types, lint and layout, then runs the test layers.
#
#   scripts/test.sh [LAYER...]
#
# LAYERs: pure      planning, parsing and text, no kernel
#         kernel    the executable against the real iptables, in private network namespaces
#         node      the end-to-end main job once more, with the executable that is built on Node.js
#         peers     beside the upstream plugin, and against other programs on the node
#         callers   called by the real runtimes
# The last line says `N passed, N failed, N skipped`, summed over the layers. A build, a check or a layer that breaks
# counts as one failure, and so does a layer without tests. Exit status 0 only without failures.
# Works from a fresh clone on Debian or Ubuntu with Node.js 20, npm and root. PORTMAP_BIN is ignored: what was just
# built is what is tested.
set -euo pipefail
unset CDPATH NODE_OPTIONS NODE_ENV NODE_PATH
# Left over in the caller's environment, any of these would change what the plugin does.
for variable in $(compgen -e); do case $variable in CNI_* | PORTMAP_* | XTABLES_* | IPTABLES_*) unset "$variable" ;; esac; done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

all=(pure kernel node peers callers)
case ${1:-} in -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
layers=("${@:-${all[@]}}")
for layer in "${layers[@]}"; do
  case " ${all[*]} " in *" $layer "*) ;; *) echo "test: no layer $layer; there are ${all[*]}" >&2; exit 2 ;; esac
done

passed=0 failed=0 skipped=0 notes=()
broke() { failed=$((failed + 1)); notes+=("$*"); echo "test: $*" >&2; }
finish() {
  trap - EXIT
  echo
  for note in "${notes[@]}"; do echo "  failed: $note"; done
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" -eq 0 ] && exit 0
  exit 1
}
trap finish EXIT
trap 'broke "interrupted"; finish' INT TERM

scripts/setup.sh || { broke 'the machine could not be set up'; finish; }
export PATH=$root/node_modules/.bin:$PATH:/usr/local/sbin:/usr/sbin:/sbin
logs=$root/.cache/test
rm -rf "$logs"
mkdir -p "$logs"
started=$SECONDS
# The whole run takes less than ten minutes on two idle cores. A busy machine gets more; a test that hangs must end.
left() { local seconds=$((2400 - (SECONDS - started))); echo $((seconds > 1 ? seconds : 1)); }

step() {
  local name=$1 start=$SECONDS
  shift
  if timeout --kill-after=5 "$(left)" "$@" >"$logs/$name.log" 2>&1; then
    echo "test: $name, $((SECONDS - start)) s"
  else
    broke "$name: $*"
    tail -n 60 "$logs/$name.log" >&2
    return 1
  fi
}
step build-bun scripts/build-sea.sh || finish
step build-node scripts/build-sea.sh --runtime node || finish
step check npm run --silent check || true

for layer in "${layers[@]}"; do
  arguments=(--project "$layer") executable=$root/dist/portmap
  if [ "$layer" = node ]; then arguments=(--project kernel test/kernel/packets.test.ts) executable=$root/dist/portmap-node; fi
  echo "test: layer $layer"
  start=$SECONDS status=0
  PORTMAP_BIN=$executable timeout --kill-after=10 "$(left)" \
    vitest run "${arguments[@]}" --reporter=default --reporter=json --outputFile.json="$logs/$layer.json" </dev/null || status=$?
  # Prints: passed, failed, skipped, files that broke before their tests ran.
  if counts=$(node -e '
    const report = JSON.parse(require("node:fs").readFileSync(process.argv[1], "utf8"));
    const broken = report.testResults.filter((file) => file.status === "failed" && !file.assertionResults.some((test) => test.status === "failed"));
    console.log(report.numPassedTests, report.numFailedTests, report.numPendingTests + (report.numTodoTests ?? 0), broken.length);' \
    "$logs/$layer.json" 2>/dev/null); then
    read -r layer_passed layer_failed layer_skipped layer_broken <<<"$counts"
    passed=$((passed + layer_passed)) failed=$((failed + layer_failed)) skipped=$((skipped + layer_skipped))
    if [ "$layer_failed" -gt 0 ]; then
      notes+=("layer $layer: $layer_failed tests")
      # Once more at the very end, where it is seen also by those who have only the end of the output.
      while IFS= read -r line; do notes+=("  $line"); done < <(node -e '
        const report = JSON.parse(require("node:fs").readFileSync(process.argv[1], "utf8"));
        for (const file of report.testResults)
          for (const test of file.assertionResults.filter(({ status }) => status === "failed"))
            console.log(`${file.name.slice(process.cwd().length + 1)}: ${test.fullName}: ${test.failureMessages.join(" ").replace(/\s+/g, " ").slice(0, 600)}`);' \
        "$logs/$layer.json")
    fi
    if [ "$layer_broken" -gt 0 ]; then
      broke "layer $layer: $layer_broken test files did not load"
    elif [ $((layer_passed + layer_failed)) -eq 0 ]; then
      broke "layer $layer ran no test"
    elif [ "$status" -ne 0 ] && [ "$layer_failed" -eq 0 ]; then
      broke "layer $layer: vitest ended with status $status"
    fi
  else
    broke "layer $layer ended with status $status and no report"
  fi
  echo "test: layer $layer, $((SECONDS - start)) s"
done
echo "test: $((SECONDS - started)) s in all"
finish
