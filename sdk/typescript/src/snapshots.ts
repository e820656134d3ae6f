/** Saved sandboxes: listed, given back, compared, and as files. A snapshot is named by its id, or by a tag: the newest with it. */

import { localTrees, pieces, toBody, type Content } from "./files.js";
import { Listing, segment, type CallOptions, type Http } from "./http.js";
import { Sandbox } from "./sandbox.js";
import type { Diff, SandboxInfo, Snapshot } from "./types.js";

export interface RestoreOptions extends CallOptions {
  /** As a new sandbox; naming one asks for it too. Else its own sandbox becomes what it was. */
  new?: boolean;
  name?: string;
  /** `scope:owner:name`. */
  key?: string;
  /** Interpreters start anew. */
  filesOnly?: boolean;
}

export interface ImportOptions extends CallOptions {
  /** For the operator: memory is taken whoever has sealed it. It is brought back with root's rights. */
  trustMemory?: boolean;
}

/** `carrel.snapshots`. */
export class Snapshots {
  readonly #http: Http;

  constructor(http: Http) {
    this.#http = http;
  }

  /** Oldest first. */
  list(options: CallOptions & { sandbox?: string; tag?: string } = {}): Listing<Snapshot> {
    const { signal, ...query } = options;
    return new Listing((after) => this.#http.json("GET", "/v1/snapshots", { query: { ...query, after }, signal }));
  }

  get(snapshot: string, options: CallOptions = {}): Promise<Snapshot> {
    return this.#http.json<Snapshot>("GET", path(snapshot), options);
  }

  /** Sandboxes that came from it stay. */
  async delete(snapshot: string, options: CallOptions = {}): Promise<void> {
    await this.#http.empty("DELETE", path(snapshot), { again: true, signal: options.signal });
  }

  /** As a new sandbox, if that is asked for or one is named; else its own sandbox becomes what it was. */
  async restore(snapshot: string, options: RestoreOptions = {}): Promise<Sandbox> {
    const { signal, ...json } = options;
    return new Sandbox(this.#http, await this.#http.json<SandboxInfo>("POST", `${path(snapshot)}/restore`, { json, creates: true, signal }));
  }

  /** Files between two snapshots, or a snapshot and a sandbox: by default its own, as it is now. */
  diff(from: string, to?: string, options: CallOptions = {}): Promise<Diff> {
    return this.#http.json<Diff>("GET", "/v1/diff", { query: { from, to }, signal: options.signal });
  }

  /** As one file, which `import` takes, here or at another daemon. */
  async export(snapshot: string, options: CallOptions = {}): Promise<ReadableStream<Uint8Array>> {
    const response = await this.#http.open("GET", `${path(snapshot)}/export`, options);
    return response.body ?? new Blob().stream();
  }

  /** The same into a local file, whole or not at all; how many bytes. */
  async exportTo(snapshot: string, local: string, options: CallOptions = {}): Promise<number> {
    const trees = await localTrees();
    // What it holds is as private as the sandbox.
    return await trees.saveFile(pieces(await this.export(snapshot, options), options.signal), local, 0o600, undefined);
  }

  /** Makes a snapshot of an exported file, all of it or nothing. Memory is taken if the daemon's own host has sealed it. */
  async import(file: Content, options: ImportOptions = {}): Promise<Snapshot> {
    const { signal, trustMemory } = options;
    const headers = { "content-type": "application/zstd" };
    return await this.#http.json<Snapshot>("POST", "/v1/snapshots", { query: { trustMemory }, body: await toBody(file), headers, signal });
  }

  async importFrom(local: string, options: ImportOptions = {}): Promise<Snapshot> {
    const trees = await localTrees();
    return await this.import(trees.localFile(local), options);
  }
}

function path(snapshot: string): string {
  return `/v1/snapshots/${segment(snapshot)}`;
}
