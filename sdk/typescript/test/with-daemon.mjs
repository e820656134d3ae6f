// Runs commands, one per line of stdin, with a daemon of their own: `SMOKE_…` name both its doors, CARREL_URL and CARREL_TOKEN one.
// What a command says is shown if it fails; a daemon that was left with a sandbox fails too.

import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";

import { Carrel } from "carrel-sdk";
import { startDaemon } from "./helper.mjs";

/** No command here takes more than seconds; a loaded machine may take its time. */
const DEADLINE_MS = 300_000;

const daemon = await startDaemon();
let failed = 0;
try {
  for (const line of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
    const [title, command] = line.split("\t");
    const ended = spawnSync("sh", ["-c", command], {
      encoding: "utf8",
      timeout: DEADLINE_MS,
      env: { ...process.env, CARREL_URL: daemon.url, CARREL_TOKEN: daemon.token, SMOKE_SOCKET: daemon.socket, SMOKE_URL: daemon.url, SMOKE_TOKEN: daemon.token },
    });
    const operator = new Carrel({ socket: daemon.socket });
    const left = await operator.sandboxes.list();
    await operator.close();
    if (ended.status === 0 && left.length === 0) {
      console.log(`ok ${title}: ${ended.stdout.trim().split("\n").at(-1)}`);
    } else {
      failed++;
      console.log(`not ok ${title} (${ended.status ?? ended.signal}, ${left.length} sandboxes left)\n${ended.stdout}${ended.stderr}`);
      for (const sandbox of left) await new Carrel({ socket: daemon.socket }).sandboxes.get(sandbox.id).then((one) => one.close());
    }
  }
} finally {
  await daemon.stop();
}
process.exitCode = failed === 0 ? 0 : 1;
