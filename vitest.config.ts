import { defineConfig } from 'vitest/config';

// One project a layer. Files run side by side, for every test has machines of its own and most of its time is waiting;
// two at once are what the two cores of a small machine can take.
const layer = (name: string, testTimeout: number) => ({
  test: {
    name,
    include: [`test/${name}/**/*.test.ts`],
    environment: 'node' as const,
    testTimeout,
    hookTimeout: 120_000,
  },
});

export default defineConfig({
  test: {
    maxWorkers: 2,
    projects: [
      layer('pure', 20_000),
      layer('kernel', 90_000),
      layer('peers', 90_000),
      layer('callers', 180_000),
    ],
  },
});
