"""Answers lines for an adapter that is written in python: `python -m comparison.worker KEY`.

The words, and what is answered, are in ../README.md. Times are taken here. When the input ends, so does everything that was
started, whatever became of who asked.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import sys
import time

from .adapter import Cannot
from .adapters import by_key

MAX_SAMPLES = 10_000
MAX_SESSIONS = 200
MAX_FLOOD = 1 << 30


class Worker:
    def __init__(self, adapter):
        self.adapter = adapter
        self.standing = {}
        self.idle = []

    def answer(self, words):
        match words:
            case ["hello"]:
                return {"version": self.adapter.version()}
            case ["create", language]:
                return self.create(language)
            case ["warm", language, count] if language in self.adapter.languages:
                session = self.stand(language)
                return {"seconds": [timed(session.call) for _ in range(bounded(count, MAX_SAMPLES))]}
            case ["together", ways, count]:
                return self.together(bounded(ways, MAX_SESSIONS), bounded(count, MAX_SESSIONS), True)
            case ["burst", count]:
                return self.together(bounded(count, MAX_SESSIONS), bounded(count, MAX_SESSIONS), False)
            case ["flood", count]:
                session, count = self.stand(self.language()), bounded(count, MAX_FLOOD)
                return {"seconds": [timed(lambda: session.flood(count))]}
            case ["wake", "standby"]:
                session = self.stand(self.language())
                session.freeze()
                return {"seconds": [timed(session.call)]}
            case ["open", count]:
                return self.open(bounded(count, MAX_SESSIONS))
            case ["shut"]:
                close_all(self.idle)
                return {}
        raise Cannot("it has no such thing")

    def language(self):
        return self.adapter.languages[0]

    def first(self, language):
        session = self.adapter.session(language)
        try:
            session.call()
        except BaseException:
            session.close()
            raise
        return session

    def create(self, language):
        if language not in self.adapter.languages:
            raise Cannot(f"it is measured without {language}")
        begun = time.perf_counter()
        session = self.first(language)
        seconds = time.perf_counter() - begun
        session.close()
        return {"seconds": [seconds]}

    def stand(self, language):
        """A session that stays until the end; a few calls, so that what is measured is warm."""
        if language not in self.standing:
            self.standing[language] = self.first(language)
            for _ in range(3):
                self.standing[language].call()
        return self.standing[language]

    def together(self, ways, count, end):
        kept = []

        def way(_):
            begun = time.perf_counter()
            session = self.first(self.language())
            seconds = time.perf_counter() - begun
            if end:
                session.close()
            else:
                kept.append(session)
            return seconds

        try:
            with concurrent.futures.ThreadPoolExecutor(ways) as pool:
                begun = time.perf_counter()
                seconds = list(pool.map(way, range(count)))
                everything = time.perf_counter() - begun
        finally:
            close_all(kept)
        return {"seconds": seconds, "all": everything}

    def open(self, count):
        for _ in range(count):
            self.idle.append(self.first(self.language()))
        pids = [pid for session in self.idle for pid in session.pids()]
        return {"pids": [*self.adapter.server_pids(), *pids]}

    def end(self):
        close_all(self.idle)
        close_all(list(self.standing.values()))
        self.adapter.end()


def bounded(word, most):
    number = int(word)
    if not 0 <= number <= most:
        raise ValueError(f"{word} is not between 0 and {most}")
    return number


def timed(call):
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def close_all(sessions):
    while sessions:
        with contextlib.suppress(Exception):
            sessions.pop().close()


def serve(adapter, arguments):
    # Lines are this program's own: what a library prints goes where people look.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Asked to end, it ends what it has started; a second time, at once.
    signal.signal(signal.SIGTERM, lambda *_: (signal.signal(signal.SIGTERM, signal.SIG_DFL), sys.exit(1)))
    worker = Worker(adapter)

    def say(reply):
        out.write(json.dumps(reply) + "\n")
        out.flush()

    try:
        try:
            adapter.start(*arguments)
        except Exception as error:
            say({"missing": f"{error}"})
            return
        for line in sys.stdin:
            try:
                reply = worker.answer(line.split())
            except Cannot as reason:
                reply = {"cannot": str(reason)}
            except Exception as error:  # Whatever a system does wrong is its figure, not the end of the comparison.
                reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            say(reply)
    finally:
        worker.end()


if __name__ == "__main__":
    serve(by_key(sys.argv[1]), sys.argv[2:])
