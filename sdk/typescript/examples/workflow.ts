// A workflow of three steps, each of which knows only the run's id. They share one sandbox, and the end of the run closes it.

import { Carrel } from "carrel-sdk";

const carrel = new Carrel();
const run = crypto.randomUUID();

async function fetchStep(): Promise<void> {
  const sandbox = await carrel.sandbox({ workflowRun: run, environment: "python" });
  await sandbox.files.write("orders.json", JSON.stringify([{ item: "book", price: 12 }, { item: "pen", price: 3 }, { item: "desk", price: 85 }]));
}

async function computeStep(): Promise<void> {
  const sandbox = await carrel.sandbox({ workflowRun: run });
  (await sandbox.run("import json\norders = json.load(open('orders.json'))\ntotal = sum(o['price'] for o in orders)")).check();
}

async function reportStep(): Promise<string> {
  const sandbox = await carrel.sandbox({ workflowRun: run });
  const report = await sandbox.run("print(f'{len(orders)} orders, {total} in all')");
  return report.check().stdout.trim();
}

try {
  await fetchStep();
  await computeStep();
  console.log(await reportStep());
} finally {
  const { closed } = await carrel.scopes.close("workflow", run);
  console.log(`closed ${closed.length} sandbox`);
}
