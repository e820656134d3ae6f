// The SDK on whatever runs this file, Node, Deno or Bun: both doors, streams, trees, ports, a terminal. Says one line.

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { Carrel, ConnectionError, PlatformError, SandboxNotFoundError } from "carrel-sdk";

const { SMOKE_SOCKET: socket, SMOKE_URL: url, SMOKE_TOKEN: token } = process.env;
const place = mkdtempSync(join(tmpdir(), "carrel-smoke-"));

async function door(carrel, name) {
  const sandbox = await carrel.sandbox(`smoke-${name}`, { environment: "python" });
  try {
    let heard = "";
    const result = await sandbox.run("for i in range(1000): print(i, 'grün')\n'done'", { onStdout: (text) => (heard += text) });
    assert.equal(result.check().text, "'done'");
    assert.equal(heard, result.stdout);
    assert.equal(heard.split("\n").length, 1001);

    let lines = "";
    for await (const chunk of sandbox.exec(["seq", "1", "50000"])) lines += chunk.text;
    assert.equal(lines.length, 288_894);
    const cat = await sandbox.exec(["cat"], { stdin: true });
    await cat.stdin.write("hello");
    await cat.stdin.close();
    assert.equal((await cat.output()).stdout, "hello");

    mkdirSync(join(place, name, "deep"), { recursive: true });
    writeFileSync(join(place, name, "deep/file"), Buffer.alloc(500_000, "x"));
    await sandbox.files.upload(join(place, name), "tree");
    await sandbox.files.download("tree", join(place, `${name}-back`));
    assert.equal(readFileSync(join(place, `${name}-back/deep/file`), "utf8"), "x".repeat(500_000));
    const watch = await sandbox.files.watch("tree");
    await sandbox.files.write("tree/new", "x");
    for await (const change of watch) if (change.path.endsWith("new")) break;

    const server = await sandbox.exec(["python3", "-m", "http.server", "8123"]);
    await sandbox.ports.wait(8123);
    assert.equal((await sandbox.ports.fetch(8123, "/tree/new")).status, 200);
    await server.kill();

    const stop = new AbortController();
    const waiting = sandbox.run("import time; time.sleep(60)", { signal: stop.signal, cancelOnDisconnect: true });
    setTimeout(() => stop.abort(new Error("enough")), 200);
    await assert.rejects(waiting, /enough/);
    await assert.rejects(carrel.sandboxes.get("sbx_nope"), SandboxNotFoundError);
    return await terminal(sandbox);
  } finally {
    await sandbox.close();
  }
}

async function terminal(sandbox) {
  const shell = await sandbox.exec(["sh"], { pty: { rows: 20, cols: 60 } });
  let attached;
  try {
    attached = await shell.attach({ since: 0 });
  } catch (error) {
    if (!(error instanceof PlatformError)) throw error;
    await shell.stdin.write("exit\n");
    await shell.wait();
    return `no terminal: ${error.message}`;
  }
  attached.resize(31, 99);
  attached.write("stty size; exit 4\n");
  let text = "";
  for await (const piece of attached) text += piece.text;
  assert.match(text, /31 99/);
  assert.equal(attached.outcome.exitCode, 4);
  return "with a terminal";
}

try {
  const said = [];
  for (const [name, options] of [["unix", { socket }], ["tcp", { url, token }]]) {
    const carrel = new Carrel(options);
    said.push(`${name} ${await door(carrel, name)}`);
    await carrel.close();
  }
  await assert.rejects(new Carrel({ url: "http://127.0.0.1:1" }).whoami(), ConnectionError);
  console.log(said.join("; "));
} finally {
  rmSync(place, { recursive: true, force: true });
}
