/** What the API takes and answers with, in JavaScript's spelling. Sizes are bytes, times seconds or milliseconds since 1970. */

import type { CallOptions } from "./http.js";

/** Limits of a sandbox; `cpuMillis` 2000 is two CPUs. */
export interface Limits {
  cpuMillis?: number;
  memory?: number;
  pids?: number;
  disk?: number;
  output?: number;
  execs?: number;
}

/** What a sandbox is made with; it matters only when it is not there yet. */
export interface SandboxSettings {
  labels?: Record<string, string>;
  limits?: Limits;
  idleTimeoutSeconds?: number;
  maxLifetimeSeconds?: number;
  /** Into standby when idle for so long; 0: never. */
  standbyAfterSeconds?: number;
  /** Hibernated when idle for so long; 0: never. */
  hibernateAfterSeconds?: number;
  /** How many calls can be taken back; 0 turns it off. */
  undoCalls?: number;
}

/** Which sandbox is meant, and how it is made. Nothing: a new one without a key. */
export interface SandboxOptions extends SandboxSettings, CallOptions {
  /** `scope:owner:name`. */
  key?: string;
  name?: string;
  workflowRun?: string;
  agentRun?: string;
  /** With `workflowRun` or `agentRun`: `default` unless told; `isolated` is a fresh one of that run. */
  session?: string;
  environment?: string;
  /** A sandbox spec: an object, YAML, or the text of an agent file with front matter. */
  spec?: string | Record<string, unknown>;
}

/** How a limit is held: by what, and what is missing or coarser. */
export interface Enforced {
  by: string;
  detail?: string;
}

export interface SandboxInfo {
  id: string;
  key: string | null;
  name: string | null;
  state: string;
  environment: string | null;
  isolation: string;
  labels: Record<string, string>;
  limits: Limits;
  enforced: Record<string, Enforced>;
  idleTimeoutSeconds: number | null;
  maxLifetimeSeconds: number | null;
  standbyAfterSeconds: number | null;
  hibernateAfterSeconds: number | null;
  /** Of a hibernated one. */
  imageBytes: number | null;
  /** Why it stays in standby though it is idle for long enough to be hibernated. */
  standbyReason: string | null;
  undoCalls?: number;
  createdUnixMs: number;
  usedUnixMs: number;
  closeAtUnixMs: number | null;
  /** Only in the answer to making or finding it. */
  created?: boolean;
  /** What a person would be told: what had become of it, say. */
  note?: string | null;
}

/** What became of files with calls that were taken back. */
export type FilesState = "restored" | "kept";

/** What `undo` has brought. */
export interface Undone {
  sandbox: string;
  session: string;
  language: string;
  /** So many calls were taken back. */
  calls: number;
  /** So many more can be. */
  kept: number;
  /** Sockets, pipes and the like that were open in that state and are closed now. */
  closedHandles: number;
  /** Whether files are as before those calls, or as the calls left them. */
  filesState: FilesState;
  /** Why they did not go back. */
  filesReason: string | null;
}

/** A saved sandbox. Without `memory` it has only files, and `reason` says why. */
export interface Snapshot {
  id: string;
  /** What it is of, which may be gone. */
  sandbox: string;
  key: string | null;
  /** The snapshot that the sandbox came from, or that was taken of it before. */
  parent: string | null;
  tags: string[];
  madeUnixMs: number;
  bytes: number;
  memory: boolean;
  reason: string | null;
  environment: string;
}

/** `count` is of all of them, `files` has the first 1000. */
export interface ComparedFiles {
  count: number;
  files: { path: string; kind: string; size: number }[];
}

/** What has become of files. */
export interface Diff {
  added: ComparedFiles;
  changed: ComparedFiles;
  removed: ComparedFiles;
}

/** What a fork took: its time after the copy, and what it holds of its own on disk and in memory. */
export interface ForkCost {
  durationMs: number;
  diskBytes: number;
  memoryBytes: number;
}

export interface SandboxMetrics {
  memory: number | null;
  peakMemory: number | null;
  cpuUs: number | null;
  processes: number | null;
  diskUsed: number | null;
  diskLimit: number | null;
  uptimeMs: number | null;
  idleMs: number | null;
  running: number | null;
}

export interface SessionInfo {
  name: string;
  cwd: string;
  env: Record<string, string>;
  interpreters: string[];
  openedUnixMs: number;
}

/** What changed below `/workspace` during a call. Names are capped, counts are exact. */
export interface FileChanges {
  added: string[];
  changed: string[];
  removed: string[];
  addedCount: number;
  changedCount: number;
  removedCount: number;
  /** False: `reason` says why not all of it is known. */
  complete: boolean;
  reason: string | null;
  /** Other calls ran meanwhile: what they changed is among it. */
  shared: boolean;
}

/** What a call used and did. */
export interface Receipt {
  durationUs: number;
  cpuUs: number;
  peakMemory: number;
  /** Of the call, still running. */
  processes: number;
  stdoutBytes: number;
  stderrBytes: number;
  /** Produced, but not kept because of the sandbox's output limit. */
  outputDropped: number;
  exitCode: number;
  cause: Cause | null;
  files: FileChanges;
  /** The first of the processes that still run. */
  running: { pid: number; command: string }[];
  /** What listens in the sandbox at the end of the call. */
  ports: { port: number; address: string }[];
  hosts: { reached: string[]; refused: string[] };
}

export interface Variable {
  name: string;
  type: string;
  shape?: string;
  size?: number;
  value?: string;
}

/** Where a session stands. */
export interface SessionBrief {
  session: string;
  cwd: string;
  ageMs: number;
  interpreters: {
    language: string;
    state: "idle" | "busy" | "starting" | "silent";
    exec: string | null;
    busyMs: number | null;
    waiting: number;
    cwd: string | null;
    variables: Variable[];
    variablesTotal: number;
    partial: boolean;
  }[];
  environment: { set: string[]; unset: string[]; setTotal: number; unsetTotal: number };
  jobs: { exec: string | null; pid: number | null; command: string }[];
  jobsTotal: number;
  ports: { port: number; address: string }[];
  portsTotal: number;
  files: FileChanges;
  errors: { exec: string; name: string; message: string }[];
  left: {
    memory: number;
    memoryLimit: number;
    disk: number;
    diskLimit: number;
    pids: number;
    pidsLimit: number;
    lifetimeMs: number;
    output: number;
  };
}

export interface Brief {
  sandbox: string;
  brief: SessionBrief;
  /** The same in words, at most 1 KB: for a model. */
  text: string;
  /** What had become of the sandbox, if anything. */
  note: string | null;
}

export type Cause = "exit" | "signal" | "oom" | "pids" | "disk" | "timeout" | "cancelled";

/** An exception of the code that ran, in short; the traceback is in stderr. */
export interface CodeException {
  name: string;
  message: string;
}

/** `kind`: `file`, `dir`, `symlink`, `fifo`, `socket` or `device`. */
export interface Entry {
  name: string;
  kind: string;
  size: number;
  mode: number;
  /** Milliseconds since 1970; nanoseconds are more than a number holds. */
  mtimeMs: number;
  /** Of a symlink. */
  target: string | undefined;
}

/** A file that was written. */
export interface Written extends Entry {
  etag: string | undefined;
  created: boolean;
}

export interface Match {
  path: string;
  line?: number;
  text?: string;
}

/** `complete` is false where a limit was reached; `skipped` counts files that were not looked into, by reason. */
export interface Found {
  matches: Match[];
  filesSearched: number;
  skipped: Record<string, number>;
  complete: boolean;
}

export interface Replaced {
  files: { path: string; count: number }[];
  count: number;
  skipped: Record<string, number>;
  complete: boolean;
}

/** What an upload or download moved, and what it left out and why. */
export interface Transferred {
  files: number;
  directories: number;
  links: number;
  bytes: number;
  /** The first ones; `leftOutCount` has all. */
  leftOut: { path: string; why: string }[];
  leftOutCount: number;
}

/** A change below a watched directory; `overflow` says that some were missed and the directory should be read again. */
export interface Change {
  kind: "created" | "changed" | "removed" | "moved" | "overflow";
  path: string;
  /** Of a move. */
  from: string | undefined;
}

export interface Port {
  port: number;
  address: string;
}

/** A link that reaches one port and nothing else. `url` is undefined where the daemon is only to be had by a unix socket. */
export interface Share {
  path: string;
  url: string | undefined;
  expiresUnixMs: number;
}

export interface Environment {
  name: string;
  source: "preset" | "artifact";
  language: string | null;
  available: boolean;
  why: string | null;
}

/** Something that happened. `kind` is `gap` where some are no longer kept; `id` resumes after it. */
export interface CarrelEvent {
  id: string | undefined;
  kind: string;
  data: Record<string, unknown>;
}

export interface ScopeClosed {
  closed: string[];
  closingAtUnixMs: number | null;
}

/** What a token may use in all; `rate` is calls per second. */
export interface Quota {
  sandboxes?: number;
  cpuMillis?: number;
  memory?: number;
  disk?: number;
  rate?: number;
}

export interface Token {
  id: string;
  name: string | null;
  scope: string[];
  quota: Quota;
  expiresUnixMs: number | null;
  /** The secret itself: only in the answer to `create`. */
  token?: string;
}

export interface Whoami {
  /** null: the operator. */
  token: Token | null;
  usage: Record<string, number>;
}
