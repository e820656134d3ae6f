/**
 * A small tar reader and writer: ustar with pax headers for what does not fit, GNU's long names read. It knows nothing of the
 * file system; `trees.ts` decides what an entry may do there. Sizes that an archive claims are bounded before they are believed.
 */

import { concat, decode, encode } from "./bytes.js";
import { ProtocolError } from "./errors.js";

const BLOCK = 512;
/** Of a pax or GNU header: names are short, and nothing else in there is of use. */
const HEADER_LIMIT = 1024 * 1024;
/** The largest size that eleven octal digits hold. */
const OCTAL_LIMIT = 0o77777777777;

export interface TarEntry {
  path: string;
  kind: "file" | "dir" | "symlink" | "hardlink" | "other";
  size: number;
  mode: number;
  mtimeSeconds: number;
  /** Of a link. */
  target: string;
}

export interface TarFile extends TarEntry {
  /** The content of a file; what is not read of it is skipped. */
  content: AsyncGenerator<Uint8Array, void>;
}

function text(block: Uint8Array, start: number, length: number): string {
  const field = block.subarray(start, start + length);
  const end = field.indexOf(0);
  return decode(end < 0 ? field : field.subarray(0, end));
}

function number(block: Uint8Array, start: number, length: number): number {
  const first = block[start] ?? 0;
  if (first & 0x80) {
    // GNU's binary numbers; negative ones and what is above 2^53 mean nothing here.
    let value = first & 0x7f;
    for (const byte of block.subarray(start + 1, start + length)) value = value * 256 + byte;
    if ((first & 0x40) !== 0 || !Number.isSafeInteger(value)) throw new ProtocolError("a number in the archive is out of bounds");
    return value;
  }
  const digits = text(block, start, length).trim();
  if (digits === "") return 0;
  if (!/^[0-7]+$/.test(digits)) throw new ProtocolError("a number in the archive is none");
  return Number.parseInt(digits, 8);
}

function checksum(block: Uint8Array): number {
  let sum = 8 * 0x20;
  for (let index = 0; index < BLOCK; index++) if (index < 148 || index >= 156) sum += block[index] ?? 0;
  return sum;
}

/** Bytes by count out of pieces of any size. */
class Source {
  readonly #pieces: AsyncIterator<Uint8Array>;
  #rest: Uint8Array = new Uint8Array();

  constructor(pieces: AsyncIterable<Uint8Array>) {
    this.#pieces = pieces[Symbol.asyncIterator]();
  }

  /** Up to `most` bytes, none at the end. */
  async some(most: number): Promise<Uint8Array> {
    while (this.#rest.length === 0) {
      const next = await this.#pieces.next();
      if (next.done) return this.#rest;
      this.#rest = next.value;
    }
    const taken = this.#rest.subarray(0, most);
    this.#rest = this.#rest.subarray(taken.length);
    return taken;
  }

  async exactly(count: number): Promise<Uint8Array> {
    const parts: Uint8Array[] = [];
    let left = count;
    while (left > 0) {
      const part = await this.some(left);
      if (part.length === 0) throw new ProtocolError("the archive is cut off");
      parts.push(part);
      left -= part.length;
    }
    return parts.length === 1 ? (parts[0] as Uint8Array) : concat(parts);
  }

  async end(): Promise<void> {
    await this.#pieces.return?.();
  }
}

const KINDS: Record<string, TarEntry["kind"]> = { "0": "file", "\0": "file", "7": "file", "1": "hardlink", "2": "symlink", "5": "dir" };

/** The entries of an archive, in order. Throws where it is none, or is cut off. */
export async function* readTar(pieces: AsyncIterable<Uint8Array>): AsyncGenerator<TarFile, void> {
  const source = new Source(pieces);
  let long: { path?: string; target?: string; size?: number } = {};
  try {
    for (;;) {
      const block = await source.exactly(BLOCK);
      if (block.every((byte) => byte === 0)) {
        // The end. What follows is padding, read so that the connection can be used again.
        while ((await source.some(BLOCK)).length > 0);
        return;
      }
      if (number(block, 148, 8) !== checksum(block)) throw new ProtocolError("the archive has a block that is no header");
      const type = String.fromCharCode(block[156] ?? 0);
      const size = number(block, 124, 12);
      if ("xgLK".includes(type)) {
        if (size > HEADER_LIMIT) throw new ProtocolError("a header of the archive is too large");
        const content = (await source.exactly(padded(size))).subarray(0, size);
        if (type === "L") long.path = text(content, 0, size);
        else if (type === "K") long.target = text(content, 0, size);
        else if (type === "x") long = { ...long, ...pax(content) };
        continue;
      }
      const prefix = text(block, 257, 5) === "ustar" && block[262] === 0 ? text(block, 345, 155) : "";
      const name = text(block, 0, 100);
      const entry: TarEntry = {
        path: long.path ?? (prefix === "" ? name : `${prefix}/${name}`),
        kind: KINDS[type] ?? "other",
        size: long.size ?? size,
        mode: number(block, 100, 8),
        mtimeSeconds: number(block, 136, 12),
        target: long.target ?? text(block, 157, 100),
      };
      long = {};
      // Old archives mark a directory by its name alone.
      if (entry.kind === "file" && entry.path.endsWith("/")) entry.kind = "dir";
      const content = contentOf(source, entry.size);
      yield { ...entry, content };
      while (!(await content.next()).done);
    }
  } finally {
    await source.end();
  }
}

async function* contentOf(source: Source, size: number): AsyncGenerator<Uint8Array, void> {
  let left = size;
  let stopped = true;
  try {
    while (left > 0) {
      const part = await source.some(left);
      if (part.length === 0) throw new ProtocolError("the archive is cut off");
      left -= part.length;
      yield part;
    }
    stopped = false;
  } finally {
    // A reader that left early must not leave the rest to be taken for a header.
    while (stopped && left > 0) {
      const part = await source.some(left);
      if (part.length === 0) throw new ProtocolError("the archive is cut off");
      left -= part.length;
    }
    if (left === 0) await source.exactly(padded(size) - size);
  }
}

function padded(size: number): number {
  return Math.ceil(size / BLOCK) * BLOCK;
}

/** Records are `LENGTH KEY=VALUE\n`, the length counting itself. */
function pax(content: Uint8Array): { path?: string; target?: string; size?: number } {
  const found: { path?: string; target?: string; size?: number } = {};
  let at = 0;
  while (at < content.length && content[at] !== 0) {
    const space = content.indexOf(0x20, at);
    const length = Number.parseInt(decode(content.subarray(at, space)), 10);
    if (space < 0 || !(length > space - at + 1) || at + length > content.length) throw new ProtocolError("a pax header is broken");
    const record = decode(content.subarray(space + 1, at + length - 1));
    const equals = record.indexOf("=");
    const key = record.slice(0, equals);
    const value = record.slice(equals + 1);
    if (key === "path") found.path = value;
    else if (key === "linkpath") found.target = value;
    else if (key === "size") {
      found.size = Number(value);
      if (!Number.isSafeInteger(found.size) || found.size < 0) throw new ProtocolError("a size in the archive is out of bounds");
    }
    at += length;
  }
  return found;
}

/** The header of an entry, with a pax header before it where a name or size does not fit. */
export function tarHeader(entry: TarEntry): Uint8Array {
  const path = entry.kind === "dir" && !entry.path.endsWith("/") ? `${entry.path}/` : entry.path;
  const records: [string, string][] = [];
  if (encode(path).length > 100) records.push(["path", path]);
  if (encode(entry.target).length > 100) records.push(["linkpath", entry.target]);
  if (entry.size > OCTAL_LIMIT) records.push(["size", String(entry.size)]);
  const type = { file: "0", dir: "5", symlink: "2", hardlink: "1", other: "0" }[entry.kind];
  const own = ustar(path, type, entry.size > OCTAL_LIMIT ? 0 : entry.size, entry.mode, entry.mtimeSeconds, entry.target);
  if (records.length === 0) return own;
  const content = concat(records.map(([key, value]) => paxRecord(key, value)));
  return concat([ustar("pax", "x", content.length, 0o644, 0, ""), content, tarPadding(content.length), own]);
}

export function tarPadding(size: number): Uint8Array {
  return new Uint8Array(padded(size) - size);
}

/** Two empty blocks. */
export function tarEnd(): Uint8Array {
  return new Uint8Array(2 * BLOCK);
}

function paxRecord(key: string, value: string): Uint8Array {
  const rest = encode(` ${key}=${value}\n`);
  let length = rest.length;
  // The length counts its own digits, which may be one more for it.
  while (rest.length + String(length).length !== length) length = rest.length + String(length).length;
  return concat([encode(String(length)), rest]);
}

function ustar(path: string, type: string, size: number, mode: number, mtimeSeconds: number, target: string): Uint8Array {
  const block = new Uint8Array(BLOCK);
  const put = (at: number, bytes: Uint8Array, most: number): void => block.set(bytes.subarray(0, most), at);
  const octal = (at: number, value: number, width: number): void =>
    put(at, encode(`${Math.trunc(value).toString(8).padStart(width - 1, "0")}\0`), width);
  put(0, encode(path), 100);
  octal(100, mode & 0o7777, 8);
  octal(108, 0, 8);
  octal(116, 0, 8);
  octal(124, size, 12);
  octal(136, Math.min(Math.max(0, mtimeSeconds), OCTAL_LIMIT), 12);
  put(156, encode(type), 1);
  put(157, encode(target), 100);
  put(257, encode("ustar\x0000"), 8);
  const sum = checksum(block);
  put(148, encode(`${sum.toString(8).padStart(6, "0")}\0 `), 8);
  return block;
}
