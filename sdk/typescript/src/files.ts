/** A sandbox's files. Paths are relative to `/workspace` or absolute inside it. */

import { decodeStrict, toName } from "./bytes.js";
import { InvalidArgumentError, PlatformError, UnprocessableError } from "./errors.js";
import { followEvents } from "./follow.js";
import { Listing, lost, segment, type CallOptions, type Http } from "./http.js";
import type { Body } from "./transport.js";
import type { Change, Entry, Found, Match, Replaced, Transferred, Written } from "./types.js";
import { fromWire, type Json } from "./wire.js";

/** Entries per question: the most that the daemon gives at once. */
const PAGE = 500;

export type Content = string | Uint8Array | ArrayBuffer | Blob | ReadableStream<Uint8Array> | AsyncIterable<Uint8Array>;

export interface ReadOptions extends CallOptions {
  /** The first byte wanted; negative ones count from the end. */
  offset?: number;
  length?: number;
  /** Only if the file is still that one. */
  ifMatch?: string;
}

export interface WriteOptions extends CallOptions {
  /** Makes the directories on the way; yes unless told. */
  parents?: boolean;
  /** Replaces what is there; yes unless told. */
  overwrite?: boolean;
  append?: boolean;
  mode?: number;
  /** Only if the file is still that one. */
  ifMatch?: string;
}

export interface SearchOptions extends CallOptions {
  path?: string;
  glob?: string;
  text?: string;
  regex?: boolean;
  ignoreCase?: boolean;
  limit?: number;
}

export interface ReplaceOptions extends CallOptions {
  find: string;
  with: string;
  path?: string;
  glob?: string;
  regex?: boolean;
  /** Refuse unless there are exactly so many. */
  expect?: number;
}

/** What a download may bring at most; 16 GB and a million entries unless told. */
export interface DownloadOptions extends CallOptions {
  maxBytes?: number;
  maxEntries?: number;
}

export class Files {
  readonly #http: Http;
  readonly #path: string;

  constructor(http: Http, sandbox: string) {
    this.#http = http;
    this.#path = `/v1/sandboxes/${segment(sandbox)}/files`;
  }

  async read(path: string, options: ReadOptions = {}): Promise<Uint8Array<ArrayBuffer>> {
    const response = await this.#content(path, options);
    try {
      return new Uint8Array(await response.arrayBuffer());
    } catch (cause) {
      throw lost(cause, options.signal);
    }
  }

  /** As text; what is not UTF-8 is an error, not a guess. */
  async readText(path: string, options: ReadOptions = {}): Promise<string> {
    const text = decodeStrict(await this.read(path, options));
    if (text === undefined) throw new UnprocessableError(`\`${path}\` is not UTF-8`, { code: "not_utf8", hint: "`files.read` gives its bytes" });
    return text;
  }

  /** The bytes as they come: for what should not be held in memory. */
  async readStream(path: string, options: ReadOptions = {}): Promise<ReadableStream<Uint8Array>> {
    return (await this.#content(path, options)).body ?? new Blob().stream();
  }

  /** What `ifMatch` takes. */
  async etag(path: string, options: CallOptions = {}): Promise<string | undefined> {
    const response = await this.#http.open("HEAD", `${this.#path}/content`, { query: { path }, signal: options.signal });
    return response.headers.get("etag") ?? undefined;
  }

  async write(path: string, content: Content, options: WriteOptions = {}): Promise<Written> {
    const { signal, ifMatch, ...query } = options;
    const body = await toBody(content);
    const response = await this.#http.open("PUT", `${this.#path}/content`, {
      query: { path, ...query },
      body,
      headers: { "if-match": ifMatch },
      // Whole contents in the place of whatever is there come out the same, however often they are sent.
      again: options.append !== true && options.overwrite !== false && ifMatch === undefined,
      signal,
    });
    const entry = parseEntry((await response.json()) as Json);
    return { ...entry, etag: response.headers.get("etag") ?? undefined, created: response.status === 201 };
  }

  /** What is in a directory; `depth` 1 unless told. Names are relative to it. */
  list(path = ".", options: CallOptions & { depth?: number } = {}): Listing<Entry> {
    const { signal, depth } = options;
    return new Listing(async (after) => {
      const page = (await this.#http.raw("GET", this.#path, { query: { path, depth, limit: PAGE, after }, signal })) as { items: Json[]; next: string | null };
      return { items: page.items.map(parseEntry), next: page.next };
    });
  }

  async stat(path: string, options: CallOptions & { follow?: boolean } = {}): Promise<Entry> {
    const { signal, follow } = options;
    return parseEntry((await this.#http.raw("GET", `${this.#path}/stat`, { query: { path, follow }, signal })) as Json);
  }

  async move(from: string, to: string, options: CallOptions & { overwrite?: boolean; parents?: boolean } = {}): Promise<Entry> {
    const { signal, ...rest } = options;
    return parseEntry((await this.#http.raw("POST", `${this.#path}/move`, { json: { from, to, ...rest }, signal })) as Json);
  }

  /** How many files, directories and links went. */
  async delete(path: string, options: CallOptions & { recursive?: boolean } = {}): Promise<number> {
    const { signal, recursive } = options;
    return (await this.#http.json<{ removed: number }>("DELETE", this.#path, { query: { path, recursive }, signal })).removed;
  }

  /** With the directories on the way, unless `parents` is false. */
  async mkdir(path: string, options: CallOptions & { parents?: boolean; mode?: number } = {}): Promise<Entry> {
    const { signal, parents = true, mode } = options;
    return parseEntry((await this.#http.raw("POST", `${this.#path}/mkdir`, { json: { path, parents, mode }, signal })) as Json);
  }

  async search(options: SearchOptions): Promise<Found> {
    const { signal, ...json } = options;
    const found = (await this.#http.raw("POST", `${this.#path}/search`, { json, again: true, signal })) as { matches: Json[] };
    const matches = found.matches.map((one) => ({ ...one, path: toName(one["path"]) }) as Match);
    return fromWire<Found>({ ...found, matches });
  }

  async replace(options: ReplaceOptions): Promise<Replaced> {
    const { signal, ...json } = options;
    const replaced = (await this.#http.raw("POST", `${this.#path}/replace`, { json, signal })) as { files: Json[] };
    const files = replaced.files.map((one) => ({ ...one, path: toName(one["path"]) }));
    return fromWire<Replaced>({ ...replaced, files });
  }

  /** A local file or whole directory into the sandbox; by its own name into `/workspace` unless told. */
  async upload(local: string, path?: string, options: CallOptions = {}): Promise<Transferred> {
    const trees = await localTrees();
    const target = path ?? local.replace(/[\\/]+$/, "").split(/[\\/]/).at(-1) ?? "";
    if (target === "" || target === "." || target === "..") {
      throw new InvalidArgumentError(`\`${local}\` has no name of its own`, { hint: "say where it goes: `files.upload(local, path)`" });
    }
    const here = trees.nothing();
    if ((await trees.localKind(local)) === "file") {
      const written = await this.write(target, trees.localFile(local), { mode: await trees.localMode(local), ...options });
      return { ...here, files: 1, bytes: written.size };
    }
    const there = await this.uploadTar(trees.packTree(local, here), target, options);
    return { ...there, leftOut: [...here.leftOut, ...there.leftOut], leftOutCount: here.leftOutCount + there.leftOutCount };
  }

  /** A file or whole directory of the sandbox into `local`; under its own name in the working directory unless told. */
  async download(path: string, local?: string, options: DownloadOptions = {}): Promise<Transferred> {
    const trees = await localTrees();
    const { signal, ...limits } = options;
    const target = local ?? path.replace(/\/+$/, "").split("/").at(-1) ?? "";
    if (target === "" || target === ".." || (target === "." && local === undefined)) {
      throw new InvalidArgumentError(`\`${path}\` has no name of its own`, { hint: "say where it goes: `files.download(path, local)`" });
    }
    const found = await this.stat(path, { follow: true, signal });
    if (found.kind === "dir") return await trees.unpackTree(pieces(await this.downloadTar(path, { signal }), signal), target, limits);
    const response = await this.#content(path, { signal });
    const length = response.headers.get("content-length");
    const body = response.body ?? new Blob().stream();
    const bytes = await trees.saveFile(pieces(body, signal), target, found.mode, length === null ? undefined : Number(length));
    return { ...trees.nothing(), files: 1, bytes };
  }

  /** A directory as a tar (or zip) archive. */
  async downloadTar(path: string, options: CallOptions & { format?: "tar" | "zip" } = {}): Promise<ReadableStream<Uint8Array>> {
    const { signal, format } = options;
    const response = await this.#http.open("GET", `${this.#path}/tree`, { query: { path, format: format ?? "tar" }, signal });
    return response.body ?? new Blob().stream();
  }

  /** Unpacks an archive into a directory of the sandbox. */
  async uploadTar(archive: Content, path: string, options: CallOptions & { format?: "tar" | "zip" } = {}): Promise<Transferred> {
    const { signal, format } = options;
    const reply = (await this.#http.raw("PUT", `${this.#path}/tree`, {
      query: { path, format: format ?? "tar" }, body: await toBody(archive), signal,
    })) as { left_out?: Json[] };
    const leftOut = (reply.left_out ?? []).map((one) => ({ path: toName(one["path"]), why: String(one["why"]) }));
    return { ...fromWire<Transferred>(reply), leftOut };
  }

  /** Resolves once it watches; iterated, it is the changes from then on. Leaving the loop ends it. */
  async watch(path = ".", options: CallOptions & { recursive?: boolean } = {}): Promise<AsyncGenerator<Change, void>> {
    const { signal, recursive } = options;
    const events = followEvents(this.#http, `${this.#path}/watch`, { path, recursive }, false, { signal });
    const early: Change[] = [];
    for (;;) {
      const next = await events.next();
      if (next.done || next.value.event === "ready") break;
      early.push(parseChange(next.value));
    }
    async function* changes(): AsyncGenerator<Change, void> {
      yield* early;
      for await (const event of events) if (event.event !== "ready") yield parseChange(event);
    }
    return changes();
  }

  async #content(path: string, options: ReadOptions): Promise<Response> {
    const { signal, offset = 0, length, ifMatch } = options;
    if (length !== undefined && (offset < 0 || length < 1)) {
      throw new InvalidArgumentError("a range has a start of 0 or more and a length of 1 or more");
    }
    let range: string | undefined;
    if (offset < 0) range = `bytes=${offset}`;
    else if (length !== undefined) range = `bytes=${offset}-${offset + length - 1}`;
    else if (offset > 0) range = `bytes=${offset}-`;
    return await this.#http.open("GET", `${this.#path}/content`, { query: { path }, headers: { range, "if-match": ifMatch }, signal });
  }
}

function parseEntry(value: Json): Entry {
  return {
    name: toName(value["name"]),
    kind: String(value["kind"]),
    size: Number(value["size"] ?? 0),
    mode: Number(value["mode"] ?? 0),
    mtimeMs: Number(value["mtime_ns"] ?? 0) / 1e6,
    target: value["target"] === undefined || value["target"] === null ? undefined : toName(value["target"]),
  };
}

function parseChange(event: { event: string; data: Json }): Change {
  if (event.event === "overflow") return { kind: "overflow", path: "", from: undefined };
  const { path, kind, from } = event.data;
  return { kind: kind as Change["kind"], path: toName(path), from: from === undefined || from === null ? undefined : toName(from) };
}

export async function toBody(content: Content): Promise<Body> {
  if (typeof content === "string" || content instanceof ReadableStream) return content;
  if (content instanceof Uint8Array || content instanceof ArrayBuffer) return new Uint8Array(content);
  if (content instanceof Blob) return content.stream();
  const source = content[Symbol.asyncIterator]();
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const next = await source.next();
        if (next.done) controller.close();
        else controller.enqueue(next.value);
      } catch (error) {
        controller.error(error);
      }
    },
    async cancel() {
      await source.return?.();
    },
  });
}

/** Not every platform's streams can be iterated. */
export async function* pieces(body: ReadableStream<Uint8Array>, signal: AbortSignal | undefined): AsyncGenerator<Uint8Array, void> {
  const reader = body.getReader();
  try {
    for (;;) {
      let next: ReadableStreamReadResult<Uint8Array>;
      try {
        next = await reader.read();
      } catch (cause) {
        throw lost(cause, signal);
      }
      if (next.done) return;
      yield next.value;
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

export async function localTrees(): Promise<typeof import("./trees.js")> {
  try {
    return await import("./trees.js");
  } catch (cause) {
    throw new PlatformError("this platform has no files", { cause, hint: "use `files.write`, `files.uploadTar` and `files.downloadTar`" });
  }
}
