# Errors, as they are told.

MESSAGE_LIMIT = 64 << 10  # an error's message, which the traceback on stderr shows in full


def describe(exc):
    """Name and message, the name as a traceback has it."""
    kind = type(exc)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = "%s.%s" % (kind.__module__, name)
    try:
        return name, clip(str(exc), MESSAGE_LIMIT)
    except Exception:
        return name, "<exception str() failed>"


def note(text):
    try:
        sys.stderr.write("carrel: %s\n" % text)
    except Exception:
        pass


def report(failure):
    """Prints what ended a call; returns its exit status and error."""
    if isinstance(failure, SystemExit):
        if failure.code is None or isinstance(failure.code, int):
            return (failure.code or 0) & 0xFF, "null"
        attempt(lambda: sys.stderr.write("%s\n" % (failure.code,)))
        return 1, "null"
    name, message = "BaseException", ""
    try:
        name, message = describe(failure)
        print_error(failure)
    except BaseException:  # exhausted memory, a broken traceback module: one line is better than none
        note("%s: %s" % (name, message))
    error = '{"name":%s,"message":%s}' % (quote(name), quote(message))
    return 130 if isinstance(failure, KeyboardInterrupt) else 1, error


def print_error(exc):
    exc.__traceback__ = trim(exc.__traceback__)  # None for errors of the compiler and of an interrupted driver
    if isinstance(exc, SyntaxError) and exc.text is None and exc.filename in SOURCES and exc.lineno:
        exc.text = "".join(line_entry(exc.filename)[2][exc.lineno - 1:exc.lineno]) or None
    sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, exc.__traceback__
    sys.last_exc = exc
    if sys.excepthook is not EXCEPTHOOK:
        try:
            return sys.excepthook(type(exc), exc, exc.__traceback__)
        except Exception as broken:
            note("sys.excepthook failed: %s: %s" % describe(broken))
    from traceback import TracebackException

    keep_lines(call.linecache)
    summary = TracebackException(type(exc), exc, exc.__traceback__)
    hide_driver(summary)
    sys.stderr.write("".join(summary.format(chain=not isinstance(exc, KeyboardInterrupt))))


def trim(traceback):
    """Cuts off what comes before the user's code: the driver's frames, and the event loop's of a top-level await."""
    first = traceback
    while first is not None and first.tb_frame.f_code.co_filename not in SOURCES:
        first = first.tb_next
    return first


def hide_driver(summary):
    """Drops the driver's frames from inside a traceback and all it is chained to: `input`, `display`, hooks."""
    todo, seen = [summary], set()
    while todo:
        item = todo.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            item.stack[:] = [frame for frame in item.stack if frame.filename != HERE]
            todo += [item.__cause__, item.__context__, *(getattr(item, "exceptions", None) or ())]
