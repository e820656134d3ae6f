// A dev server in the sandbox, reached through its port: start it, ask it, change a file, ask again.

import { Carrel } from "carrel-sdk";

const carrel = new Carrel();
await using sandbox = await carrel.sandbox({ environment: "python" });

await sandbox.files.write("site/index.html", "<h1>first version</h1>");
const server = await sandbox.exec(["python3", "-m", "http.server", "8000", "--directory", "site"]);
await sandbox.ports.wait(8000);

console.log(await (await sandbox.ports.fetch(8000, "/")).text());
await sandbox.files.write("site/index.html", "<h1>second version</h1>");
console.log(await (await sandbox.ports.fetch(8000, "/index.html")).text());

const link = await sandbox.ports.share(8000, { expiresSeconds: 600 });
console.log(`a link for ten minutes: ${link.url === undefined ? "a path below the daemon" : "an address"}`);
await server.cancel();
