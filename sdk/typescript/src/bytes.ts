/** Bytes as the API writes them, text out of pieces, and a bounded memory of a stream. */

import { ProtocolError } from "./errors.js";
import { isObject } from "./wire.js";

/** What is kept of a stream unless asked otherwise: the daemon's own default for replies. */
export const DEFAULT_MAX_OUTPUT = 1024 * 1024;

const encoder = new TextEncoder();

export function encode(text: string): Uint8Array<ArrayBuffer> {
  return encoder.encode(text);
}

/** Bytes that are not UTF-8 become U+FFFD; a byte order mark is kept, as every other byte is. */
export function decode(bytes: Uint8Array): string {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}

/** The text, or undefined where it is not UTF-8. */
export function decodeStrict(bytes: Uint8Array): string | undefined {
  try {
    return new TextDecoder("utf-8", { ignoreBOM: true, fatal: true }).decode(bytes);
  } catch {
    return undefined;
  }
}

export function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  let binary: string;
  try {
    binary = atob(text);
  } catch (cause) {
    throw new ProtocolError("bytes that are not base64", { cause });
  }
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

export function toBase64(bytes: Uint8Array): string {
  // In pieces: a call takes only so many arguments.
  let binary = "";
  for (let start = 0; start < bytes.length; start += 0x8000) {
    binary += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  }
  return btoa(binary);
}

/** BYTES of the API: a string where they are UTF-8, else `{"base64": …}`. */
export function toBytes(value: unknown): Uint8Array<ArrayBuffer> {
  if (typeof value === "string") return encode(value);
  if (isObject(value) && typeof value["base64"] === "string") return fromBase64(value["base64"]);
  throw new ProtocolError(`bytes are a string or base64, not ${typeof value}`);
}

/** The reverse: what a request carries. */
export function fromBytes(value: string | Uint8Array): unknown {
  if (typeof value === "string") return value;
  return decodeStrict(value) ?? { base64: toBase64(value) };
}

/** A file's name; one that is not UTF-8 is shown, with U+FFFD, and cannot be asked for by that text. */
export function toName(value: unknown): string {
  return typeof value === "string" ? value : decode(toBytes(value));
}

export function concat(parts: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** UTF-8 in pieces: a character that is cut in two arrives whole, with the second piece. */
export class Utf8Pieces {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  feed(data: Uint8Array): string {
    return this.#decoder.decode(data, { stream: true });
  }

  finish(): string {
    return this.#decoder.decode();
  }
}

/** One stream of a call. `omitted` bytes are missing between `head` and `tail`; most often that is none. */
export class Output {
  constructor(
    readonly head: Uint8Array = new Uint8Array(),
    readonly tail: Uint8Array = new Uint8Array(),
    readonly omitted = 0,
  ) {}

  static parse(value: unknown): Output {
    if (isObject(value) && "omitted_bytes" in value) {
      return new Output(toBytes(value["head"]), toBytes(value["tail"]), Number(value["omitted_bytes"]));
    }
    return new Output(toBytes(value ?? ""));
  }

  /** All of it; what was left out is named in its place. */
  get bytes(): Uint8Array<ArrayBuffer> {
    const hole = this.omitted > 0 ? encode(`\n[… ${this.omitted} bytes left out …]\n`) : new Uint8Array();
    return concat([this.head, hole, this.tail]);
  }

  get text(): string {
    return decode(this.bytes);
  }
}

/**
 * Keeps at most `limit` bytes of a stream, half from its start and half from its end, and counts the rest. Pieces come with
 * their offset: where it jumps, the daemon itself had not kept what is between.
 */
export class Collector {
  #headRoom: number;
  readonly #tailRoom: number;
  readonly #head: Uint8Array[] = [];
  #tail: Uint8Array[] = [];
  #tailSize = 0;
  #omitted = 0;
  #next = 0;

  constructor(limit: number) {
    this.#tailRoom = Math.floor(limit / 2);
    this.#headRoom = limit - this.#tailRoom;
  }

  /** Returns how many bytes are missing before `data`. */
  add(data: Uint8Array, offset: number): number {
    const missing = Math.max(0, offset - this.#next);
    this.#next = offset + data.length;
    if (missing > 0) {
      // Bytes on both sides of a hole cannot be one head: what comes now is tail.
      this.#headRoom = 0;
      this.#omitted += missing + this.#tailSize;
      this.#tail = [];
      this.#tailSize = 0;
    }
    if (this.#headRoom > 0) {
      const kept = data.subarray(0, this.#headRoom);
      this.#head.push(kept);
      this.#headRoom -= kept.length;
      data = data.subarray(kept.length);
    }
    if (data.length > 0) {
      this.#tail.push(data);
      this.#tailSize += data.length;
    }
    // Whole pieces go as soon as the rest suffices, so the list stays as long as the tail is; the last cut is exact.
    let gone = 0;
    let first = this.#tail[gone];
    while (first !== undefined && this.#tailSize - first.length >= this.#tailRoom) {
      this.#tailSize -= first.length;
      this.#omitted += first.length;
      first = this.#tail[++gone];
    }
    if (gone > 0) this.#tail.splice(0, gone);
    return missing;
  }

  output(): Output {
    const tail = concat(this.#tail);
    const over = Math.max(0, tail.length - this.#tailRoom);
    return new Output(concat(this.#head), tail.subarray(over), this.#omitted + over);
  }
}
