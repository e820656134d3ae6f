"""Fuzzes both doors: `run.py [SEED] [EFFORT]`. The same seed makes the same inputs."""

import asyncio
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "python"))

import corpus  # noqa: E402
import pipe  # noqa: E402
import web  # noqa: E402
from doors import Place  # noqa: E402


async def main(seed, effort):
    for name, door, transport in (("stdio", pipe.Fuzz, "stdio"), ("http", web.Fuzz, "http")):
        place = Place(transport)
        fuzz = door(place, corpus.rng(seed), effort)
        try:
            await fuzz.run()
        except BaseException:
            print(f"FAILED fuzz of {name}, seed {seed}, after {fuzz.inputs} inputs", file=sys.stderr)
            raise
        finally:
            await place.leave()
        print(f"fuzz {name}: {fuzz.inputs} inputs, {fuzz.closes} clean closes, seed {seed}")


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
asyncio.run(main(seed, int(sys.argv[2]) if len(sys.argv) > 2 else 1))
