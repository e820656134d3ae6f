# `wait` without a pid must not see spares.

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
