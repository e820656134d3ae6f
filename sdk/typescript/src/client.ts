/** The client: finds or makes sandboxes, and asks the daemon about itself. */

import { UnavailableError, type CarrelError } from "./errors.js";
import { followEvents } from "./follow.js";
import { Http, Listing, segment, type CallOptions, type ClientOptions } from "./http.js";
import type { Result } from "./result.js";
import { run, type RunOptions } from "./run.js";
import { Sandbox } from "./sandbox.js";
import { Snapshots } from "./snapshots.js";
import type { CarrelEvent, Environment, Quota, SandboxInfo, SandboxOptions, SandboxSettings, ScopeClosed, Token, Whoami } from "./types.js";
import { fromWire, type Json } from "./wire.js";

export interface ListSandboxes extends CallOptions {
  key?: string;
  /** Of keys. */
  prefix?: string;
  state?: string;
  labels?: Record<string, string>;
}

export interface ClientRunOptions extends RunOptions, SandboxSettings {
  /** Its name or key; none: a fresh one that is gone afterwards. */
  sandbox?: string;
  workflowRun?: string;
  agentRun?: string;
}

export interface EventOptions extends CallOptions {
  sandbox?: string;
  key?: string;
  /** The kind, or its beginning: `run.`. */
  kind?: string;
  /** After this number. */
  since?: number | string;
}

/** A daemon. Options left out come from CARREL_URL, CARREL_TOKEN, CARREL_SOCKET, then the usual sockets. */
export class Carrel {
  readonly #http: Http;
  readonly sandboxes: Sandboxes;
  readonly snapshots: Snapshots;
  readonly scopes: Scopes;
  readonly tokens: Tokens;

  constructor(options: ClientOptions = {}) {
    this.#http = new Http(options);
    this.sandboxes = new Sandboxes(this.#http);
    this.snapshots = new Snapshots(this.#http);
    this.scopes = new Scopes(this.#http);
    this.tokens = new Tokens(this.#http);
  }

  /** The sandbox of that name or key (`scope:owner:name`), made if it is not there. Without one: a new one. */
  async sandbox(name?: string | SandboxOptions, options: SandboxOptions = {}): Promise<Sandbox> {
    const named = typeof name === "string" ? { [name.includes(":") ? "key" : "name"]: name } : name;
    const { signal, ...json } = { ...named, ...options };
    return new Sandbox(this.#http, await this.#http.json<SandboxInfo>("POST", "/v1/sandboxes", { json, creates: true, signal }));
  }

  /** Runs code in a sandbox by name or key, or in a fresh one that is gone afterwards. */
  run(code: string, options: ClientRunOptions = {}): Promise<Result> {
    const { sandbox, workflowRun, agentRun, labels, limits, idleTimeoutSeconds, maxLifetimeSeconds, undoCalls, ...rest } = options;
    const more = { sandbox, workflowRun, agentRun, labels, limits, idleTimeoutSeconds, maxLifetimeSeconds, undoCalls };
    return run(this.#http, "/v1/run", code, rest, more);
  }

  environments(options: CallOptions = {}): Listing<Environment> {
    return new Listing((after) => this.#http.json("GET", "/v1/environments", { query: { after }, signal: options.signal }));
  }

  /** What happens, as it happens; a broken connection goes on after the last event. Leaving the loop ends it. */
  async *events(options: EventOptions = {}): AsyncGenerator<CarrelEvent, void> {
    const { signal, ...query } = options;
    for await (const event of followEvents(this.#http, "/v1/events", { ...query }, true, { signal })) {
      yield { id: event.id, kind: event.event, data: fromWire(event.data) };
    }
  }

  whoami(options: CallOptions = {}): Promise<Whoami> {
    return this.#http.json<Whoami>("GET", "/v1/whoami", options);
  }

  /** Whether the daemon takes calls: false while it shuts down. */
  async ready(options: CallOptions = {}): Promise<boolean> {
    try {
      await this.#http.empty("GET", "/ready", options);
      return true;
    } catch (error) {
      if (error instanceof UnavailableError || (error as CarrelError).code === "connection") return false;
      throw error;
    }
  }

  /** The OpenAPI document. */
  openapi(options: CallOptions = {}): Promise<Json> {
    return this.#http.raw("GET", "/openapi.json", options) as Promise<Json>;
  }

  /** Prometheus' text. */
  async metrics(options: CallOptions = {}): Promise<string> {
    return await (await this.#http.open("GET", "/metrics", options)).text();
  }

  /** Ends idle connections; sandboxes are not touched. */
  async close(): Promise<void> {
    await this.#http.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

export class Sandboxes {
  readonly #http: Http;

  constructor(http: Http) {
    this.#http = http;
  }

  list(options: ListSandboxes = {}): Listing<Sandbox> {
    const { signal, labels, ...query } = options;
    const label = Object.entries(labels ?? {}).map(([name, value]) => `${name}=${value}`);
    return new Listing(async (after) => {
      const page = await this.#http.json<{ items: SandboxInfo[]; next: string | null }>("GET", "/v1/sandboxes", { query: { ...query, label, after }, signal });
      return { items: page.items.map((info) => new Sandbox(this.#http, info)), next: page.next };
    });
  }

  /** By its id `sbx_…`. */
  async get(id: string, options: CallOptions = {}): Promise<Sandbox> {
    return new Sandbox(this.#http, await this.#http.json<SandboxInfo>("GET", `/v1/sandboxes/${segment(id)}`, options));
  }
}

export class Scopes {
  readonly #http: Http;

  constructor(http: Http) {
    this.#http = http;
  }

  /** Closes every sandbox `SCOPE:OWNER:*`, also those being made meanwhile; with a retention, that much later. */
  async close(scope: string, owner: string, options: CallOptions & { retentionSeconds?: number } = {}): Promise<ScopeClosed> {
    const { signal, ...query } = options;
    const path = `/v1/scopes/${segment(scope)}/${segment(owner)}`;
    return await this.#http.json<ScopeClosed>("DELETE", path, { query, again: true, signal });
  }
}

export class Tokens {
  readonly #http: Http;

  constructor(http: Http) {
    this.#http = http;
  }

  /** `token` in the answer is shown this once, so the call cannot be made again when its answer got lost. */
  create(options: CallOptions & { name: string; scope?: string[]; quota?: Quota; expiresSeconds?: number }): Promise<Token & { token: string }> {
    const { signal, ...json } = options;
    return this.#http.json<Token & { token: string }>("POST", "/v1/tokens", { json, signal });
  }

  list(options: CallOptions = {}): Listing<Token> {
    return new Listing((after) => this.#http.json("GET", "/v1/tokens", { query: { after }, signal: options.signal }));
  }

  async revoke(id: string, options: CallOptions = {}): Promise<void> {
    await this.#http.empty("DELETE", `/v1/tokens/${segment(id)}`, options);
  }
}
