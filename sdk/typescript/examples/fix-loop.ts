// Write, run, fix: a program goes into the sandbox, its error comes back, the next version goes in.

import { Carrel, type Result } from "carrel-sdk";

// What a model would write, one version after the other.
const versions = [
  "def mean(numbers):\n    return sum(numbers) / len(number)\n",
  "def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
  "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0\n",
];
const test = "from mean import mean\nassert mean([1, 2, 3]) == 2\nassert mean([]) == 0\nprint('all good')\n";

const carrel = new Carrel();
await using sandbox = await carrel.sandbox({ environment: "python" });
await sandbox.files.write("test.py", test);

let result: Result | undefined;
for (const [attempt, program] of versions.entries()) {
  await sandbox.files.write("mean.py", program);
  result = await sandbox.exec(["python3", "test.py"], { timeoutSeconds: 30 }).output();
  if (result.ok) {
    console.log(`attempt ${attempt + 1}: ${result.stdout.trim()}`);
    break;
  }
  console.log(`attempt ${attempt + 1}: ${result.stderr.trim().split("\n").at(-1)}`);
}
result?.check();
