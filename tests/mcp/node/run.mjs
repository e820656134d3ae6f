// Runs the tasks: `run.mjs stdio|http [NAME…]`, with MCP_CLIENT=1 or 2. Prints one line, and what failed.

import { NEW, VERSION, connect } from './connect.mjs';
import { Place } from './place.mjs';
import { Skip, TASKS } from './tasks.mjs';

// Far more than any task needs: only something that hangs gets there.
const PATIENCE = 90_000;

const [transport, ...wanted] = process.argv.slice(2);
const place = new Place(transport);
// Clients of the newest protocol have no connection on HTTP that the server could tell apart.
place.stateless = NEW && transport === 'http';
const failed = [];
const skipped = [];
let passed = 0;

const within = (promise) => {
  let clock;
  const late = new Promise((_, reject) => {
    clock = setTimeout(() => reject(new Error(`still not done after ${PATIENCE / 1000} s`)), PATIENCE);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(clock));
};

const client = await connect(place, ['--tools', 'all']);
for (const task of TASKS.filter((task) => !wanted.length || wanted.includes(task.name))) {
  try {
    await within(task(client, place));
    passed += 1;
  } catch (error) {
    if (error instanceof Skip) {
      skipped.push(`${task.name}: ${error.message}`);
      continue;
    }
    failed.push(task.name);
    console.error(`FAILED ${task.name} (typescript ${VERSION}, ${transport})\n${error.stack ?? error}`);
  }
}
await client.leave();
await place.leave();
const note = skipped.length ? `, left out ${skipped.join('; ')}` : '';
console.log(`typescript ${VERSION} ${transport}: ${passed} of ${passed + failed.length + skipped.length} tasks${note}`);
process.exit(failed.length || !passed ? 1 : 0);
