"""Two floors: what any process costs, and what any process in namespaces costs."""

import os
import shutil

from ..adapter import Adapter, Missing
from ..place import run


class Floor(Adapter):
    key = "floor"
    title = "fork+exec /bin/true"
    note = "the floor: every ratio is against it, measured in the same rounds"

    def command(self, place):
        return [place.bench, "adapter", "floor"]


class CFloor(Adapter):
    key = "c-floor"
    title = "clone into namespaces (C)"
    walls = "bare namespaces"
    note = "/bin/true or an echo of bytes in place of an interpreter"

    def prepare(self, place):
        source = os.path.join(os.path.dirname(os.path.dirname(__file__)), "floor.c")
        self.program = place.path("floor")
        if os.path.exists(self.program) and os.path.getmtime(self.program) > os.path.getmtime(source):
            return
        compiler = shutil.which("cc")
        if not compiler:
            raise Missing("no C compiler here")
        run([compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", self.program, source], "compiling floor.c")

    def command(self, place):
        return [self.program]
