# Talking to the agent.

# Out of the way of user code that closes low descriptors, and not inherited by the programs it starts.
HIGH = min(posix.sysconf("SC_OPEN_MAX"), 1024) - 40
SAVED = [dup2(fd, HIGH + fd, False) for fd in range(5)]
REQUESTS = open(SAVED[3], "rb", closefd=False)
close(3)
close(4)


class Scan:
    """What json.decoder would tell the C scanner, without importing `json` and with it `re`."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant, memo = float, int, float, {}


scan = make_scanner(Scan)


def quote(text):
    """A JSON string; lone surrogates, which are not Unicode text, become visible escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return encode_basestring(text)


def send(line):
    """Writes one reply line; the caller holds LOCK."""
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[write(SAVED[4], rest):]
    except OSError:
        _exit(LOST)


def emit(kind, entries, text):
    """Sends a display. Outside a call (a forked child, a thread that outlived its call) its text is printed instead."""
    flush()  # what was printed before comes before
    with LOCK:
        if call.id is not None:
            line = call.held + b'{"id":%d,"display":{"kind":"%s","mime":{%s}}}\n' % (call.id, kind, entries)
            call.held = b""
            if kind == b"result" and len(line) < SHORT_LINE and nothing_follows():
                call.held = line
                return
            return send(line)
    print(text)


def nothing_follows():
    """Whether what comes between a result and the end of its call is over at once: no figures, no streams that may block."""
    plain = sys.stdout is STREAMS["stdout"] and sys.stderr is STREAMS["stderr"]
    return plain and call.pyplot is None and "ctypes" not in sys.modules


def forked():
    """A forked child has no part in the conversation with the agent."""
    global LOCK
    if call.sparing:
        return
    LOCK = allocate_lock()
    call.id, call.held = None, b""
    call.undo = 0
    for fd in SAVED[3:] + [slot for _, slot, _ in SPARES]:
        try:
            close(fd)
        except OSError:
            pass
