/** The unix socket, by node:http: Node, and Deno and Bun by their like-named modules. Imported only when it is used. */

import { Agent, request as httpRequest, type IncomingMessage } from "node:http";
import { Readable } from "node:stream";

import type { Transport, TransportRequest } from "./transport.js";

/** Replies that have no body by HTTP's own rules; `Response` refuses one for them. */
const BODYLESS = new Set([101, 204, 205, 304]);

export class UnixTransport implements Transport {
  readonly origin = undefined;
  readonly #agent = new Agent({ keepAlive: true });

  constructor(readonly socketPath: string) {}

  request(request: TransportRequest): Promise<Response> {
    const { signal, body } = request;
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(signal.reason);
        return;
      }
      const headers: Record<string, string> = { host: "localhost" };
      request.headers.forEach((value, name) => {
        headers[name] = value;
      });
      if (typeof body === "string") headers["content-length"] = String(new TextEncoder().encode(body).length);
      else if (body instanceof Uint8Array) headers["content-length"] = String(body.length);
      const call = httpRequest({
        socketPath: this.socketPath,
        // Deno sends a request again by itself when a connection it used before breaks; a fresh one it does not.
        agent: request.once === true && "Deno" in globalThis ? false : this.#agent,
        method: request.method,
        path: request.path,
        headers,
      });
      let reply: IncomingMessage | undefined;
      const abort = (): void => {
        const reason: unknown = signal?.reason;
        const error = reason instanceof Error ? reason : new DOMException("aborted", "AbortError");
        reply?.destroy(error);
        call.destroy(error);
        // Not every platform tells of it by an event.
        reject(reason);
      };
      const done = (): void => signal?.removeEventListener("abort", abort);
      signal?.addEventListener("abort", abort, { once: true });
      call.on("error", (error) => {
        done();
        reject(signal?.aborted ? (signal.reason as Error) : error);
      });
      call.on("response", (message: IncomingMessage) => {
        reply = message;
        message.once("close", done);
        resolve(toResponse(message, request.method));
      });
      if (body instanceof ReadableStream) {
        const source = Readable.fromWeb(body as Parameters<typeof Readable.fromWeb>[0]);
        source.on("error", (error) => call.destroy(error));
        call.once("close", () => source.destroy());
        source.pipe(call);
      } else {
        call.end(body);
      }
    });
  }

  close(): void {
    this.#agent.destroy();
  }
}

function toResponse(message: IncomingMessage, method: string): Response {
  const headers = new Headers();
  for (let index = 0; index + 1 < message.rawHeaders.length; index += 2) {
    headers.append(message.rawHeaders[index] as string, message.rawHeaders[index + 1] as string);
  }
  const status = message.statusCode ?? 0;
  if (method === "HEAD" || BODYLESS.has(status)) {
    message.resume();
    return new Response(null, { status, headers });
  }
  const body = Readable.toWeb(message) as unknown as ReadableStream<Uint8Array>;
  return new Response(body, { status, statusText: message.statusMessage ?? "", headers });
}
