// Data analysis: upload numbers, look at them, save a chart as PNG.

import { writeFile } from "node:fs/promises";
import { Carrel } from "carrel-sdk";

const carrel = new Carrel();
await using sandbox = await carrel.sandbox("analysis", { environment: "python" });

const rows = Array.from({ length: 24 }, (_, hour) => `${hour},${Math.round(15 + 8 * Math.sin((hour - 9) / 3.8))}`);
await sandbox.files.write("temperatures.csv", `hour,celsius\n${rows.join("\n")}\n`);

const mean = await sandbox.run(`
import csv
rows = [(int(r["hour"]), float(r["celsius"])) for r in csv.DictReader(open("temperatures.csv"))]
round(sum(celsius for _, celsius in rows) / len(rows), 1)
`);
console.log(`mean: ${mean.check().text} °C`);

// `rows` is still there.
const chart = await sandbox.run(`
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
plt.plot(*zip(*rows))
plt.xlabel("hour")
plt.ylabel("°C")
plt.savefig("chart.png")
`, { timeoutSeconds: 120, onStderr: (text) => process.stderr.write(text) });
chart.check();

await writeFile("chart.png", await sandbox.files.read("chart.png"));
console.log("saved chart.png");
