# One call, from request to `done`.


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
