/**
 * One request and its reply: address, token, idempotency key, retry, errors as classes.
 *
 * What is made twice when a connection breaks: calls that change nothing, and those with an `Idempotency-Key`, which the daemon
 * answers with its first answer. Every other call is made again only when it certainly never arrived.
 */

import { CarrelError, ConnectionError, InvalidArgumentError, ProtocolError, UnavailableError, fromResponse } from "./errors.js";
import { openTransport, variable, type Body, type Endpoint, type Transport, type TransportRequest } from "./transport.js";
import { fromWire, toWire } from "./wire.js";

/** Tries of a call that may be made again; with the pauses between them, under two seconds. */
const TRIES = 4;
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 1000;

export interface ClientOptions extends Endpoint {
  /** Else CARREL_TOKEN. */
  token?: string | undefined;
  /** How long a broken stream is tried to be taken up again without any progress; 30 unless told. */
  resumeSeconds?: number | undefined;
}

/** Every call takes one; `abort` of it ends the waiting, not what the daemon already does. */
export interface CallOptions {
  signal?: AbortSignal | undefined;
}

export type Query = Record<string, string | number | boolean | readonly string[] | null | undefined>;

export interface Call extends CallOptions {
  query?: Query;
  /** In JavaScript's spelling. */
  json?: unknown;
  body?: Body;
  headers?: Record<string, string | undefined>;
  /** Makes something: sent with an Idempotency-Key. */
  creates?: boolean;
  /** May be made twice; GET and HEAD always may. */
  again?: boolean;
  /** How long a thing that is made may take, for who asks again after a broken connection. */
  takesMs?: number;
}

export class Http {
  readonly #endpoint: Endpoint;
  readonly token: string | undefined;
  readonly resumeMs: number;
  #transport: Promise<Transport> | undefined;

  constructor(options: ClientOptions) {
    this.#endpoint = { url: options.url, socket: options.socket };
    this.token = options.token ?? variable("CARREL_TOKEN");
    this.resumeMs = (options.resumeSeconds ?? 30) * 1000;
  }

  transport(): Promise<Transport> {
    this.#transport ??= openTransport(this.#endpoint);
    return this.#transport;
  }

  async close(): Promise<void> {
    const transport = await this.#transport?.catch(() => undefined);
    transport?.close();
    this.#transport = undefined;
  }

  /** The reply's JSON, in JavaScript's spelling. */
  async json<T>(method: string, path: string, call: Call = {}): Promise<T> {
    return fromWire<T>(await this.raw(method, path, call));
  }

  /** The reply's JSON as the daemon wrote it. */
  async raw(method: string, path: string, call: Call = {}): Promise<unknown> {
    return await this.#attempts(method, path, call, (response) => readJson(response, call.signal));
  }

  /** For replies without a body. */
  async empty(method: string, path: string, call: Call = {}): Promise<void> {
    await this.#attempts(method, path, call, async (response) => {
      await response.body?.cancel();
    });
  }

  /** The reply itself, its body unread. Errors are thrown, unless `call` knows better what a status means. */
  async open(method: string, path: string, call: Call = {}): Promise<Response> {
    return await this.#attempts(method, path, call, async (response) => response);
  }

  /** One attempt, whatever the status: for the pages of a sandbox's own servers. */
  async pass(method: string, path: string, headers: Headers, body: Body | undefined, signal?: AbortSignal): Promise<Response> {
    this.#authorize(headers);
    return await this.#once({ method, path, headers, body, signal, once: method !== "GET" && method !== "HEAD" });
  }

  async #attempts<T>(method: string, path: string, call: Call, read: (response: Response) => Promise<T>): Promise<T> {
    const headers = new Headers();
    for (const [name, value] of Object.entries(call.headers ?? {})) if (value !== undefined) headers.set(name, value);
    let body = call.body;
    if (call.json !== undefined) {
      body = JSON.stringify(toWire(call.json));
      headers.set("content-type", "application/json");
    } else if (body !== undefined && !headers.has("content-type")) {
      headers.set("content-type", "application/octet-stream");
    }
    if (call.creates === true) headers.set("idempotency-key", crypto.randomUUID());
    this.#authorize(headers);
    let again = call.again === true || call.creates === true || method === "GET" || method === "HEAD";
    const replayable = !(body instanceof ReadableStream);
    let broken: number | undefined;
    for (let attempt = 1, wait = FIRST_PAUSE_MS; ; wait = Math.min(wait * 2, LONGEST_PAUSE_MS)) {
      let failure: CarrelError;
      try {
        const response = await this.#once({ method, path: path + queryText(call.query), headers, body, signal: call.signal, once: !again });
        if (response.status < 400) return await read(response);
        failure = await fromResponse(response);
        const keyed = headers.has("idempotency-key");
        if (keyed && broken === undefined && failure.code === "too_many") {
          // The daemon keeps only so many keys. Without one the call works all the same; it just cannot be made again.
          headers.delete("idempotency-key");
          again = call.again === true;
          continue;
        }
        // Asked again while the first request is still under way: its answer will be there.
        const underWay = keyed && broken !== undefined && failure.code === "in_progress";
        // A daemon that shuts down has not begun; the next one will.
        const leaving = failure instanceof UnavailableError && failure.code === "unavailable" && again;
        if (underWay && Date.now() < (broken ?? 0) + this.resumeMs + (call.takesMs ?? 0)) attempt--;
        else if (!leaving) throw failure;
      } catch (error) {
        if (!(error instanceof ConnectionError)) throw error;
        failure = error;
        if (!again && !neverArrived(error)) throw error;
        broken ??= Date.now();
      }
      if (attempt++ >= TRIES || !replayable) throw failure;
      await pause(wait, call.signal);
    }
  }

  #authorize(headers: Headers): void {
    if (this.token !== undefined) headers.set("authorization", `Bearer ${this.token}`);
  }

  async #once(request: TransportRequest): Promise<Response> {
    const transport = await this.transport();
    try {
      return await transport.request(request);
    } catch (cause) {
      throw lost(cause, request.signal);
    }
  }
}

/** What a failed request or a broken body is to a caller: their own abort as they gave it, everything else a lost connection. */
export function lost(cause: unknown, signal: AbortSignal | undefined): unknown {
  if (signal?.aborted) return signal.reason;
  if (cause instanceof CarrelError) return cause;
  const reason = systemCode(cause);
  const absent = reason === "ECONNREFUSED" || reason === "ENOENT";
  return new ConnectionError(absent ? `no daemon answers (${reason})` : `the connection broke (${reason ?? String(cause)})`, {
    cause,
    hint: absent ? "start one with `carrel serve`, or set CARREL_URL or CARREL_SOCKET" : undefined,
  });
}

/** The system's own name of what went wrong; fetch hides it in causes, Bun has names of its own. */
function systemCode(error: unknown): string | undefined {
  for (let depth = 0; depth < 5 && error instanceof Error; depth++) {
    const code = (error as { code?: unknown }).code;
    if (typeof code === "string" && code !== "") return code === "ConnectionRefused" ? "ECONNREFUSED" : code;
    if (error instanceof AggregateError && error.errors.length > 0) error = error.errors[0];
    else error = error.cause;
  }
  return undefined;
}

function neverArrived(error: ConnectionError): boolean {
  const code = systemCode(error.cause);
  return code === "ECONNREFUSED" || code === "ENOENT";
}

async function readJson(response: Response, signal: AbortSignal | undefined): Promise<unknown> {
  let text: string;
  try {
    text = await response.text();
  } catch (cause) {
    throw lost(cause, signal);
  }
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new ProtocolError(`the answer is not JSON: ${text.slice(0, 200)}`, { cause, status: response.status });
  }
}

/** One part of a path. Dots alone would be resolved away on the way, into another path. */
export function segment(value: string | number): string {
  const text = String(value);
  if (text === "" || text === "." || text === "..") throw new InvalidArgumentError(`\`${text}\` names nothing`);
  return encodeURIComponent(text);
}

export function queryText(query: Query | undefined): string {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value === undefined || value === null) continue;
    const key = name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    for (const one of Array.isArray(value) ? value : [value]) parameters.append(key, String(one));
  }
  const text = parameters.toString();
  return text === "" ? "" : `?${text}`;
}

/** Waits, or throws the signal's reason. */
export function pause(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) {
      reject(signal.reason);
      return;
    }
    const abort = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", abort, { once: true });
  });
}

/** A list by pages: awaited it is all of them, iterated it asks for the next page when it is needed. */
export class Listing<T> implements AsyncIterable<T>, PromiseLike<T[]> {
  readonly #page: (after: string | undefined) => Promise<{ items: T[]; next: string | null }>;

  constructor(page: (after: string | undefined) => Promise<{ items: T[]; next: string | null }>) {
    this.#page = page;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<T, void> {
    let after: string | undefined;
    do {
      const { items, next } = await this.#page(after);
      yield* items;
      after = next ?? undefined;
    } while (after !== undefined);
  }

  then<A = T[], B = never>(
    fulfilled?: ((items: T[]) => A | PromiseLike<A>) | null,
    rejected?: ((reason: unknown) => B | PromiseLike<B>) | null,
  ): Promise<A | B> {
    return this.#all().then(fulfilled, rejected);
  }

  catch<B = never>(rejected?: ((reason: unknown) => B | PromiseLike<B>) | null): Promise<T[] | B> {
    return this.#all().catch(rejected);
  }

  async #all(): Promise<T[]> {
    const all: T[] = [];
    for await (const one of this) all.push(one);
    return all;
  }
}
