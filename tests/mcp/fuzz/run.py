"""Fuzzes both doors: `run.py stdio|http [SEED] [EFFORT]`. The same seed makes the same inputs."""

import asyncio
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "python"))

import corpus  # noqa: E402
import pipe  # noqa: E402
import web  # noqa: E402
from place import Place  # noqa: E402

DOORS = {"stdio": pipe.Fuzz, "http": web.Fuzz}


async def main(transport, seed=1, effort=1):
    place = Place(transport)
    fuzz = DOORS[transport](place, corpus.rng(seed), effort)
    try:
        await fuzz.run()
    except BaseException:
        print(f"FAILED fuzz of {transport}, seed {seed}, after {fuzz.inputs} inputs", file=sys.stderr)
        raise
    finally:
        await place.leave()
    print(f"fuzz {transport}: {fuzz.inputs} inputs, {fuzz.closes} clean closes, seed {seed}")


asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
