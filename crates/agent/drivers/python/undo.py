# Spares: states of before, each kept by a forked child that does nothing but wait.
#
#     this process ── forks ──> spare of call 9      each spare reads from a pipe whose other end is held by this process
#                  ── forks ──> spare of call 8      and by all newer spares, and written to only by `obey`
#
# When this process dies, the newest spare reads the end of its pipe and takes its place; when that one is gone too, the
# next. Of a crash nothing has to be told, so nothing that user code does to this process can keep a spare from noticing.

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
