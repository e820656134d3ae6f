"""Interpreters as they are, without walls: what any sandbox adds to."""

import os
import platform
import sys

from ..adapter import Adapter
from ..piped import PipedSession, interpreter


class Bare(Adapter):
    key = "bare"
    title = "bare interpreter"
    languages = ("python", "bash", "node")

    def version(self):
        return f"python {platform.python_version()}"

    def session(self, language):
        return PipedSession(interpreter(language, os.path.realpath(sys.executable)), language)
