/** What listens in a sandbox, reached through the daemon. */

import { PlatformError, TimeoutError, fromResponse } from "./errors.js";
import { pause, segment, type CallOptions, type Http } from "./http.js";
import type { Body } from "./transport.js";
import type { Port, Share } from "./types.js";

const POLL_MS = 100;

export interface PortRequest extends CallOptions {
  method?: string;
  headers?: Record<string, string> | Headers;
  body?: string | Uint8Array | ReadableStream<Uint8Array>;
}

export class Ports {
  readonly #http: Http;
  readonly #path: string;
  readonly #shares: string;

  constructor(http: Http, sandbox: string) {
    this.#http = http;
    this.#path = `/v1/sandboxes/${segment(sandbox)}/ports`;
    this.#shares = `/v1/sandboxes/${segment(sandbox)}/shares`;
  }

  async list(options: CallOptions = {}): Promise<Port[]> {
    return (await this.#http.json<{ items: Port[] }>("GET", this.#path, { query: { limit: 500 }, ...options })).items;
  }

  /** Waits until something listens there; 30 seconds unless told, then TimeoutError. */
  async wait(port: number, options: CallOptions & { timeoutSeconds?: number } = {}): Promise<Port> {
    const seconds = options.timeoutSeconds ?? 30;
    const deadline = Date.now() + seconds * 1000;
    for (;;) {
      const found = (await this.list(options)).find((one) => one.port === port);
      if (found !== undefined) return found;
      if (Date.now() >= deadline) {
        throw new TimeoutError(`nothing listens on port ${port} after ${seconds} s`, { hint: "look at the output of its server" });
      }
      await pause(POLL_MS, options.signal);
    }
  }

  /** The address of a port through the daemon. Whoever uses it needs the token, as `Authorization: Bearer …`. */
  async url(port: number, path = "/"): Promise<string> {
    const { origin } = await this.#http.transport();
    if (origin === undefined) {
      throw new PlatformError("a daemon on a unix socket has no address to give away", {
        hint: "use `ports.fetch`, or let the daemon listen on TCP and set CARREL_URL",
      });
    }
    return origin + this.#target(port, path);
  }

  /** As fetch, but to a server in the sandbox. Redirects are not followed; what its server answers is not judged. */
  async fetch(port: number, path = "/", request: PortRequest = {}): Promise<Response> {
    const { body } = request;
    const sent: Body | undefined = body instanceof Uint8Array ? new Uint8Array(body) : body;
    const response = await this.#http.pass(
      request.method ?? "GET",
      this.#target(port, path),
      new Headers(request.headers),
      sent,
      request.signal,
    );
    // A sandbox's own pages carry that header, whatever else they say; a problem without it is the daemon's.
    const own = (response.headers.get("content-security-policy") ?? "").includes("sandbox");
    const problem = (response.headers.get("content-type") ?? "").startsWith("application/problem+json");
    if (problem && !own) throw await fromResponse(response);
    return response;
  }

  /** A link for somebody without a token: that port and nothing else, until it expires or the sandbox is closed. */
  async share(port: number, options: CallOptions & { expiresSeconds?: number } = {}): Promise<Share> {
    const { signal, ...json } = options;
    const share = await this.#http.json<{ path: string; url: string | null; expiresUnixMs: number }>(
      "POST", this.#shares, { json: { port, ...json }, creates: true, signal },
    );
    const { origin } = await this.#http.transport();
    return { ...share, url: share.url ?? (origin === undefined ? undefined : origin + share.path) };
  }

  #target(port: number, path: string): string {
    // Resolved here, so that no `..` of a path leads to another part of the API.
    const inside = new URL(`http://sandbox/${path.replace(/^\//, "")}`);
    return `${this.#path}/${segment(port)}${inside.pathname}${inside.search}`;
  }
}
