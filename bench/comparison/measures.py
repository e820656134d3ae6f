"""What is measured, and how often. Every measure goes round by round over all systems, so that a noisy moment hits them all; the
floor is measured in every one of these rounds."""

import time
from dataclasses import dataclass

from .figures import Figure
from .memory import pss
from .workers import Broken

FLOOR_SAMPLES = 4
"""Of the floor in every round of every measure."""
LEAST_FLOOR_SAMPLES = 20
"""Of the floor in every measure: one of few rounds has more of them in each."""
PATIENCE = 60
"""Seconds that one system may take for one measure; then it has as many samples as it has."""
ANSWER_SECONDS = 180
"""For one answer; who takes longer is ended."""


@dataclass(frozen=True)
class Effort:
    rounds: int
    slow_rounds: int
    heavy_rounds: int
    warm: int
    ways: int
    many: int
    burst: int
    flood: int
    idle: int


LONG = Effort(rounds=30, slow_rounds=10, heavy_rounds=3, warm=100, ways=8, many=48, burst=100, flood=64 << 20, idle=8)
QUICK = Effort(rounds=2, slow_rounds=1, heavy_rounds=1, warm=10, ways=4, many=4, burst=6, flood=4 << 20, idle=2)


@dataclass(frozen=True)
class Measure:
    key: str
    title: str
    words: str
    """What adapters are asked."""
    rounds: int
    per_sample: int = 1
    """More than one: the sample is the time of all of them together."""
    flood: int = 0
    idle: int = 0
    rehearse: bool = False
    """Once before counting: caches and templates are not what is measured."""

    def take(self, worker, figure):
        if self.idle:
            before = pss(worker.ask("open 0", ANSWER_SECONDS)["pids"])
            reply = worker.ask(f"open {self.idle}", ANSWER_SECONDS)
            figure.memory = (pss(reply["pids"]) - before) // self.idle
            worker.ask("shut", ANSWER_SECONDS)
            return
        reply = worker.ask(self.words, ANSWER_SECONDS)
        figure.seconds += [reply["all"]] if self.per_sample > 1 else reply["seconds"]


def measures(effort):
    """All of them, in the order they are measured and shown."""
    e = effort
    return [
        Measure("create-python", "create to first python result", "create python", e.rounds, rehearse=True),
        Measure("create-bash", "create to first bash result", "create bash", e.rounds, rehearse=True),
        Measure("create-node", "create to first node result", "create node", e.slow_rounds, rehearse=True),
        Measure("warm-python", "warm python call", f"warm python {e.warm}", e.slow_rounds),
        Measure("warm-bash", "warm bash call", f"warm bash {e.warm}", e.slow_rounds),
        Measure("warm-undo", "warm python call, 3 calls can be taken back", f"warm undo {e.warm}", e.slow_rounds),
        Measure("flood", "stdout through to the caller", f"flood {e.flood}", e.heavy_rounds, flood=e.flood),
        Measure("memory", "one more idle session, PSS of all its processes", "open", 1, idle=e.idle),
        Measure("wake-standby", "wake from standby to first result", "wake standby", e.rounds),
        Measure("wake-hibernated", "wake from disk to first result", "wake hibernated", e.slow_rounds),
        Measure("fork", "fork with a heap of 10 MB to first result", "fork", e.slow_rounds),
        # Last: who is too slow for these is ended, and has its other figures by then.
        Measure("together", f"creations, {e.ways} at a time", f"together {e.ways} {e.many}", e.heavy_rounds, e.many),
        Measure("burst", f"burst: {e.burst} creations at once, to the last result", f"burst {e.burst}", 1, e.burst),
    ]


def take(measure, floor, workers):
    """One figure per worker that still lives; `floor` is a worker too."""
    def blank(worker):
        return Figure(measure.key, worker.key, per_sample=measure.per_sample, flood=measure.flood)

    figures = {worker: blank(worker) for worker in workers}
    took = dict.fromkeys(workers, 0.0)
    samples = []
    for number in range(-1 if measure.rehearse else 0, measure.rounds):
        if number == 0:
            figures = {worker: blank(worker) if figure.seconds else figure for worker, figure in figures.items()}
        for _ in range(max(FLOOR_SAMPLES, LEAST_FLOOR_SAMPLES // measure.rounds) if number >= 0 else 0):
            samples += floor.ask("create nothing", ANSWER_SECONDS)["seconds"]
        for worker, figure in figures.items():
            if figure.failed or figure.cannot or worker.ended or took[worker] > PATIENCE:
                continue
            begun = time.monotonic()
            try:
                measure.take(worker, figure)
            except Broken as broken:
                figure.failed, figure.cannot = broken.failed, broken.cannot
            took[worker] += time.monotonic() - begun
    for worker, figure in figures.items():
        figure.floor = samples
        if worker.ended and not figure.measured and not figure.failed:
            figure.failed = worker.ended
    return list(figures.values())
