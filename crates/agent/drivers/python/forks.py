# Forks, of user code's and of the driver's own.

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
