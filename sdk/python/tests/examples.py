"""Runs every example against a daemon of its own: examples.py DIRECTORY."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "live"))

from daemon import Daemon

# What an example must have said, besides ending well.
SAYS = {
    "analysis.py": "saved ",
    "write_run_fix.py": "attempt 2: passes",
    "workflow.py": "report: 1, 2, 3",
    "dev_server.py": "page: <h1>second</h1>",
    "agent_loop.py": "answer: the standard deviation is 2.0",
}


def main(directory: Path) -> int:
    failed = 0
    daemon = Daemon(tcp=False)
    daemon.start()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("CARREL_")}
            environment.update(CARREL_SOCKET=daemon.socket, TMPDIR=scratch)
            assert {path.name for path in directory.glob("*.py")} == set(SAYS)
            for name, wanted in SAYS.items():
                command = [sys.executable, "-W", "error", str(directory / name)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
                good = done.returncode == 0 and wanted in done.stdout
                print(f"{name}: {'passed' if good else 'FAILED'}")
                if not good:
                    failed += 1
                    print(done.stdout + done.stderr)
            if not (Path(scratch) / "sales.png").read_bytes().startswith(b"\x89PNG"):
                failed += 1
                print("the chart is no PNG")
    finally:
        daemon.stop()
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
