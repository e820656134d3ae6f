"""carrel's python driver: keeps one interpreter's state and runs the calls it is given. Contract: docs/drivers.md.

Invariants:
- The driver never dies of SIGINT. Its handler raises only when the interrupted frame is not the driver's own (see
  `on_sigint`), so there is no moment between "user code runs" and "driver code runs" that a signal can hit.
- User code shares this process and may break anything it can name: the driver keeps its own builtins, descriptors and
  references, and puts descriptors 0-2 and the standard streams back after every call.
- Starting is cheap. Python compiles this file at every start, so what most calls do without is kept as text in RARE,
  compiled when first needed; and `_json` and `posix` serve where `json` and `os` would cost milliseconds to import.
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


# ---- talking to the agent --------------------------------------------------------------------------------------------

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


# ---- forks of the driver's own ----------------------------------------------------------------------------------------

SPARES = []  # older states, oldest first: (pid, descriptor whose closing it waits for, last call of that state)
AT_FORK = [], [], []  # what user code and python's modules have registered: before, in the parent, in the child


def register_at_fork(*, before=None, after_in_parent=None, after_in_child=None):
    """Stands in for posix's own, so that a spare is an exact copy: `random` would seed itself anew in it."""
    if before is after_in_parent is after_in_child is None:
        raise TypeError("At least one argument is required.")
    for functions, function in zip(AT_FORK, (before, after_in_parent, after_in_child)):
        if function is not None:
            if not callable(function):
                raise TypeError("'%s' object is not callable" % type(function).__name__)
            functions.append(function)


def at_fork(which):
    def run_registered():
        if not call.sparing:
            for function in AT_FORK[which][::-1] if which == 0 else AT_FORK[which][:]:
                try:
                    function()
                except BaseException:
                    sys.unraisablehook(Unraisable(function))

    return run_registered


class Unraisable:
    """What python itself tells of a registered function that failed."""

    def __init__(self, function):
        self.exc_type, self.exc_value, self.exc_traceback = sys.exc_info()
        self.err_msg, self.object = None, function


def obstacle():
    """Why a fork of this process would not be this state; None if it would."""
    try:
        if posix.stat("/proc/self/task").st_nlink > 3:  # 2 and one per thread
            return "threads are running, and a fork has none of them"
        if call.loop is not None and not call.loop.is_closed() and sys.modules["asyncio"].all_tasks(call.loop):
            return "tasks of the event loop are under way, and a fork would share what they wait for"
        if call.memory and resident() * 3 > call.memory:
            return "the interpreter has more than a third of the sandbox's memory"
    except Exception:  # /proc is not there, or user code has changed a module
        pass


def resident():
    with open("/proc/self/statm", "rb", 0) as statm:
        return int(statm.read().split()[1]) * 4096


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
    if failure is not None:
        settle()
    if getpid() != PID:
        _exit(status)
    del failure  # and with it the frames and their variables
    reason = obstacle() if call.undo else None
    unspared = "" if reason is None else ',"unspared":' + quote(reason)
    if "import" in source:  # before the end, after which nobody may be left to hear it
        attempt(tell_imports, source)
    with LOCK:
        call.id, call.last = None, number
        held, call.held = call.held, b""
        send(held + ('{"id":%d,"done":{"exit":%d,"error":%s%s}}\n' % (number, status, error, unspared)).encode())


def tell_imports(source):
    """Which modules user code has asked for by name, each once: a warm parent may have them next time."""
    found = []
    for line in source.split("\n"):
        verb, _, rest = line.partition(";")[0].strip().partition(" ")
        if verb in ("import", "from"):
            for name in rest.split(",") if verb == "import" else [rest]:
                name = name.strip().partition(" ")[0].partition(".")[0]
                if name in sys.modules and name not in NAMED:
                    NAMED.add(name)
                    found.append(quote(name))
    if found:
        with LOCK:
            send(('{"imports":[%s]}\n' % ",".join(found)).encode())


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
    set_defaults()
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


def set_defaults():
    if b"MPLBACKEND" not in environ:
        environ[b"MPLBACKEND"] = b"agg"
        putenv(b"MPLBACKEND", b"agg")


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
    posix.register_at_fork(before=at_fork(0), after_in_parent=at_fork(1), after_in_child=at_fork(2))
    posix.register_at_fork = register_at_fork
    register_at_fork(after_in_child=forked)
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
    NAMED.update(sys.modules)
    if b"CARREL_PARENT" in environ:
        rare("await_life", "WARM")()
    send(b'{"ready":{"version":"%d.%d.%d"}}\n' % sys.version_info[:3])


def brief(request):
    """What the session holds, told at the idle prompt without running any of its code."""
    was_on, profile = gc_is_on(), getprofile()
    pause_gc()  # a collection would run finalizers
    if profile is not None:
        setprofile(None)
    try:
        held = rare("holdings")(request["brief"])
    except BaseException:  # no memory
        held = "{}"
    if profile is not None:
        setprofile(profile)
    if was_on:
        resume_gc()
    with LOCK:
        send(('{"id":%d,"brief":%s}\n' % (request["id"], held)).encode())


def reseed():
    """This process has come back from disk, and another one may have done so as well: not with the same numbers."""
    for name in ("random", "numpy.random"):
        try:
            sys.modules[name].seed()
        except BaseException:
            pass  # not loaded, or user code has put something of its own there
    # Compiling the text takes longer than all else on the way of a first call.
    for module, name in (("_ssl", "stir_openssl"), ("numpy.random", "stir_generators")):
        if module in sys.modules:
            attempt(rare(name))


def take_descriptors():
    """Of a process that has become a copy of another one: it was executed with those of a new interpreter."""
    global PID
    for fd in range(5):
        dup2(fd, HIGH + fd, False)
    close(3)
    close(4)
    PID = getpid()
    signal(SIGINT, on_sigint)


def forget():
    """The call was only to warm this process up, and nobody's."""
    SOURCES.clear()
    call.kept, call.last = 0, None


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
        if "brief" in request:
            brief(request)
            continue
        if "code" not in request:
            rare("obey", "UNDO")(request)
            continue
        call.undo, call.memory = request.get("undo", 0), request.get("memory", 0)
        # Done already, unless spares were off or have been let go. For a spare that takes over here the call is not meant.
        if (call.undo or SPARES) and rare("keep", "UNDO")():
            continue
        if "env" in request:
            change_environment(request["env"])
        if "reseed" in request:
            reseed()
        answer(request["id"], request["code"])
        if "warm" in request:
            forget()
    if SPARES:
        rare("let_go", "UNDO")(0)
    import atexit

    attempt(atexit._run_exitfuncs)  # threads, however, are not waited for
    settle()
    _exit(0)


# A warm parent: python with all of this loaded, and modules if it is told to, that waits before the first request. An image of
# its memory is taken while it sleeps, and copies of it wake up at once, each in a process of its own that was executed with the
# descriptors of a new interpreter. What copies must not share (descriptors, the pid, random numbers) is made anew in each.
WARM = r'''
from gc import collect, freeze
from time import sleep

PATIENCE = 600  # whoever takes the image has long given up by then


def await_life():
    names = environ.pop(b"CARREL_PARENT").decode()
    unsetenv(b"CARREL_PARENT")
    for name in filter(None, names.split(",")):
        attempt(__import__, name)  # one that is not there is not there for the copies either
    if posix.stat("/proc/self/task").st_nlink > 3:
        leave_threads()
    rare("report"), rare("keep", "UNDO")  # for all copies, once
    collect()
    freeze()  # or a copy's first collection would write to all that they share
    sleep(PATIENCE)
    # From here on in a copy. The parent itself, if nobody came, ends here: it has no descriptors 3 and 4.
    try:
        take_descriptors()
        given = scan(REQUESTS.readline().decode(), 0)[0]["variables"]
    except (OSError, ValueError, StopIteration):
        _exit(LOST)
    for name in list(environ):
        unsetenv(name)
    environ.clear()
    change_environment(given)
    set_defaults()
    reseed()


def leave_threads():
    """Goes on in a fork, which has no threads: libraries that compute with them start theirs anew when they are needed."""
    call.sparing = True
    pid = posix.fork()
    call.sparing = False
    if pid:
        posix.waitpid(pid, 0)
        _exit(LOST)
'''

# Spares: states of before, each kept by a forked child that does nothing but wait.
#
#     this process ── forks ──> spare of call 9      each spare reads from a pipe whose other end is held by this process
#                  ── forks ──> spare of call 8      and by all newer spares, and written to only by `obey`
#
# When this process dies, the newest spare reads the end of its pipe and takes its place; when that one is gone too, the
# next. Of a crash nothing has to be told, so nothing that user code does to this process can keep a spare from noticing.
UNDO = r'''
from _signal import ITIMER_PROF, ITIMER_REAL, ITIMER_VIRTUAL, SIGKILL, getitimer, setitimer
from posix import getppid, kill
from time import sleep

try:
    from select import poll
    from posix import pidfd_open
except ImportError:  # pidfd_open came with 3.9
    poll = None

SCORE = "/proc/self/oom_score_adj"
OWN = set()  # spares that are this process's children, also those that were killed and are not reaped yet
BORN = {}  # pid of a spare of the process whose place this one has taken -> when it began
FAULTS = {}  # pid of a spare -> faults() when it was made
SLOTS = range(HIGH + 5, HIGH + 40)
PLAIN_SCORE = None  # of this process, before the first spare


def keep():
    """Sees to it that a spare has this state, and that there are no more spares than wanted. True in one that has taken over."""
    heir = False
    attempt(let_go, call.undo + 1 if call.undo else 0)
    while call.undo and call.spared != call.last and spare():
        heir = True  # the process before this one has died: this state needs a spare again
    return heir


def spare():
    """Forks. True in the fork, when it has taken over."""
    number, reason = call.last, obstacle()
    if reason is None:
        try:
            let_go(call.undo)
            make_room()
            return fork_spare(number)
        except BaseException as exc:  # no room for a process; or user code has changed what this needs
            reason = "no copy of the interpreter could be made: %s" % exc
    tell('{"unspared":{"id":%d,"reason":%s}}' % (number, quote(reason)))


def fork_spare(number):
    if not OWN:
        hide_spares()
        be_killed_first(250)
    handles, timers, parent, before = handles_now(), timers_now(), getpid(), faults()
    ours, theirs = posix.pipe()
    try:
        held = {slot for _, slot, _ in SPARES}
        slot = dup2(theirs, next(slot for slot in SLOTS if slot not in held), False)
    finally:
        close(theirs)
    done = posix.pipe() if handles else ()
    call.sparing = True
    try:
        pid = posix.fork()
    except OSError:
        for fd in (ours, slot, *done):
            close(fd)
        raise
    finally:
        call.sparing = False
    if pid:
        close(ours)
        if handles:
            # What user code closes in its next call must be closed by then: a port is free, a reader sees the end.
            close(done[1])
            attempt(posix.read, done[0], 1)
            close(done[0])
        SPARES.append((pid, slot, number))
        FAULTS[pid] = before
        OWN.add(pid)
        call.spared = number
        attempt(rehearse)
        bare = "" if handles or timers or call.loop is not None else ',"bare":true'
        return tell('{"spare":{"id":%d,"pid":%d%s}}' % (number, pid, bare))
    try:
        FAULTS[None] = before
        closed = disconnect(handles)
        for fd in done:
            close(fd)
        take_over(number, timers, closed, wait_in_reserve(ours, slot, parent))
    except BaseException:
        _exit(LOST)
    return True


def rehearse():
    """Does what every call does. After a fork the first write to a page copies it, which would be on the next call's time."""
    name = "<rehearsal>"
    scan('{"id":1,"code":"0","undo":1,"memory":1}', 0)
    tree = compile("0", name, "exec", ONLY_AST | ALLOW_AWAIT, True)
    code = compile(Expression(tree.body[0].value), name, "eval", ALLOW_AWAIT, True)
    if call.handler is None and call.trace is None:  # otherwise it would be noticed
        SOURCES[name] = name
        del SOURCES[name]
        attempt(run, code)
        attempt(perform, "pass", name)
        leave()
    memoryview(b'{"display":{%s}}' % quote(plain(0)).encode())
    settle(), settle()
    obstacle()
    call.last = call.last


def wait_in_reserve(pipe, slot, parent):
    """Until it is this process's turn. True in a copy of it, for which the reading is over at once: in a box of its own, with the
    descriptors of a new interpreter, nobody's child."""
    close(slot)
    OWN.clear()
    posix.setsid()  # interrupts and other signals to the interpreter's group are not for a spare
    be_killed_first(0)
    own = posix.fstat(pipe)[1:3]
    while True:
        try:
            asked = posix.read(pipe, 1)
            break
        except OSError:
            asked = b""
            break
        except BaseException:  # a signal handler of the user's
            pass
    if attempt(posix.fstat, pipe) or posix.fstat(pipe)[1:3] != own:
        return True
    close(pipe)
    if asked:  # the parent is about to end: see `obey`
        return
    # Its descriptors are closed. It may be dying, or have become another program, or user code has closed them.
    while getppid() == parent:
        try:
            await_end(parent)
        except BaseException:
            pass


def await_end(pid):
    if poll is None:
        return sleep(0.01)
    fd = pidfd_open(pid)
    try:
        if getppid() == pid:
            watch = poll()
            watch.register(fd, 1)
            watch.poll()
    finally:
        close(fd)


def take_over(number, timers, closed, copied):
    global PID
    PID = getpid()
    call.spared = None
    if copied:
        take_descriptors()
        SPARES.clear(), FAULTS.clear(), BORN.clear()
    for pid, _, _ in SPARES:
        attempt(note_birth, pid)
    be_killed_first(250)
    for which, (delay, interval) in timers:
        setitimer(which, delay, interval)
    if call.loop is not None:  # its descriptors are gone; no task was waiting for one
        call.loop = None
        attempt(sys.modules["asyncio"].set_event_loop, None)
    if not copied:
        tell('{"restored":{"id":%d,"pid":%d,"closed":%d}}' % (number, PID, closed))
    # What is left in the pipe, or was read of it, was for the process that died, or that this is a copy of.
    word = b'{"resume":%d}\n' % number
    while True:
        line = REQUESTS.readline()
        if not line:
            _exit(LOST)
        if line == word:
            return tell('{"ready":{}}')


def handles_now():
    """Descriptors of user code, and where files are read and written."""
    found = []
    for name in posix.listdir("/proc/self/fd"):
        fd = int(name)
        if 2 < fd < HIGH or fd >= HIGH + 40:
            try:
                found.append((fd, posix.lseek(fd, 0, 1)))
            except OSError as exc:
                if exc.errno != 9:  # that of the listing itself is closed by now
                    found.append((fd, None))
    return found


def disconnect(handles):
    """A spare must not hold what user code may close: the other end of a pipe or socket would wait for ever, a port would
    stay taken, a lock locked. It opens files anew, which also gives it a position of its own. Instead of the rest it has
    descriptors that can do nothing, so that their numbers stay taken. Says how many."""
    if not handles:
        return 0
    streams = [posix.fstat(fd)[1:3] for fd in SAVED[:3]]
    closed, nothing = 0, posix.open("/", 0o10000000 | posix.O_CLOEXEC)  # O_PATH
    for fd, position in handles:
        try:
            status = posix.fstat(fd)
            if status[1:3] in streams:
                continue
            if status.st_mode & 0o170000 not in (0o100000, 0o040000, 0o020000):  # a file, a directory, a device
                raise OSError
            reopen_handle(fd, position)
        except (OSError, ValueError, StopIteration):
            try:
                dup2(nothing, fd, False)
                closed += 1
            except OSError:
                pass
    close(nothing)
    return closed


def reopen_handle(fd, position):
    with open("/proc/self/fdinfo/%d" % fd) as info:
        flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
    flags &= ~(posix.O_CREAT | posix.O_EXCL | posix.O_TRUNC)
    new = posix.open("/proc/self/fd/%d" % fd, flags | posix.O_CLOEXEC | posix.O_NOCTTY)
    try:
        if position is not None:
            posix.lseek(new, position, 0)
        dup2(new, fd, posix.get_inheritable(fd))
    finally:
        close(new)


def timers_now():
    """A fork has no timers."""
    return [(which, now) for which in (ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF) for now in [getitimer(which)] if now[0]]


def be_killed_first(more):
    """If memory runs out it is the interpreter that has to go, and not the state of before."""
    global PLAIN_SCORE
    try:
        if PLAIN_SCORE is None:
            with open(SCORE) as score:
                PLAIN_SCORE = int(score.read())
        with open(SCORE, "w") as score:
            score.write(str(min(PLAIN_SCORE + more, 1000)))
    except OSError:
        pass


def tell(line):
    with LOCK:
        send(line.encode() + b"\n")


def let_go(count):
    """Ends the oldest spares beyond this many, and forgets those that were killed: by user code or by the agent."""
    for pid in OWN - {spare[0] for spare in SPARES}:
        ended(pid)
    drop([spare for spare in SPARES if ended(spare[0])], False)
    drop(SPARES[:max(0, len(SPARES) - count)])
    if not count:  # nobody comes back to reap them
        for pid in list(OWN):
            ended(pid, 0)


def make_room():
    """Whatever changes after a fork is there twice. Before that could fill the sandbox, the oldest states go."""
    size, room = resident(), call.memory * 3 // 4
    if not call.memory or size * (call.undo + 2) <= room:
        return
    # A page that changes after a fork is a page fault here, so their number bounds what spares have alone.
    while SPARES and (faults() - FAULTS.get(SPARES[0][0], 0)) * 4096 + 2 * size > room:
        drop(SPARES[:1])


def faults():
    """Page faults of this process, and before it of the one whose place it has taken."""
    return int(stat("self")[7]) + FAULTS.get(None, 0)


def stat(pid):
    """What the kernel says of a process, from its state on."""
    with open("/proc/%s/stat" % pid, "rb", 0) as file:
        return file.read().rpartition(b")")[2].split()


def drop(spares, alive=True):
    for item in spares:
        SPARES.remove(item)
        pid, slot, number = item
        if number == call.spared:
            call.spared = None
        try:
            close(slot)
        except OSError:
            pass
        FAULTS.pop(pid, None)
        if alive and not ended(pid):
            attempt(make_way, pid)
            try:
                kill(pid, SIGKILL)  # its end takes a while; it is reaped later
            except OSError:
                pass


def make_way(pid):
    """A process that is about to end gives back its memory, which takes a while: those who work come first."""
    posix.setpriority(posix.PRIO_PROCESS, pid, 19)


def ended(pid, how=posix.WNOHANG):
    try:
        if pid not in OWN:  # not a child: its number may be another's by now
            return born(pid) != BORN.get(pid)
        if REAL["waitpid"](pid, how)[0] != pid:
            return False
    except OSError:
        pass
    OWN.discard(pid)
    return True


def note_birth(pid):
    """Of a spare that is older than this process; whoever is younger has its number, and it is gone."""
    birth = born(pid)
    if birth <= born(PID):
        BORN[pid] = birth


def born(pid):
    return int(stat(pid)[19])


def obey(request):
    """Keeps this state, if states are kept; copies it in any case; or goes back to the one after a call, whose spare takes over."""
    if "keep" in request:
        return keep()
    if "copy" in request:
        drop([spare for spare in SPARES if spare[2] == call.last])  # the agent has lost it, or killed it
        return spare() and keep()
    drop([spare for spare in SPARES if spare[2] > request["undo"]])
    settle()
    try:
        slot = SPARES[-1][1]
        # The end of a big process takes a while, and its descriptors are closed after its memory: not on the caller's time.
        posix.closerange(0, slot)
        posix.closerange(slot + 1, HIGH + 40)
        posix.write(slot, b"u")
        make_way(0)
    finally:
        _exit(0)


# ---- `wait` without a pid must not see spares


REAL = {name: getattr(posix, name) for name in ("wait", "wait3", "wait4", "waitpid", "waitid") if hasattr(posix, name)}


def hide_spares():
    if posix.waitpid is not REAL["waitpid"]:
        return
    modules = [posix, *filter(None, [sys.modules.get("os")])]
    for name, real in REAL.items():
        function = without_spares(name, real)
        for module in modules:
            if getattr(module, name, None) is real:
                setattr(module, name, function)


def without_spares(name, real):
    def any_child(arguments):
        if name in ("wait", "wait3"):
            return True
        return bool(arguments) and arguments[0] == (posix.P_ALL if name == "waitid" else -1)

    def wait(*arguments, **named):
        while OWN and any_child(arguments or tuple(named.values())):
            if not others():
                raise ChildProcessError(10, "No child processes")
            found = real(*arguments, **named)
            pid = getattr(found, "si_pid", None) if name == "waitid" else found[0]
            if pid not in OWN:
                return found
            ended(pid)
        return real(*arguments, **named)

    wait.__name__ = wait.__qualname__ = name
    wait.__doc__ = real.__doc__
    return wait


def others():
    """Whether there is a child besides the spares."""
    try:
        for task in posix.listdir("/proc/self/task"):
            with open("/proc/self/task/%s/children" % task) as children:
                if set(map(int, children.read().split())) - OWN:
                    return True
        return False
    except OSError:
        return True
'''

RARE = r'''
from _io import BytesIO, TextIOWrapper
from _json import make_encoder

LINE_LIMIT = 32 << 20  # the contract's longest reply line
SYSTEM_SEED = 64  # bits; numpy takes 128 from the system for a generator that is given no seed, and people give fewer
TEXT_LIMIT = 1 << 20  # text/plain is for reading; nobody reads more than this
MESSAGE_LIMIT = 64 << 10  # an error's message, which the traceback on stderr shows in full


# ---- numbers nobody else shall have


def stir_openssl():
    """OpenSSL's generator starts anew by itself in a process with another pid, and a process that comes back has its old one."""
    sys.modules["_ssl"].RAND_add(posix.urandom(64), 64.0)


def stir_generators():
    """Those that `numpy.random.default_rng()` has made. One that was given a seed is meant to go on as it would have."""
    from gc import get_objects

    numpy = sys.modules["numpy.random"]
    kinds = [getattr(numpy, name, None) for name in ("PCG64", "PCG64DXSM", "Philox", "SFC64")]
    known = {id(kind): kind for kind in kinds if kind is not None}  # not by `==`, which may be user code's
    for it in get_objects():
        kind = known.get(id(type(it)))
        if kind is None:
            continue
        sequence = it.seed_seq if hasattr(it, "seed_seq") else it._seed_seq
        entropy = getattr(sequence, "entropy", None)
        if type(entropy) is int and entropy.bit_length() > SYSTEM_SEED:
            it.state = kind().state


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


# ---- the brief: what the session holds, seen without running any code of the user's
#
# An object is asked nothing: its class is what `type` says, and an attribute counts only where C code keeps it (`field`).
# Nothing is looked up in a dict that user code fills, since a key of its own making may be compared then; dicts are gone
# through, and only keys that are really strings are looked at. No name is bound, nothing is collected.

LOOKED_AT = 500  # the newest names: what a caller has just made is what it wants to know of
TOLD = 40
CLIP = 60
MODULE, FUNCTION, BUILTIN = type(sys), type(plain), type(write)
NAME_OF, MRO_OF, DICT_OF = (vars(type)[name].__get__ for name in ("__name__", "__mro__", "__dict__"))
KEPT_BY_C = type(vars(type)["__dict__"]), type(vars(type)["__mro__"])
SIZED = list, tuple, dict, set, frozenset, str, bytes, bytearray, range
NUMBERS = int, float, complex, bool
GIVEN = "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__", "__warningregistry__"


def holdings(given):
    classes = known_classes()
    ranked = [[], [], [], []]  # data, what is called, modules, private names
    for name, value in newest():
        if not (type(name) is str and name in GIVEN):
            rank = 3 if type(name) is not str or name.startswith("_") else rank_of(value)
            if len(ranked[rank]) < TOLD and type(name) is str:
                ranked[rank].append(described(name, value, classes))
    names = list(MAIN)
    total = len(names) - sum(type(name) is str and name in GIVEN for name in names[:LOOKED_AT])
    rows = [row for rank in ranked for row in rank][:TOLD]
    now = {key: value for key, value in list(environ.items()) if type(key) is bytes and type(value) is bytes}
    was = {name.encode(): value.encode() for name, value in given.items()}
    changed = [key for key in now if now[key] != was.get(key)]
    gone = [key for key in was if key not in now]
    listed = lambda keys: ",".join(quote(key[:CLIP].decode("utf-8", "replace")) for key in keys[:TOLD])
    rows = ",".join(rows)
    return '{"variables":[%s],"total":%d,"set":[%s],"unset":[%s]}' % (rows, total, listed(changed), listed(gone))


def newest():
    """The newest names with their values. A thread may be at work on them meanwhile."""
    for _ in range(10):
        found = []
        try:
            for item in reversed(MAIN.items()):
                found.append(item)
                if len(found) == LOOKED_AT:
                    break
            return found
        except RuntimeError:  # changed size
            pass
    return list(MAIN.items())[:-LOOKED_AT:-1]


def rank_of(value):
    kind = type(value)
    if kind is FUNCTION or kind is BUILTIN:
        return 1
    for base in MRO_OF(kind):
        if base is type:
            return 1
        if base is MODULE:
            return 2
    return 0


def described(name, value, classes):
    kind = type(value)
    label, entries = type_name(kind), []
    try:
        if any(kind is it for it in NUMBERS):
            if kind is not int or -(1 << 63) < value < 1 << 64:
                entries.append('"value":%s' % quote(repr(value)))
        elif any(kind is it for it in SIZED):
            entries += '"shape":"%d"' % len(value), '"size":%d' % getsizeof(value)
        elif kind is FUNCTION:
            label = "function"
        elif any(kind is it for it in classes):
            label, entries = measured(label, value, classes)
    except Exception:  # it is not what it seemed to be: its class is all there is to say
        entries = []
    return '{"name":%s,"type":%s%s}' % (quote(name[:CLIP]), quote(label), "".join("," + entry for entry in entries))


def type_name(kind):
    name = NAME_OF(kind)
    return str.__getitem__(name, slice(CLIP))  # may be of a subclass


# ---- arrays and tables of the libraries that everybody uses, where they are loaded


def known_classes():
    """numpy.ndarray, pandas.DataFrame and Series, torch.Tensor, or None for what is not there."""
    try:
        loaded = [item(sys.modules, name) for name in ("numpy", "pandas", "torch")] if type(sys.modules) is dict else [None] * 3
        numpy, pandas, torch = (vars(it) if type(it) is MODULE else {} for it in loaded)
        return item(numpy, "ndarray"), item(pandas, "DataFrame"), item(pandas, "Series"), item(torch, "Tensor")
    except Exception:
        return None, None, None, None


def item(mapping, wanted):
    for name, value in mapping.items():
        if type(name) is str and name == wanted:
            return value


def field(value, name):
    """What C code keeps in an object under that name, or None."""
    for base in MRO_OF(type(value)):
        found = item(DICT_OF(base), name)
        if found is not None:
            kind = type(found)
            return kind.__get__(found, value) if kind is KEPT_BY_C[0] or kind is KEPT_BY_C[1] else None


def measured(label, value, classes):
    array, frame, series, tensor = classes
    kind, entries = type(value), []
    if kind is frame or kind is series:
        # A table's axes: the manager's, which C keeps for some and the object itself for others. pandas moved them more than once.
        manager = item(field(value, "__dict__"), "_mgr")
        axes = field(manager, "axes")
        if axes is None:
            axes = item(field(manager, "__dict__") or {}, "axes")
        shape = [length(axis, array) for axis in (axes if type(axes) is list else ())][::-1]
    else:
        shape = sizes(field(value, "shape"))
        if kind is array:
            dtype, nbytes = field(value, "dtype"), field(value, "nbytes")
            code, width = field(dtype, "kind"), field(dtype, "itemsize")
            if type(code) is str and type(width) is int:
                label += " %s%d" % (code[:1], width)
            if type(nbytes) is int:
                entries.append('"size":%d' % nbytes)
    if shape and None not in shape:
        entries.append('"shape":"%s"' % "x".join(map(str, shape))[:CLIP])
    return label, entries


def sizes(shape):
    """A tuple of numbers, or of a subclass that C made (torch.Size)."""
    if not any(base is tuple for base in MRO_OF(type(shape))):
        return None
    numbers = list(tuple.__iter__(shape))
    return numbers if all(type(it) is int for it in numbers) else None


def length(axis, array):
    """Of an index: a range, or what an array has."""
    kept = field(axis, "__dict__")
    data, numbers = item(kept, "_data"), item(kept, "_range")
    if type(numbers) is range:
        return len(numbers)
    if type(data) is not array:  # texts, since pandas 3, are in an array that C keeps in another
        data = field(data, "_ndarray")
    return sizes(field(data, "shape"))[0] if type(data) is array else None


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
