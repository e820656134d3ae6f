# Running code.


def future_flags(code):
    import __future__

    # Nested scopes have bit 16, which code objects use for something else.
    flags = {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}
    return code.co_flags & sum(flags - {16})


def hushed(source, last):
    """Whether a `;` follows the last expression. Only brackets and comments can stand there beside it."""
    lines = source.split("\n")[last.end_lineno - 1:]
    lines[0] = lines[0].encode()[last.end_col_offset:].decode()
    return any(";" in line.partition("#")[0] for line in lines)


def run_awaitable(coroutine):
    """Runs a top-level await. Tasks of earlier calls continue meanwhile, as all share one loop."""
    import asyncio

    if call.loop is None or call.loop.is_closed():
        call.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(call.loop)
    call.cancelled = call.pending
    call.task = task = call.loop.create_task(coroutine)
    if call.pending:
        task.cancel()
    try:
        return call.loop.run_until_complete(task)
    except asyncio.CancelledError as exc:
        if not call.cancelled:
            raise
        while isinstance(exc.__context__, asyncio.CancelledError):  # up to 3.10 the place of the await is there
            exc = exc.__context__
        raise KeyboardInterrupt().with_traceback(exc.__traceback__) from None
    finally:
        call.task = None
        if not task.done():  # interrupted elsewhere: give its `finally` blocks a moment, not forever
            task.cancel()
            call.loop.run_until_complete(asyncio.wait([task], timeout=1))


def idle(frame):
    """Whether the event loop was interrupted outside any user code, where raising would lose its callbacks."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("asyncio.", "selectors")):
        frame = frame.f_back
    return frame is not None and frame.f_code is run_awaitable.__code__
