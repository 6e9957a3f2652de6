// The container runtime interface as kubelet speaks it: a gRPC client over a unix socket, with only the calls that
// bring a sandbox up and down. It knows the interface, nothing of how the runtime or its node came to be.
import { Client, credentials } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { fileURLToPath } from 'node:url';
import * as z from 'zod';

export type PortMapping = {
  readonly protocol: 'TCP' | 'UDP' | 'SCTP';
  readonly containerPort: number;
  readonly hostPort: number;
  readonly hostIp?: string;
};
export type SandboxConfig = {
  readonly metadata: {
    readonly name: string;
    readonly uid: string;
    readonly namespace: string;
    readonly attempt: number;
  };
  readonly hostname: string;
  readonly portMappings: readonly PortMapping[];
  readonly linux: { readonly cgroupParent: string };
};
export type SandboxStatus = {
  /** Of the process that keeps the sandbox, in the runtime's own process namespace. */
  readonly pid: number;
  /** The path of its network namespace. */
  readonly netns: string;
  readonly addresses: readonly string[];
};
export type RuntimeClient = {
  /** What the runtime says is not ready, or an empty list. */
  unready(): Promise<readonly string[]>;
  runPodSandbox(config: SandboxConfig): Promise<string>;
  podSandboxStatus(podSandboxId: string): Promise<SandboxStatus>;
  listPodSandbox(): Promise<readonly string[]>;
  stopPodSandbox(podSandboxId: string): Promise<void>;
  removePodSandbox(podSandboxId: string): Promise<void>;
  close(): void;
};

const definition = loadSync(fileURLToPath(new URL('cri.proto', import.meta.url)), {
  enums: String,
  defaults: true,
});
// A stop may hold many others up, but kubelet waits no longer than this either.
const callTimeout = 120_000;

const conditions = z.object({
  status: z.object({
    conditions: z.array(z.object({ type: z.string(), status: z.boolean(), message: z.string() })),
  }),
});
const started = z.object({ podSandboxId: z.string().min(1) });
const listed = z.object({ items: z.array(z.object({ id: z.string() })) });
const described = z.object({ info: z.object({ info: z.string() }) });
const sandboxInfo = z.object({
  pid: z.number(),
  cniResult: z.object({
    Interfaces: z.object({
      eth0: z.object({ Sandbox: z.string(), IPConfigs: z.array(z.object({ IP: z.string() })) }),
    }),
  }),
});

/** A client of the runtime that listens on the socket. It connects with its first call. */
export function openRuntimeClient(socket: string): RuntimeClient {
  const service = definition['runtime.v1.RuntimeService'];
  if (service === undefined || 'format' in service) throw new Error('cri.proto has lost its service');
  const client = new Client(`unix:${socket}`, credentials.createInsecure());

  const call = (name: string, request: object): Promise<unknown> => {
    const { promise, resolve, reject } = Promise.withResolvers<unknown>();
    const method = service[name];
    if (method === undefined) throw new Error(`cri.proto has no call ${name}`);
    client.makeUnaryRequest(
      method.path,
      method.requestSerialize,
      method.responseDeserialize,
      request,
      { deadline: Date.now() + callTimeout },
      (error: Error | null, response?: unknown) => {
        if (error === null) resolve(response);
        else reject(new Error(`${name}: ${error.message}`, { cause: error }));
      },
    );
    return promise;
  };

  return {
    unready: async () =>
      conditions
        .parse(await call('Status', {}))
        .status.conditions.filter(({ status }) => !status)
        .map(({ type, message }) => `${type}: ${message}`),
    runPodSandbox: async (config) => started.parse(await call('RunPodSandbox', { config })).podSandboxId,
    podSandboxStatus: async (podSandboxId) => {
      const { info } = described.parse(await call('PodSandboxStatus', { podSandboxId, verbose: true }));
      const { pid, cniResult } = sandboxInfo.parse(JSON.parse(info.info));
      const { Sandbox, IPConfigs } = cniResult.Interfaces.eth0;
      return { pid, netns: Sandbox, addresses: IPConfigs.map(({ IP }) => IP) };
    },
    listPodSandbox: async () => listed.parse(await call('ListPodSandbox', {})).items.map(({ id }) => id),
    stopPodSandbox: async (podSandboxId) => {
      await call('StopPodSandbox', { podSandboxId });
    },
    removePodSandbox: async (podSandboxId) => {
      await call('RemovePodSandbox', { podSandboxId });
    },
    close: () => client.close(),
  };
}
