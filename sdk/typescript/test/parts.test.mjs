// The parts that need no daemon: events out of bytes, bytes out of events, errors, spelling.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

import * as sdk from "carrel-sdk";
import { internal } from "./internal.mjs";

const { SseParser, events } = await internal("sse.js");
const { Collector, Output, Utf8Pieces, fromBytes, toBytes, toBase64 } = await internal("bytes.js");
const { fromProblem, fromResponse } = await internal("errors.js");
const { fromWire, toWire } = await internal("wire.js");

const parse = (pieces) => {
  const parser = new SseParser();
  return pieces.flatMap((piece) => [...parser.push(piece)]);
};

test("events do not depend on where the text was cut, nor on how lines end", () => {
  for (const end of ["\n", "\r", "\r\n"]) {
    const text = ["\uFEFF: hello", "event: stdout", "id: sbx_1/ex_1/7", 'data: {"a":1}', "", "", "data:one", "data: two", "unknown: x", "", ": alone", "", "event: cut", "data: off"].join(end);
    const whole = parse([text]);
    assert.deepEqual(whole, [
      { event: "stdout", data: '{"a":1}', id: "sbx_1/ex_1/7" },
      { event: "message", data: "one\ntwo", id: undefined },
    ]);
    for (let at = 0; at <= text.length; at++) assert.deepEqual(parse([text.slice(0, at), text.slice(at)]), whole, `cut at ${at}`);
    assert.deepEqual(parse([...text]), whole);
  }
});

test("characters that are cut in two arrive whole", async () => {
  const bytes = new TextEncoder().encode("data: aé€😀z\n\n");
  for (let at = 0; at <= bytes.length; at++) {
    const body = new ReadableStream({
      start(controller) {
        controller.enqueue(bytes.subarray(0, at));
        controller.enqueue(bytes.subarray(at));
        controller.close();
      },
    });
    const found = [];
    for await (const event of events(body)) found.push(event.data);
    assert.deepEqual(found, ["aé€😀z"]);
    const pieces = new Utf8Pieces();
    assert.equal(pieces.feed(bytes.subarray(0, at)) + pieces.feed(bytes.subarray(at)) + pieces.finish(), "data: aé€😀z\n\n");
  }
});

test("bytes go over JSON and back", () => {
  const binary = Uint8Array.from({ length: 100_000 }, (_, index) => (index * 7) % 256);
  assert.deepEqual(toBytes(fromBytes(binary)), binary);
  assert.equal(fromBytes(new TextEncoder().encode("grün")), "grün");
  assert.equal(toBase64(binary), Buffer.from(binary).toString("base64"));
  assert.throws(() => toBytes({ base64: "?" }), sdk.ProtocolError);
  assert.throws(() => toBytes(7), sdk.ProtocolError);
});

test("a collector keeps head and tail and counts the rest exactly", () => {
  for (const step of [1, 3, 7, 100, 1000]) {
    const all = Uint8Array.from({ length: 1000 }, (_, index) => index % 251);
    const collector = new Collector(101);
    for (let at = 0; at < all.length; at += step) collector.add(all.subarray(at, at + step), at);
    const output = collector.output();
    assert.deepEqual(output.head, all.slice(0, 51));
    assert.deepEqual(output.tail, all.slice(950));
    assert.equal(output.omitted, 1000 - 101);
    assert.match(output.text, /\[… 899 bytes left out …\]/);
  }
  const whole = new Collector(10);
  whole.add(new TextEncoder().encode("0123456789"), 0);
  assert.equal(whole.output().text, "0123456789");
  const hole = new Collector(100);
  assert.equal(hole.add(new TextEncoder().encode("ab"), 0), 0);
  assert.equal(hole.add(new TextEncoder().encode("yz"), 24), 22);
  assert.equal(hole.output().omitted, 22);
  assert.equal(new Output().text, "");
  assert.equal(Output.parse({ head: "a", tail: { base64: "/w==" }, omitted_bytes: 5 }).bytes.at(-1), 0xff);
});

test("errors are classes by code, then by status", async () => {
  const error = fromProblem({ status: 409, detail: "there", code: "session_exists", hint: "take it", session_state: "preserved" });
  assert.ok(error instanceof sdk.SessionExistsError && error instanceof sdk.ConflictError && error instanceof sdk.CarrelError);
  assert.deepEqual([error.code, error.hint, error.sessionState, error.status, error.name], ["session_exists", "take it", "preserved", 409, "SessionExistsError"]);
  assert.match(String(error), /there \[session_exists\]\nhint: take it/);
  const busy = fromProblem({ code: "rate_limited" }, 429, new Headers({ "retry-after": "7", "x-request-id": "r1" }));
  assert.ok(busy instanceof sdk.RateLimitError);
  assert.deepEqual([busy.retryAfter, busy.requestId], [7, "r1"]);
  assert.ok(fromProblem({ code: "quota" }, 429) instanceof sdk.QuotaError);
  assert.ok(fromProblem({ code: "brand_new" }, 404) instanceof sdk.NotFoundError);
  assert.equal(fromProblem({ code: "brand_new" }, 404).code, "brand_new");
  assert.ok(fromProblem({}, 599) instanceof sdk.ServerError);
  const page = await fromResponse(new Response("<h1>Bad Gateway</h1>", { status: 502, headers: { "content-type": "text/html" } }));
  assert.match(page.message, /HTTP status 502: <h1>Bad/);
  const broken = await fromResponse(new Response("{oops", { status: 500, headers: { "content-type": "application/problem+json" } }));
  assert.match(broken.message, /HTTP status 500/);
});

test("spelling changes, a caller's own keys do not", () => {
  assert.deepEqual(toWire({ timeoutSeconds: 1, gone: undefined, env: { myVar: "x" }, labels: { a_b: "c" }, limits: { cpuMillis: 5 } }), {
    timeout_seconds: 1, env: { myVar: "x" }, labels: { a_b: "c" }, limits: { cpu_millis: 5 },
  });
  assert.deepEqual(fromWire({ exit_code: 1, labels: { a_b: "c" }, items: [{ mtime_ns: 1 }] }), { exitCode: 1, labels: { a_b: "c" }, items: [{ mtimeNs: 1 }] });
});

test("a result says what went wrong when it is checked", () => {
  const receipt = { duration_us: 1 };
  const base = { sandbox: "s", session: "default", exec: "ex_1", cause: "exit", session_state: "preserved", stdout: "", stderr: "", results: [], receipt };
  const fine = new sdk.Result({ ...base, exit_code: 0, results: [{ kind: "display", mime: { "image/png": "iVBORw==", "text/plain": "<plot>" } }, { kind: "result", mime: { "text/plain": "42" } }] });
  assert.equal(fine.check().text, "42");
  assert.deepEqual([...fine.png], [0x89, 0x50, 0x4e, 0x47]);
  assert.equal(fine.receipt.durationUs, 1);
  const failed = new sdk.Result({ ...base, exit_code: 1, exception: { name: "NameError", message: "no x" } });
  assert.throws(() => failed.check(), (error) => error instanceof sdk.RunFailedError && error.message === "NameError: no x" && error.result === failed);
  const late = new sdk.Result({ ...base, exit_code: 124, cause: "timeout", error: { code: "timeout", message: "too long", hint: "more time" } });
  assert.throws(() => late.check(), (error) => error.code === "timeout" && error.hint === "more time" && error.cause instanceof sdk.TimeoutError);
  const exit = new sdk.Result({ ...base, exit_code: 3, stderr: "one\ntwo\n" });
  assert.throws(() => exit.check(), /exit code 3: two/);
});

test("loading the package touches none of Node's modules", () => {
  const lazily = new Set(["unix.js", "trees.js"]);
  const folder = new URL("./node_modules/carrel-sdk/dist/", import.meta.url);
  for (const name of readdirSync(folder).filter((one) => one.endsWith(".js") && !lazily.has(one))) {
    const text = readFileSync(new URL(name, folder), "utf8");
    assert.doesNotMatch(text, /^import .*"(node:|\.\/(unix|trees)\.js)/m, name);
  }
});
