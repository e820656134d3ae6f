# Streams of user code's own, and input.

from _io import TextIOWrapper


def reopen(number, name):
    raw = open(number, "wb" if number else "rb", closefd=False)
    errors = "carrel" if number else "surrogateescape"
    STREAMS[name] = stream = TextIOWrapper(raw, "utf-8", errors, line_buffering=number > 0)
    setattr(sys, "__%s__" % name, stream)
    return stream


def flush_c():
    try:
        if call.fflush is None:
            from ctypes import CDLL

            call.fflush = CDLL(None).fflush
        call.fflush(None)
    except Exception:
        pass


def read_input(prompt):
    """Reads from what user code made of sys.stdin; else says why there is nothing to read."""
    try:
        return INPUT(prompt)
    except EOFError:
        if sys.stdin is not STREAMS["stdin"]:
            raise
    raise EOFError("input() is not available here: carrel runs code without a terminal or standard input")
