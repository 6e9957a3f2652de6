import { defineConfig } from 'vitest/config';

// One project a layer. Only the pure layer runs files side by side: the others load the kernel of a small machine.
const layer = (name: string, parallel: boolean, testTimeout: number) => ({
  test: {
    name,
    include: [`test/${name}/**/*.test.ts`],
    environment: 'node' as const,
    fileParallelism: parallel,
    testTimeout,
    hookTimeout: 120_000,
  },
});

export default defineConfig({
  test: {
    projects: [
      layer('pure', true, 20_000),
      layer('kernel', false, 60_000),
      layer('peers', false, 60_000),
      layer('callers', false, 180_000),
    ],
  },
});
