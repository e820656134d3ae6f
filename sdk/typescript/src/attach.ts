/**
 * A terminal over a WebSocket: the platform's own, which Node has from version 22 on, Deno and Bun always. Browsers' cannot
 * carry a token, and none of them speaks over a unix socket; `Exec` itself (iterate, `stdin`, `resize`) works everywhere.
 */

import { Utf8Pieces } from "./bytes.js";
import { ConnectionError, PlatformError, ProtocolError } from "./errors.js";
import { queryText, type CallOptions, type Http } from "./http.js";
import { parseOutcome, type Outcome } from "./result.js";
import { isObject, type Json } from "./wire.js";

/** Output that arrived and was not read yet. A WebSocket cannot be asked to wait, so there is an end to it. */
const UNREAD_LIMIT = 64 * 1024 * 1024;

export interface AttachOptions extends CallOptions {
  /** The first chunk wanted: 0 replays everything. */
  since?: number;
  /** Only look on. */
  readOnly?: boolean;
}

export interface Piece {
  data: Uint8Array<ArrayBuffer>;
  /** What is complete of it as UTF-8. */
  text: string;
}

type SocketClass = new (url: string, options?: { headers?: Record<string, string> }) => WebSocket;

export async function attach(http: Http, path: string, options: AttachOptions): Promise<Attachment> {
  const Socket = (globalThis as { WebSocket?: SocketClass }).WebSocket;
  if (Socket === undefined) {
    throw new PlatformError("this platform has no WebSocket", {
      hint: "use Node 22 or newer, Deno or Bun; or iterate the exec and use `exec.stdin` and `exec.resize`, which need none",
    });
  }
  const { origin } = await http.transport();
  if (origin === undefined) {
    throw new PlatformError("a WebSocket does not go over a unix socket here", {
      hint: "let the daemon listen on TCP and set CARREL_URL; or iterate the exec and use `exec.stdin` and `exec.resize`",
    });
  }
  const { signal, ...query } = options;
  if (signal?.aborted) throw signal.reason;
  const url = origin.replace(/^http/, "ws") + path + queryText(query);
  const headers: Record<string, string> = http.token === undefined ? {} : { authorization: `Bearer ${http.token}` };
  let socket: WebSocket;
  try {
    socket = http.token === undefined ? new Socket(url) : new Socket(url, { headers });
  } catch (cause) {
    throw new PlatformError("this platform's WebSocket takes no token", { cause, hint: "iterate the exec and use `exec.stdin` and `exec.resize`" });
  }
  const attachment = new Attachment(socket, signal);
  await attachment.opened;
  return attachment;
}

/** Iterated once, it is the terminal's output up to its end; leaving the loop detaches. */
export class Attachment implements AsyncIterable<Piece> {
  readonly #socket: WebSocket;
  readonly #pieces: Uint8Array<ArrayBuffer>[] = [];
  #unread = 0;
  #wake: (() => void) | undefined;
  #over: { error?: unknown } | undefined;
  #outcome: Outcome | undefined;
  /** @internal */
  readonly opened: Promise<void>;
  #refuse: (reason: unknown) => void = () => undefined;

  constructor(socket: WebSocket, signal: AbortSignal | undefined) {
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    const abort = (): void => this.#finish(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    this.opened = new Promise((resolve, reject) => {
      this.#refuse = reject;
      socket.addEventListener("open", () => resolve());
    });
    this.opened.catch(() => undefined);
    socket.addEventListener("message", (event: MessageEvent) => this.#receive(event.data));
    socket.addEventListener("error", (cause) => this.#finish(new ConnectionError("the WebSocket failed", { cause })));
    socket.addEventListener("close", () => {
      signal?.removeEventListener("abort", abort);
      this.#finish(this.#outcome === undefined ? new ConnectionError("the WebSocket was closed before the end") : undefined);
    });
  }

  /** How it ended; undefined while it runs. */
  get outcome(): Outcome | undefined {
    return this.#outcome;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Piece, void> {
    const decoder = new Utf8Pieces();
    try {
      for (;;) {
        const data = this.#pieces.shift();
        if (data !== undefined) {
          this.#unread -= data.length;
          yield { data, text: decoder.feed(data) };
        } else if (this.#over !== undefined) {
          if (this.#over.error !== undefined) throw this.#over.error;
          return;
        } else {
          await new Promise<void>((resolve) => {
            this.#wake = resolve;
          });
        }
      }
    } finally {
      this.close();
    }
  }

  write(data: string | Uint8Array): void {
    this.#socket.send(typeof data === "string" ? new TextEncoder().encode(data) : new Uint8Array(data));
  }

  resize(rows: number, cols: number): void {
    this.#socket.send(JSON.stringify({ type: "resize", rows, cols }));
  }

  signal(signal: number | string): void {
    this.#socket.send(JSON.stringify({ type: "signal", signal }));
  }

  closeStdin(): void {
    this.#socket.send(JSON.stringify({ type: "close_stdin" }));
  }

  /** Detaches; the exec goes on. */
  close(): void {
    this.#finish(undefined);
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #receive(message: unknown): void {
    if (this.#over !== undefined) return;
    if (message instanceof ArrayBuffer) {
      this.#pieces.push(new Uint8Array(message));
      this.#unread += message.byteLength;
      if (this.#unread > UNREAD_LIMIT) this.#finish(new ProtocolError("output came faster than it was read", { code: "too_large" }));
    } else if (typeof message === "string") {
      let value: unknown;
      try {
        value = JSON.parse(message);
      } catch {
        value = undefined;
      }
      if (isObject(value) && value["type"] === "end") {
        this.#outcome = parseOutcome((value as Json)["outcome"]);
        this.#finish(undefined);
      }
    }
    this.#wake?.();
  }

  #finish(error: unknown): void {
    if (this.#over === undefined) {
      this.#over = error === undefined ? {} : { error };
      // Not left to the event `close`: it does not come where nothing was ever open.
      this.#refuse(error ?? new ConnectionError("the WebSocket was closed"));
      this.#socket.close();
    }
    this.#wake?.();
  }
}
