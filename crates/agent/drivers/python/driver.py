"""carrel's python driver: keeps one interpreter's state and runs the calls it is given. Contract: docs/drivers.md.

One program: ../python.rs puts it together from this file, which begins it, and those beside it.

Invariants:
- The driver never dies of SIGINT. Its handler raises only when the interrupted frame is not the driver's own (see
  `on_sigint`), so there is no moment between "user code runs" and "driver code runs" that a signal can hit.
- User code shares this process and may break anything it can name: the driver keeps its own builtins, descriptors and
  references, and puts descriptors 0-2 and the standard streams back after every call.
- Starting is cheap. Python compiles this program at every start, so what most calls do without is kept as text (WARM, UNDO
  and RARE), compiled when first needed; and `_json` and `posix` serve where `json` and `os` would cost milliseconds to import.
- C stdio is flushed only once user code has loaded ctypes; without it we have no way to call fflush.
- Between calls the process may be forked: the child, a *spare*, keeps the state and waits for this process's end (see
  UNDO). The process that user code knows stays: its pid, children, threads and timers are never a copy's.

Deliberately absent: IPython magics, `sitecustomize`, terminal input.
"""
import builtins
import sys

# A private copy of the builtins: user code may replace `len` or `__import__` without breaking the driver.
__builtins__ = dict(vars(builtins))

import posix
from _ast import Expr, Expression
from _codecs import register_error
from _io import open
from _json import encode_basestring, make_scanner
from _signal import SIGINT, signal
from _thread import allocate_lock
from gc import disable as pause_gc, enable as resume_gc, isenabled as gc_is_on
from posix import _exit, close, dup2, environ, getpid, putenv, set_blocking, unsetenv, write
from sys import getprofile, getrecursionlimit, getsizeof, gettrace, setprofile, setrecursionlimit, settrace

SOURCE_LIMIT = 16 << 20  # code of earlier calls kept for tracebacks, in characters
SHORT_LINE = 3500  # a result that is no longer goes with the end of its call: the agent is woken and reads once, and not twice
LOST = 70  # exit status when the agent's pipes are gone: nobody is left to tell
HERE = sys._getframe().f_code.co_filename
PID = getpid()
ONLY_AST, ALLOW_AWAIT, CO_COROUTINE = 0x400, 0x2000, 0x80
DRIVER = sys.modules["__main__"]  # referenced for good: its dict holds everything here
EXCEPTHOOK, DISPLAYHOOK, INPUT = sys.excepthook, sys.displayhook, input
STREAMS = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
SOURCES = {}  # file name of a call -> its code, oldest first
PLAIN = {int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset, type}
HOOKED = {"linecache", "matplotlib.pyplot", "IPython.core.display_functions"}  # adapted when user code imports them
LOCK = allocate_lock()
NAMED = {"__main__"}  # modules that the agent need not be told of: python has them anyway, or it has been told


class call:
    """The state of the running call, and what lasts from one to the next."""

    id = None  # None: no call, or a forked child. Guarded by LOCK, so nothing follows a call's `done`.
    live = False  # whether SIGINT may raise
    pending = False  # SIGINT arrived while the driver's own code ran
    task = None  # the asyncio task of a top-level await
    cancelled = False  # SIGINT has cancelled that task
    handler = None  # the user's own SIGINT handler, in force during calls
    trace = None  # the user's trace function, likewise
    flags = ALLOW_AWAIT  # compiler flags; __future__ imports stay in force
    kept = 0  # characters in SOURCES
    loop = None  # one event loop for all top-level awaits
    undo = memory = 0  # calls that can be taken back, and the sandbox's memory
    held = b""  # a result that waits for the end of the call
    last = spared = None  # the last call of this state, and that of the state which the newest spare has
    sparing = False  # a fork of the driver's own is under way
    linecache = sys.modules.get("linecache")  # this and the next: once user code has loaded them
    pyplot = fflush = None


def rare(name, text="RARE"):
    """A function of RARE, or of another of the texts that are compiled when first needed."""
    if name not in globals():
        exec(compile(globals()[text], HERE, "exec", 0, True), globals())
    return globals()[name]
