/**
 * Local directories as tar and back, with node:fs (Node, Deno, Bun). Imported only when it is used.
 *
 * Unpacking trusts nothing: what an archive of a sandbox holds was written by the code in it. Nothing is written outside the
 * target directory or through a link, a link is made only if it cannot lead out, and everything else is left out by name.
 */

import { createReadStream, constants } from "node:fs";
import { chmod, lstat, mkdir, open, readdir, readlink, rename, rm, stat, symlink, type FileHandle } from "node:fs/promises";
import { basename, dirname, join } from "node:path";

import { InvalidArgumentError, ProtocolError, TooLargeError } from "./errors.js";
import { readTar, tarEnd, tarHeader, tarPadding, type TarEntry } from "./tar.js";
import type { Transferred } from "./types.js";

/** Names of what was left out that are kept; the count is always exact. */
const LEFT_OUT_LIMIT = 1000;
/** Entries of one download, unless told: more would fill a file system's table before its blocks. */
const ENTRY_LIMIT = 1_000_000;
/** Bytes of one download, unless told: sixteen times a workspace's usual size. */
const BYTES_LIMIT = 16 * 1024 ** 3;

export interface ExtractLimits {
  maxBytes?: number;
  maxEntries?: number;
}

export function nothing(): Transferred {
  return { files: 0, directories: 0, links: 0, bytes: 0, leftOut: [], leftOutCount: 0 };
}

function leaveOut(moved: Transferred, path: string, why: string): void {
  moved.leftOutCount++;
  if (moved.leftOut.length < LEFT_OUT_LIMIT) moved.leftOut.push({ path, why });
}

/** What a local path is; a link is what it points to, since the caller named it. */
export async function localKind(path: string): Promise<"file" | "dir"> {
  const found = await stat(path);
  if (found.isDirectory()) return "dir";
  if (found.isFile()) return "file";
  throw new InvalidArgumentError(`\`${path}\` is neither a file nor a directory`);
}

/** A local file's bytes as they are needed. */
export async function* localFile(path: string): AsyncGenerator<Uint8Array<ArrayBuffer>, void> {
  for await (const piece of createReadStream(path)) yield new Uint8Array(piece as Uint8Array);
}

export async function localMode(path: string): Promise<number> {
  return (await stat(path)).mode & 0o777;
}

/** A directory as tar. `moved.leftOut` gets what is no file, directory or link. */
export async function* packTree(root: string, moved: Transferred): AsyncGenerator<Uint8Array<ArrayBuffer>, void> {
  const waiting = [""];
  for (let folder = waiting.pop(); folder !== undefined; folder = waiting.pop()) {
    for (const name of (await readdir(join(root, folder))).sort()) {
      const path = folder === "" ? name : `${folder}/${name}`;
      const full = join(root, path);
      const found = await lstat(full);
      const entry: TarEntry = { path, kind: "other", size: 0, mode: found.mode & 0o777, mtimeSeconds: found.mtimeMs / 1000, target: "" };
      if (found.isDirectory()) {
        waiting.push(path);
        yield own(tarHeader({ ...entry, kind: "dir" }));
      } else if (found.isSymbolicLink()) {
        yield own(tarHeader({ ...entry, kind: "symlink", target: await readlink(full) }));
      } else if (found.isFile()) {
        yield* packFile(full, entry);
      } else {
        leaveOut(moved, path, "neither a file, a directory nor a link");
      }
    }
  }
  yield own(tarEnd());
}

async function* packFile(full: string, entry: TarEntry): AsyncGenerator<Uint8Array<ArrayBuffer>, void> {
  const file = await open(full, constants.O_RDONLY | (constants.O_NOFOLLOW ?? 0));
  try {
    const { size } = await file.stat();
    yield own(tarHeader({ ...entry, kind: "file", size }));
    const buffer = new Uint8Array(256 * 1024);
    let left = size;
    while (left > 0) {
      const { bytesRead } = await file.read(buffer, 0, Math.min(buffer.length, left), null);
      if (bytesRead === 0) throw new InvalidArgumentError(`\`${full}\` became shorter while it was read`, { hint: "upload again once it is complete" });
      left -= bytesRead;
      yield buffer.slice(0, bytesRead);
    }
    yield own(tarPadding(size));
  } finally {
    await file.close();
  }
}

function own(bytes: Uint8Array): Uint8Array<ArrayBuffer> {
  return new Uint8Array(bytes);
}

/** Unpacks below `root`, which is made if it is not there. Files that are there are replaced, directories are kept. */
export async function unpackTree(pieces: AsyncIterable<Uint8Array>, root: string, limits: ExtractLimits = {}): Promise<Transferred> {
  const maxBytes = limits.maxBytes ?? BYTES_LIMIT;
  const maxEntries = limits.maxEntries ?? ENTRY_LIMIT;
  const moved = nothing();
  let entries = 0;
  await mkdir(root, { recursive: true });
  for await (const entry of readTar(pieces)) {
    if (++entries > maxEntries) throw new TooLargeError(`more than ${maxEntries} entries`, { hint: "raise `maxEntries`, or download less" });
    const parts = partsOf(entry.path);
    if (parts === undefined) {
      leaveOut(moved, entry.path, "leads out of the directory");
    } else if (parts.length === 0) {
      continue;
    } else if (!(await realDirectories(root, parts.slice(0, -1)))) {
      leaveOut(moved, entry.path, "is below something that is no directory");
    } else {
      await unpackEntry(entry, entry.content, root, parts, moved, maxBytes);
    }
  }
  return moved;
}

async function unpackEntry(
  entry: TarEntry,
  content: AsyncIterable<Uint8Array>,
  root: string,
  parts: string[],
  moved: Transferred,
  maxBytes: number,
): Promise<void> {
  const full = join(root, ...parts);
  const there = await lstat(full).catch(() => undefined);
  if (entry.kind === "dir") {
    if (there === undefined) await mkdir(full, { mode: (entry.mode & 0o777) | 0o700 });
    else if (!there.isDirectory()) return leaveOut(moved, entry.path, "something else has its name");
    moved.directories++;
  } else if (there?.isDirectory()) {
    leaveOut(moved, entry.path, "a directory has its name");
  } else if (entry.kind === "symlink") {
    if (!staysInside(parts, entry.target)) return leaveOut(moved, entry.path, "a link that leads out of the directory");
    await rm(full, { force: true });
    await symlink(entry.target, full);
    moved.links++;
  } else if (entry.kind === "file") {
    if (moved.bytes + entry.size > maxBytes) throw new TooLargeError(`more than ${maxBytes} bytes`, { hint: "raise `maxBytes`, or download less" });
    await rm(full, { force: true });
    const file = await open(full, constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL | (constants.O_NOFOLLOW ?? 0), entry.mode & 0o777);
    try {
      moved.bytes += await writeAll(file, content);
      await file.chmod(entry.mode & 0o777);
      await file.utimes(entry.mtimeSeconds, entry.mtimeSeconds);
    } finally {
      await file.close();
    }
    moved.files++;
  } else {
    leaveOut(moved, entry.path, entry.kind === "hardlink" ? "a hard link" : "neither a file, a directory nor a link");
  }
}

/** The components of an archive's path; undefined where it may lead out. None: the directory itself. */
function partsOf(path: string): string[] | undefined {
  if (path.startsWith("/") || path.includes("\0")) return undefined;
  // On Windows these would be separators and drives.
  if (globalThis.process?.platform === "win32" && /[\\:]/.test(path)) return undefined;
  const parts = path.split("/").filter((part) => part !== "" && part !== ".");
  return parts.includes("..") ? undefined : parts;
}

/**
 * Whether a link may be made. Only leading `..` are taken, and no more than the link's own directories, which are real ones: after
 * a name, `..` would mean the parent of wherever that name leads. So each link stays inside, and so does every chain of them.
 */
function staysInside(parts: readonly string[], target: string): boolean {
  if (target === "" || target.startsWith("/") || target.includes("\0")) return false;
  if (globalThis.process?.platform === "win32" && /[\\:]/.test(target)) return false;
  const steps = target.split("/").filter((part) => part !== "" && part !== ".");
  const up = steps.findIndex((part) => part !== "..");
  const leading = up < 0 ? steps.length : up;
  return leading <= parts.length - 1 && !steps.slice(leading).includes("..");
}

/** Makes the directories on the way; false where one of them is something else, a link for example. */
async function realDirectories(root: string, parts: readonly string[]): Promise<boolean> {
  let full = root;
  for (const part of parts) {
    full = join(full, part);
    const found = await lstat(full).catch(() => undefined);
    if (found === undefined) await mkdir(full);
    else if (!found.isDirectory()) return false;
  }
  return true;
}

/** A file at its place only once it is whole. */
export async function saveFile(pieces: AsyncIterable<Uint8Array>, target: string, mode: number, size: number | undefined): Promise<number> {
  await mkdir(dirname(target), { recursive: true });
  const temporary = join(dirname(target), `.${basename(target)}.${crypto.randomUUID()}`);
  const file = await open(temporary, "wx", 0o600);
  try {
    let written: number;
    try {
      written = await writeAll(file, pieces);
    } finally {
      await file.close();
    }
    if (size !== undefined && written !== size) throw new ProtocolError(`${written} bytes came where ${size} were promised`);
    await chmod(temporary, mode & 0o777);
    await rename(temporary, target);
    return written;
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}

async function writeAll(file: FileHandle, pieces: AsyncIterable<Uint8Array>): Promise<number> {
  let written = 0;
  for await (const piece of pieces) {
    for (let at = 0; at < piece.length; ) at += (await file.write(piece, at)).bytesWritten;
    written += piece.length;
  }
  return written;
}
