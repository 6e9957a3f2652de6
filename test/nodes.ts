// The set-up of tests that run on a private node: opened before the first of them, wiped before each, closed after
// the last.
import { afterAll, beforeAll, beforeEach, describe } from 'vitest';
import { wipe } from './footprint.ts';
import {
  type Container,
  families,
  type LabNode,
  type MachineOptions,
  openNode,
  type Variant,
  variants,
} from './lab.ts';
import type { Transport } from './station.ts';

type Options = {
  /** What both containers answer on, at port 80 of each of their addresses. */
  readonly serving?: readonly Transport[];
  /** Lets a test find the rules and files that the tests before it have left. */
  readonly isKept?: boolean;
};

/** For hooks and tests. What tests are made of (`test.each`) must not look into them: the node is not open yet. */
type Lab = { readonly node: LabNode; readonly c1: Container; readonly c2: Container };

/** A suite on a node with two containers. Its tests share the node, so they run in turn, whatever is beside it. */
export function describeNode(
  name: string,
  { serving = [], isKept = false, ...machine }: Options & MachineOptions,
  body: (lab: Lab) => void,
): void {
  describe(name, { concurrent: false }, () => {
    // Filled by the hook, so that everything in the suite can name them as they are.
    const lab: Lab = { node: Object.create(null), c1: Object.create(null), c2: Object.create(null) };
    let opened: LabNode | undefined;
    beforeAll(async () => {
      opened = await openNode(machine);
      Object.assign(lab.node, opened);
      for (const container of ['c1', 'c2'] as const) {
        Object.assign(lab[container], await opened.addContainer(container));
        for (const protocol of serving)
          for (const family of families)
            await opened.serve(container, { protocol, address: lab[container][family], port: 80 });
      }
    });
    afterAll(() => opened?.close());
    if (!isKept) beforeEach(() => wipe(lab.node));
    body(lab);
  });
}

/** The same suite on a node of each variant. */
export function describeVariants(
  options: Options,
  body: (lab: Lab & { readonly variant: Variant }) => void,
): void {
  for (const variant of variants)
    describeNode(`iptables-${variant}`, { ...options, variant }, (lab) => body({ ...lab, variant }));
}
