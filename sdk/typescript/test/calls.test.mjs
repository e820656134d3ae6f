// Calls and streams against a server that the test writes: what is sent, what is made again, what is never lost or repeated.

import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";

import * as sdk from "carrel-sdk";
import { json, startServer, temporary } from "./helper.mjs";

const SANDBOX = { id: "sbx_1", key: "user:local:a", name: "a", state: "running", labels: {}, limits: {}, enforced: {}, created: true };
const REPLY = { sandbox: "sbx_1", session: "default", exec: "ex_1", exit_code: 0, cause: "exit", session_state: "preserved", exception: null, error: null, receipt: {}, note: null };

/** The same test over TCP and over a unix socket. */
function both(name, body) {
  for (const door of ["tcp", "unix"]) {
    test(`${name} (${door})`, async (t) => {
      const place = temporary();
      t.after(place.remove);
      let sockets = 0;
      const start = async (handler, options) => {
        const server = await startServer(handler, door === "unix" ? join(place.path, `s${sockets++}`) : undefined);
        t.after(server.stop);
        const carrel = new sdk.Carrel({ url: server.url, token: "secret", resumeSeconds: 5, ...options });
        t.after(() => carrel.close());
        return { server, carrel };
      };
      await body(t, start);
    });
  }
}

both("a create is made again with the same key when its connection breaks", async (t, start) => {
  const { server, carrel } = await start((request, response, count) => {
    if (count < 3) response.socket.destroy();
    else json(response, SANDBOX, 201);
  });
  const sandbox = await carrel.sandbox("a", { labels: { a_b: "c" }, idleTimeoutSeconds: 5 });
  assert.equal(sandbox.id, "sbx_1");
  assert.ok(sandbox.created);
  assert.equal(server.seen.length, 3);
  assert.equal(new Set(server.seen.map((one) => one.headers["idempotency-key"])).size, 1);
  assert.match(server.seen[0].headers["idempotency-key"], /^[\x21-\x7e]{1,255}$/);
  assert.equal(server.seen[0].headers.authorization, "Bearer secret");
  assert.deepEqual(JSON.parse(server.seen[0].body), { name: "a", labels: { a_b: "c" }, idle_timeout_seconds: 5 });
});

both("what may not be made twice is not", async (t, start) => {
  const { server, carrel } = await start((request, response) => {
    if (request.url === "/v1/sandboxes") json(response, SANDBOX, 201);
    else response.socket.destroy();
  });
  const sandbox = await carrel.sandbox("a");
  const seen = () => server.seen.length - 1;
  await assert.rejects(sandbox.attach("ex_1").stdin.write("x"), sdk.ConnectionError);
  assert.equal(seen(), 1);
  await assert.rejects(sandbox.files.write("a", "x", { append: true }), sdk.ConnectionError);
  assert.equal(seen(), 2);
  await assert.rejects(sandbox.run("1", { onStdout() {} }), sdk.ConnectionError);
  assert.equal(seen(), 3);
  assert.equal(server.seen.at(-1).headers["idempotency-key"], undefined, "streams take no key");
  await assert.rejects(sandbox.files.write("a", "x"), sdk.ConnectionError);
  assert.ok(seen() > 4, "the whole file again is harmless");
});

both("who asks again while the first request is under way waits for its answer", async (t, start) => {
  const { server, carrel } = await start((request, response, count) => {
    if (count === 1) response.socket.destroy();
    else if (count < 6) json(response, { code: "in_progress", detail: "still under way" }, 409);
    else json(response, { ...SANDBOX }, 201, { "idempotency-replayed": "true" });
  });
  assert.equal((await carrel.sandbox()).id, "sbx_1");
  assert.equal(server.seen.length, 6);
  const { carrel: other } = await start((request, response) => json(response, { code: "conflict", detail: "no" }, 409));
  await assert.rejects(other.sandbox("a"), sdk.ConflictError);
});

both("a daemon that keeps no more keys is asked without one, and then only once", async (t, start) => {
  const { server, carrel } = await start((request, response) => {
    if (request.headers["idempotency-key"] !== undefined) json(response, { code: "too_many", detail: "keys" }, 429);
    else if (request.url === "/v1/sandboxes") json(response, SANDBOX, 201);
    else response.socket.destroy();
  });
  const sandbox = await carrel.sandbox("a");
  await assert.rejects(sandbox.run("1"), sdk.ConnectionError);
  assert.deepEqual(server.seen.map((one) => one.headers["idempotency-key"] !== undefined), [true, false, true, false]);
});

both("a path leads nowhere else", async (t, start) => {
  const { server, carrel } = await start((request, response) => json(response, SANDBOX, request.method === "POST" ? 201 : 200));
  const sandbox = await carrel.sandbox("a");
  for (const id of ["", ".", ".."]) await assert.rejects(carrel.sandboxes.get(id), sdk.InvalidArgumentError);
  await carrel.sandboxes.get("../../x");
  await sandbox.ports.fetch(80, "/../../%2e%2e/../tokens?a=b");
  await sandbox.ports.fetch(80, "//elsewhere/x");
  assert.deepEqual(server.seen.slice(1).map((one) => one.url), ["/v1/sandboxes/..%2F..%2Fx", "/v1/sandboxes/sbx_1/ports/80/tokens?a=b", "/v1/sandboxes/sbx_1/ports/80//elsewhere/x"]);
});

both("errors carry what the daemon said", async (t, start) => {
  const { carrel } = await start((request, response) =>
    json(response, { status: 429, detail: "slow down", code: "rate_limited", hint: "wait", session_state: "none" }, 429, { "retry-after": "3", "x-request-id": "req_9" }),
  );
  await assert.rejects(carrel.sandbox("a"), (error) => error instanceof sdk.RateLimitError && error.retryAfter === 3 && error.hint === "wait" && error.requestId === "req_9" && error.status === 429);
});

both("an abort is the caller's own reason, and at once", async (t, start) => {
  const { carrel } = await start((request, response) => {
    if (request.url === "/v1/sandboxes") json(response, SANDBOX, 201);
    else if (request.url.endsWith("/stream")) {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write('event: start\ndata: {"sandbox":"sbx_1","exec":"ex_1","session":"default"}\n\n');
    }
  });
  const sandbox = await carrel.sandbox("a");
  const reason = new Error("enough");
  const stop = new AbortController();
  const waiting = sandbox.run("1", { signal: stop.signal });
  setImmediate(() => stop.abort(reason));
  await assert.rejects(waiting, (error) => error === reason);
  await assert.rejects(sandbox.metrics({ signal: stop.signal }), (error) => error === reason);
  const later = new AbortController();
  const streaming = sandbox.attach("ex_1").output({ signal: later.signal });
  setTimeout(() => later.abort(reason), 50);
  await assert.rejects(streaming, (error) => error === reason);
});

both("lists ask for the next page when it is needed", async (t, start) => {
  const { server, carrel } = await start((request, response) => {
    const after = Number(new URL(request.url, "http://x").searchParams.get("after") ?? 0);
    json(response, { items: [{ ...SANDBOX, id: `sbx_${after}` }], next: after < 4 ? String(after + 1) : null });
  });
  const all = await carrel.sandboxes.list({ labels: { team: "a", b: "c d" }, prefix: "user:" });
  assert.deepEqual(all.map((one) => one.id), ["sbx_0", "sbx_1", "sbx_2", "sbx_3", "sbx_4"]);
  assert.equal(server.seen[0].url, "/v1/sandboxes?prefix=user%3A&label=team%3Da&label=b%3Dc+d");
  for await (const one of carrel.sandboxes.list()) if (one.id === "sbx_1") break;
  assert.equal(server.seen.length, 7);
});

/** A stream whose server cuts it after `cut(count)` bytes of each reply. */
function scripted(events, cut) {
  return (request, response, count) => {
    if (request.url === "/v1/sandboxes") return json(response, SANDBOX, 201);
    const last = request.headers["last-event-id"];
    const since = last === undefined ? 0 : Number(last.split("/")[2]) + 1;
    const start = ["event: start", `data: ${JSON.stringify({ sandbox: "sbx_1", session: "default", exec: "ex_1" })}`, "", ""].join("\n");
    const text = start + ": still here\n\n" + events.filter((one) => one.chunk === undefined || one.chunk >= since).map((one) => one.text).join("");
    response.writeHead(200, { "content-type": "text/event-stream" });
    const bytes = Buffer.from(text);
    const until = cut(count);
    if (until >= bytes.length) response.end(bytes);
    else if (request.method === "GET") response.write(bytes.subarray(0, until), () => response.socket.destroy());
    else {
      // A run's own connection may break once its id is known; Bun forgets what it had not handed on by then.
      response.write(start);
      setTimeout(() => response.write(bytes.subarray(start.length, until), () => response.socket.destroy()), 50);
    }
    return undefined;
  };
}

function script(payload, size) {
  const events = [];
  for (let at = 0, chunk = 0; at < payload.length; at += size, chunk++) {
    const piece = payload.subarray(at, at + size);
    const data = piece.toString("utf8");
    const value = Buffer.from(data).equals(piece) ? data : { base64: piece.toString("base64") };
    events.push({ chunk, text: `id: sbx_1/ex_1/${chunk}\nevent: stdout\ndata: ${JSON.stringify({ chunk, offset: at, data: value })}\n\n` });
  }
  const chunk = events.length;
  events.push({ chunk, text: `id: sbx_1/ex_1/${chunk}\nevent: result\ndata: ${JSON.stringify({ chunk, kind: "result", mime: { "text/plain": "42" } })}\n\n` });
  events.push({ text: `event: receipt\ndata: {}\n\nevent: end\ndata: ${JSON.stringify(REPLY)}\n\n` });
  return events;
}

both("a stream that breaks anywhere loses no byte and repeats none", async (t, start) => {
  const payload = Buffer.from("zeile grün € 😀\n".repeat(40));
  const events = script(payload, 7);
  let state = 12345;
  const random = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
  const { server, carrel } = await start(scripted(events, (count) => (count > 60 ? Infinity : 100 + Math.floor(random() * 900))));
  const sandbox = await carrel.sandbox("a");
  let text = "";
  const numbers = [];
  const result = await sandbox.run("x", {
    onStdout: (piece, chunk) => {
      text += piece;
      numbers.push(chunk.number);
    },
  });
  assert.equal(text, payload.toString());
  assert.deepEqual(Buffer.from(result.stdoutBytes), payload);
  assert.deepEqual(numbers, numbers.map((_, index) => index));
  assert.equal(result.text, "42");
  assert.equal(result.results.length, 1);
  assert.ok(server.seen.length > 10, `${server.seen.length} connections`);
  const resumed = server.seen.slice(2);
  assert.ok(resumed.every((one) => one.method === "GET" && one.url.startsWith("/v1/sandboxes/sbx_1/execs/ex_1/stream")));
});

both("a server that repeats chunks is not believed, one that left some out is", async (t, start) => {
  const events = [
    { text: 'id: sbx_1/ex_1/0\nevent: stdout\ndata: {"chunk":0,"offset":0,"data":"a"}\n\n' },
    { text: 'id: sbx_1/ex_1/0\nevent: stdout\ndata: {"chunk":0,"offset":0,"data":"a"}\n\n' },
    { text: 'id: sbx_1/ex_1/9\nevent: stdout\ndata: {"chunk":9,"offset":11,"data":{"base64":"w7w="}}\n\n' },
    { text: `event: end\ndata: ${JSON.stringify(REPLY)}\n\n` },
  ];
  const { carrel } = await start(scripted(events, () => Infinity));
  const sandbox = await carrel.sandbox("a");
  const chunks = [];
  for await (const chunk of sandbox.attach("ex_1")) chunks.push([chunk.text, chunk.missing]);
  assert.deepEqual(chunks, [["a", 0], ["ü", 10]]);
  assert.equal((await sandbox.attach("ex_1").output()).out.omitted, 10);
});

both("a stream that cannot be followed says why; one that never heals gives up", async (t, start) => {
  const problem = JSON.stringify({ status: 502, code: "agent_lost", detail: "gone", session_state: "lost" });
  const { carrel } = await start(
    (request, response) => {
      if (request.url === "/v1/sandboxes") json(response, SANDBOX, 201);
      else if (request.url.includes("ex_2")) json(response, { code: "exec_not_found", detail: "no such exec" }, 404);
      else if (request.url.includes("ex_3")) response.socket.destroy();
      else {
        response.writeHead(200, { "content-type": "text/event-stream" });
        response.end(`event: error\ndata: ${problem.replace("502", "409")}\n\n`);
      }
    },
    { resumeSeconds: 0.2 },
  );
  const sandbox = await carrel.sandbox("a");
  await assert.rejects(sandbox.attach("ex_1").output(), (error) => error instanceof sdk.AgentLostError && error.sessionState === "lost");
  await assert.rejects(sandbox.attach("ex_2").output(), sdk.ExecNotFoundError);
  await assert.rejects(sandbox.attach("ex_3").output(), sdk.ConnectionError);
});

both("events go on after the last one, watches say that some may be missing", async (t, start) => {
  const { server, carrel } = await start((request, response) => {
    if (request.url === "/v1/sandboxes") return json(response, SANDBOX, 201);
    response.writeHead(200, { "content-type": "text/event-stream" });
    if (request.url.includes("/watch")) response.write('event: ready\ndata: {}\n\nevent: change\ndata: {"path":"a","kind":"created"}\n\n');
    else {
      const next = Number(request.headers["last-event-id"] ?? 6) + 1;
      response.write(`id: ${next}\nevent: run.finished\ndata: {"exec_id":"x"}\n\n`);
    }
    setImmediate(() => response.socket?.destroy());
    return undefined;
  });
  const ids = [];
  for await (const event of carrel.events({ kind: "run.", since: 6 })) {
    ids.push([event.id, event.kind, event.data.execId]);
    if (ids.length === 3) break;
  }
  assert.deepEqual(ids, [["7", "run.finished", "x"], ["8", "run.finished", "x"], ["9", "run.finished", "x"]]);
  assert.equal(server.seen[0].url, "/v1/events?kind=run.&since=6");
  const kinds = [];
  const sandbox = await carrel.sandbox("a");
  for await (const change of await sandbox.files.watch("d")) {
    kinds.push(change.kind);
    if (kinds.length === 3) break;
  }
  assert.deepEqual(kinds, ["created", "overflow", "created"]);
});

both("a server in the sandbox answers for itself, the daemon for what it cannot reach", async (t, start) => {
  const { server, carrel } = await start((request, response) => {
    if (request.url === "/v1/sandboxes") json(response, SANDBOX, 201);
    else if (request.url.includes("/ports/1/")) json(response, { code: "port_closed", detail: "nothing listens" }, 502);
    else json(response, { code: "mine" }, 418, { "content-security-policy": "sandbox allow-scripts" });
  });
  const sandbox = await carrel.sandbox("a");
  const reply = await sandbox.ports.fetch(8000, "/a?b=c", { method: "POST", body: "x", headers: { "x-mine": "1" } });
  assert.equal(reply.status, 418);
  assert.deepEqual(await reply.json(), { code: "mine" });
  assert.deepEqual([server.seen[1].url, server.seen[1].headers["x-mine"], server.seen[1].body], ["/v1/sandboxes/sbx_1/ports/8000/a?b=c", "1", "x"]);
  await assert.rejects(sandbox.ports.fetch(1), sdk.PortClosedError);
});

test("without a daemon the error says what to do", async (t) => {
  const place = temporary();
  t.after(place.remove);
  const carrel = new sdk.Carrel({ socket: join(place.path, "none.sock") });
  await assert.rejects(carrel.sandbox("a"), (error) => error instanceof sdk.ConnectionError && /carrel serve/.test(error.hint));
  await assert.rejects(new sdk.Carrel({ url: "http://127.0.0.1:1" }).sandbox("a"), sdk.ConnectionError);
  await assert.rejects(new sdk.Carrel({ url: "ftp://x" }).sandbox("a"), sdk.InvalidArgumentError);
});

test("the environment names the daemon", async (t) => {
  const place = temporary();
  t.after(place.remove);
  const kept = { ...process.env };
  t.after(() => Object.assign(process.env, { CARREL_URL: "", CARREL_TOKEN: "", CARREL_SOCKET: "", XDG_RUNTIME_DIR: "" }, kept));
  const server = await startServer((request, response) => json(response, { token: null, usage: {} }));
  t.after(server.stop);
  process.env.CARREL_URL = server.url;
  process.env.CARREL_TOKEN = "from-env";
  await new sdk.Carrel().whoami();
  assert.equal(server.seen[0].headers.authorization, "Bearer from-env");
  const socket = await startServer((request, response) => json(response, { token: null, usage: {} }), join(place.path, "s"));
  t.after(socket.stop);
  process.env.CARREL_URL = "";
  process.env.CARREL_SOCKET = join(place.path, "s");
  const carrel = new sdk.Carrel();
  t.after(() => carrel.close());
  await carrel.whoami();
  assert.equal(socket.seen.length, 1);
});
