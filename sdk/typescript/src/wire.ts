/**
 * The API's JSON in JavaScript's spelling and back: `exit_code` is `exitCode` here. Keys that are a caller's own data
 * (labels, environment variables, media types) are left as they are.
 */

/** Objects below these keys have a caller's own keys. */
const OPAQUE = new Set(["labels", "env", "mime"]);

export type Json = Record<string, unknown>;

export function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isPlain(value: unknown): value is Json {
  if (!isObject(value)) return false;
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === Object.prototype || prototype === null;
}

function rename(value: unknown, name: (key: string) => string): unknown {
  if (Array.isArray(value)) return value.map((one) => rename(one, name));
  if (!isPlain(value)) return value;
  const renamed: Json = {};
  for (const [key, one] of Object.entries(value)) {
    if (one === undefined) continue;
    renamed[name(key)] = OPAQUE.has(key) ? one : rename(one, name);
  }
  return renamed;
}

/** What the API said. The type is the caller's claim: readers are tolerant, since a newer daemon may add fields. */
export function fromWire<T>(value: unknown): T {
  return rename(value, (key) => key.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase())) as T;
}

/** What the API understands; keys without a value are left out. */
export function toWire(value: unknown): unknown {
  return rename(value, (key) => key.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`));
}
