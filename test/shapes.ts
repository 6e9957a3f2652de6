// Nat tables as other programs leave them, as text for iptables-restore: what kube-proxy and Docker write, and one rule
// of every kind that the nat table takes. A character is a byte.
import type { Family } from './lab.ts';

/** A text as the kernel has it. */
export const bytesOf = (text: string): string => Buffer.from(text, 'utf8').toString('latin1');

const ip = (family: Family, v4: string, v6: string): string => (family === 'v4' ? v4 : v6);
/** With a port behind it, an IPv6 address stands in brackets. */
const endpoint = (family: Family, v4: string, v6: string, port: string): string =>
  `${ip(family, v4, `[${v6}]`)}:${port}`;

/** Three services of kube-proxy: with session affinity, with a node port, and one of two endpoints by chance. */
export function kubeProxyTable(family: Family): string {
  const pods = ip(family, '10.244.0.0/16', 'fd00:244::/56');
  const pod = (number: number) => ip(family, `10.244.1.${number}`, `fd00:244::1:${number}`);
  const full = ip(family, '32', '128');
  const service = (number: number) => ip(family, `10.96.0.${number}/32`, `fd00:96::${number}/128`);
  const mask = ip(family, '255.255.255.255', 'ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff');
  const to = (number: number, port: number) =>
    endpoint(family, `10.244.1.${number}`, `fd00:244::1:${number}`, String(port));
  return `*nat
:PREROUTING ACCEPT [1043:68921]
:INPUT ACCEPT [12:720]
:OUTPUT ACCEPT [99999999:18446744073709551]
:POSTROUTING ACCEPT [5:300]
:KUBE-EXT-TCOU7JCQXEZGVUNU - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SEP-6E7XQMQ4RAYOWTTM - [0:0]
:KUBE-SEP-IT2ZTR26TO4XFPTO - [0:0]
:KUBE-SEP-N4G2XR5TDX7PQE7P - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
:KUBE-SVC-TCOU7JCQXEZGVUNU - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-EXT-TCOU7JCQXEZGVUNU -s ${pods} -m comment --comment "pod traffic for kube-system/kube-dns:dns external destinations" -j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-EXT-TCOU7JCQXEZGVUNU -m comment --comment "masquerade LOCAL traffic for kube-system/kube-dns:dns external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p udp -m comment --comment "kube-system/kube-dns:dns" -m udp --dport 30053 -j KUBE-EXT-TCOU7JCQXEZGVUNU
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-6E7XQMQ4RAYOWTTM -s ${pod(5)}/${full} -m comment --comment "kube-system/kube-dns:dns" -j KUBE-MARK-MASQ
-A KUBE-SEP-6E7XQMQ4RAYOWTTM -p udp -m comment --comment "kube-system/kube-dns:dns" -m udp -j DNAT --to-destination ${to(5, 53)}
-A KUBE-SEP-IT2ZTR26TO4XFPTO -p udp -m comment --comment "kube-system/kube-dns:dns" -m udp -j DNAT --to-destination ${to(6, 53)}
-A KUBE-SEP-N4G2XR5TDX7PQE7P -p tcp -m comment --comment "default/web:http" -m recent --set --name KUBE-SEP-N4G2XR5TDX7PQE7P --mask ${mask} --rsource -m tcp -j DNAT --to-destination ${to(7, 8080)}
-A KUBE-SERVICES -d ${service(1)} -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-ERIFXISQEP7F7OF4
-A KUBE-SERVICES -d ${service(2)} -p udp -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-ERIFXISQEP7F7OF4 ! -s ${pods} -d ${service(1)} -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-ERIFXISQEP7F7OF4 -m comment --comment "default/web:http -> ${to(7, 8080)}" -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-N4G2XR5TDX7PQE7P --mask ${mask} --rsource -j KUBE-SEP-N4G2XR5TDX7PQE7P
-A KUBE-SVC-ERIFXISQEP7F7OF4 -m comment --comment "default/web:http -> ${to(7, 8080)}" -j KUBE-SEP-N4G2XR5TDX7PQE7P
-A KUBE-SVC-TCOU7JCQXEZGVUNU -m comment --comment "kube-system/kube-dns:dns -> ${to(5, 53)}" -m statistic --mode random --probability 0.33333333349 -j KUBE-SEP-6E7XQMQ4RAYOWTTM
-A KUBE-SVC-TCOU7JCQXEZGVUNU -m comment --comment "kube-system/kube-dns:dns -> ${to(6, 53)}" -j KUBE-SEP-IT2ZTR26TO4XFPTO
COMMIT
`;
}

/** Docker with a published port, a swarm service and a network of its own. Some rules have counters. */
export function dockerTable(family: Family): string {
  const bridge = ip(family, '172.17.0.0/16', 'fd00:172:17::/64');
  const custom = ip(family, '172.18.0.0/16', 'fd00:172:18::/64');
  const own = ip(family, '172.17.0.2/32', 'fd00:172:17::2/128');
  const loopback = ip(family, '127.0.0.0/8', '::1/128');
  return `*nat
:PREROUTING ACCEPT [7:420]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [3:180]
:POSTROUTING ACCEPT [3:180]
:DOCKER - [0:0]
:DOCKER-INGRESS - [0:0]
[4:240] -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER-INGRESS
[4:240] -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
[0:0] -A OUTPUT -m addrtype --dst-type LOCAL -j DOCKER-INGRESS
[1:60] -A OUTPUT ! -d ${loopback} -m addrtype --dst-type LOCAL -j DOCKER
[2:120] -A POSTROUTING -o docker_gwbridge -m addrtype --src-type LOCAL -j MASQUERADE
[2:120] -A POSTROUTING -s ${bridge} ! -o docker0 -j MASQUERADE
[0:0] -A POSTROUTING -s ${custom} ! -o br-2f1c8b5e7a90 -j MASQUERADE
[0:0] -A POSTROUTING -s ${own} -d ${own} -p tcp -m tcp --dport 80 -j MASQUERADE
[0:0] -A DOCKER -i docker0 -j RETURN
[0:0] -A DOCKER -i br-2f1c8b5e7a90 -j RETURN
[4:240] -A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination ${endpoint(family, '172.17.0.2', 'fd00:172:17::2', '80')}
[0:0] -A DOCKER -d ${ip(family, '198.51.100.1/32', '2001:db8:3::1/128')} ! -i br-2f1c8b5e7a90 -p udp -m udp --dport 5300 -j DNAT --to-destination ${endpoint(family, '172.18.0.2', 'fd00:172:18::2', '53')}
[0:0] -A DOCKER-INGRESS -p tcp -m tcp --dport 9000 -j DNAT --to-destination ${endpoint(family, '172.19.0.2', 'fd00:172:19::2', '9000')}
[0:0] -A DOCKER-INGRESS -j RETURN
COMMIT
`;
}

/** The set of addresses that some of the odd rules ask; it must be there before them. */
export const oddSet = (family: Family): string => `odd-${family}`;
export const makeOddSets = `
  ipset create ${oddSet('v4')} hash:ip,port family inet timeout 0
  ipset create ${oddSet('v6')} hash:ip,port family inet6 timeout 0`;

/** Where a rule may stand: on the way in, on the way out, or where the node's own packets begin. */
export type Way = 'in' | 'out' | 'own';
/** Names that iptables takes, and tools of its surroundings use or could use. */
export const oddChains: Readonly<Record<Way | 'goto' | 'empty', string>> = {
  in: 'a.b:c/d@e=f%g~h',
  out: "{x'y}[c]?*|&;<>()$_^`",
  own: 'CNI-0123456789abcdef01234567',
  goto: 'abcdefghijklmnopqrstuvwxyz12',
  empty: bytesOf('#\\näh!'),
};
export type OddRule = { readonly way: Way; readonly rule: string };

/** A rule that only counts: neither a match nor a target. */
export const bareRule: OddRule = { way: 'in', rule: '' };

/** A rule of every other kind that the nat table takes, as one could write it, not as it is printed. */
export function oddRules(family: Family): OddRule[] {
  const inFamily: Record<Family, string[]> = {
    v4: [
      'in ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j RETURN',
      'in -s 10.0.0.1/255.0.255.0 -j RETURN',
      'in -f -d 1.2.3.4/255.255.0.255 -j RETURN',
      'in ! -f -j RETURN',
      'in -p icmp -m icmp --icmp-type 8 -j RETURN',
      'in -m ttl --ttl-lt 5 -j RETURN',
      'in -p ah -m ah --ahspi 5 -j RETURN',
      'in -p tcp -m ecn --ecn-tcp-cwr -j RETURN',
      'in -m iprange --src-range 192.0.2.1-192.0.2.9 ! --dst-range 198.51.100.1-198.51.100.9 -j RETURN',
      'in -m conntrack --ctorigdst 198.51.100.1 ! --ctorigsrc 10.0.0.0/8 -j RETURN',
      'in -j DNAT --to-destination 10.1.0.5-10.1.0.9',
      'in -p tcp -j DNAT --to-destination 10.1.0.5-10.1.0.9:8080-8090 --persistent',
      'in -p tcp -j DNAT --to-destination 10.1.0.5:80 --random',
      'in -p tcp -m tcp --dport 8000:8010 -j DNAT --to-destination 10.1.0.5:5000-5010/8000',
      'in -d 198.51.100.0/24 -j NETMAP --to 10.9.0.0/24',
      'out -s 10.9.0.0/24 -j NETMAP --to 198.51.100.0/24',
      'out -j SNAT --to-source 198.51.100.10-198.51.100.20 --persistent',
      'out -p tcp -j SNAT --to-source 198.51.100.10:1000-2000 --random-fully',
    ],
    v6: [
      'in ! -s fd00:244::/64 -d fd00:96::1/128 -p tcp -m tcp --dport 443 -j RETURN',
      'in -s 2001:db8::1/ffff:ffff::ffff -j RETURN',
      'in -m frag --fragid 0:5 --fragfirst -j RETURN',
      'in -m rt --rt-type 0 -j RETURN',
      'in -m ipv6header --header dst,hop --soft -j RETURN',
      'in -m eui64 -j RETURN',
      'in -p ipv6-icmp -m icmp6 --icmpv6-type 128 -j RETURN',
      'in -m hl --hl-gt 5 -j RETURN',
      'in -m iprange --dst-range 2001:db8:3::1-2001:db8:3::9 -j RETURN',
      'in -j DNAT --to-destination 2001:db8:1::5-2001:db8:1::9',
      'in -p tcp -j DNAT --to-destination [2001:db8:1::5]:8080-8090 --persistent',
      'in -d 2001:db8:3::/64 -j NETMAP --to 2001:db8:9::/64',
      'out -j SNAT --to-source 2001:db8:3::10-2001:db8:3::20 --persistent',
    ],
  };
  const inBoth = [
    'in -p tcp',
    'in -p 47 -j RETURN',
    'in ! -p tcp -j RETURN',
    'in -i eth+ -j RETURN',
    'in -j ACCEPT',
    `in -g ${oddChains.goto}`,
    `in -p tcp -g ${oddChains.goto}`,
    'in -m comment --comment plain -j RETURN',
    'in -m comment --comment "" -j RETURN',
    'in -m comment --comment "-j ACCEPT" -j RETURN',
    String.raw`in -m comment --comment "web:http has \"quotes\", back\\slashes and 'single' ones" -j RETURN`,
    String.raw`in -m comment --comment "ends in a backslash \\" -j RETURN`,
    String.raw`in -m comment --comment "\"" -j RETURN`,
    'in -m comment --comment one -p tcp -m comment --comment two -j RETURN',
    `in -m comment --comment "${bytesOf('größer als → ☃')}" -j RETURN`,
    // 255 bytes, of which the last is the first half of a letter.
    `in -m comment --comment ${'x'.repeat(254)}\xc3 -j RETURN`,
    'in -m statistic --mode random --probability 0.33333333349 -j RETURN',
    'in -m statistic --mode random ! --probability 0.5 -j RETURN',
    'in -m statistic --mode nth --every 3 --packet 1 -j RETURN',
    'in -m recent --set --name odd --rsource -j RETURN',
    'in -m recent --update --seconds 60 --hitcount 4 --rttl --name odd --rdest -j RETURN',
    'in -m mark ! --mark 0x4000/0x4000 -j RETURN',
    'in -m connmark --mark 0x1/0x1 -j RETURN',
    'in -j MARK --or-mark 0x4000',
    'in -j MARK --and-mark 0xff',
    'in -j MARK --set-mark 7',
    'in -j CONNMARK --save-mark --nfmask 0xf --ctmask 0xf',
    'in -j CONNMARK --restore-mark',
    'in -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j RETURN',
    'in -p tcp -m tcp ! --tcp-flags ALL NONE -j RETURN',
    'in -p tcp -m tcp --syn --sport 1024:65535 --dport :1023 -j RETURN',
    'in -p tcp -m tcp --tcp-option 8 -j RETURN',
    'in -p tcp -m tcpmss --mss 500:1400 -j RETURN',
    'in -p udp -m udp ! --dport 53 -j RETURN',
    'in -p sctp -m sctp --dport 80 --chunk-types any INIT -j RETURN',
    'in -p dccp -m dccp --dport 80 -j RETURN',
    'in -p esp -m esp --espspi 100:200 -j RETURN',
    'in -p tcp -m multiport --dports 80,443,8000:8010 -j RETURN',
    'in -p tcp -m multiport ! --sports 1,2:3 -j RETURN',
    'in -p udp -m multiport --ports 53,5353 -j RETURN',
    'in -m time --timestart 08:00:00 --timestop 17:30:00 --weekdays Mon,Tue,Wed,Thu,Fri -j RETURN',
    'in -m time --datestart 2026-01-01T00:00:00 --datestop 2037-01-01T00:00:00 --monthdays 1,15 --kerneltz -j RETURN',
    'in -m u32 --u32 "0x0>>0x16&0x3c@0x4=0x7b:0x1c8" -j RETURN',
    'in -m bpf --bytecode "4,48 0 0 9,21 0 1 6,6 0 0 1,6 0 0 0" -j RETURN',
    String.raw`in -m string --string "GET /\"index\"" --algo bm --to 65535 -j RETURN`,
    'in -m string --hex-string "|00ff2041|" --algo kmp --from 40 --to 200 --icase -j RETURN',
    'in -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN',
    'in -m conntrack ! --ctstate NEW --ctdir ORIGINAL -j RETURN',
    'in -m conntrack --ctstatus CONFIRMED,ASSURED --ctexpire 10:20 -j RETURN',
    'in -p tcp -m conntrack --ctorigdstport 8080 --ctproto 6 -j RETURN',
    'in -m state --state NEW -j RETURN',
    'in -m addrtype --dst-type LOCAL --limit-iface-in -j RETURN',
    'in -m addrtype ! --src-type LOCAL --dst-type LOCAL -j RETURN',
    'in -m physdev --physdev-in veth+ --physdev-is-bridged -j RETURN',
    'in -m physdev ! --physdev-is-in -j RETURN',
    'in -m policy --dir in --pol ipsec --mode tunnel --strict --proto esp -j RETURN',
    `in -m set --match-set ${oddSet(family)} src,dst -j RETURN`,
    `in -m set ! --match-set ${oddSet(family)} dst,dst --return-nomatch ! --update-counters -j RETURN`,
    `in -j SET --add-set ${oddSet(family)} src,src --exist --timeout 60`,
    String.raw`in -m limit --limit 5/min --limit-burst 10 -j LOG --log-prefix "nat: \"odd\" " --log-level 4`,
    'in -j LOG --log-prefix "STATE_INVALID_DROP: " --log-tcp-options --log-ip-options --log-uid',
    'in -j NFLOG --nflog-group 5 --nflog-prefix "a b" --nflog-threshold 3',
    'in -m hashlimit --hashlimit-upto 10/sec --hashlimit-burst 20 --hashlimit-mode srcip,dstport --hashlimit-name odd --hashlimit-htable-expire 60000 -j RETURN',
    'in -m hashlimit --hashlimit-above 512kb/s --hashlimit-mode srcip --hashlimit-name bytes -j RETURN',
    'in -m connlimit --connlimit-above 20 --connlimit-mask 24 --connlimit-saddr -j RETURN',
    'in -m connbytes --connbytes 100:200 --connbytes-dir both --connbytes-mode bytes -j RETURN',
    'in -m quota --quota 100000 -j RETURN',
    'in -m mac --mac-source 02:00:00:00:00:01 -j RETURN',
    'in -m pkttype --pkt-type broadcast -j RETURN',
    'in -m length --length 100:200 -j RETURN',
    'in -m dscp --dscp-class EF -j RETURN',
    'in -m tos ! --tos 0x10/0x3f -j RETURN',
    'in -m helper --helper ftp -j RETURN',
    'in -m cpu ! --cpu 0 -j RETURN',
    'in -m socket --transparent --nowildcard -j RETURN',
    'in -m devgroup --src-group 0x7 -j RETURN',
    'in -j REDIRECT',
    'in -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 1053-1063',
    'in -p udp -j REDIRECT --to-ports 5353 --random',
    'out ! -o docker0 -j MASQUERADE',
    'out -j MASQUERADE --random-fully',
    'out -p tcp -j MASQUERADE --to-ports 1024-65535',
    'out -p udp -j MASQUERADE --to-ports 1024-65535 --random',
    'out -m addrtype --src-type LOCAL -j RETURN',
    'out -m physdev --physdev-is-bridged -j RETURN',
    'own -m owner --uid-owner 1000 -j RETURN',
    'own -m owner ! --uid-owner 0-99 --gid-owner 5 -j RETURN',
    'own -m owner --socket-exists -j RETURN',
  ];
  return [...inBoth, ...inFamily[family]].map((text) => {
    const [, way = '', rule = ''] = /^(in|out|own) ?(.*)$/s.exec(text) ?? [];
    return { way: way === 'out' || way === 'own' ? way : 'in', rule };
  });
}

/** A table with these rules behind the built-in chains, in this order. */
export function oddTable(rules: readonly OddRule[]): string {
  const hooks: Record<Way, string> = { in: 'PREROUTING', out: 'POSTROUTING', own: 'OUTPUT' };
  return [
    '*nat',
    ':PREROUTING ACCEPT [1:2]',
    ...Object.values(oddChains).map((chain) => `:${chain} - [3:4]`),
    ...(['in', 'out', 'own'] as const).map((way) => `-A ${hooks[way]} -j ${oddChains[way]}`),
    ...rules.map(({ way, rule }) => `-A ${oddChains[way]} ${rule}`),
    'COMMIT',
    '',
  ].join('\n');
}
