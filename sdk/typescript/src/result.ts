/** How a run or exec ended, as values. */

import { fromBase64, encode, Output, toBytes } from "./bytes.js";
import { RunFailedError, fromProblem, type CarrelError, type SessionState } from "./errors.js";
import type { Cause, CodeException, FilesState, Receipt } from "./types.js";
import { fromWire, isObject, type Json } from "./wire.js";

/** A value that was shown, in every form it offers. `kind`: `result` (the last expression's) or `display`. */
export interface Display {
  kind: string;
  /** By media type; binary ones as base64. */
  mime: Record<string, unknown>;
}

export interface Image {
  mime: string;
  data: Uint8Array<ArrayBuffer>;
}

export interface Outcome {
  exec: string;
  exitCode: number;
  cause: Cause;
  signal: number | undefined;
  sessionState: SessionState;
  exception: CodeException | undefined;
  /** When something other than the code's own exit ended it. */
  error: CarrelError | undefined;
  receipt: Receipt;
  /** Whether a call that takes the interpreter down leaves the session as before; undefined where undo is off. */
  transactional: boolean | undefined;
  transactionalReason: string | undefined;
  /** With `rolled_back`: how many calls were taken back, this one included. */
  takenBack: number | undefined;
  /** With `rolled_back`: whether files went back too, and why not. */
  filesState: FilesState | undefined;
  filesReason: string | undefined;
}

export function parseOutcome(value: unknown): Outcome | undefined {
  if (!isObject(value)) return undefined;
  const problem = value["problem"] ?? value["error"];
  return {
    exec: String(value["exec"] ?? ""),
    exitCode: Number(value["exit_code"]),
    cause: value["cause"] as Cause,
    signal: typeof value["signal"] === "number" ? value["signal"] : undefined,
    sessionState: (value["session_state"] ?? "none") as SessionState,
    exception: (value["exception"] ?? undefined) as CodeException | undefined,
    error: problem ? fromProblem(problem) : undefined,
    receipt: fromWire<Receipt>(value["receipt"] ?? {}),
    transactional: typeof value["transactional"] === "boolean" ? value["transactional"] : undefined,
    transactionalReason: typeof value["transactional_reason"] === "string" ? value["transactional_reason"] : undefined,
    takenBack: typeof value["taken_back"] === "number" ? value["taken_back"] : undefined,
    filesState: (value["files_state"] ?? undefined) as FilesState | undefined,
    filesReason: typeof value["files_reason"] === "string" ? value["files_reason"] : undefined,
  };
}

/** A run or exec that has ended, with its output. */
export class Result {
  readonly sandbox: string;
  readonly session: string;
  readonly exec: string;
  readonly environment: string | undefined;
  readonly language: string | undefined;
  readonly exitCode: number;
  readonly cause: Cause;
  readonly sessionState: SessionState;
  readonly out: Output;
  readonly err: Output;
  readonly results: readonly Display[];
  readonly exception: CodeException | undefined;
  /** When something other than the code's own exit ended it: a timeout, say. */
  readonly error: CarrelError | undefined;
  readonly receipt: Receipt;
  readonly transactional: boolean | undefined;
  readonly transactionalReason: string | undefined;
  readonly takenBack: number | undefined;
  readonly filesState: FilesState | undefined;
  readonly filesReason: string | undefined;
  /** What a person would be told: that the sandbox had ended before, say. */
  readonly note: string | undefined;

  /** Of a reply; of the `end` of a stream, which comes without the output, with what was collected. */
  constructor(reply: Json, collected?: { out: Output; err: Output; results: Display[] }) {
    const text = (name: string): string | undefined => (typeof reply[name] === "string" ? reply[name] : undefined);
    const outcome = parseOutcome(reply) as Outcome;
    this.sandbox = text("sandbox") ?? "";
    this.session = text("session") ?? "";
    this.exec = outcome.exec;
    this.environment = text("environment");
    this.language = text("language");
    this.exitCode = outcome.exitCode;
    this.cause = outcome.cause;
    this.sessionState = outcome.sessionState;
    this.out = collected?.out ?? Output.parse(reply["stdout"]);
    this.err = collected?.err ?? Output.parse(reply["stderr"]);
    this.results = collected?.results ?? ((reply["results"] ?? []) as Display[]);
    this.exception = outcome.exception;
    this.error = outcome.error;
    this.receipt = outcome.receipt;
    this.transactional = outcome.transactional;
    this.transactionalReason = outcome.transactionalReason;
    this.takenBack = outcome.takenBack;
    this.filesState = outcome.filesState;
    this.filesReason = outcome.filesReason;
    this.note = text("note");
  }

  get ok(): boolean {
    return this.exitCode === 0 && this.cause === "exit" && this.error === undefined;
  }

  /** As text; bytes that are not UTF-8 become U+FFFD. What was left out is named in its place. */
  get stdout(): string {
    return this.out.text;
  }

  get stderr(): string {
    return this.err.text;
  }

  get stdoutBytes(): Uint8Array<ArrayBuffer> {
    return this.out.bytes;
  }

  get stderrBytes(): Uint8Array<ArrayBuffer> {
    return this.err.bytes;
  }

  /** The value of the last expression as text; undefined if there was none. */
  get text(): string | undefined {
    const shown = this.results.findLast((one) => one.kind === "result" && typeof one.mime["text/plain"] === "string");
    return shown?.mime["text/plain"] as string | undefined;
  }

  get images(): Image[] {
    return this.results.flatMap((shown) =>
      Object.entries(shown.mime)
        .filter(([mime]) => mime.startsWith("image/"))
        .map(([mime, value]) => ({ mime, data: imageBytes(mime, value) })),
    );
  }

  /** The last PNG that was shown; undefined if there was none. */
  get png(): Uint8Array<ArrayBuffer> | undefined {
    return this.images.findLast((image) => image.mime === "image/png")?.data;
  }

  /** Itself if all went well, else a RunFailedError. */
  check(): this {
    if (this.ok) return this;
    if (this.error !== undefined) {
      throw new RunFailedError(this.error.message, this, { code: this.error.code, hint: this.error.hint, cause: this.error });
    }
    if (this.exception !== undefined) {
      throw new RunFailedError([this.exception.name, this.exception.message].filter(Boolean).join(": "), this);
    }
    const what = this.cause === "exit" ? `exit code ${this.exitCode}` : `ended by ${this.cause}`;
    const last = this.stderr.trimEnd().split("\n").at(-1);
    throw new RunFailedError(last ? `${what}: ${last}` : what, this);
  }
}

function imageBytes(mime: string, value: unknown): Uint8Array<ArrayBuffer> {
  // Binary forms are base64, as in Jupyter; SVG is text.
  if (typeof value !== "string") return toBytes(value);
  return mime.includes("svg") ? encode(value) : fromBase64(value);
}
