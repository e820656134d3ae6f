/**
 * What can go wrong, as classes. Every one is a CarrelError with the daemon's stable `code`, its `hint`, the HTTP `status` and
 * what became of the session. Classes follow codes; a code this version does not know gets the class of its status.
 */

import { isObject } from "./wire.js";
import type { Result } from "./result.js";

/** What became of the state that a call could touch. */
export type SessionState = "preserved" | "rolled_back" | "lost" | "none";

export interface ErrorFields {
  code?: string | undefined;
  /** What to do next. */
  hint?: string | undefined;
  sessionState?: SessionState | undefined;
  /** HTTP status; none where no reply came. */
  status?: number | undefined;
  requestId?: string | undefined;
  retryAfter?: number | undefined;
  cause?: unknown;
}

export class CarrelError extends Error {
  static readonly code: string = "internal";
  readonly code: string;
  readonly hint: string | undefined;
  readonly sessionState: SessionState;
  readonly status: number | undefined;
  /** `X-Request-Id` of the reply: what to look for in the daemon's log. */
  readonly requestId: string | undefined;
  /** Seconds until it is worth asking again, where the daemon said so. */
  readonly retryAfter: number | undefined;

  constructor(message: string, fields: ErrorFields = {}) {
    super(message, fields.cause === undefined ? undefined : { cause: fields.cause });
    this.name = new.target.name;
    this.code = fields.code ?? new.target.code;
    this.hint = fields.hint;
    this.sessionState = fields.sessionState ?? "none";
    this.status = fields.status;
    this.requestId = fields.requestId;
    this.retryAfter = fields.retryAfter;
  }

  override toString(): string {
    const text = `${this.name}: ${this.message} [${this.code}]`;
    return this.hint === undefined ? text : `${text}\nhint: ${this.hint}`;
  }
}

/** 400: the request is wrong as it stands. */
export class InvalidArgumentError extends CarrelError {
  static override readonly code: string = "invalid_argument";
}
/** 401: no token, or one that is not known (any more). */
export class UnauthorizedError extends CarrelError {
  static override readonly code: string = "unauthorized";
}
/** 403: the token may not do this. */
export class ForbiddenError extends CarrelError {
  static override readonly code: string = "forbidden";
}
/** 404. */
export class NotFoundError extends CarrelError {
  static override readonly code: string = "not_found";
}
export class SandboxNotFoundError extends NotFoundError {
  static override readonly code: string = "sandbox_not_found";
}
export class SessionNotFoundError extends NotFoundError {
  static override readonly code: string = "session_not_found";
}
export class ExecNotFoundError extends NotFoundError {
  static override readonly code: string = "exec_not_found";
}
/** 409: not as things stand now. */
export class ConflictError extends CarrelError {
  static override readonly code: string = "conflict";
}
export class AlreadyExistsError extends ConflictError {
  static override readonly code: string = "exists";
}
export class SessionExistsError extends AlreadyExistsError {
  static override readonly code: string = "session_exists";
}
/** The exec has ended, so it takes no input or signal. */
export class ExecEndedError extends ConflictError {
  static override readonly code: string = "exec_ended";
}
/** The sandbox has another environment than the one asked for. */
export class EnvironmentMismatchError extends ConflictError {
  static override readonly code: string = "environment_mismatch";
}
/** Another call kept the interpreter until the time was over. */
export class BusyError extends ConflictError {
  static override readonly code: string = "busy";
}
/** These calls cannot be taken back; the message says why, and how many can. */
export class UndoUnavailableError extends ConflictError {
  static override readonly code: string = "undo_unavailable";
}
/** An earlier call took the interpreter down while this one was waiting. */
export class StateLostError extends ConflictError {
  static override readonly code: string = "state_lost";
}
/** 412: the file is not the one that `ifMatch` names. */
export class PreconditionFailedError extends CarrelError {
  static override readonly code: string = "precondition_failed";
}
/** 413. */
export class TooLargeError extends CarrelError {
  static override readonly code: string = "too_large";
}
/** 422: understood, but not possible here: no such command or interpreter, an operation the box does not have. */
export class UnprocessableError extends CarrelError {
  static override readonly code: string = "unsupported";
}
export class CommandNotFoundError extends UnprocessableError {
  static override readonly code: string = "command_not_found";
}
/** 429: a quota of the token is used up; the message says which and by what. */
export class QuotaError extends CarrelError {
  static override readonly code: string = "quota";
}
/** 429: too many calls; `retryAfter` seconds from now there is room again. */
export class RateLimitError extends CarrelError {
  static override readonly code: string = "rate_limited";
}
/** 5xx. */
export class ServerError extends CarrelError {}
/** 502: the sandbox's agent does not answer. */
export class AgentLostError extends ServerError {
  static override readonly code: string = "agent_lost";
}
/** 502: nothing listens on that port of the sandbox. */
export class PortClosedError extends ServerError {
  static override readonly code: string = "port_closed";
}
/** 503: the daemon shuts down, or this host cannot isolate as asked. */
export class UnavailableError extends ServerError {
  static override readonly code: string = "unavailable";
}
/** 504, or this side waited as long as it was told to. */
export class TimeoutError extends ServerError {
  static override readonly code: string = "timeout";
}
/** 507: the sandbox's workspace is full. */
export class DiskFullError extends ServerError {
  static override readonly code: string = "disk";
}
/** The answer was not one of a carrel daemon. */
export class ProtocolError extends CarrelError {
  static override readonly code: string = "protocol";
}
/** No reply came: there is no daemon, or the connection broke and the call is not one that may be made twice. */
export class ConnectionError extends CarrelError {
  static override readonly code: string = "connection";
}
/** This platform cannot do it: no unix sockets, no files, no WebSocket. */
export class PlatformError extends CarrelError {
  static override readonly code: string = "platform";
}
/** `Result.check` of a call that did not end well; the whole is in `result`. */
export class RunFailedError extends CarrelError {
  static override readonly code: string = "run_failed";
  readonly result: Result;

  constructor(message: string, result: Result, fields: ErrorFields = {}) {
    super(message, { ...fields, sessionState: result.sessionState });
    this.result = result;
  }
}

type ErrorClass = new (message: string, fields?: ErrorFields) => CarrelError;

const BY_CODE = new Map<string, ErrorClass>(
  [
    InvalidArgumentError, UnauthorizedError, ForbiddenError, NotFoundError, SandboxNotFoundError, SessionNotFoundError,
    ExecNotFoundError, ConflictError, AlreadyExistsError, SessionExistsError, ExecEndedError, EnvironmentMismatchError, BusyError,
    UndoUnavailableError, StateLostError, PreconditionFailedError, TooLargeError, UnprocessableError, CommandNotFoundError, QuotaError, RateLimitError,
    AgentLostError, PortClosedError, UnavailableError, TimeoutError, DiskFullError,
  ].map((kind) => [kind.code, kind]),
);

const BY_STATUS = new Map<number, ErrorClass>([
  [400, InvalidArgumentError], [401, UnauthorizedError], [403, ForbiddenError], [404, NotFoundError], [409, ConflictError],
  [412, PreconditionFailedError], [413, TooLargeError], [422, UnprocessableError], [429, RateLimitError], [503, UnavailableError],
  [504, TimeoutError], [507, DiskFullError],
]);

/** More than this of an error's body is not read: a problem document is short. */
const ERROR_BODY_LIMIT = 64 * 1024;
const STATES = new Set<unknown>(["preserved", "rolled_back", "lost", "none"]);

/** The error of a problem document, or of an `error` in a reply, which has `message` for `detail`. */
export function fromProblem(problem: unknown, status?: number, headers?: Headers): CarrelError {
  const fields = isObject(problem) ? problem : {};
  const text = (name: string): string | undefined => {
    const value = fields[name];
    return typeof value === "string" && value !== "" ? value : undefined;
  };
  const found = status ?? (typeof fields["status"] === "number" ? fields["status"] : undefined);
  const code = text("code");
  const message = text("detail") ?? text("message") ?? text("title") ?? `HTTP status ${found}`;
  const kind: ErrorClass =
    BY_CODE.get(code ?? "") ?? BY_STATUS.get(found ?? 0) ?? (found !== undefined && found >= 500 ? ServerError : CarrelError);
  const state = fields["session_state"];
  // A date is allowed by HTTP and never sent by the daemon.
  const after = Number(headers?.get("retry-after") ?? Number.NaN);
  return new kind(message, {
    code,
    hint: text("hint"),
    sessionState: STATES.has(state) ? (state as SessionState) : "none",
    status: found,
    requestId: headers?.get("x-request-id") ?? undefined,
    retryAfter: Number.isFinite(after) ? Math.max(0, after) : undefined,
  });
}

/** The error of a reply, also of one that no carrel daemon wrote (a proxy on the way, say). */
export async function fromResponse(response: Response): Promise<CarrelError> {
  const body = await readStart(response, ERROR_BODY_LIMIT);
  if ((response.headers.get("content-type") ?? "").includes("json")) {
    try {
      const problem: unknown = JSON.parse(body);
      if (isObject(problem)) return fromProblem(problem, response.status, response.headers);
    } catch {
      // Not JSON after all: told as it is, below.
    }
  }
  const start = body.slice(0, 200).trim();
  return fromProblem({ detail: `HTTP status ${response.status}${start && `: ${start}`}` }, response.status, response.headers);
}

async function readStart(response: Response, limit: number): Promise<string> {
  if (response.body === null) return "";
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    while (text.length < limit) {
      const { done, value } = await reader.read();
      if (done) break;
      text += decoder.decode(value, { stream: true });
    }
  } catch {
    // What came so far has to do.
  }
  await reader.cancel().catch(() => undefined);
  return text;
}
