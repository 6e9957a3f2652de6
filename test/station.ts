// A station answers and asks on behalf of one network namespace of the lab. It runs as a process of its own inside
// that namespace and takes one JSON order a line on stdin, so a test pays for its start once and then probes in
// about a millisecond. It ends with its stdin. It knows sockets only, nothing of port mappings.
//
//   {"id":1,"op":"serve","protocol":"udp","address":"10.1.0.2","port":53,"name":"c1"}   ->  {"id":1}
//   {"id":2,"op":"ask","protocol":"udp","address":"198.51.100.1","port":5300}           ->  {"id":2,"answer":{…}}
import { randomUUID } from 'node:crypto';
import { createSocket } from 'node:dgram';
import module from 'node:module';
import { createServer, connect } from 'node:net';
import { createInterface } from 'node:readline';

export type Transport = 'tcp' | 'udp';

export type Order =
  | { op: 'serve'; protocol: Transport; address: string; port: number; name: string }
  | { op: 'stop'; protocol: Transport; address: string; port: number }
  | {
      op: 'ask';
      protocol: Transport;
      address: string;
      port: number;
      source?: string;
      sourcePort?: number;
      timeout: number;
    };

/** What a server saw of a request: who it is, whom it saw asking, and on which of its addresses. */
export type Answer = { name: string; peer: string; peerPort: number; local: string };

const isV6 = (address: string): boolean => address.includes(':');

const servers = new Map<string, { close(done: () => void): unknown }>();
const keyOf = (order: Order): string => `${order.protocol} ${order.address} ${order.port}`;

function serve(order: Order & { op: 'serve' }): Promise<void> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const answer = (peer: string, peerPort: number, local: string, asked: string): string =>
    JSON.stringify({ name: order.name, peer, peerPort, local, asked });
  if (order.protocol === 'tcp') {
    const server = createServer((socket) => {
      socket.on('error', () => socket.destroy());
      socket.once('data', (asked) =>
        socket.end(
          answer(
            socket.remoteAddress ?? '',
            socket.remotePort ?? 0,
            socket.localAddress ?? '',
            asked.toString(),
          ),
        ),
      );
    });
    servers.set(keyOf(order), server);
    server.once('error', reject);
    server.listen({ host: order.address, port: order.port, ipv6Only: true, backlog: 128 }, () => resolve());
  } else {
    const socket = createSocket(isV6(order.address) ? { type: 'udp6', ipv6Only: true } : { type: 'udp4' });
    servers.set(keyOf(order), socket);
    socket.on('error', reject);
    socket.on('message', (asked, from) => {
      socket.send(
        answer(from.address, from.port, order.address, asked.toString()),
        from.port,
        from.address,
        () => {},
      );
    });
    socket.bind(order.port, order.address, () => resolve());
  }
  return promise;
}

function stop(order: Order & { op: 'stop' }): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const server = servers.get(keyOf(order));
  servers.delete(keyOf(order));
  if (server === undefined) resolve();
  else server.close(() => resolve());
  return promise;
}

// The question is random, so an answer can only come from a server that really got it.
function readAnswer(text: string, question: string): Answer | null {
  try {
    const { asked, ...answer }: Answer & { asked: string } = JSON.parse(text);
    return asked === question ? answer : null;
  } catch {
    return null;
  }
}

function ask(order: Order & { op: 'ask' }): Promise<Answer | null> {
  const { promise, resolve } = Promise.withResolvers<Answer | null>();
  const question = randomUUID();
  if (order.protocol === 'tcp') {
    let text = '';
    const socket = connect({
      host: order.address,
      port: order.port,
      ...(order.source === undefined ? {} : { localAddress: order.source }),
      ...(order.sourcePort === undefined ? {} : { localPort: order.sourcePort }),
    });
    const end = (answer: Answer | null): void => {
      clearTimeout(timer);
      socket.destroy();
      resolve(answer);
    };
    const timer = setTimeout(() => end(null), order.timeout);
    socket.once('connect', () => socket.write(question));
    socket.on('data', (data) => (text += data.toString()));
    socket.once('error', () => end(null));
    socket.once('end', () => end(readAnswer(text, question)));
  } else {
    const socket = createSocket(isV6(order.address) ? 'udp6' : 'udp4');
    let timer: NodeJS.Timeout | undefined;
    const end = (answer: Answer | null): void => {
      clearTimeout(timer);
      socket.close();
      resolve(answer);
    };
    timer = setTimeout(() => end(null), order.timeout);
    socket.once('error', () => end(null));
    socket.once('message', (data) => end(readAnswer(data.toString(), question)));
    // Connected, so that a refusal ends the wait and an answer from another address does not count.
    socket.bind(order.sourcePort ?? 0, order.source, () =>
      socket.connect(order.port, order.address, () => socket.send(question)),
    );
  }
  return promise;
}

async function obey(order: Order): Promise<{ answer?: Answer | null }> {
  switch (order.op) {
    case 'serve':
      await serve(order);
      break;
    case 'stop':
      await stop(order);
      break;
    case 'ask':
      return { answer: await ask(order) };
  }
  return {};
}

if (import.meta.main) {
  // It is seldom left the time to do so at its end. Node.js 20 has no such cache.
  module.flushCompileCache?.();
  for await (const line of createInterface({ input: process.stdin })) {
    const order: Order & { id: number } = JSON.parse(line);
    void obey(order)
      .catch((cause: unknown) => ({ error: String(cause) }))
      .then((reply) => console.log(JSON.stringify({ id: order.id, ...reply })));
  }
  process.exit();
}
