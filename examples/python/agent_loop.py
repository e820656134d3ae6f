"""An agent's loop: the model asks for code to be run, reads what came of it, and goes on until it has an answer.

The model is a fake with a script, so that this runs anywhere; a real one is given `observation` and answers likewise.
"""

import asyncio
from dataclasses import dataclass
from typing import Iterator, Optional

import carrel


@dataclass
class Turn:
    """What a model says: code to run, or its answer."""

    code: Optional[str] = None
    answer: Optional[str] = None


class FakeModel:
    def __init__(self) -> None:
        self._turns: Iterator[Turn] = iter(
            [
                Turn(code="import statistcs"),  # a slip, as models make them
                Turn(code="import statistics\nvalues = [2, 4, 4, 4, 5, 5, 7, 9]"),
                Turn(code="statistics.pstdev(values)"),
            ]
        )

    def reply(self, observation: str) -> Turn:
        turn = next(self._turns, None)
        return turn or Turn(answer=f"the standard deviation is {observation}")


def observe(result: carrel.Result) -> str:
    """What the model is shown: the value, else the output, and what went wrong."""
    if result.exception is not None:
        return str(result.exception)
    if result.error is not None:
        return f"{result.error.message} (state: {result.session_state})"
    return result.text or result.stdout or "(no output)"


async def main() -> None:
    model = FakeModel()
    observation = "compute the standard deviation of 2, 4, 4, 4, 5, 5, 7, 9"
    async with await carrel.async_sandbox() as sandbox:
        for _ in range(10):
            turn = model.reply(observation)
            if turn.code is None:
                print("answer:", turn.answer)
                return
            observation = observe(await sandbox.run(turn.code, env="python", timeout=30))
            print("ran:", turn.code.splitlines()[-1], "->", observation)
    raise SystemExit("no answer")


if __name__ == "__main__":
    asyncio.run(main())
