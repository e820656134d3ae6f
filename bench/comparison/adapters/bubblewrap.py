"""bubblewrap around an interpreter: the namespaces that carrel uses too, without limits or a filter of system calls."""

import os
import subprocess
import sys

from ..adapter import Adapter
from ..piped import PipedSession, interpreter

WALLS = ["--unshare-all", "--new-session", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
# Not all of `/`: with it come all mounts below it, and one that vanishes meanwhile makes the start fail.
SEEN = [path for path in ("/usr", "/bin", "/lib", "/lib64", "/etc", sys.base_prefix) if os.path.exists(path)]


class Bubblewrap(Adapter):
    key = "bubblewrap"
    title = "bubblewrap + interpreter"
    walls = "namespaces"
    languages = ("python", "bash", "node")

    def prepare(self, place):
        self.arguments = [place.debian("bwrap", "bubblewrap")]

    def start(self, program):
        self.program = program

    def version(self):
        return subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()

    def session(self, language):
        seen = [word for path in SEEN for word in ("--ro-bind", path, path)]
        command = interpreter(language, os.path.realpath(sys.executable))
        return PipedSession([self.program, *seen, *WALLS, *command], language)
