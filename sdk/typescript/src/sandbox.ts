/** One sandbox: run code, start commands, reach its files and ports, close it. */

import { SandboxNotFoundError, SessionExistsError } from "./errors.js";
import { Exec, parseExec, startExec, type ExecInfo, type ExecOptions, type StartedExec } from "./exec.js";
import { Files } from "./files.js";
import { Listing, segment, type CallOptions, type Http } from "./http.js";
import { Ports } from "./ports.js";
import type { Result } from "./result.js";
import { run, type RunOptions } from "./run.js";
import { Session, type SessionOptions } from "./session.js";
import type { Brief, ForkCost, SandboxInfo, SandboxMetrics, SandboxSettings, SessionInfo, Snapshot, Undone } from "./types.js";

export class Sandbox {
  readonly #http: Http;
  readonly #path: string;
  readonly id: string;
  readonly files: Files;
  readonly ports: Ports;
  /** Of a fork. */
  cost: ForkCost | undefined;

  constructor(
    http: Http,
    /** As the daemon described it last; `refresh` asks again. */
    public info: SandboxInfo,
  ) {
    this.#http = http;
    this.id = info.id;
    this.#path = `/v1/sandboxes/${segment(info.id)}`;
    this.files = new Files(http, info.id);
    this.ports = new Ports(http, info.id);
  }

  get key(): string | null {
    return this.info.key;
  }

  get name(): string | null {
    return this.info.name;
  }

  /** Whether the call that gave this made it; false: it was there. */
  get created(): boolean {
    return this.info.created === true;
  }

  /** Runs code; variables, imports and definitions are still there at the next call. How it ended is in the result. */
  run(code: string, options: RunOptions = {}): Promise<Result> {
    return run(this.#http, `${this.#path}/run`, code, options);
  }

  /**
   * Starts a command. Awaited it is the Exec, iterated its output as it comes, and `.output()` waits for all of it:
   * `const { exitCode, stdout } = await sandbox.exec(["ls"]).output()`.
   */
  exec(argv: readonly string[], options: ExecOptions = {}): StartedExec {
    return startExec(this.#http, this.id, argv, options);
  }

  /** An exec or run by its id, also one that another process started. */
  attach(exec: string): Exec {
    return new Exec(this.#http, this.id, exec);
  }

  /** Execs and runs, newest last. */
  execs(options: CallOptions = {}): Listing<ExecInfo> {
    return new Listing(async (after) => {
      const page = (await this.#http.raw("GET", `${this.#path}/execs`, { query: { after }, signal: options.signal })) as { items: unknown[]; next: string | null };
      return { items: page.items.map(parseExec), next: page.next };
    });
  }

  /** The session of that name; made if it is not there, else given the variables too. */
  async session(name: string, options: SessionOptions = {}): Promise<Session> {
    const { signal, cwd, env, undoCalls } = options;
    try {
      const info = await this.#http.json<SessionInfo>("POST", `${this.#path}/sessions`, { json: { name, cwd, env, undoCalls }, creates: true, signal });
      return new Session(this.#http, this.id, info);
    } catch (error) {
      if (!(error instanceof SessionExistsError)) throw error;
    }
    const path = `${this.#path}/sessions/${segment(name)}`;
    const session = new Session(this.#http, this.id, await this.#http.json<SessionInfo>("GET", path, { signal }));
    if (env !== undefined && Object.keys(env).length > 0) await session.setEnv(env, { signal });
    return session;
  }

  sessions(options: CallOptions = {}): Listing<Session> {
    return new Listing(async (after) => {
      const page = await this.#http.json<{ items: SessionInfo[]; next: string | null }>("GET", `${this.#path}/sessions`, { query: { after }, signal: options.signal });
      return { items: page.items.map((info) => new Session(this.#http, this.id, info)), next: page.next };
    });
  }

  /** Where a session stands: variables, jobs, ports, files, errors, limits. Runs none of its code and waits for no call. */
  brief(session = "default", options: CallOptions = {}): Promise<Brief> {
    return this.#http.json<Brief>("GET", `${this.#path}/brief`, { query: { session }, signal: options.signal });
  }

  /** Takes back the last calls of the interpreter that ran last, or of `language`: variables are as before them, files stay. */
  undo(calls = 1, options: CallOptions & { session?: string; language?: string } = {}): Promise<Undone> {
    const { signal, session, language } = options;
    return this.#http.json<Undone>("POST", `${this.#path}/undo`, { json: { calls, session, language }, creates: true, signal });
  }

  metrics(options: CallOptions = {}): Promise<SandboxMetrics> {
    return this.#http.json<SandboxMetrics>("GET", `${this.#path}/metrics`, options);
  }

  /** Does not wake it. */
  async refresh(options: CallOptions = {}): Promise<SandboxInfo> {
    this.info = await this.#http.json<SandboxInfo>("GET", this.#path, options);
    return this.info;
  }

  /** Changes limits, labels and timeouts; what cannot be changed in place is refused, and nothing is changed. */
  async update(settings: Omit<SandboxSettings, "undoCalls"> & CallOptions): Promise<SandboxInfo> {
    const { signal, ...json } = settings;
    this.info = await this.#http.json<SandboxInfo>("PATCH", this.#path, { json, again: true, signal });
    return this.info;
  }

  /** Frozen: it keeps its memory, and any call wakes it. */
  async standby(options: CallOptions = {}): Promise<SandboxInfo> {
    this.info = await this.#http.json<SandboxInfo>("POST", `${this.#path}/standby`, { again: true, signal: options.signal });
    return this.info;
  }

  /** On disk: it holds no memory, and any call restores it. */
  async hibernate(options: CallOptions = {}): Promise<SandboxInfo> {
    this.info = await this.#http.json<SandboxInfo>("POST", `${this.#path}/hibernate`, { again: true, signal: options.signal });
    return this.info;
  }

  /** Alive again; `info.note` says what had become of it. */
  async wake(options: CallOptions = {}): Promise<SandboxInfo> {
    this.info = await this.#http.json<SandboxInfo>("POST", `${this.#path}/wake`, { again: true, signal: options.signal });
    return this.info;
  }

  /** Saves it: files, and everything that lives in it. It goes on. */
  snapshot(options: CallOptions & { tags?: string[]; filesOnly?: boolean } = {}): Promise<Snapshot> {
    const { signal, ...json } = options;
    return this.#http.json<Snapshot>("POST", `${this.#path}/snapshots`, { json, creates: true, signal });
  }

  /** Copies of it with interpreters, variables and files as they are; `cost` of each says what it took. All of them or none. */
  async fork(count = 1, options: CallOptions = {}): Promise<Sandbox[]> {
    const call = { json: { count }, creates: true, signal: options.signal };
    const { forks } = await this.#http.json<{ forks: ({ sandbox: SandboxInfo } & ForkCost)[] }>("POST", `${this.#path}/fork`, call);
    return forks.map(({ sandbox, ...cost }) => Object.assign(new Sandbox(this.#http, sandbox), { cost }));
  }

  /** This fork takes the key of what it was forked from, which gets this one's. */
  async adopt(options: CallOptions = {}): Promise<SandboxInfo> {
    this.info = await this.#http.json<SandboxInfo>("POST", `${this.#path}/adopt`, options);
    return this.info;
  }

  /** Ends its processes and removes its files; with `deleteWorkspace: false` they stay, and the next call brings it back over them. Closing twice is fine. */
  async close(options: CallOptions & { deleteWorkspace?: boolean } = {}): Promise<void> {
    const { signal, deleteWorkspace } = options;
    try {
      await this.#http.empty("DELETE", this.#path, { query: { deleteWorkspace }, again: true, signal });
    } catch (error) {
      if (!(error instanceof SandboxNotFoundError)) throw error;
    }
  }

  /** `await using sandbox = …` closes it. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
