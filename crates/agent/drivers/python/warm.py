# A warm parent: python with all of this loaded, and modules if it is told to, that waits before the first request. An image of
# its memory is taken while it sleeps, and copies of it wake up at once, each in a process of its own that was executed with the
# descriptors of a new interpreter. What copies must not share (descriptors, the pid, random numbers) is made anew in each.

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
