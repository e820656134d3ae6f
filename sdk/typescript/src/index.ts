/** carrel from TypeScript: sandboxes whose state persists. `new Carrel()` is where everything begins. */

import { Carrel, type ClientRunOptions } from "./client.js";
import type { Result } from "./result.js";
import type { Sandbox } from "./sandbox.js";
import type { SandboxOptions } from "./types.js";

export { Carrel, type ClientRunOptions, type EventOptions, type ListSandboxes, type Sandboxes, type Scopes, type Tokens } from "./client.js";
export { Sandbox } from "./sandbox.js";
export { Snapshots, type ImportOptions, type RestoreOptions } from "./snapshots.js";
export { Session, type SessionOptions } from "./session.js";
export { Exec, StartedExec, type ExecInfo, type ExecOptions, type ExecStream, type Listeners, type OutputPage, type Stdin } from "./exec.js";
export type { Chunk, ExecEvent, FollowOptions } from "./follow.js";
export type { RunOptions } from "./run.js";
export { Result, type Display, type Image, type Outcome } from "./result.js";
export { Files, type Content, type DownloadOptions, type ReadOptions, type ReplaceOptions, type SearchOptions, type WriteOptions } from "./files.js";
export { Ports, type PortRequest } from "./ports.js";
export { Attachment, type AttachOptions, type Piece } from "./attach.js";
export { Output } from "./bytes.js";
export { Listing, type CallOptions, type ClientOptions } from "./http.js";
export type * from "./types.js";
export * from "./public-errors.js";

let usual: Carrel | undefined;

/** As `new Carrel().sandbox(…)`, with one client for all such calls. */
export function sandbox(name?: string | SandboxOptions, options?: SandboxOptions): Promise<Sandbox> {
  usual ??= new Carrel();
  return usual.sandbox(name, options);
}

/** As `new Carrel().run(…)`. */
export function run(code: string, options?: ClientRunOptions): Promise<Result> {
  usual ??= new Carrel();
  return usual.run(code, options);
}
