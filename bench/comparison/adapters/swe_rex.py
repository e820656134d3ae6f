"""SWE-ReX's local runtime: shells of the host's, driven through terminals; no walls of its own."""

import asyncio
import itertools

from ..adapter import Adapter, Session

ANSWER_SECONDS = 60


class Shell(Session):
    numbers = itertools.count()

    def __init__(self, runtime):
        from swerex.runtime.abstract import CreateBashSessionRequest

        self.runtime, self.name = runtime, f"session-{next(self.numbers)}"
        asyncio.run(runtime.create_session(CreateBashSessionRequest(session=self.name, startup_timeout=ANSWER_SECONDS)))

    def call(self):
        from swerex.runtime.abstract import BashAction

        # Without arithmetic, which its parser does not know: it would wait a tenth of a second more.
        action = BashAction(command="echo 42", session=self.name, timeout=ANSWER_SECONDS)
        output = asyncio.run(self.runtime.run_in_session(action)).output
        if output.strip() != "42":
            raise ValueError(f"answered {output[:200]!r}")

    def flood(self, count):
        # Its sessions are terminals; a command of its own is how it moves much.
        from swerex.runtime.abstract import Command

        command = Command(command=["head", "-c", str(count), "/dev/zero"], timeout=ANSWER_SECONDS)
        seen = len(asyncio.run(self.runtime.execute(command)).stdout)
        if seen != count:
            raise ValueError(f"{seen} of {count} bytes came through")

    def pids(self):
        return [self.runtime.sessions[self.name].shell.pid]

    def close(self):
        from swerex.runtime.abstract import CloseBashSessionRequest

        asyncio.run(self.runtime.close_session(CloseBashSessionRequest(session=self.name)))


class SweRex(Adapter):
    key = "swe-rex"
    title = "SWE-ReX, local runtime"
    languages = ("bash",)
    note = "bash in place of python; stdout throughput is a command's"

    def prepare(self, place):
        self.python = place.venv("swe-rex")

    def start(self):
        from swerex.runtime.local import LocalRuntime

        self.runtime = LocalRuntime()

    def version(self):
        from importlib.metadata import version

        return version("swe-rex")

    def session(self, language):
        return Shell(self.runtime)
