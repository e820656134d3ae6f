// What the tests share: a daemon of their own, a server that says what a test tells it, and a proxy that cuts connections.

import { spawn, execFileSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { connect, createServer as createTcpServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

import { Carrel } from "carrel-sdk";

export function temporary() {
  const path = mkdtempSync(join(tmpdir(), "carrel-ts-"));
  return { path, remove: () => rmSync(path, { recursive: true, force: true }) };
}

/** A daemon with a state directory of its own, on a unix socket and on TCP. `stop` closes its sandboxes first: they would outlive it. */
export async function startDaemon() {
  const binary = process.env.CARREL_BIN;
  if (!binary) throw new Error("CARREL_BIN names no carrel");
  const place = temporary();
  const state = join(place.path, "state");
  const socket = join(place.path, "carrel.sock");
  const token = execFileSync(binary, ["--state", state, "token", "create", "--name", "t"], { encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] }).trim();
  const daemon = { socket, token, state, url: undefined, child: undefined };
  daemon.start = async (listen = "127.0.0.1:0") => {
    const child = spawn(binary, ["--state", state, "serve", "--socket", socket, "--listen", listen], { stdio: ["ignore", "ignore", "pipe"] });
    daemon.child = child;
    const said = [];
    let unix = false;
    daemon.url = undefined;
    await new Promise((resolve, reject) => {
      createInterface({ input: child.stderr }).on("line", (line) => {
        said.push(line);
        daemon.url ??= /listening on (http:\/\/\S+)/.exec(line)?.[1];
        unix ||= line.includes("listening on unix:");
        if (daemon.url && unix) resolve();
      });
      child.once("exit", (code) => reject(new Error(`the daemon ended with ${code}:\n${said.join("\n")}`)));
      child.once("error", reject);
    });
  };
  daemon.kill = async (signal = "SIGTERM") => {
    if (daemon.child.exitCode !== null || daemon.child.signalCode !== null) return;
    const ended = once(daemon.child, "exit");
    daemon.child.kill(signal);
    await ended;
  };
  daemon.stop = async () => {
    try {
      await using_(new Carrel({ socket }), async (carrel) => {
        for (const sandbox of await carrel.sandboxes.list()) await sandbox.close();
      });
    } finally {
      await daemon.kill();
      place.remove();
    }
  };
  await daemon.start();
  return daemon;
}

async function using_(carrel, body) {
  try {
    return await body(carrel);
  } finally {
    await carrel.close();
  }
}

/** A server whose replies a test writes; `seen` has its requests. `where`: a unix socket's path, else a TCP port. */
export async function startServer(handler, where) {
  const seen = [];
  const server = createServer((request, response) => {
    const body = [];
    request.on("data", (piece) => body.push(piece));
    request.on("end", () => {
      const one = { method: request.method, url: request.url, headers: request.headers, body: Buffer.concat(body).toString() };
      seen.push(one);
      handler(one, response, seen.length);
    });
    request.on("error", () => undefined);
  });
  server.listen(where ?? { port: 0, host: "127.0.0.1" });
  await once(server, "listening");
  return {
    seen,
    url: where === undefined ? `http://127.0.0.1:${server.address().port}` : `unix:${where}`,
    stop: () => {
      server.closeAllConnections();
      return new Promise((resolve) => server.close(resolve));
    },
  };
}

export function json(response, value, status = 200, headers = {}) {
  response.writeHead(status, { "content-type": status >= 400 ? "application/problem+json" : "application/json", ...headers });
  response.end(JSON.stringify(value));
}

/** Passes bytes on to a daemon; `cut(bytes)` says after how many bytes of the daemon's the next connection is cut, undefined: never. */
export async function startCutter(target, cut) {
  const { hostname, port } = new URL(target);
  const sockets = new Set();
  let cuts = 0;
  const proxy = createTcpServer((client) => {
    const server = connect({ host: hostname, port: Number(port) });
    let left = cut(cuts);
    for (const socket of [client, server]) {
      sockets.add(socket);
      socket.on("error", () => undefined);
      socket.on("close", () => {
        sockets.delete(socket);
        client.destroy();
        server.destroy();
      });
    }
    client.pipe(server);
    server.on("data", (piece) => {
      if (left === undefined || piece.length < left) {
        if (left !== undefined) left -= piece.length;
        if (!client.write(piece)) {
          server.pause();
          client.once("drain", () => server.resume());
        }
        return;
      }
      cuts++;
      client.write(piece.subarray(0, left), () => client.resetAndDestroy());
      server.destroy();
    });
  });
  proxy.listen({ port: 0, host: "127.0.0.1" });
  await once(proxy, "listening");
  return {
    url: `http://127.0.0.1:${proxy.address().port}`,
    get cuts() {
      return cuts;
    },
    stop: () => {
      for (const socket of sockets) socket.destroy();
      return new Promise((resolve) => proxy.close(resolve));
    },
  };
}
