// The one error type of the plugin and what each kind means to a CNI runtime. A leaf: it imports nothing.

/** What went wrong, as a closed list; each has its CNI code in `cniCodes`. */
export const errorCodes = [
  'VERSION',
  'ENV',
  'IO',
  'DECODE',
  'CONFIG',
  'NETNS',
  'BUSY',
  'CONFLICT',
  'UNAVAILABLE',
  'DEGRADED',
  'PORT_TAKEN',
  'CHECK',
  'REJECTED',
  'CHAIN_TAKEN',
  'INTERNAL',
] as const;

export type ErrorCode = (typeof errorCodes)[number];

/**
 * The CNI error code of each kind (CNI 1.1.0, section 5: 0 to 99 are the specification's own, 100 and up are
 * the plugin's). `CONFLICT` is retried inside the call and shows only when the retries end without success.
 */
export const cniCodes = {
  VERSION: 1,
  ENV: 4,
  IO: 5,
  DECODE: 6,
  CONFIG: 7,
  NETNS: 8,
  BUSY: 11,
  CONFLICT: 11,
  UNAVAILABLE: 50,
  DEGRADED: 51,
  PORT_TAKEN: 100,
  CHECK: 101,
  REJECTED: 102,
  CHAIN_TAKEN: 103,
  INTERNAL: 999,
} as const satisfies Record<ErrorCode, number>;

/** A failure with a message an operator can act on and, in `details`, the evidence and what to do. */
export class PortmapError extends Error {
  readonly code: ErrorCode;
  readonly details: string;
  /** Nothing is known of what was asked for: its process was ended, or was not let look. */
  readonly isUncertain: boolean;

  constructor(
    code: ErrorCode,
    message: string,
    details = '',
    options: { readonly cause?: unknown; readonly isUncertain?: boolean } = {},
  ) {
    super(message, { cause: options.cause });
    this.isUncertain = options.isUncertain ?? false;
    this.name = 'PortmapError';
    this.code = code;
    this.details = details;
  }
}

/**
 * `error` as a PortmapError. A machine that is out of something is `BUSY`: it may have it again soon. Anything else
 * that is none is a fault of ours and becomes `INTERNAL`.
 */
export function toPortmapError(error: unknown): PortmapError {
  if (error instanceof PortmapError) return error;
  const message = error instanceof Error ? error.message : String(error);
  if (scarcities.includes(systemCode(error)))
    return new PortmapError('BUSY', `the machine is short of something: ${message}`, 'it is safe to repeat', {
      cause: error,
    });
  return new PortmapError(
    'INTERNAL',
    `unexpected failure: ${message}`,
    'this is a fault in portmap: please report it',
    {
      cause: error,
    },
  );
}

const scarcities = ['EMFILE', 'ENFILE', 'ENOMEM', 'EAGAIN', 'ENOSPC'];

/** The `code` of a system call's error (`ENOENT`, `EEXIST`, …), or the empty string. */
export function systemCode(error: unknown): string {
  return error instanceof Error && 'code' in error && typeof error.code === 'string' ? error.code : '';
}
