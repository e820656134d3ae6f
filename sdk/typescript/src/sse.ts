/**
 * Server-sent events out of a body. Invariant: what is parsed does not depend on where the network cut the bytes; lines end
 * with LF, CR or CRLF, also when the cut is between the two.
 */

import { ProtocolError } from "./errors.js";

/** One event. `id` is its own, undefined if it had none: unlike a browser's, it is not inherited. */
export interface ServerSentEvent {
  event: string;
  data: string;
  id: string | undefined;
}

/** Characters of one event: a chunk of output is far smaller, an image of a result may be some megabytes. */
const EVENT_LIMIT = 64 * 1024 * 1024;

export class SseParser {
  #line = "";
  #afterReturn = false;
  #started = false;
  #event = "";
  #data: string[] = [];
  #size = 0;
  #id: string | undefined;

  /** The events that `text` completes. An event whose empty line never comes was cut off and is none. */
  *push(text: string): Generator<ServerSentEvent> {
    if (text === "") return;
    if (!this.#started) {
      this.#started = true;
      if (text.startsWith("\uFEFF")) text = text.slice(1);
    }
    if (this.#afterReturn && text.startsWith("\n")) text = text.slice(1);
    this.#afterReturn = text.endsWith("\r");
    let start = 0;
    for (const end of text.matchAll(/\r\n|\r|\n/g)) {
      const line = this.#line + text.slice(start, end.index);
      this.#line = "";
      start = end.index + end[0].length;
      if (line === "") {
        const event = this.#take();
        if (event !== undefined) yield event;
      } else {
        this.#field(line);
      }
    }
    this.#line += text.slice(start);
    if (this.#size + this.#line.length > EVENT_LIMIT) throw new ProtocolError("an event of the stream is too large");
  }

  #field(line: string): void {
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
    else if (name === "data") {
      this.#data.push(value);
      this.#size += value.length;
      if (this.#size > EVENT_LIMIT) throw new ProtocolError("an event of the stream is too large");
    }
  }

  #take(): ServerSentEvent | undefined {
    const taken =
      this.#data.length === 0 ? undefined : { event: this.#event || "message", data: this.#data.join("\n"), id: this.#id };
    this.#event = "";
    this.#data = [];
    this.#size = 0;
    this.#id = undefined;
    return taken;
  }
}

/** The events of a body. Leaving the loop ends the connection. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerSentEvent> {
  const parser = new SseParser();
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    // Not awaited: a connection that hangs must not hold its reader.
    reader.cancel().catch(() => undefined);
  }
}
