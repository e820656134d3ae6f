/** A command (or run) of a sandbox by its id: its output as a stream, its input, its end. */

import { attach, type Attachment, type AttachOptions } from "./attach.js";
import { Collector, DEFAULT_MAX_OUTPUT, fromBytes, toBytes } from "./bytes.js";
import { ProtocolError, TimeoutError } from "./errors.js";
import { followExec, type Chunk, type ExecEvent, type FollowOptions } from "./follow.js";
import { segment, type CallOptions, type Http } from "./http.js";
import { parseOutcome, Result, type Display, type Outcome } from "./result.js";
import { isObject, type Json } from "./wire.js";

/** One question to the daemon waits this long; short enough for every proxy on the way. */
const WAIT_SECONDS = 30;

export interface ExecOptions extends CallOptions {
  session?: string;
  cwd?: string;
  /** Environment variables, on top of the session's. */
  env?: Record<string, string>;
  timeoutSeconds?: number;
  /** `true`: open for `exec.stdin`. Text or bytes: given at once and closed. */
  stdin?: boolean | string | Uint8Array;
  /** A terminal of this size. */
  pty?: { rows: number; cols: number };
}

export interface ExecInfo {
  exec: string;
  session: string;
  /** Of a command. */
  argv: string[] | undefined;
  /** Of a run. */
  language: string | undefined;
  running: boolean;
  startedUnixMs: number;
  outcome: Outcome | undefined;
}

/** Output from some chunk on; go on with `read({since: page.next})`. */
export interface OutputPage {
  chunks: { number: number; stream: string; offset: number; data: Uint8Array<ArrayBuffer> }[];
  next: number;
  running: boolean;
  outcome: Outcome | undefined;
}

export function parseExec(value: unknown): ExecInfo {
  if (!isObject(value)) throw new ProtocolError("an exec that is no object");
  const what = (value["what"] ?? {}) as { exec?: { argv?: string[] }; run?: { language?: string } };
  return {
    exec: String(value["exec"]),
    session: String(value["session"] ?? ""),
    argv: what.exec?.argv,
    language: what.run?.language,
    running: value["running"] === true,
    startedUnixMs: Number(value["started_unix_ms"] ?? 0),
    outcome: parseOutcome(value["outcome"]),
  };
}

export class Stdin {
  readonly #http: Http;
  readonly #path: string;

  constructor(http: Http, exec: string) {
    this.#http = http;
    this.#path = `${exec}/stdin`;
  }

  /** Resolves once the command took it. */
  async write(data: string | Uint8Array, options: CallOptions = {}): Promise<void> {
    await this.#send(data, false, options);
  }

  /** The end of its input. */
  async close(options: CallOptions = {}): Promise<void> {
    await this.#send("", true, options);
  }

  async #send(data: string | Uint8Array, close: boolean, options: CallOptions): Promise<void> {
    const body = typeof data === "string" ? data : new Uint8Array(data);
    await this.#http.empty("POST", this.#path, { query: { close }, body, signal: options.signal });
  }
}

/** What both a started exec and one that is being started can do. */
export interface ExecStream extends AsyncIterable<Chunk> {
  wait(options?: CallOptions & { timeoutSeconds?: number }): Promise<Outcome>;
  output(options?: CallOptions & { maxOutput?: number }): Promise<Result>;
}

export class Exec implements ExecStream {
  readonly #http: Http;
  readonly #path: string;
  /** Its input; needs `stdin: true` or a terminal. */
  readonly stdin: Stdin;

  constructor(
    http: Http,
    readonly sandbox: string,
    readonly id: string,
  ) {
    this.#http = http;
    this.#path = `/v1/sandboxes/${segment(sandbox)}/execs/${segment(id)}`;
    this.stdin = new Stdin(http, this.#path);
  }

  /** stdout and stderr from the beginning, as they come; a broken connection is taken up where it broke. */
  [Symbol.asyncIterator](): AsyncGenerator<Chunk, void> {
    return this.stream();
  }

  async *stream(options: FollowOptions = {}): AsyncGenerator<Chunk, void> {
    for await (const event of this.events(options)) if (event.type === "output") yield event;
  }

  /** Everything: output, values that were shown, and the end. */
  events(options: FollowOptions = {}): AsyncGenerator<ExecEvent, void> {
    return followExec(this.#http, { sandbox: this.sandbox, exec: this.id }, undefined, options);
  }

  /** Waits for the end. With a timeout, TimeoutError when it is over; the exec goes on. */
  async wait(options: CallOptions & { timeoutSeconds?: number } = {}): Promise<Outcome> {
    const deadline = Date.now() + (options.timeoutSeconds ?? Number.POSITIVE_INFINITY) * 1000;
    for (;;) {
      const left = Math.max(0, (deadline - Date.now()) / 1000);
      const reply = await this.#http.raw("GET", `${this.#path}/wait`, {
        query: { timeoutSeconds: Math.min(WAIT_SECONDS, left) },
        signal: options.signal,
      });
      const outcome = parseOutcome((reply as Json)["outcome"]);
      if (outcome !== undefined) return outcome;
      if (Date.now() >= deadline) {
        throw new TimeoutError(`${this.id} still runs after ${options.timeoutSeconds} s`, {
          hint: "wait again, or end it with `exec.cancel()`",
        });
      }
    }
  }

  /** Waits for the end and collects the output, at most `maxOutput` bytes of each stream (1 MB unless told). */
  output(options: CallOptions & { maxOutput?: number } = {}): Promise<Result> {
    return collect(this.events(options), options.maxOutput);
  }

  async info(options: CallOptions = {}): Promise<ExecInfo> {
    return parseExec(await this.#http.raw("GET", this.#path, options));
  }

  /** Chunks numbered `since` and above, at most `max` bytes of them; with `waitSeconds` it waits that long for the first. */
  async read(options: CallOptions & { since?: number; max?: number; waitSeconds?: number } = {}): Promise<OutputPage> {
    const { signal, ...query } = options;
    const page = (await this.#http.raw("GET", `${this.#path}/output`, { query, signal })) as Json;
    return {
      chunks: (page["chunks"] as Json[]).map((chunk) => ({
        number: Number(chunk["chunk"]),
        stream: String(chunk["stream"]),
        offset: Number(chunk["offset"]),
        data: toBytes(chunk["data"]),
      })),
      next: Number(page["next"]),
      running: page["running"] === true,
      outcome: parseOutcome(page["outcome"]),
    };
  }

  /** The bytes themselves. They are not taken up again when the connection breaks; iterate the exec for that. */
  async raw(options: CallOptions & { stream?: "stdout" | "stderr"; follow?: boolean } = {}): Promise<ReadableStream<Uint8Array>> {
    const { signal, ...query } = options;
    const response = await this.#http.open("GET", `${this.#path}/raw`, { query, signal });
    return response.body ?? new Blob().stream();
  }

  /** A number, or a name like `TERM`. */
  async signal(signal: number | string, options: CallOptions = {}): Promise<void> {
    await this.#http.empty("POST", `${this.#path}/signal`, { json: { signal }, signal: options.signal });
  }

  async resize(rows: number, cols: number, options: CallOptions = {}): Promise<void> {
    await this.#http.empty("POST", `${this.#path}/resize`, { json: { rows, cols }, again: true, signal: options.signal });
  }

  async kill(options: CallOptions = {}): Promise<void> {
    await this.signal("KILL", options);
  }

  /** Interrupted, then killed, with everything it started. */
  async cancel(options: CallOptions = {}): Promise<void> {
    await this.#http.empty("POST", `${this.#path}/cancel`, { again: true, signal: options.signal });
  }

  /** Its terminal over a WebSocket. */
  attach(options: AttachOptions = {}): Promise<Attachment> {
    return attach(this.#http, `${this.#path}/attach`, options);
  }
}

/**
 * An exec that is being started. Awaited it is the Exec, iterated its output; `.output()` is the whole of it once it ended:
 * `await sandbox.exec(["ls"]).output()`.
 */
export class StartedExec implements ExecStream, PromiseLike<Exec> {
  readonly #exec: Promise<Exec>;
  readonly #signal: AbortSignal | undefined;

  constructor(exec: Promise<Exec>, signal: AbortSignal | undefined) {
    this.#exec = exec;
    this.#signal = signal;
    // Whoever awaits it is told; nobody listening is not a reason to end the process.
    exec.catch(() => undefined);
  }

  then<A = Exec, B = never>(
    fulfilled?: ((exec: Exec) => A | PromiseLike<A>) | null,
    rejected?: ((reason: unknown) => B | PromiseLike<B>) | null,
  ): Promise<A | B> {
    return this.#exec.then(fulfilled, rejected);
  }

  catch<B = never>(rejected?: ((reason: unknown) => B | PromiseLike<B>) | null): Promise<Exec | B> {
    return this.#exec.catch(rejected);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk, void> {
    yield* (await this.#exec).stream({ signal: this.#signal });
  }

  async wait(options: CallOptions & { timeoutSeconds?: number } = {}): Promise<Outcome> {
    return await (await this.#exec).wait({ signal: this.#signal, ...options });
  }

  async output(options: CallOptions & { maxOutput?: number } = {}): Promise<Result> {
    return await (await this.#exec).output({ signal: this.#signal, ...options });
  }
}

export function startExec(http: Http, sandbox: string, argv: readonly string[], options: ExecOptions): StartedExec {
  const { signal, stdin, ...rest } = options;
  const start = async (): Promise<Exec> => {
    const input = typeof stdin === "boolean" || stdin === undefined ? stdin : fromBytes(stdin);
    const reply = await http.raw("POST", `/v1/sandboxes/${segment(sandbox)}/execs`, {
      json: { argv, ...rest, stdin: input, stream: true },
      creates: true,
      signal,
    });
    return new Exec(http, sandbox, parseExec(reply).exec);
  };
  return new StartedExec(start(), signal);
}

/** What hears of a run while it goes on. */
export interface Listeners {
  onStdout?: (text: string, chunk: Chunk) => void;
  onStderr?: (text: string, chunk: Chunk) => void;
  onResult?: (display: Display) => void;
  onStart?: (exec: string) => void;
}

/** The result out of a stream of events. */
export async function collect(source: AsyncIterable<ExecEvent>, maxOutput = DEFAULT_MAX_OUTPUT, listeners: Listeners = {}): Promise<Result> {
  const streams = { stdout: new Collector(maxOutput), stderr: new Collector(maxOutput) };
  const results: Display[] = [];
  for await (const event of source) {
    switch (event.type) {
      case "start":
        listeners.onStart?.(event.exec);
        break;
      case "output":
        if (event.data.length > 0) streams[event.stream].add(event.data, event.offset);
        (event.stream === "stdout" ? listeners.onStdout : listeners.onStderr)?.(event.text, event);
        break;
      case "result":
        results.push(event.display);
        listeners.onResult?.(event.display);
        break;
      case "end":
        return new Result(event.reply, { out: streams.stdout.output(), err: streams.stderr.output(), results });
    }
  }
  throw new ProtocolError("the stream ended without its end");
}
