// A constant that costs too much to make in calls that do not need it.

/** A function that makes its value on the first call and gives the same one ever after. */
export function once<T>(make: () => T): () => T {
  let made: { readonly value: T } | undefined;
  return () => (made ??= { value: make() }).value;
}
