# Standard streams, put back after every call.


def settle():
    """Flushes everything to where user code sent it, then puts descriptors and streams back."""
    flush()
    if "ctypes" in sys.modules:
        rare("flush_c")()
    try:
        dup2(SAVED[0], 0), dup2(SAVED[1], 1), dup2(SAVED[2], 2)
        set_blocking(1, True), set_blocking(2, True)  # a flag of the pipe, so it outlives the descriptor
    except OSError:
        _exit(LOST)
    for number, name in enumerate(STREAMS):
        stream = STREAMS[name]
        try:
            usable = not stream.closed and stream.fileno() == number
        except ValueError:  # detached
            usable = False
        if not usable:
            stream = rare("reopen")(number, name)
        if getattr(sys, name, None) is not stream:
            setattr(sys, name, stream)
    flush()


def flush():
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:
            pass


def encode_surrogate(error):
    """Lone surrogates never fail to print: those that stand for a raw byte become it, others an escape."""
    char = ord(error.object[error.start])
    return bytes([char - 0xDC00]) if 0xDC80 <= char <= 0xDCFF else "\\u%04x" % char, error.start + 1
