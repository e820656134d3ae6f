"""bubblewrap around an interpreter: the namespaces that carrel uses too, without limits or a filter of system calls."""

import os
import subprocess
import sys

from ..adapter import Adapter
from ..piped import PipedSession, interpreter

WALLS = ["--unshare-all", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/", "/",
         "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]


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
        return PipedSession([self.program, *WALLS, *interpreter(language, os.path.realpath(sys.executable))], language)
