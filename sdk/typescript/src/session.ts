/** A line of work inside a sandbox: its own processes, working directory, environment variables and interpreters. */

import { startExec, type ExecOptions, type StartedExec } from "./exec.js";
import { segment, type CallOptions, type Http } from "./http.js";
import type { Result } from "./result.js";
import { run, type RunOptions } from "./run.js";
import type { SessionInfo, Undone } from "./types.js";

export interface SessionOptions extends CallOptions {
  cwd?: string;
  env?: Record<string, string>;
  /** How many calls can be taken back, of a session that is opened. */
  undoCalls?: number;
}

export class Session {
  readonly #http: Http;
  readonly #path: string;
  readonly name: string;

  constructor(
    http: Http,
    readonly sandbox: string,
    /** As the daemon described it last. */
    public info: SessionInfo,
  ) {
    this.#http = http;
    this.name = info.name;
    this.#path = `/v1/sandboxes/${segment(sandbox)}/sessions/${segment(info.name)}`;
  }

  run(code: string, options: Omit<RunOptions, "session"> = {}): Promise<Result> {
    return run(this.#http, `/v1/sandboxes/${segment(this.sandbox)}/run`, code, { ...options, session: this.name });
  }

  exec(argv: readonly string[], options: Omit<ExecOptions, "session"> = {}): StartedExec {
    return startExec(this.#http, this.sandbox, argv, { ...options, session: this.name });
  }

  /** Takes back its last calls. */
  undo(calls = 1, options: CallOptions & { language?: string } = {}): Promise<Undone> {
    const { signal, language } = options;
    const json = { calls, session: this.name, language };
    return this.#http.json<Undone>("POST", `/v1/sandboxes/${segment(this.sandbox)}/undo`, { json, creates: true, signal });
  }

  /** Sets variables, and unsets those that are null; interpreters that run know them too. */
  async setEnv(env: Record<string, string | null>, options: CallOptions = {}): Promise<SessionInfo> {
    this.info = await this.#http.json<SessionInfo>("PATCH", this.#path, { json: { env }, again: true, signal: options.signal });
    return this.info;
  }

  async refresh(options: CallOptions = {}): Promise<SessionInfo> {
    this.info = await this.#http.json<SessionInfo>("GET", this.#path, options);
    return this.info;
  }

  /** Ends everything in it. */
  async delete(options: CallOptions = {}): Promise<void> {
    await this.#http.empty("DELETE", this.#path, options);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.delete();
  }
}
