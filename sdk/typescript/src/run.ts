/** Running code: at once where nobody listens meanwhile, as a stream where somebody does or it may take long. */

import { collect, type Listeners } from "./exec.js";
import { followExec } from "./follow.js";
import type { CallOptions, Http } from "./http.js";
import { Result } from "./result.js";
import type { Json } from "./wire.js";

/**
 * A longer run is streamed though nobody listens: some platforms give up on a reply that takes more than five minutes to begin,
 * and a stream says every few seconds that it lives. Queueing before the run takes time too, hence well below.
 */
const LONGEST_SILENT_SECONDS = 120;

export interface RunOptions extends CallOptions, Listeners {
  /** The environment whose interpreter runs it: `python`, `node`, `bash`; the sandbox's own unless told. */
  env?: string;
  session?: string;
  timeoutSeconds?: number;
  /** What the result keeps of each output; 1 MB unless told. */
  maxOutput?: number;
  /** A client that goes away, by `signal` too, cancels the run. Else it goes on. */
  cancelOnDisconnect?: boolean;
}

export async function run(http: Http, path: string, code: string, options: RunOptions, more: Json = {}): Promise<Result> {
  const { env, session, timeoutSeconds, maxOutput, cancelOnDisconnect, signal } = options;
  const json = { code, environment: env, session, timeoutSeconds, cancelOnDisconnect, maxOutput, ...more };
  const listened = options.onStdout ?? options.onStderr ?? options.onResult ?? options.onStart;
  if (listened === undefined && (timeoutSeconds ?? 0) <= LONGEST_SILENT_SECONDS) {
    // A call that ends with its connection is not one to make again.
    const reply = await http.raw("POST", path, { json, creates: cancelOnDisconnect !== true, takesMs: (timeoutSeconds ?? LONGEST_SILENT_SECONDS) * 1000, signal });
    return new Result(reply as Json);
  }
  const response = await http.open("POST", path, { json: { ...json, stream: true }, headers: { accept: "text/event-stream" }, signal });
  return await collect(followExec(http, undefined, response, { signal }), maxOutput, options);
}
