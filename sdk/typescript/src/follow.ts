/**
 * Streams of the daemon, taken up again when they break.
 *
 * Invariant of an exec's events: a chunk is handed on at most once and in order, and between two of them nothing is missing but
 * what the daemon itself did not keep. The id of the last chunk goes back as `Last-Event-ID`; a number that was already seen
 * is dropped, whatever a server or a proxy repeats.
 */

import { toBytes, Utf8Pieces } from "./bytes.js";
import { CarrelError, ConnectionError, ProtocolError, RateLimitError, ServerError, fromProblem } from "./errors.js";
import { lost, pause, segment, type Http, type Query } from "./http.js";
import type { Display } from "./result.js";
import { events, type ServerSentEvent } from "./sse.js";
import { isObject, type Json } from "./wire.js";

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;
/** A connection that lasted this long counts as progress: a proxy that cuts the idle does not use up the patience. */
const STEADY_MS = 5000;

/** A piece of output. `missing` bytes before it were not kept by the daemon; `text` is what is complete of it as UTF-8. */
export interface Chunk {
  stream: "stdout" | "stderr";
  data: Uint8Array<ArrayBuffer>;
  text: string;
  offset: number;
  number: number;
  missing: number;
}

export type ExecEvent =
  | { type: "start"; sandbox: string; session: string; exec: string }
  | ({ type: "output" } & Chunk)
  | { type: "result"; number: number; display: Display }
  | { type: "end"; reply: Json };

export interface Place {
  sandbox: string;
  exec: string;
}

export interface FollowOptions {
  signal?: AbortSignal | undefined;
  /** The first chunk wanted. */
  since?: number | undefined;
}

/** How long to go on trying: grows between tries, starts over with progress, ends with the client's patience. */
class Patience {
  #since: number | undefined;
  #pause = FIRST_PAUSE_MS;

  constructor(
    readonly limitMs: number,
    readonly signal: AbortSignal | undefined,
  ) {}

  progress(): void {
    this.#since = undefined;
    this.#pause = FIRST_PAUSE_MS;
  }

  /** Waits for the next try, or throws `why` where it is over or is nothing that time heals. */
  async next(why: unknown): Promise<void> {
    if (this.signal?.aborted) throw this.signal.reason;
    if (!mayHeal(why)) throw why;
    this.#since ??= Date.now();
    if (Date.now() - this.#since >= this.limitMs) throw why;
    await pause(Math.max(this.#pause, ((why as CarrelError).retryAfter ?? 0) * 1000), this.signal);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE_MS);
  }
}

function mayHeal(why: unknown): boolean {
  if (why instanceof RateLimitError) return why.code === "rate_limited";
  return why instanceof ConnectionError || (why instanceof ServerError && [502, 503, 504].includes(why.status ?? 0));
}

/**
 * The events of one exec, up to and with `end`. `first` is the reply that a streamed run began with; without it, or once it
 * broke, the exec's own stream is asked for.
 */
export async function* followExec(
  http: Http,
  place: Place | undefined,
  first: Response | undefined,
  options: FollowOptions = {},
): AsyncGenerator<ExecEvent, void> {
  const { signal } = options;
  const patience = new Patience(http.resumeMs, signal);
  const decoders = { stdout: new Utf8Pieces(), stderr: new Utf8Pieces() };
  const ends = { stdout: undefined as number | undefined, stderr: undefined as number | undefined };
  let last = (options.since ?? 0) - 1;
  let lastId: string | undefined;
  let started = false;
  let response = first;
  for (;;) {
    let failure: unknown;
    let problem: CarrelError | undefined;
    const opened = Date.now();
    try {
      if (response === undefined) {
        if (place === undefined) throw new ProtocolError("the stream ended before it began");
        response = await http.open("GET", `/v1/sandboxes/${segment(place.sandbox)}/execs/${segment(place.exec)}/stream`, {
          query: lastId === undefined ? { since: options.since } : {},
          headers: { accept: "text/event-stream", "last-event-id": lastId },
          signal,
        });
      }
      for await (const event of stream(response, signal)) {
        const data = parse(event);
        switch (event.event) {
          case "start":
            place ??= { sandbox: String(data["sandbox"]), exec: String(data["exec"]) };
            // A resumed stream may begin with it again.
            if (!started) yield { type: "start", session: String(data["session"] ?? ""), ...place };
            started = true;
            break;
          case "stdout":
          case "stderr": {
            const number = Number(data["chunk"]);
            lastId = event.id ?? lastId;
            if (number <= last) break;
            last = number;
            patience.progress();
            const bytes = toBytes(data["data"]);
            const offset = Number(data["offset"]);
            // Whoever asked for a later chunk than the first misses nothing before it.
            const expected = ends[event.event] ?? ((options.since ?? 0) > 0 ? offset : 0);
            ends[event.event] = offset + bytes.length;
            const missing = Math.max(0, offset - expected);
            const decoder = decoders[event.event];
            const before = missing > 0 ? decoder.finish() : "";
            yield { type: "output", stream: event.event, data: bytes, text: before + decoder.feed(bytes), offset, number, missing };
            break;
          }
          case "result": {
            const number = Number(data["chunk"]);
            lastId = event.id ?? lastId;
            if (number <= last) break;
            last = number;
            patience.progress();
            yield { type: "result", number, display: { kind: String(data["kind"]), mime: (data["mime"] ?? {}) as Display["mime"] } };
            break;
          }
          case "error":
            problem = fromProblem(data);
            break;
          case "end":
            // A character that was never completed is still something that was written.
            for (const name of ["stdout", "stderr"] as const) {
              const text = decoders[name].finish();
              if (text !== "") yield { type: "output", stream: name, data: new Uint8Array(), text, offset: ends[name] ?? 0, number: last, missing: 0 };
            }
            yield { type: "end", reply: data };
            return;
          default:
            break;
        }
      }
      failure = problem ?? new ConnectionError("the stream broke off before its end");
    } catch (error) {
      failure = error;
    }
    response = undefined;
    if (Date.now() - opened >= STEADY_MS) patience.progress();
    if (place === undefined && failure instanceof ConnectionError) {
      throw new ConnectionError("the connection broke before the call's id was known; it may have run", {
        cause: failure,
        hint: "look at `sandbox.execs()` before you run it again",
      });
    }
    await patience.next(failure);
  }
}

/**
 * Events that go on for ever. Where the daemon numbers them (`ids`), a broken stream goes on after the last one; else
 * `{event: "overflow"}` is handed on in the place of what may have been missed.
 */
export async function* followEvents(
  http: Http,
  path: string,
  query: Query,
  ids: boolean,
  options: { signal?: AbortSignal | undefined },
): AsyncGenerator<{ event: string; id: string | undefined; data: Json }, void> {
  const { signal } = options;
  const patience = new Patience(http.resumeMs, signal);
  let lastId: string | undefined;
  let began = false;
  for (;;) {
    let failure: unknown;
    const opened = Date.now();
    try {
      const response = await http.open("GET", path, {
        query: lastId === undefined ? query : { ...query, since: undefined },
        headers: { accept: "text/event-stream", "last-event-id": lastId },
        signal,
      });
      // Where it begins, should it break before the first event.
      if (ids) lastId ??= response.headers.get("last-event-id") ?? undefined;
      if (began && !ids) yield { event: "overflow", id: undefined, data: {} };
      began = true;
      for await (const event of stream(response, signal)) {
        const data = parse(event);
        if (event.event === "error") throw fromProblem(data);
        if (ids) lastId = event.id ?? lastId;
        patience.progress();
        yield { event: event.event, id: event.id, data };
      }
      failure = new ConnectionError("the stream broke off");
    } catch (error) {
      failure = error;
    }
    if (Date.now() - opened >= STEADY_MS) patience.progress();
    await patience.next(failure);
  }
}

async function* stream(response: Response, signal: AbortSignal | undefined): AsyncGenerator<ServerSentEvent, void> {
  if (!(response.headers.get("content-type") ?? "").startsWith("text/event-stream") || response.body === null) {
    await response.body?.cancel();
    throw new ProtocolError("the answer is no event stream", { status: response.status });
  }
  const source = events(response.body);
  try {
    for (;;) {
      let next: IteratorResult<ServerSentEvent, unknown>;
      try {
        next = await source.next();
      } catch (cause) {
        throw lost(cause, signal);
      }
      if (next.done) return;
      yield next.value;
    }
  } finally {
    await source.return(undefined);
  }
}

function parse(event: ServerSentEvent): Json {
  let data: unknown;
  try {
    data = JSON.parse(event.data);
  } catch (cause) {
    throw new ProtocolError(`an event \`${event.event}\` that is not JSON`, { cause });
  }
  if (!isObject(data)) throw new ProtocolError(`an event \`${event.event}\` that is no object`);
  return data;
}
