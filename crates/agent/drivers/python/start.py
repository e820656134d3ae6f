# The start, and the way of a request.

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
