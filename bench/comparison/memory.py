"""Memory of processes as the host sees it: proportional set size, so that shared pages are counted once."""

import os


def children():
    """Every process's children, by pid."""
    below = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        below.setdefault(parent, []).append(int(name))
    return below


def trees(roots):
    """These processes and all below them, each once."""
    below, seen, waiting = children(), set(), list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            waiting += below.get(pid, [])
    return seen


def pss(roots):
    """Bytes of these process trees. Kernel memory is not in it."""
    total = 0
    for pid in trees(roots):
        try:
            with open(f"/proc/{pid}/smaps_rollup") as rollup:
                total += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        except OSError:
            continue
    return total << 10
