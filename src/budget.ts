// Bounds every wait of a call.
import { wakeSignal } from './process.ts';

/** The time one call has, and the signal that ends it early. */
export interface Budget {
  /** Aborted when the time is up or the call is told to stop; its reason is a PortmapError. */
  readonly signal: AbortSignal;
  /** Milliseconds left, never below zero; measured by the monotonic clock. */
  readonly remaining: () => number;
  /** Says whether somebody told the call to end, rather than its time. */
  readonly isTold: () => boolean;
}

/** A budget of its own for what must be put back after the call's time is over. */
export function graceBudget(milliseconds: number): Budget {
  const end = performance.now() + milliseconds;
  return {
    signal: AbortSignal.timeout(milliseconds),
    remaining: () => Math.max(0, end - performance.now()),
    isTold: () => false,
  };
}

/** A part of a call's budget: so many milliseconds of it, and no longer than the call itself has. */
export function partOf(call: Budget, milliseconds: number): Budget {
  const end = performance.now() + Math.min(milliseconds, call.remaining());
  return {
    signal: AbortSignal.any([call.signal, AbortSignal.timeout(milliseconds)]),
    remaining: () => Math.max(0, end - performance.now()),
    isTold: call.isTold,
  };
}

/** What cuts a sleep short: another process, by `wake`. One that rings between two sleeps cuts the next. */
export interface Alarm {
  isRung: boolean;
  onRing: () => void;
}

/** Listens for `wake` from now on. */
export function openAlarm(): Alarm {
  const alarm: Alarm = { isRung: false, onRing: () => undefined };
  process.on(wakeSignal, () => {
    alarm.isRung = true;
    alarm.onRing();
  });
  return alarm;
}

/** Waits, or less when the budget ends first or the alarm rings. */
export async function sleep(milliseconds: number, budget: Budget, alarm?: Alarm): Promise<void> {
  await new Promise<void>((resolve) => {
    if (budget.signal.aborted || alarm?.isRung === true) {
      resolve();
      return;
    }
    const end = () => {
      clearTimeout(timer);
      budget.signal.removeEventListener('abort', end);
      resolve();
    };
    const timer = setTimeout(end, Math.min(milliseconds, budget.remaining()));
    budget.signal.addEventListener('abort', end, { once: true });
    if (alarm !== undefined) alarm.onRing = end;
  });
  if (alarm !== undefined) alarm.isRung = false;
}
