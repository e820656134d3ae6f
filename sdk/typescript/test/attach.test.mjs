// A terminal over a WebSocket, against a server that the test writes. On a platform without WebSocket: that it says so.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { createServer } from "node:http";
import { test } from "node:test";

import * as sdk from "carrel-sdk";
import { internal } from "./internal.mjs";

const { Exec } = await internal("exec.js");
const { Http } = await internal("http.js");
const missing = globalThis.WebSocket === undefined && "this platform has no WebSocket";

/** Speaks just enough of RFC 6455: whole frames, none longer than 64 KiB. `say` sends text or bytes. */
async function startSocketServer(t, serve) {
  const server = createServer((_, response) => response.writeHead(404).end());
  const sockets = new Set();
  server.on("upgrade", (request, socket) => {
    sockets.add(socket);
    socket.on("error", () => undefined);
    const accept = createHash("sha1").update(`${request.headers["sec-websocket-key"]}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
    socket.write(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`);
    const say = (message) => {
      const payload = Buffer.from(message);
      const length = payload.length < 126 ? [payload.length] : [126, payload.length >> 8, payload.length & 255];
      socket.write(Buffer.concat([Buffer.from([typeof message === "string" ? 0x81 : 0x82, ...length]), payload]));
    };
    let rest = Buffer.alloc(0);
    const hear = serve({ request, socket, say });
    socket.on("data", (data) => {
      rest = Buffer.concat([rest, data]);
      for (;;) {
        if (rest.length < 6) return;
        let length = rest[1] & 127;
        let at = 2;
        if (length === 126) {
          length = rest.readUInt16BE(2);
          at = 4;
        }
        if (rest.length < at + 4 + length) return;
        const mask = rest.subarray(at, at + 4);
        const payload = Buffer.from(rest.subarray(at + 4, at + 4 + length).map((byte, index) => byte ^ mask[index % 4]));
        const kind = rest[0] & 15;
        rest = rest.subarray(at + 4 + length);
        if (kind === 8) socket.end(Buffer.from([0x88, 0]));
        else hear(kind === 1 ? payload.toString() : payload);
      }
    });
  });
  server.listen({ port: 0, host: "127.0.0.1" });
  await once(server, "listening");
  t.after(() => {
    for (const socket of sockets) socket.destroy();
    return new Promise((resolve) => server.close(resolve));
  });
  return new Exec(new Http({ url: `http://127.0.0.1:${server.address().port}`, token: "secret" }), "sbx_1", "ex_1");
}

const END = JSON.stringify({ type: "end", outcome: { exec: "ex_1", exit_code: 4, cause: "exit", session_state: "preserved", receipt: {} } });

test("keys go in, output and the end come out", { skip: missing }, async (t) => {
  const heard = [];
  let asked;
  const exec = await startSocketServer(t, ({ request, say }) => {
    asked = request;
    say(JSON.stringify({ type: "chunk", chunk: 3, offset: 10 }));
    const euro = Buffer.from("€");
    say(euro.subarray(0, 1));
    say(euro.subarray(1));
    return (message) => {
      heard.push(typeof message === "string" ? JSON.parse(message) : message.toString());
      if (heard.length === 4) {
        say(Buffer.alloc(1000, "x"));
        say(END);
      }
    };
  });
  const attached = await exec.attach({ since: 3, readOnly: false });
  attached.resize(31, 99);
  attached.write("ls\n");
  attached.signal("INT");
  attached.closeStdin();
  let text = "";
  for await (const piece of attached) text += piece.text;
  assert.equal(text, `€${"x".repeat(1000)}`);
  assert.equal(attached.outcome.exitCode, 4);
  assert.deepEqual(heard, [{ type: "resize", rows: 31, cols: 99 }, "ls\n", { type: "signal", signal: "INT" }, { type: "close_stdin" }]);
  assert.equal(asked.url, "/v1/sandboxes/sbx_1/execs/ex_1/attach?since=3&read_only=false");
  assert.equal(asked.headers.authorization, "Bearer secret");
});

test("a connection that is cut is told, an abort too", { skip: missing }, async (t) => {
  const exec = await startSocketServer(t, ({ say, socket }) => {
    say(Buffer.from("a"));
    return () => socket.destroy();
  });
  const attached = await exec.attach();
  const reading = (async () => {
    for await (const piece of attached) if (piece.text === "a") attached.write("now");
  })();
  await assert.rejects(reading, sdk.ConnectionError);
  const stop = new AbortController();
  const second = await exec.attach({ signal: stop.signal });
  const reason = new Error("enough");
  const waiting = (async () => {
    for await (const piece of second) if (piece.text === "a") stop.abort(reason);
  })();
  await assert.rejects(waiting, (error) => error === reason);
});

test("no server, no attachment", { skip: missing }, async () => {
  const exec = new Exec(new Http({ url: "http://127.0.0.1:1" }), "sbx_1", "ex_1");
  await assert.rejects(exec.attach(), sdk.ConnectionError);
});

test("where it does not work the error says what does", async () => {
  const unix = new Exec(new Http({ socket: "/nowhere" }), "sbx_1", "ex_1");
  await assert.rejects(unix.attach(), (error) => error instanceof sdk.PlatformError && /exec\.stdin/.test(error.hint));
});
