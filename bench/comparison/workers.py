"""The processes that answer lines: started, asked with a deadline, and ended whatever happens.

Each has a session of the terminal of its own, so that ctrl-C reaches only the one who compares, and ends when its input does.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time

END_SECONDS = 60
"""To end everything it has started."""
MAX_ANSWER = 4 << 20


class Broken(Exception):
    """No figure: because the system failed, or because it cannot do it."""

    def __init__(self, failed="", cannot=""):
        super().__init__(failed or cannot)
        self.failed, self.cannot = failed, cannot


class Worker:
    def __init__(self, key, argv, environment, log):
        self.key, self.ended, self.log = key, "", log
        self.buffer = b""
        with open(log, "ab") as words:
            self.process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=words, bufsize=0, start_new_session=True)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, words, seconds):
        """The answer to a line. Raises `Broken`."""
        if self.ended:
            raise Broken(failed=self.ended)
        try:
            self.process.stdin.write(f"{words}\n".encode())
        except OSError:
            pass  # It has ended, and may have said why.
        try:
            reply = json.loads(self.line(time.monotonic() + seconds))
        except TimeoutError:
            self.ended = f"no answer to `{words}` in {seconds} s"
            # Now: what it is still doing would be on the others' time.
            self.end()
        except EOFError:
            self.ended = self.last_words()
        except ValueError as error:
            self.ended = f"answered `{words}` with something else: {error}"
        else:
            if "missing" in reply:
                self.ended = reply["missing"]
            elif "error" in reply or "cannot" in reply:
                raise Broken(reply.get("error", ""), reply.get("cannot", ""))
            else:
                return reply
        raise Broken(failed=self.ended)

    def line(self, until):
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, until - time.monotonic())):
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            self.buffer += part
            if len(self.buffer) > MAX_ANSWER:
                raise ValueError("it does not end")
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def last_words(self):
        with open(self.log, errors="replace") as log:
            said = [line for line in log.read().splitlines() if line.strip()]
        return f"it has ended: {said[-1][-200:] if said else 'without a word'}"

    def leave(self):
        """No more questions: it begins to clean up behind itself."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self):
        """First politely. True: it has cleaned up behind itself. A second time does nothing."""
        if self.process.stdout.closed:
            return False
        self.leave()
        clean = False
        for step in (None, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if step == signal.SIGTERM:
                    self.process.terminate()
                elif step == signal.SIGKILL:
                    os.killpg(self.process.pid, step)
            # One that no longer answers is not waited for as long.
            patience = 5 if self.ended and step is None else END_SECONDS
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                clean = step is None and self.process.returncode == 0
                break
        if not clean:
            # What it had started itself, a server say, is of the same group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdout.close()
        self.selector.close()
        return clean
