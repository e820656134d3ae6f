// Archives: whole trees there and back, and what an archive made by an enemy can do.

import assert from "node:assert/strict";
import { chmodSync, existsSync, lstatSync, mkdirSync, readFileSync, readlinkSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { test } from "node:test";

import * as sdk from "carrel-sdk";
import { temporary } from "./helper.mjs";
import { internal } from "./internal.mjs";

const { readTar, tarHeader, tarPadding, tarEnd } = await internal("tar.js");
const { nothing, packTree, unpackTree } = await internal("trees.js");

async function* inPieces(bytes, size) {
  for (let at = 0; at < bytes.length; at += size) yield bytes.subarray(at, at + size);
}

const entry = (path, more = {}) => ({ path, kind: "file", size: 0, mode: 0o644, mtimeSeconds: 1_000_000, target: "", ...more });

function archive(...entries) {
  const parts = entries.flatMap(([header, content = ""]) => {
    const bytes = Buffer.from(content);
    return [tarHeader({ ...header, size: bytes.length }), bytes, tarPadding(bytes.length)];
  });
  return Buffer.concat([...parts, tarEnd()]);
}

async function unpack(bytes, root, limits, size = 700) {
  return await unpackTree(inPieces(bytes, size), root, limits);
}

async function all(source) {
  const parts = [];
  for await (const piece of source) parts.push(piece);
  return Buffer.concat(parts);
}

test("a tree comes back as it was, whatever the size of the pieces, and the system's tar reads it", async (t) => {
  const place = temporary();
  t.after(place.remove);
  const from = join(place.path, "from");
  const deep = join(from, ...Array.from({ length: 12 }, (_, index) => `directory-${index}-${"x".repeat(12)}`));
  mkdirSync(deep, { recursive: true });
  mkdirSync(join(from, "empty"));
  writeFileSync(join(from, "a.txt"), "hello");
  writeFileSync(join(from, "grün-😀.bin"), Buffer.from(Array.from({ length: 1537 }, (_, index) => index % 256)));
  writeFileSync(join(deep, "b".repeat(150)), "far down");
  writeFileSync(join(from, "script"), "#!/bin/sh\n");
  chmodSync(join(from, "script"), 0o755);
  symlinkSync("a.txt", join(from, "link"));
  symlinkSync("/etc/passwd", join(from, "out"));
  const bytes = await all(packTree(from, nothing()));
  for (const size of [1, 511, 512, 513, 10_000_000]) {
    const to = join(place.path, `to-${size}`);
    const moved = await unpack(bytes, to, {}, size);
    assert.deepEqual([moved.files, moved.directories, moved.links, moved.leftOutCount], [4, 13, 1, 1]);
    assert.equal(moved.leftOut[0].path, "out");
    assert.deepEqual(readFileSync(join(to, "grün-😀.bin")), readFileSync(join(from, "grün-😀.bin")));
    assert.equal(readFileSync(join(deep.replace(from, to), "b".repeat(150)), "utf8"), "far down");
    assert.equal(statSync(join(to, "script")).mode & 0o777, 0o755);
    assert.equal(readlinkSync(join(to, "link")), "a.txt");
  }
  const listed = execFileSync("tar", ["-tf", "-"], { input: bytes, encoding: "utf8" }).trim().split("\n");
  assert.equal(listed.length, 19);
  // And the other way: what the system's tar writes, with its own long names.
  for (const format of ["gnu", "pax", "ustar"]) {
    const theirs = execFileSync("tar", ["-C", from, `--format=${format}`, "--exclude=directory-2*", "-cf", "-", "."], { maxBuffer: 1 << 28 });
    const moved = await unpack(theirs, join(place.path, `tar-${format}`));
    assert.equal(moved.files, 3, format);
  }
  const long = execFileSync("tar", ["-C", from, "--format=gnu", "-cf", "-", "."], { maxBuffer: 1 << 28 });
  await unpack(long, join(place.path, "long"));
  assert.equal(readFileSync(join(deep.replace(from, join(place.path, "long")), "b".repeat(150)), "utf8"), "far down");
});

test("nothing is written outside the directory, nor through a link", async (t) => {
  const place = temporary();
  t.after(place.remove);
  const root = join(place.path, "root");
  const outside = join(place.path, "outside");
  mkdirSync(outside);
  mkdirSync(root);
  symlinkSync(outside, join(root, "mine"));
  const link = (path, target) => [entry(path, { kind: "symlink", target })];
  const bytes = archive(
    [entry("../up"), "x"], [entry("/abs"), "x"], [entry("a/../../up"), "x"], [entry("..")], [entry("./fine"), "x"],
    link("l1", "/etc"), link("l2", ".."), link("l3", "../outside"), link("d/l4", "../.."), link("d/l5", "../fine"),
    // Each harmless by its letters; together they climb: `l7` is the directory above.
    link("sub/l6", "."), link("l7", "sub/l6/../.."),
    link("to", "sub"), [entry("to/through"), "x"],
    [entry("mine/through"), "x"], [entry("mine"), "mine now"],
    [entry("hard", { kind: "hardlink", target: "../outside/x" })],
    [entry("device", { kind: "other" })],
    [entry("sub"), "a file for a directory"],
    [entry("setuid", { mode: 0o6777 }), "x"],
  );
  const moved = await unpack(bytes, root);
  assert.deepEqual(
    moved.leftOut.map((one) => one.path),
    ["../up", "/abs", "a/../../up", "..", "l1", "l2", "l3", "d/l4", "l7", "to/through", "mine/through", "hard", "sub"],
  );
  assert.ok(!existsSync(join(place.path, "up")) && !existsSync(join(outside, "through")) && !existsSync("/abs"));
  assert.ok(lstatSync(join(root, "mine")).isFile(), "a link with a file's name is replaced, not followed");
  assert.equal(readFileSync(join(root, "d/l5"), "utf8"), "x");
  assert.equal(statSync(join(root, "setuid")).mode & 0o7777, 0o777);
});

test("an archive that is cut off, broken or too large is refused", async (t) => {
  const place = temporary();
  t.after(place.remove);
  const bytes = archive([entry("a"), "x".repeat(1000)], [entry(`${"b".repeat(99)}/`.repeat(3) + "b"), "y"]);
  for (let at = 1; at < bytes.length - 1024; at += 97) {
    await assert.rejects(unpack(bytes.subarray(0, at), join(place.path, "cut")), sdk.ProtocolError, `cut at ${at}`);
  }
  const broken = Buffer.from(bytes);
  broken[3] ^= 1;
  await assert.rejects(unpack(broken, join(place.path, "broken")), /no header/);
  await assert.rejects(unpack(Buffer.alloc(4096, 7), join(place.path, "noise")), sdk.ProtocolError);
  await assert.rejects(unpack(bytes, join(place.path, "large"), { maxBytes: 999 }), sdk.TooLargeError);
  await assert.rejects(unpack(bytes, join(place.path, "many"), { maxEntries: 1 }), sdk.TooLargeError);
  // A header that claims gigabytes of name is not believed.
  const claim = Buffer.from(tarHeader(entry("x", { size: 8_000_000_000 })));
  claim[156] = "x".charCodeAt(0);
  let sum = 256;
  claim.forEach((byte, index) => (sum += index >= 148 && index < 156 ? 0 : byte));
  claim.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
  await assert.rejects(unpack(Buffer.concat([claim, tarEnd()]), join(place.path, "claim")), /too large/);
});

test("who reads only some of an entry finds the next one", async () => {
  const bytes = archive([entry("a"), "x".repeat(5000)], [entry("b"), "y"]);
  const names = [];
  for await (const one of readTar(inPieces(bytes, 300))) {
    names.push(one.path);
    for await (const piece of one.content) {
      assert.ok(piece.length > 0);
      break;
    }
  }
  assert.deepEqual(names, ["a", "b"]);
});

test("sizes and names that do not fit go into a pax header", async () => {
  const header = tarHeader(entry("big", { size: 9 * 1024 ** 3 }));
  const source = readTar(inPieces(header, 512));
  const first = (await source.next()).value;
  assert.equal(first.size, 9 * 1024 ** 3);
});
