// An agent: a model asks for code to be run until it has its answer. The model here is a fake one, with two fixed turns.

import { Carrel } from "carrel-sdk";

interface Message {
  role: "user" | "tool";
  text: string;
}
type Turn = { run: string } | { answer: string };

/** A real one would send `messages` to a model whose only tool is `run`. */
function fakeModel(messages: readonly Message[]): Turn {
  const said = messages.at(-1)?.text ?? "";
  if (messages.length === 1) return { run: "primes = [n for n in range(2, 100) if all(n % d for d in range(2, n))]\nlen(primes)" };
  if (messages.length === 2) return { run: `sum(primes) if len(primes) == ${said} else None` };
  return { answer: `The primes below 100 add up to ${said}.` };
}

const carrel = new Carrel();
await using sandbox = await carrel.sandbox({ agentRun: crypto.randomUUID(), environment: "python" });

const messages: Message[] = [{ role: "user", text: "What do the primes below 100 add up to?" }];
for (let step = 0; step < 10; step++) {
  const turn = fakeModel(messages);
  if ("answer" in turn) {
    console.log(turn.answer);
    break;
  }
  console.log(`> ${turn.run.split("\n").at(-1)}`);
  const result = await sandbox.run(turn.run, { timeoutSeconds: 30 });
  // The model sees errors too: it may do better in its next turn.
  messages.push({ role: "tool", text: result.text ?? `${result.stdout}${result.stderr}` });
}
