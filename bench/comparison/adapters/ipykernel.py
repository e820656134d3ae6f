"""A Jupyter kernel through jupyter_client, as notebooks and many agents use it: a process of the host's, no walls."""

from ..adapter import Adapter, Session

ANSWER_SECONDS = 120


class Kernel(Session):
    def __init__(self):
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(startup_timeout=ANSWER_SECONDS, kernel_name="python3")

    def run(self, code, hear):
        reply = self.client.execute_interactive(code, timeout=ANSWER_SECONDS, output_hook=hear, allow_stdin=False)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(str(reply["content"])[:200])

    def call(self):
        seen = []

        def hear(message):
            if message["msg_type"] == "execute_result":
                seen.append(message["content"]["data"]["text/plain"])

        self.run("6*7", hear)
        if seen != ["42"]:
            raise ValueError(f"answered {seen!r}")

    def flood(self, count):
        seen = 0

        def hear(message):
            nonlocal seen
            if message["msg_type"] == "stream":
                seen += len(message["content"]["text"])

        self.run(f"import sys\nblock = 'x' * (1 << 20)\nfor _ in range({count} >> 20): n = sys.stdout.write(block)", hear)
        if seen != count:
            raise ValueError(f"{seen} of {count} bytes came through")

    def pids(self):
        return [self.manager.provisioner.pid]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


class Ipykernel(Adapter):
    key = "ipykernel"
    title = "ipykernel, jupyter_client"

    def prepare(self, place):
        self.python = place.venv("ipykernel", "jupyter_client")

    def version(self):
        from importlib.metadata import version

        return f"ipykernel {version('ipykernel')}, jupyter_client {version('jupyter_client')}"

    def session(self, language):
        return Kernel()
