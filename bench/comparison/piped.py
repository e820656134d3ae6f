"""A session that is a plain interpreter at the end of two pipes: the least that keeps state between calls.

Its loop is as short as it can be, so that a system which only starts processes is measured at its best.
"""

import os
import shutil
import subprocess

from .adapter import Cannot, Session

PYTHON = """
import os, sys
def flood(count):
    block = b"x" * (1 << 20)
    while count:
        count -= os.write(1, block[:count])
    return 42
for line in sys.stdin:
    os.write(1, b"%d\\n" % eval(line))
"""
BASH = 'while read -r line; do eval "$line"; done'
NODE = "process.stdin.on('data', line => require('fs').writeSync(1, eval(String(line)) + '\\n'))"

QUESTIONS = {"python": b"6*7\n", "bash": b"echo $((6*7))\n", "node": b"6*7\n"}
BLOCK = 1 << 20


def interpreter(language, python):
    """The command of a loop that answers a line with a line."""
    if language == "python":
        return [python, "-I", "-S", "-u", "-c", PYTHON]
    program = shutil.which(language)
    if not program:
        raise Cannot(f"there is no {language} here")
    if language == "bash":
        return [program, "--norc", "--noprofile", "-c", BASH]
    return [program, "-e", NODE]


class PipedSession(Session):
    def __init__(self, argv, language, environment=None):
        self.language = language
        # From a clean environment: inherited variables change what an interpreter does at its start.
        environment = environment or {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        self.process = subprocess.Popen(argv, bufsize=0, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def call(self):
        self.write(QUESTIONS[self.language])
        answer = b""
        while not answer.endswith(b"\n"):
            part = self.read(4096)
            if not part:
                raise EOFError(self.last_words())
            answer += part
        if answer != b"42\n":
            raise ValueError(f"answered {answer[:200]!r}")

    def flood(self, count):
        if self.language != "python":
            raise Cannot("output is measured with python")
        self.write(b"flood(%d)\n" % count)
        left = count + len(b"42\n")
        while left:
            part = self.read(min(BLOCK, left))
            if not part:
                raise EOFError(self.last_words())
            left -= len(part)

    def write(self, data):
        os.write(self.process.stdin.fileno(), data)

    def read(self, most):
        return os.read(self.process.stdout.fileno(), most)

    def last_words(self):
        """Why there is no answer. Its output has ended, so what it had to say has been said."""
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read(4096) or b"").decode(errors="replace").split("\n")
        return next((line for line in reversed(said) if line.strip()), "it has ended without a word")

    def pids(self):
        return [self.process.pid]

    def close(self):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
