"""Runs the tasks: `run.py stdio|http [NAME…]`. Prints one line, and what failed."""

import asyncio
import sys
import traceback

from connect import NEW, VERSION, connect
from place import Place
from tasks import TASKS, Skip

# Far more than any task needs: only something that hangs gets there.
PATIENCE = 90


async def main(transport, wanted):
    place = Place(transport)
    # Clients of the newest protocol have no connection on HTTP that the server could tell apart.
    place.stateless = NEW and transport == "http"
    passed, failed, skipped = 0, [], []
    try:
        async with connect(place, "--tools", "all") as client:
            for task in TASKS:
                name = task.__name__
                if wanted and name not in wanted:
                    continue
                try:
                    await asyncio.wait_for(task(client, place), PATIENCE)
                    passed += 1
                except Skip as skip:
                    skipped.append(f"{name}: {skip}")
                except Exception:
                    failed.append(name)
                    print(f"FAILED {name} (python mcp {VERSION}, {transport})", file=sys.stderr)
                    traceback.print_exc()
    finally:
        await place.leave()
    note = f", left out {'; '.join(skipped)}" if skipped else ""
    print(f"python mcp {VERSION} {transport}: {passed} of {passed + len(failed) + len(skipped)} tasks{note}")
    return bool(failed) or not passed


sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
