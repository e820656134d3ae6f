# SIGINT: raised in user code, remembered in the driver's.


def on_sigint(signum, frame):
    """Raises in user code, remembers in the driver's.

    Python runs this between two bytecodes of `frame`. If that is the driver's code, raising would hit a place not made
    for it, so the signal is left for `enter`, the next gate to user code; after the last gate it comes too late and is
    dropped. A frame of OPEN may be hit anywhere. No flag has to be flipped in step with user code, hence no race.
    """
    if not call.live:
        return
    if frame.f_code.co_filename == HERE and frame.f_code not in OPEN:
        # Inside the event loop of C (uvloop) the innermost Python frame is the driver's.
        if call.task is None or frame.f_code is not run_awaitable.__code__:
            call.pending = True
            return
    if call.task is not None and not call.cancelled and idle(frame):
        call.cancelled = True
        call.loop.call_soon_threadsafe(call.task.cancel)
    else:
        raise KeyboardInterrupt


def enter(code, namespace):
    """The gate to user code."""
    if call.pending:
        raise KeyboardInterrupt
    if call.handler is not None:
        signal(SIGINT, call.handler)
    if call.trace is not None:
        settrace(call.trace)
    return eval(code, namespace)


def plain(value):
    return repr(value)


OPEN = (enter.__code__, plain.__code__)


def leave():
    """Takes signals and tracing back from user code, noting what it wants during its next call."""
    call.trace = gettrace()
    if call.trace is not None:
        settrace(None)
    while True:
        try:
            handler = signal(SIGINT, on_sigint)
            break
        except BaseException:  # the user's handler raised, at us
            pass
    call.handler = None if handler is on_sigint else handler
