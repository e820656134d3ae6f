"""carrel's python driver: keeps one interpreter's state and runs the calls it is given. Contract: docs/drivers.md.

Invariants:
- The driver never dies of SIGINT. Its handler raises only when the interrupted frame is not the driver's own (see
  `on_sigint`), so there is no moment between "user code runs" and "driver code runs" that a signal can hit.
- User code shares this process and may break anything it can name: the driver keeps its own builtins, descriptors and
  references, and puts descriptors 0-2 and the standard streams back after every call.
- Starting is cheap. Python compiles this file at every start, so what most calls do without is kept as text in RARE,
  compiled when first needed; and `_json` and `posix` serve where `json` and `os` would cost milliseconds to import.
- C stdio is flushed only once user code has loaded ctypes; without it we have no way to call fflush.

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
from posix import _exit, close, dup2, environ, getpid, putenv, set_blocking, unsetenv, write
from sys import getrecursionlimit, gettrace, setrecursionlimit, settrace

SOURCE_LIMIT = 16 << 20  # code of earlier calls kept for tracebacks, in characters
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
    linecache = sys.modules.get("linecache")  # this and the next: once user code has loaded them
    pyplot = fflush = None


def rare(name):
    """A function of RARE."""
    if name not in globals():
        exec(compile(RARE, HERE, "exec", 0, True), globals())
    return globals()[name]


# ---- talking to the agent --------------------------------------------------------------------------------------------

# Out of the way of user code that closes low descriptors, and not inherited by the programs it starts.
HIGH = min(posix.sysconf("SC_OPEN_MAX"), 1024) - 8
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
            return send(b'{"id":%d,"display":{"kind":"%s","mime":{%s}}}\n' % (call.id, kind, entries))
    print(text)


def forked():
    """A forked child has no part in the conversation with the agent."""
    global LOCK
    LOCK = allocate_lock()
    call.id = None
    for fd in SAVED[3:]:
        try:
            close(fd)
        except OSError:
            pass


# ---- SIGINT ----------------------------------------------------------------------------------------------------------


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


# ---- one call --------------------------------------------------------------------------------------------------------


def answer(number, source):
    """Runs one call from request to `done`, of which there is exactly one whatever happens."""
    if "\r" in source:
        source = source.replace("\r\n", "\n").replace("\r", "\n")  # as Python's tokenizer does
    name = "<call %d>" % number
    remember(name, source)
    call.id, call.pending, call.live = number, False, True
    try:
        failure = attempt(perform, source, name)
        leave()
    except BaseException as exc:  # only a SIGINT handler of the user's own can raise here
        failure = exc
        leave()
    if getrecursionlimit() < 200:  # too low for the driver itself
        setrecursionlimit(1000)
    if call.pyplot is not None and call.id is not None:
        failure = attempt(rare("show_figures")) or failure
    settle()
    status, error = (0, "null") if failure is None else rare("report")(failure)
    call.live = False
    settle()
    if getpid() != PID:
        _exit(status)
    del failure  # and with it the frames and their variables
    with LOCK:
        call.id = None
        send(('{"id":%d,"done":{"exit":%d,"error":%s}}\n' % (number, status, error)).encode())


def attempt(function, *arguments):
    try:
        function(*arguments)
    except BaseException as exc:
        return exc


def perform(source, name):
    """Runs one call's code in `__main__` and shows the value of its last expression."""
    flags = call.flags
    tree = compile(source, name, "exec", ONLY_AST | flags, True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
    body = compile(tree, name, "exec", flags, True) if tree.body else None
    if body is not None and "__future__" in source:
        flags = call.flags = flags | rare("future_flags")(body)
    tail = last and compile(Expression(last.value), name, "eval", flags, True)
    if body is not None:
        run(body)
    value = tail and run(tail)
    if value is not None and not (";" in source and rare("hushed")(source, last)):
        if sys.displayhook is not DISPLAYHOOK:
            return sys.displayhook(value)
        builtins._ = value
        show(value, b"result")


def run(code):
    value = enter(code, MAIN)
    return rare("run_awaitable")(value) if code.co_flags & CO_COROUTINE else value


def show(value, kind):
    if type(value) in PLAIN:
        text = plain(value)
        if len(text) < 100000:
            return emit(kind, b'"text/plain":' + quote(text).encode(), text)
    rare("show_rich")(value, kind)


def remember(name, source):
    """Keeps the code for tracebacks, of this call and of later ones that run its functions."""
    SOURCES[name] = source
    call.kept += len(source)
    while call.kept > SOURCE_LIMIT and len(SOURCES) > 1:
        oldest = next(iter(SOURCES))
        call.kept -= len(SOURCES.pop(oldest))
        if call.linecache is not None:
            call.linecache.cache.pop(oldest, None)
    if call.linecache is not None:
        call.linecache.cache[name] = line_entry(name)


def line_entry(name):
    """An entry of linecache; without a time, so that it is not checked against a file."""
    source = SOURCES[name]
    return len(source), None, [line + "\n" for line in source.split("\n")], name


# ---- standard streams ------------------------------------------------------------------------------------------------


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


# ---- start -----------------------------------------------------------------------------------------------------------


PENDING = []  # site directories whose .pth files wait for the first import of something that is not python's own


class Hook:
    """A finder that finds nothing itself: it lets the others find, and adapts the few modules of HOOKED once loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if PENDING and name.partition(".")[0] not in sys.stdlib_module_names:
            add_pending()
        return rare("adapted_spec")(name, path, target) if name in HOOKED else None


class Text(str):
    """Stands in for site's printers, which would import os to look for licence files."""

    def __repr__(self):
        return str(self)

    def __call__(self):
        print(self)


def display(*values, raw=False, **_):
    """Shows values as a notebook does; with raw=True they are mime bundles."""
    for value in values:
        rare("show_bundle")(value, b"display") if raw else show(value, b"display")


def set_builtins():
    """What `site` adds to the builtins, and what notebooks do."""
    from _sitebuiltins import Quitter, _Helper

    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D (i.e. EOF)"), Quitter("quit", "Ctrl-D (i.e. EOF)")
    builtins.help = _Helper()
    builtins.copyright = Text(sys.copyright)
    builtins.credits = Text("See https://www.python.org for more information.")
    builtins.license = Text("See https://www.python.org/psf/license/")
    builtins.display = display
    builtins.input = lambda prompt="": rare("read_input")(prompt)


def variable(name):
    return environ.get(name, b"").decode("utf-8", "surrogateescape")


def set_environment():
    """What an interpreter without -I and -S would have taken from its environment; os.environ is made from posix's."""
    sys.path[:0] = ["", *filter(None, variable(b"PYTHONPATH").split(":"))]
    sys.dont_write_bytecode |= variable(b"PYTHONDONTWRITEBYTECODE") != ""
    sys.warnoptions += filter(None, variable(b"PYTHONWARNINGS").split(","))
    if b"MPLBACKEND" not in environ:
        environ[b"MPLBACKEND"] = b"agg"
        posix.putenv(b"MPLBACKEND", b"agg")
    folder = sys.executable.rpartition("/")[0]
    prefix = folder.rpartition("/")[0]
    for config in (folder, prefix):
        try:
            posix.stat(config + "/pyvenv.cfg")
            sys.prefix = sys.exec_prefix = prefix
        except OSError:
            pass
    sites = variable(b"CARREL_SITE")
    if environ.pop(b"CARREL_SITE", None) is not None:
        posix.unsetenv(b"CARREL_SITE")
    for folder in filter(None, sites.split(":")):
        add_site(folder)


def add_site(folder):
    try:
        names = sorted(name for name in posix.listdir(folder) if name.endswith(".pth"))
    except OSError:
        return
    if folder not in sys.path:
        sys.path.append(folder)
    if names:
        PENDING.append((folder, names))
        if not hasattr(sys, "stdlib_module_names"):  # before 3.10 nothing says what is python's own
            add_pending()


def change_environment(changes):
    """What the session's variables have become since the last request; os.environ shows posix's."""
    for name, value in changes.items():
        name = name.encode()
        if value is None:
            environ.pop(name, None)
            unsetenv(name)
        else:
            environ[name] = value.encode()
            putenv(name, value.encode())


def add_pending():
    """Processes .pth files as `site` would. Their `import` lines can take longer than all the rest of the start, and only
    matter to packages, so they wait until one is imported."""
    import site

    pending = PENDING[:]
    del PENDING[:]
    known = site._init_pathinfo()
    for folder, names in pending:
        for name in names:
            site.addpackage(folder, name, known)


def start():
    global MAIN
    signal(SIGINT, on_sigint)
    posix.register_at_fork(after_in_child=forked)
    register_error("carrel", encode_surrogate)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="carrel", line_buffering=True)
    # The namespace of user code is a real module, so that pickle and multiprocessing find it.
    sys.modules["__main__"] = main = type(sys)("__main__")
    MAIN = main.__dict__
    MAIN["__builtins__"] = builtins
    sys.argv = [""]
    sys.meta_path.insert(0, Hook)
    set_builtins()
    set_environment()
    send(b'{"ready":{"version":"%d.%d.%d"}}\n' % sys.version_info[:3])


def reseed():
    """This process has come back from disk, and another one may have done so as well: not with the same numbers."""
    for name in ("random", "numpy.random"):
        try:
            sys.modules[name].seed()
        except BaseException:
            pass  # not loaded, or user code has put something of its own there


def serve():
    start()
    while True:
        try:
            line = REQUESTS.readline()
            if not line:
                break
            request = scan(line.decode(), 0)[0]
        except (OSError, ValueError, StopIteration):
            _exit(LOST)
        if "env" in request:
            change_environment(request["env"])
        if "reseed" in request:
            reseed()
        answer(request["id"], request["code"])
    import atexit

    attempt(atexit._run_exitfuncs)  # threads, however, are not waited for
    settle()
    _exit(0)


RARE = r'''
from _io import BytesIO, TextIOWrapper
from _json import make_encoder

LINE_LIMIT = 32 << 20  # the contract's longest reply line
TEXT_LIMIT = 1 << 20  # text/plain is for reading; nobody reads more than this
MESSAGE_LIMIT = 64 << 10  # an error's message, which the traceback on stderr shows in full


# ---- running code


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


# ---- values

REPRS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)


def show_rich(value, kind):
    """Shows a value in all the representations it offers, as Jupyter does."""
    mime = {}
    if type(value) not in PLAIN:
        offered = represent(value, "_repr_mimebundle_", include=None, exclude=None)
        if isinstance(offered, dict):
            mime.update(offered)
        for method, key in REPRS:
            if key not in mime:
                mime[key] = represent(value, method)
        if call.pyplot is not None and isinstance(value, call.pyplot.Figure):
            mime["image/png"] = picture(value)
    if mime.get("text/plain") is None:
        mime["text/plain"] = plain(value)
    show_bundle(mime, kind)


def represent(value, method, **arguments):
    """One representation, or None. Looked up on the type, since mocks and proxies claim to have any attribute."""
    try:
        if getattr(type(value), method, None) is None:
            return None
        found = getattr(value, method)(**arguments)
        return found[0] if isinstance(found, tuple) and found else found  # (data, metadata)
    except Exception as exc:
        note("%s of %s failed: %s: %s" % (method, type(value).__name__, *describe(exc)))


def show_bundle(mime, kind):
    """Sends a bundle, without what would not fit into a reply line."""
    entries, text = {}, clip(str(mime.get("text/plain", "")), TEXT_LIMIT)
    for key, value in mime.items():
        if value is not None and key != "text/plain":
            try:
                entries[key] = (quote(key) + ":" + to_json(transportable(key, value))).encode()
            except Exception as exc:
                note("%s left out: %s: %s" % (key, *describe(exc)))
    room = LINE_LIMIT - 8 * TEXT_LIMIT  # escaped, text is up to 6 times as long
    while sum(map(len, entries.values())) + len(entries) > room:
        key = max(entries, key=lambda key: len(entries[key]))
        text += "\n[%s left out: %d bytes]" % (key[:100], len(entries.pop(key)))
    emit(kind, b",".join([b'"text/plain":' + quote(text).encode(), *entries.values()]), text)


def transportable(key, value):
    """Binary types in base64, as in Jupyter."""
    if not isinstance(value, (bytes, bytearray)):
        return value
    if key.startswith("text/") or key in ("image/svg+xml", "application/json", "application/javascript"):
        return value.decode("utf-8", "replace")
    from binascii import b2a_base64

    return b2a_base64(value, newline=False).decode()


def to_json(value):
    if isinstance(value, str):
        return quote(value)
    return "".join(make_encoder({}, unjsonable, quote, None, ":", ",", False, False, False)(value, 0))


def unjsonable(value):
    raise TypeError("%s is not a JSON value" % type(value).__name__)


def clip(text, limit):
    if len(text) * 4 <= limit:
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return text
    kept = data[:limit].decode("utf-8", "ignore")
    return "%s\n[%d more bytes left out]" % (kept, len(data) - len(kept.encode()))


def picture(figure):
    """A figure as PNG. It is closed, since it has been shown; it can still be changed and shown again."""
    buffer = BytesIO()
    try:
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
    except Exception as exc:
        note("figure not shown: %s: %s" % describe(exc))
    finally:
        call.pyplot.close(figure)


def show_figures(*_, **__):
    """What plt.show() does here, and what happens to figures left open at the end of a call."""
    for number in call.pyplot.get_fignums():
        show(call.pyplot.figure(number), b"display")


# ---- errors


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


# ---- streams


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


# ---- imports


def adapted_spec(name, path, target):
    """The spec the other finders find, its loader made to call one of ADAPT after the module's own code."""
    finders = [finder for finder in sys.meta_path if finder is not Hook]
    spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
    if spec is not None and not isinstance(spec.loader, type):
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            ADAPT[name](module)

        spec.loader.exec_module = exec_module
    return spec


def keep_lines(linecache):
    """Gives linecache the code of all calls; user code may have emptied it."""
    call.linecache = linecache
    for name in SOURCES:
        if name not in linecache.cache:
            linecache.cache[name] = line_entry(name)


def adopt_pyplot(pyplot):
    call.pyplot = pyplot
    pyplot.show = show_figures
    pyplot.Figure.show = lambda figure, warn=True: show(figure, b"display")


def adopt_ipython(module):
    module.display = display


ADAPT = {
    "linecache": keep_lines,
    "matplotlib.pyplot": adopt_pyplot,
    "IPython.core.display_functions": adopt_ipython,
}
'''

# Up to Python 3.9 a function uses its caller's builtins if both have the same globals; this caller has others.
eval("serve()", {"serve": serve})
