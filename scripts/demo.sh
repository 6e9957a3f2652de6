#!/usr/bin/env bash
# Shows portmap at work, in network namespaces of its own: a node, a client and a container; a conflist; ADD; a request
# through the host port; the rules; DEL; the port closed again. Leaves nothing behind, touches nothing outside.
#
#   scripts/demo.sh
#
# Works from a fresh clone on Debian or Ubuntu with Node.js 20, npm and root, in less than two minutes.
# Exit status 0 only if all of it happened. PORTMAP_BIN names another executable to show.
set -euo pipefail
unset CDPATH NODE_OPTIONS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cni=/usr/lib/cni # where containernetworking-plugins has bridge and host-local

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'; else bold='' dim='' green='' red='' plain=''; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
good() { printf '%s  ok%s  %s\n' "$green" "$plain" "$*"; }
fail() { printf '%sfail%s  %s\n' "$red" "$plain" "$*" >&2; exit 1; }
indent() { sed 's/^/      /'; }

if [ "${1:-}" != --inside ]; then
  case ${1:-} in '') ;; *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
  "$root/scripts/setup.sh" busybox-static conntrack containernetworking-plugins curl iproute2 iptables jq libatomic1 procps util-linux
  portmap=${PORTMAP_BIN:-$root/dist/portmap}
  if [ -z "${PORTMAP_BIN:-}" ] && { [ ! -x "$portmap" ] ||
    [ -n "$(find "$root/bin" "$root/src" "$root/package.json" "$root/scripts/build-sea.sh" -newer "$portmap" -print -quit)" ]; }; then
    say 'Building portmap'
    "$root/scripts/build-sea.sh" | indent
  fi
  # Everything from here on happens in private namespaces, and ends with this process, whatever happens.
  exec unshare --net --mount --pid --fork --kill-child --mount-proc \
    env -i PATH="$PATH" TERM="${TERM:-dumb}" LC_ALL=C PORTMAP="$portmap" timeout --foreground 60 "$BASH" "${BASH_SOURCE[0]}" --inside
fi

# ---- inside the private namespaces ----
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
id=demo-sandbox

# The smallest runtime there can be: runs the plugins of a conflist as the CNI specification says. ADD hands each
# result to the next plugin, DEL runs them backwards with the result of ADD. Prints the final result.
exec 3>&1
cni() {
  local verb=$1 conflist=$2 result=${3:-null} filter='.plugins[]' plugin config
  if [ "$verb" = DEL ]; then filter='.plugins | reverse[]'; fi
  while read -r plugin; do
    config=$(jq -c --argjson plugin "$plugin" --argjson result "$result" --argjson ports "$ports" '
      $plugin + {name, cniVersion}
      + (if $plugin.capabilities.portMappings then {runtimeConfig: {portMappings: $ports}} else {} end)
      + (if $result then {prevResult: $result} else {} end)' "$conflist")
    local type; type=$(jq -r .type <<<"$plugin")
    local binary=$cni/$type
    if [ "$type" = portmap ]; then binary=$PORTMAP; fi
    local started=${EPOCHREALTIME/./} output status=0
    output=$(CNI_COMMAND=$verb CNI_CONTAINERID=$id CNI_NETNS=/run/netns/container CNI_IFNAME=eth0 CNI_PATH=$cni "$binary" <<<"$config") || status=$?
    printf '      %s %s: %s ms\n' "$verb" "$type" $(((${EPOCHREALTIME/./} - started) / 1000)) >&3
    if [ "$status" -ne 0 ]; then fail "$type $verb: $output"; fi
    if [ "$verb" = ADD ]; then result=$output; fi
  done < <(jq -c "$filter" "$conflist")
  if [ "$verb" = ADD ]; then echo "$result"; fi
}
ask() { ip netns exec client curl -gsfm 2 "http://$1:8080/" 2>&1; }
# An IPv6 address is not used before the kernel has made sure that nobody else has it.
ask_patiently() { for _ in 1 2 3 4 5 6; do if ask "$1"; then return; fi; sleep 0.3; done; return 1; }
rules() { "$1" -t nat -S | grep -E 'CNI-(DN|HOSTPORT)' | grep -v '^-N' || true; }

say 'A node with an address 198.51.100.1, a client beside it, and an empty container'
ip netns add client
ip netns add container
ip link set lo up
ip link add eth0 type veth peer name eth0 netns client
ip addr add 198.51.100.1/24 dev eth0
ip addr add 2001:db8:100::1/64 dev eth0 nodad
ip link set eth0 up
ip -n client addr add 198.51.100.2/24 dev eth0
ip -n client addr add 2001:db8:100::2/64 dev eth0 nodad
ip -n client link set lo up
ip -n client link set eth0 up
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
mkdir "$stage/www" && echo 'hello from the container' > "$stage/www/index.html"
ip netns exec container busybox httpd -p '[::]:80' -h "$stage/www"
good 'the container serves a page on its port 80; nothing leads there yet'

say 'The conflist: bridge makes the interface, portmap maps the ports'
cat > "$stage/demo.conflist" <<'CONFLIST'
{
  "cniVersion": "1.0.0",
  "name": "demo",
  "plugins": [
    { "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
      "ipam": { "type": "host-local",
                "ranges": [[{ "subnet": "10.88.0.0/16" }], [{ "subnet": "fd00:88::/64" }]],
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }] } },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
CONFLIST
ports='[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]'
indent < "$stage/demo.conflist"
echo "      and the runtime asks for: $ports"
if ask 198.51.100.1 >/dev/null; then fail 'port 8080 answers before ADD'; fi
good 'before ADD, 198.51.100.1:8080 is closed'

say 'ADD'
result=$(cni ADD "$stage/demo.conflist")
address=$(jq -r '[.ips[].address] | join(", ")' <<<"$result")
good "the container has $address"

say 'A request from the client through the host port'
for target in 198.51.100.1 '[2001:db8:100::1]'; do
  page=$(ask_patiently "$target") || fail "http://$target:8080/ does not answer: $page"
  [ "$page" = 'hello from the container' ] || fail "http://$target:8080/ answers: $page"
  good "http://$target:8080/ says: $page"
done
page=$(curl -gsfm 2 http://127.0.0.1:8080/) || fail '127.0.0.1:8080 on the node does not answer'
good "and on the node itself, http://127.0.0.1:8080/ says: $page"

for tool in iptables ip6tables; do
  say "The rules behind it: $tool -t nat -S"
  rules "$tool" | sed "s/^/$dim      /; s/\$/$plain/"
  grep -q CNI-DN <(rules "$tool") || fail "$tool has no rule of the sandbox"
done

say 'DEL'
cni DEL "$stage/demo.conflist" "$result"
for target in 198.51.100.1 '[2001:db8:100::1]'; do
  if page=$(ask "$target"); then fail "http://$target:8080/ still answers: $page"; fi
done
good 'port 8080 is closed again'
left=$( (rules iptables; rules ip6tables) | grep CNI-DN || true)
[ -z "$left" ] || fail "rules of the sandbox are left: $left"
good 'no rule of the sandbox is left'
say 'All of it worked.'
