"""Data analysis: upload a table, look at it in a sandbox that remembers, save the chart."""

import sys
import tempfile
from pathlib import Path

import carrel

TABLE = "month,sales\n" + "".join(f"{month},{100 + month * month}\n" for month in range(1, 13))

LOAD = """
import csv
rows = [(int(r["month"]), int(r["sales"])) for r in csv.DictReader(open("sales.csv"))]
"""

DRAW = """
import matplotlib.pyplot as plt
plt.bar(*zip(*rows))
plt.title("Sales by month")
plt.show()
"""


def main(target: Path) -> None:
    with carrel.sandbox(labels={"example": "analysis"}) as sandbox:
        sandbox.files.write("sales.csv", TABLE)

        sandbox.run(LOAD, env="python").check()

        # A second call: the rows are still there.
        best = sandbox.run("max(rows, key=lambda row: row[1])", env="python").check()
        print("best month and sales:", best.text)

        chart = sandbox.run(DRAW, env="python", timeout=120).check()
        if chart.png is None:
            raise SystemExit("no chart came back")
        target.write_bytes(chart.png)
        print(f"saved {target} ({len(chart.png)} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "sales.png")
