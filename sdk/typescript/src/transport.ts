/**
 * How a request reaches the daemon: the platform's fetch over TCP, node:http over a unix socket. Both answer with the platform's
 * `Response`, so nothing above knows the difference. Node's modules are imported only when a unix socket is used: the package
 * loads in browsers too.
 */

import { InvalidArgumentError, PlatformError } from "./errors.js";

export type Body = string | Uint8Array<ArrayBuffer> | ReadableStream<Uint8Array>;

export interface TransportRequest {
  method: string;
  /** With query, starting with a slash. */
  path: string;
  headers: Headers;
  body?: Body | undefined;
  signal?: AbortSignal | undefined;
  /** Must not arrive twice, whatever the platform thinks of broken connections. */
  once?: boolean | undefined;
}

export interface Transport {
  /** `http://HOST:PORT` without a slash at the end; undefined where only this process can reach the daemon. */
  readonly origin: string | undefined;
  request(request: TransportRequest): Promise<Response>;
  close(): void;
}

export interface Endpoint {
  /** `http://…`, `https://…` or `unix:PATH`. */
  url?: string | undefined;
  /** A unix socket's path. */
  socket?: string | undefined;
}

/** The environment's variables where there are any; Deno refuses them without a permission. */
export function variable(name: string): string | undefined {
  try {
    const platform = globalThis as { process?: { env?: Record<string, string | undefined> } };
    return platform.process?.env?.[name] || undefined;
  } catch {
    return undefined;
  }
}

export async function openTransport(endpoint: Endpoint): Promise<Transport> {
  const url = endpoint.url ?? (endpoint.socket === undefined ? variable("CARREL_URL") : undefined);
  if (url !== undefined && !url.startsWith("unix:")) return new FetchTransport(url);
  const path = url?.slice("unix:".length) ?? endpoint.socket ?? variable("CARREL_SOCKET") ?? (await usualSocket());
  let unix;
  try {
    unix = await import("./unix.js");
  } catch (cause) {
    throw new PlatformError("this platform has no unix sockets", {
      cause,
      hint: "give `url` (and `token`), or set CARREL_URL and CARREL_TOKEN",
    });
  }
  return new unix.UnixTransport(path);
}

/** The user's own socket if it is there, else the system's. */
async function usualSocket(): Promise<string> {
  const system = "/run/carrel/carrel.sock";
  const runtime = variable("XDG_RUNTIME_DIR");
  if (runtime === undefined) return system;
  const own = `${runtime}/carrel/carrel.sock`;
  try {
    const { existsSync } = await import("node:fs");
    return existsSync(own) || !existsSync(system) ? own : system;
  } catch {
    return own;
  }
}

class FetchTransport implements Transport {
  readonly origin: string;
  readonly #base: string;

  constructor(url: string) {
    let parsed: URL;
    try {
      parsed = new URL(url);
    } catch (cause) {
      throw new InvalidArgumentError(`\`${url}\` is not an address`, { cause, hint: "http://HOST:PORT or unix:PATH" });
    }
    if (parsed.protocol !== "http:" && parsed.protocol !== "https:") {
      throw new InvalidArgumentError(`\`${parsed.protocol}\` is no way to reach a daemon`, {
        hint: "http://HOST:PORT, https://… or unix:PATH",
      });
    }
    // A path is kept: the daemon may sit below one, behind a proxy.
    this.#base = parsed.origin + parsed.pathname.replace(/\/+$/, "");
    this.origin = this.#base;
  }

  async request(request: TransportRequest): Promise<Response> {
    const init: RequestInit & { duplex?: "half"; timeout?: false } = {
      method: request.method,
      headers: request.headers,
      // A redirect could lead the token elsewhere.
      redirect: "manual",
      // Bun's own limit of five minutes is no match for a run that may take an hour.
      timeout: false,
    };
    let body = request.body;
    // Deno sends a request again by itself when a connection it used before breaks; a stream it cannot.
    if (request.once === true && request.method !== "GET" && "Deno" in globalThis) body = streamed(body);
    if (body !== undefined) init.body = body;
    if (body instanceof ReadableStream) init.duplex = "half";
    if (request.signal !== undefined) init.signal = request.signal;
    return await fetch(this.#base + request.path, init);
  }

  close(): void {
    // The platform owns its connections.
  }
}

function streamed(body: Body | undefined): ReadableStream<Uint8Array> {
  if (body instanceof ReadableStream) return body;
  return new ReadableStream<Uint8Array>({
    start(controller) {
      if (body !== undefined && body.length > 0) controller.enqueue(typeof body === "string" ? new TextEncoder().encode(body) : body);
      controller.close();
    },
  });
}
