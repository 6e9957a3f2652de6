// The first packet of an SCTP association, sent and received raw: port mapping needs SCTP in the kernel's connection
// tracking only, so this works on kernels that have no SCTP sockets. Perl's base package, which Debian always has,
// opens the raw sockets.
import type { Family, LabNode } from './lab.ts';

const sourcePort = 4000;

/**
 * Sends an INIT from a network namespace of the node to `port` of an address, and gives the source and destination
 * ports of what arrives in the namespace `receiver`, or null if nothing does.
 */
export async function sendSctp(
  node: LabNode,
  from: string,
  to: { readonly family: Family; readonly address: string; readonly port: number },
  receiver: string,
): Promise<{ readonly from: number; readonly to: number } | null> {
  const family = to.family === 'v4' ? 'AF_INET' : 'AF_INET6';
  const open = `socket(S, ${family}, SOCK_RAW, 132) or die "socket: $!";`;
  // Takes what arrived of SCTP until it has waited for a second.
  const receive = `$| = 1; ${open} print "ready\\n"; alarm 1; recv(S, $packet, 2048, 0); print unpack("H*", $packet);`;
  const pack = to.family === 'v4' ? 'pack_sockaddr_in' : 'pack_sockaddr_in6';
  const send = `${open} send(S, pack("H*", $ARGV[0]), 0, ${pack}(0, Socket::inet_pton(${family}, $ARGV[1]))) or die "send: $!";`;

  const listener = node.start(['perl', '-MSocket', '-e', receive], { netns: receiver });
  let text = '';
  const { promise: ready, resolve } = Promise.withResolvers<void>();
  const { promise: ended, resolve: end } = Promise.withResolvers<void>();
  listener.stdout?.on('data', (data) => {
    text += String(data);
    if (text.startsWith('ready\n')) resolve();
  });
  listener.once('close', () => {
    resolve();
    end();
  });
  await ready;
  const sent = await node.run(
    ['perl', '-MSocket', '-e', send, initPacket(to.port).toString('hex'), to.address],
    {
      netns: from,
    },
  );
  if (sent.exitCode !== 0) throw new Error(`no SCTP packet could be sent: ${sent.stderr}`);
  await ended;
  // IPv4 gives the header of the packet too.
  const packet = Buffer.from(text.replace('ready\n', ''), 'hex').subarray(to.family === 'v4' ? 20 : 0);
  return packet.length === 0 ? null : { from: packet.readUInt16BE(0), to: packet.readUInt16BE(2) };
}

/** RFC 9260, sections 3.1 and 3.3.2. */
function initPacket(port: number): Buffer {
  const packet = Buffer.alloc(32);
  packet.writeUInt16BE(sourcePort, 0);
  packet.writeUInt16BE(port, 2);
  // The chunk: its type INIT and length, then tag, window, streams out and in, first sequence number.
  packet.writeUInt8(1, 12);
  packet.writeUInt16BE(20, 14);
  packet.writeUInt32BE(0x12345678, 16);
  packet.writeUInt32BE(65_536, 20);
  packet.writeUInt16BE(1, 24);
  packet.writeUInt16BE(1, 26);
  packet.writeUInt32BE(1, 28);
  // Connection tracking drops a packet whose checksum is wrong.
  packet.writeUInt32LE(crc32c(packet), 8);
  return packet;
}

function crc32c(bytes: Buffer): number {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) crc = (crc >>> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return ~crc >>> 0;
}
