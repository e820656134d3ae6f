// The whole of it against a real daemon, by the unix socket as the operator and by TCP as a token.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";

import * as sdk from "carrel-sdk";
import { startCutter, startDaemon, temporary } from "./helper.mjs";

let daemon;
before(async () => {
  daemon = await startDaemon();
});
after(() => daemon?.stop());

for (const door of ["unix", "tcp"]) {
  describe(door, () => {
    let carrel;
    let sandbox;
    before(async () => {
      carrel = door === "unix" ? new sdk.Carrel({ socket: daemon.socket }) : new sdk.Carrel({ url: daemon.url, token: daemon.token });
      sandbox = await carrel.sandbox(`work-${door}`, { labels: { door }, environment: "python" });
    });
    after(async () => {
      await sandbox?.close();
      await carrel.close();
    });

    test("the same name is the same sandbox, and closing it twice is fine", async () => {
      const first = await carrel.sandbox("twice");
      const second = await carrel.sandbox("twice");
      assert.deepEqual([first.created, second.created, first.id === second.id], [true, false, true]);
      assert.equal((await carrel.sandbox(first.key)).id, first.id);
      assert.ok((await carrel.sandboxes.list({ key: first.key })).some((one) => one.id === first.id));
      assert.equal((await carrel.sandboxes.get(first.id)).name, "twice");
      await first[Symbol.asyncDispose]();
      await second.close();
      await assert.rejects(carrel.sandboxes.get(first.id), (error) => error instanceof sdk.SandboxNotFoundError && error.status === 404);
    });

    test("state stays from run to run; what the code did wrong is in the result", async () => {
      assert.equal((await sandbox.run("x = 6*7; x")).check().text, "42");
      const second = await sandbox.run("print(x, 'grün'); x + 1");
      assert.deepEqual([second.stdout, second.text, second.sessionState, second.language], ["42 grün\n", "43", "preserved", "python"]);
      const failed = await sandbox.run("nope");
      assert.ok(!failed.ok);
      assert.equal(failed.exception.name, "NameError");
      assert.match(failed.stderr, /Traceback/);
      assert.throws(() => failed.check(), sdk.RunFailedError);
      const late = await sandbox.run("import time; time.sleep(60)", { timeoutSeconds: 0.3 });
      assert.equal(late.cause, "timeout");
      assert.ok(late.error instanceof sdk.TimeoutError);
      await assert.rejects(sandbox.run("1", { env: "cobol" }), sdk.CarrelError);
    });

    test("snapshots are taken, listed, compared, given back and removed", async (t) => {
      const work = await carrel.sandbox();
      t.after(() => work.close());
      await work.files.write("file", "old");
      const taken = await work.snapshot({ tags: [`good-${door}`], filesOnly: true });
      assert.deepEqual([taken.sandbox, taken.tags, taken.memory], [work.id, [`good-${door}`], false]);
      assert.deepEqual((await carrel.snapshots.list({ tag: `good-${door}` })).map((one) => one.id), [taken.id]);
      assert.equal((await carrel.snapshots.get(`good-${door}`)).id, taken.id);
      await work.files.write("file", "new");
      await work.files.write("more", "");
      const diff = await carrel.snapshots.diff(taken.id);
      assert.deepEqual([diff.added.files.map((one) => one.path), diff.changed.count, diff.removed.count], [["more"], 1, 0]);
      const restored = await carrel.snapshots.restore(taken.id, { new: true });
      t.after(() => restored.close());
      assert.notEqual(restored.id, work.id);
      assert.equal(await restored.files.readText("file"), "old");
      const back = await carrel.snapshots.restore(taken.id);
      assert.equal(back.id, work.id);
      assert.equal(await work.files.readText("file"), "old");
      await carrel.snapshots.delete(taken.id);
      await assert.rejects(carrel.snapshots.get(taken.id), (error) => error.code === "snapshot_not_found");
    });

    test("a snapshot goes out as a file and comes in again", async (t) => {
      const work = await carrel.sandbox();
      t.after(() => work.close());
      await work.files.write("file", "kept");
      const taken = await work.snapshot({ filesOnly: true });
      const place = temporary();
      t.after(place.remove);
      const local = join(place.path, "work.carrel");
      const size = await carrel.snapshots.exportTo(taken.id, local);
      assert.equal(readFileSync(local).length, size);
      const imported = await carrel.snapshots.importFrom(local);
      assert.notEqual(imported.id, taken.id);
      const restored = await carrel.snapshots.restore(imported.id, { new: true });
      t.after(() => restored.close());
      assert.equal(await restored.files.readText("file"), "kept");
      // From one to the other without a file between; half of one is none.
      const streamed = await carrel.snapshots.import(await carrel.snapshots.export(taken.id));
      await assert.rejects(carrel.snapshots.import(readFileSync(local).subarray(0, size / 2)), sdk.InvalidArgumentError);
      if (door === "tcp") await assert.rejects(carrel.snapshots.importFrom(local, { trustMemory: true }), sdk.ForbiddenError);
      for (const one of [taken, imported, streamed]) await carrel.snapshots.delete(one.id);
    });

    test("forks go their own ways, and one is adopted", async (t) => {
      const work = await carrel.sandbox(`forked-${door}`);
      t.after(() => work.close());
      (await work.run("x = 1")).check();
      await work.files.write("file", "same");
      const [fork, second] = await work.fork(2);
      await second.close();
      assert.ok(fork.cost.diskBytes > 0);
      await fork.files.write("file", "other");
      assert.deepEqual([await work.files.readText("file"), await fork.files.readText("file")], ["same", "other"]);
      const { key } = work;
      assert.equal((await fork.adopt()).key, key);
      assert.notEqual((await work.refresh()).key, key);
      await fork.close();
    });

    test("it sleeps and wakes as it was, calls are taken back, a brief says where it stands", async (t) => {
      const work = await carrel.sandbox();
      t.after(() => work.close());
      (await work.run("x = 1")).check();
      (await work.run("x = 2")).check();
      assert.equal((await work.undo()).calls, 1);
      assert.equal((await work.run("x")).text, "1");
      assert.match((await work.brief()).text, /x/);
      for (const sleep of ["standby", "hibernate"]) {
        try {
          await work[sleep]();
        } catch (error) {
          assert.equal(error.code, "unsupported", String(error));
          continue;
        }
        assert.equal((await work.refresh()).state, sleep === "standby" ? "standby" : "hibernated");
        assert.equal((await work.wake()).state, "running");
        assert.equal((await work.run("x")).text, "1");
      }
    });

    test("a streamed run tells what it hears, and the result has it all", async () => {
      const heard = [];
      const result = await sandbox.run("import sys\nfor i in range(3): print('ä', i, flush=True)\nprint('bad', file=sys.stderr)\n'value'", {
        onStart: (exec) => heard.push(exec),
        onStdout: (text) => heard.push(text),
        onStderr: (text) => heard.push(text),
        onResult: (display) => heard.push(display.mime["text/plain"]),
      });
      assert.ok(heard[0].startsWith("ex_"));
      assert.equal(result.stdout, "ä 0\nä 1\nä 2\n");
      assert.equal(result.stderr, "bad\n");
      assert.equal(result.text, "'value'");
      assert.equal(heard.slice(1).sort().join(""), ["ä 0\nä 1\nä 2\n", "bad\n", "'value'"].sort().join(""));
      assert.ok(result.receipt.durationUs > 0);
    });

    test("long output is cut in the middle, and the count is exact", async () => {
      for (const listeners of [{}, { onStdout() {} }]) {
        const result = await sandbox.run("print('x' * 99999)", { maxOutput: 1000, ...listeners });
        assert.equal(result.out.head.length + result.out.tail.length + result.out.omitted, 100_000);
        assert.ok(result.out.omitted >= 99_000);
      }
    });

    test("an exec is a stream, an end and a whole", async () => {
      let text = "";
      for await (const chunk of sandbox.exec(["sh", "-c", "for i in 1 2 3; do echo $i; done; echo $WHO >&2"], { env: { WHO: "me" } })) text += `${chunk.stream}:${chunk.text}`;
      assert.equal(text.replaceAll("stdout:", "").replace("stderr:", ""), "1\n2\n3\nme\n");
      const whole = await sandbox.exec(["sh", "-c", "printf '\\377'; exit 3"]).output();
      assert.deepEqual([whole.exitCode, whole.cause, [...whole.stdoutBytes]], [3, "exit", [255]]);
      const outcome = await sandbox.exec(["true"]).wait();
      assert.equal(outcome.exitCode, 0);
      const absent = await sandbox.exec(["no-such-command"]).output();
      assert.equal(absent.exitCode, 127);
      assert.ok(absent.error instanceof sdk.CommandNotFoundError);
      assert.throws(() => absent.check(), (error) => error instanceof sdk.RunFailedError && error.code === "command_not_found");
    });

    test("an exec takes input, signals and time", async () => {
      const cat = await sandbox.exec(["cat"], { stdin: true });
      await cat.stdin.write("hello ");
      await cat.stdin.write(new TextEncoder().encode("grün"));
      await cat.stdin.close();
      assert.equal((await cat.output()).stdout, "hello grün");
      await assert.rejects(cat.stdin.write("more"), sdk.ExecEndedError);
      assert.equal((await sandbox.exec(["cat"], { stdin: "at once" }).output()).stdout, "at once");
      const sleeper = await sandbox.exec(["sleep", "1000"]);
      assert.equal((await sleeper.info()).running, true);
      assert.deepEqual((await sleeper.info()).argv, ["sleep", "1000"]);
      await assert.rejects(sleeper.wait({ timeoutSeconds: 0.2 }), sdk.TimeoutError);
      await sleeper.signal("TERM");
      assert.deepEqual([(await sleeper.wait()).cause, (await sleeper.wait()).signal], ["signal", 15]);
      const other = await sandbox.exec(["sleep", "1000"]);
      await other.cancel();
      assert.equal((await other.wait()).cause, "cancelled");
      assert.ok((await sandbox.execs()).some((one) => one.exec === other.id && !one.running));
      const echo = await sandbox.exec(["echo", "again"]);
      await echo.wait();
      const page = await echo.read();
      assert.equal(new TextDecoder().decode(page.chunks[0].data), "again\n");
      assert.equal(page.outcome.exitCode, 0);
      assert.equal(await new Response(await echo.raw()).text(), "again\n");
      assert.equal((await sandbox.attach(echo.id).output()).stdout, "again\n");
    });

    test("a terminal takes keys and a size", async () => {
      const shell = await sandbox.exec(["sh"], { pty: { rows: 20, cols: 60 } });
      await shell.stdin.write("stty size; exit\n");
      assert.match((await shell.output()).stdout, /20 60/);
      if (door === "unix" || globalThis.WebSocket === undefined) {
        await assert.rejects(shell.attach(), (error) => error instanceof sdk.PlatformError && error.hint.length > 0);
        return;
      }
      const second = await sandbox.exec(["sh"], { pty: { rows: 20, cols: 60 } });
      const attached = await second.attach({ since: 0 });
      attached.resize(31, 99);
      attached.write("stty size; exit 4\n");
      let text = "";
      for await (const piece of attached) text += piece.text;
      assert.match(text, /31 99/);
      assert.equal(attached.outcome.exitCode, 4);
    });

    test("sessions have variables of their own", async () => {
      const build = await sandbox.session("build", { env: { MODE: "fast" }, cwd: "/tmp" });
      assert.equal((await build.exec(["sh", "-c", "echo $MODE; pwd"]).output()).stdout, "fast\n/tmp\n");
      assert.equal((await build.run("import os; os.environ['MODE']")).text, "'fast'");
      await build.setEnv({ MODE: "slow" });
      assert.equal((await build.run("os.environ['MODE']")).text, "'slow'");
      const again = await sandbox.session("build", { env: { MORE: "1" } });
      assert.deepEqual([again.info.env.MODE, again.info.env.MORE], ["slow", "1"]);
      await again.setEnv({ MORE: null });
      assert.equal(again.info.env.MORE, undefined);
      assert.ok((await sandbox.sessions()).some((one) => one.name === "build"));
      assert.equal((await sandbox.run("import os; print(os.environ.get('MODE'))")).stdout, "None\n", "another session has its own");
      await build.delete();
      await assert.rejects(build.refresh(), sdk.SessionNotFoundError);
    });

    test("files are written, read, found and changed", async () => {
      const { files } = sandbox;
      const written = await files.write("notes/a.txt", "one two\nthree\n");
      assert.ok(written.created && written.etag);
      assert.equal(await files.readText("notes/a.txt"), "one two\nthree\n");
      assert.equal(new TextDecoder().decode(await files.read("/workspace/notes/a.txt", { offset: 4, length: 3 })), "two");
      assert.equal(await files.etag("notes/a.txt"), written.etag);
      await files.write("notes/a.txt", "more\n", { append: true });
      await assert.rejects(files.write("notes/a.txt", "x", { ifMatch: written.etag }), sdk.PreconditionFailedError);
      await assert.rejects(files.write("notes/a.txt", "x", { overwrite: false }), sdk.ConflictError);
      await files.write("notes/bin", Uint8Array.of(255, 0, 1), { mode: 0o600 });
      await assert.rejects(files.readText("notes/bin"), (error) => error.code === "not_utf8");
      async function* slowly() {
        for (let index = 0; index < 50; index++) yield new Uint8Array(100_000).fill(index);
      }
      assert.equal((await files.write("notes/big", slowly())).size, 5_000_000);
      let size = 0;
      const reader = (await files.readStream("notes/big")).getReader();
      for (let next = await reader.read(); !next.done; next = await reader.read()) size += next.value.length;
      assert.equal(size, 5_000_000);
      assert.deepEqual((await files.list("notes")).map((one) => one.name).sort(), ["a.txt", "big", "bin"]);
      const found = await files.search({ path: "notes", text: "three" });
      assert.equal(found.matches[0].line, 2);
      const replaced = await files.replace({ path: "notes/a.txt", find: "two", with: "2" });
      assert.equal(replaced.count, 1);
      assert.equal(await files.readText("notes/a.txt"), "one 2\nthree\nmore\n");
      await files.mkdir("deep/er");
      await files.move("notes/bin", "deep/er/bin");
      const stat = await files.stat("deep/er/bin");
      assert.deepEqual([stat.kind, stat.size, stat.mode & 0o777], ["file", 3, 0o600]);
      assert.ok(stat.mtimeMs > 1.6e12);
      assert.ok((await files.delete("deep", { recursive: true })) >= 3);
      await assert.rejects(files.read("deep/er/bin"), sdk.NotFoundError);
      await assert.rejects(files.read("../../etc/passwd"), sdk.InvalidArgumentError);
    });

    test("whole directories go in and come out", async (t) => {
      const place = temporary();
      t.after(place.remove);
      const from = join(place.path, "project");
      mkdirSync(join(from, "src/deep"), { recursive: true });
      writeFileSync(join(from, "src/deep/main.py"), "print('from the tree')\n");
      writeFileSync(join(from, "größe.bin"), Buffer.alloc(300_000, 7));
      symlinkSync("src/deep/main.py", join(from, "main.py"));
      const up = await sandbox.files.upload(from);
      assert.deepEqual([up.files, up.links, up.leftOutCount, up.bytes], [2, 1, 0, 300_023]);
      assert.equal((await sandbox.exec(["python3", "project/main.py"]).output()).stdout, "from the tree\n");
      await sandbox.run("open('/workspace/project/new.txt', 'w').write('made inside')");
      const to = join(place.path, "back");
      const down = await sandbox.files.download("project", to);
      assert.deepEqual([down.files, down.links], [3, 1]);
      assert.equal(readFileSync(join(to, "new.txt"), "utf8"), "made inside");
      assert.deepEqual(readFileSync(join(to, "größe.bin")), readFileSync(join(from, "größe.bin")));
      await sandbox.files.upload(join(from, "größe.bin"), "one.bin");
      const one = await sandbox.files.download("one.bin", join(place.path, "one.bin"));
      assert.deepEqual([one.files, one.bytes], [1, 300_000]);
      await sandbox.exec(["ln", "-s", "/etc/passwd", "project/evil"]).output();
      const careful = await sandbox.files.download("project", join(place.path, "careful"));
      assert.equal(careful.links, 1, "a link that leads out is left out, here or there");
    });

    test("a watch tells of changes", async () => {
      await sandbox.files.mkdir("watched");
      const changes = await sandbox.files.watch("watched");
      await sandbox.files.write("watched/new.txt", "x");
      for await (const change of changes) {
        if (change.path.endsWith("new.txt")) {
          assert.ok(["created", "changed", "moved"].includes(change.kind));
          break;
        }
      }
    });

    test("a server in the sandbox is reached", async () => {
      await sandbox.files.write("www/index.html", "<h1>hello from inside</h1>");
      const server = await sandbox.exec(["python3", "-m", "http.server", "8123", "--directory", "www"]);
      await sandbox.ports.wait(8123);
      const page = await sandbox.ports.fetch(8123);
      assert.equal(page.status, 200);
      assert.match(await page.text(), /hello from inside/);
      assert.equal((await sandbox.ports.fetch(8123, "/absent")).status, 404);
      const share = await sandbox.ports.share(8123, { expiresSeconds: 60 });
      assert.match(share.path, /^\/shared\//);
      if (door === "tcp") {
        assert.match(await (await fetch(share.url)).text(), /hello from inside/);
        const url = await sandbox.ports.url(8123, "/index.html");
        assert.equal((await fetch(url)).status, 401);
        assert.equal((await fetch(url, { headers: { authorization: `Bearer ${daemon.token}` } })).status, 200);
      } else {
        assert.equal(share.url, undefined);
        await assert.rejects(sandbox.ports.url(8123), sdk.PlatformError);
      }
      await server.kill();
      await server.wait();
      await assert.rejects(sandbox.ports.fetch(8123), sdk.PortClosedError);
    });

    test("a sandbox is looked at, changed and woken", async () => {
      assert.ok((await sandbox.metrics()).uptimeMs >= 0);
      const made = await sandbox.run("told = [1, 2]; open('told.txt', 'w').close()");
      assert.ok(made.receipt.files.added.includes("told.txt") && made.receipt.files.complete);
      const told = await sandbox.brief();
      assert.match(told.text, /told list\[2\]/);
      assert.ok(told.brief.interpreters.some((one) => one.variables.some((variable) => variable.name === "told")));
      assert.equal((await sandbox.update({ labels: { door, more: "yes" }, idleTimeoutSeconds: 900 })).labels.more, "yes");
      assert.equal((await sandbox.refresh()).idleTimeoutSeconds, 900);
      assert.equal((await sandbox.wake()).state, "running");
      assert.ok((await carrel.sandboxes.list({ labels: { more: "yes", door } })).some((one) => one.id === sandbox.id));
      assert.ok((await carrel.environments()).some((one) => one.name === "python" && one.available));
      assert.equal(await carrel.ready(), true);
      assert.match((await carrel.openapi()).openapi, /^3\.1/);
      assert.equal((await carrel.whoami()).token === null, door === "unix");
    });

    test("runs without a sandbox, of a workflow, and the end of its scope", async () => {
      assert.equal((await carrel.run("1+1", { env: "python" })).text, "2");
      const owner = `run-${door}`;
      await carrel.run("shared = 5", { env: "python", workflowRun: owner });
      assert.equal((await carrel.run("shared", { env: "python", workflowRun: owner })).text, "5");
      const same = await carrel.sandbox({ workflowRun: owner });
      assert.equal(same.created, false);
      assert.deepEqual((await carrel.scopes.close("workflow", owner)).closed, [same.id]);
      await assert.rejects(carrel.sandbox({ workflowRun: owner }), sdk.CarrelError);
    });

    test("events tell what happens", async () => {
      const stop = new AbortController();
      const events = carrel.events({ sandbox: sandbox.id, kind: "run.", signal: stop.signal });
      const first = events.next();
      // Runs until one is heard of: the stream may begin after the first.
      let heard = false;
      first.then(() => (heard = true), () => (heard = true));
      while (!heard) await sandbox.run("1");
      const { value } = await first;
      assert.match(value.kind, /^run\./);
      assert.ok(value.id);
      stop.abort();
      await events.return();
    });
  });
}

test("tokens are made, used and revoked by the operator", async () => {
  const operator = new sdk.Carrel({ socket: daemon.socket });
  const made = await operator.tokens.create({ name: "second", quota: { sandboxes: 1 } });
  const second = new sdk.Carrel({ url: daemon.url, token: made.token });
  assert.equal((await second.whoami()).token.name, "second");
  const own = await second.sandbox("mine");
  await assert.rejects(second.sandbox("two"), (error) => error instanceof sdk.QuotaError && error.status === 429);
  await assert.rejects(second.tokens.list(), sdk.ForbiddenError);
  const first = new sdk.Carrel({ url: daemon.url, token: daemon.token });
  await assert.rejects(first.sandboxes.get(own.id), sdk.SandboxNotFoundError);
  await own.close();
  await operator.tokens.revoke(made.id);
  await assert.rejects(second.whoami(), (error) => error instanceof sdk.UnauthorizedError && error.status === 401);
  assert.ok((await operator.tokens.list()).some((one) => one.name === "t"));
  await operator.close();
});

test("a real stream that is cut again and again loses nothing and repeats nothing", async (t) => {
  // Each connection lives for a little more than the one before, so that it ends at last.
  const cutter = await startCutter(daemon.url, (cuts) => (cuts < 25 ? 3000 + cuts * 20_000 : undefined));
  t.after(cutter.stop);
  const carrel = new sdk.Carrel({ url: cutter.url, token: daemon.token });
  const sandbox = await carrel.sandbox("cut");
  t.after(() => new sdk.Carrel({ url: daemon.url, token: daemon.token }).sandboxes.get(sandbox.id).then((one) => one.close()));
  const lines = 40_000;
  const code = `for i in range(${lines}): print(i, 'grün €', flush=(i % 100 == 0))`;
  const expected = Array.from({ length: lines }, (_, index) => `${index} grün €\n`).join("");
  let text = "";
  const result = await sandbox.run(code, { env: "python", maxOutput: 10_000_000, onStdout: (piece) => (text += piece) });
  assert.ok(text === expected, `${text.length} characters of ${expected.length}`);
  assert.ok(result.stdout === expected);
  const exec = await sandbox.exec(["seq", "1", "200000"]);
  const whole = await exec.output({ maxOutput: 10_000_000 });
  assert.ok(whole.stdout === Array.from({ length: 200_000 }, (_, index) => `${index + 1}\n`).join(""));
  assert.ok(cutter.cuts > 5, `${cutter.cuts} cuts`);
});

test("a stream goes on after the daemon was killed and started again", async () => {
  const listen = new URL(daemon.url).host;
  const carrel = new sdk.Carrel({ url: daemon.url, token: daemon.token });
  const sandbox = await carrel.sandbox("outlives");
  let text = "";
  let killed;
  for await (const chunk of sandbox.exec(["sh", "-c", "i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); sleep 0.01; done"])) {
    text += chunk.text;
    killed ??= daemon.kill("SIGKILL").then(() => daemon.start(listen));
  }
  await killed;
  assert.equal(text, Array.from({ length: 300 }, (_, index) => `${index}\n`).join(""));
  await sandbox.close();
});
