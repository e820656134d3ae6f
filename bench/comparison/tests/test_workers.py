"""Workers that answer, refuse, hang, die and do not want to end; and a whole comparison with a carrel that is made up."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

from comparison import workers
from comparison.adapter import Cannot
from comparison.adapters import ALL
from comparison.measures import QUICK, measures, take
from comparison.memory import pss, trees
from comparison.piped import PipedSession
from comparison.worker import MAX_SESSIONS
from comparison.workers import Broken, Worker

BENCH = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WAIT_SECONDS = 60


def until(condition, what):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.02)


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False



def interruptible():
    """Whoever runs these tests in the background may ignore ctrl-C, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class WithWorkers(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def worker(self, *argv):
        environment = {**os.environ, "PYTHONPATH": BENCH}
        worker = Worker("test", argv, environment, os.path.join(self.directory.name, "log"))
        self.addCleanup(worker.end)
        return worker

    def python(self, code):
        return self.worker(sys.executable, "-c", code)

    def bare(self):
        return self.worker(sys.executable, "-m", "comparison.worker", "bare")


class Adapters(WithWorkers):
    def test_a_plain_interpreter_is_measured_by_every_word_it_has(self):
        worker = self.bare()
        self.assertIn("python", worker.ask("hello", WAIT_SECONDS)["version"])
        self.assertEqual(len(worker.ask("create python", WAIT_SECONDS)["seconds"]), 1)
        self.assertEqual(len(worker.ask("warm python 20", WAIT_SECONDS)["seconds"]), 20)
        many = worker.ask("together 2 5", WAIT_SECONDS)
        self.assertEqual(len(many["seconds"]), 5)
        self.assertGreaterEqual(many["all"], max(many["seconds"]))
        self.assertEqual(len(worker.ask("burst 3", WAIT_SECONDS)["seconds"]), 3)
        self.assertEqual(len(worker.ask(f"flood {3 << 20}", WAIT_SECONDS)["seconds"]), 1)
        # The session still answers what it is asked: all of the output was read, and no more.
        worker.ask("warm python 1", WAIT_SECONDS)

    def test_idle_sessions_are_weighed_and_gone_afterwards(self):
        worker = self.bare()
        pids = worker.ask("open 2", WAIT_SECONDS)["pids"]
        self.assertEqual(len(pids), 2)
        self.assertGreater(pss(pids), 1 << 20)
        worker.ask("shut", WAIT_SECONDS)
        self.assertFalse(any(map(lives, pids)))

    def test_what_it_cannot_do_is_no_failure_and_what_is_wrong_is(self):
        worker = self.bare()
        for words in ("wake hibernated", "fork", "create cobol", "warm undo 3"):
            with self.assertRaises(Broken) as broken:
                worker.ask(words, WAIT_SECONDS)
            self.assertTrue(broken.exception.cannot and not broken.exception.failed, words)
        for words in (f"burst {MAX_SESSIONS + 1}", "warm python many", "together -1 3"):
            with self.assertRaises(Broken) as broken:
                worker.ask(words, WAIT_SECONDS)
            self.assertTrue(broken.exception.failed, words)
        worker.ask("create python", WAIT_SECONDS)

    def test_its_sessions_end_with_its_input(self):
        worker = self.bare()
        pids = worker.ask("open 3", WAIT_SECONDS)["pids"]
        self.assertTrue(worker.end())
        self.assertFalse(any(map(lives, pids)))

    def test_a_system_that_does_not_start_is_missing_and_says_why(self):
        worker = self.worker(sys.executable, "-m", "comparison.worker", "bubblewrap")
        with self.assertRaises(Broken) as broken:
            worker.ask("hello", WAIT_SECONDS)
        self.assertIn("program", broken.exception.failed)

    def test_an_interpreter_that_does_not_come_up_is_quoted(self):
        session = PipedSession(["sh", "-c", "echo out of luck >&2"], "python")
        self.addCleanup(session.close)
        with self.assertRaisesRegex((EOFError, BrokenPipeError), "out of luck|pipe"):
            session.call()

    def test_names_are_given_once_and_every_adapter_says_what_it_is(self):
        self.assertEqual(len({adapter.key for adapter in ALL}), len(ALL))
        for adapter in ALL:
            self.assertTrue(adapter.title and adapter.walls and adapter.languages, adapter)
        self.assertTrue(issubclass(Cannot, Exception))


class Unruly(WithWorkers):
    def test_who_hangs_is_given_up_and_not_asked_again(self):
        worker = self.python("import time; time.sleep(600)")
        with self.assertRaises(Broken):
            worker.ask("hello", 0.2)
        begun = time.monotonic()
        with self.assertRaises(Broken) as broken:
            worker.ask("hello", 600)
        self.assertLess(time.monotonic() - begun, 300)
        self.assertIn("no answer", broken.exception.failed)

    def test_who_dies_is_quoted(self):
        worker = self.python("import sys; sys.exit('out of luck')")
        with self.assertRaises(Broken) as broken:
            worker.ask("hello", WAIT_SECONDS)
        self.assertIn("out of luck", broken.exception.failed)

    def test_who_answers_nonsense_or_without_end_is_given_up(self):
        for code in ("print('what?'); input()", "import sys\nwhile True: sys.stdout.write('x' * 65536)"):
            with self.assertRaises(Broken):
                self.python(code).ask("hello", WAIT_SECONDS)

    def test_who_does_not_want_to_end_is_killed_with_what_it_has_started(self):
        worker = self.python(
            "import json, signal, subprocess, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            "input(); print(json.dumps({'pids': [child.pid]}), flush=True)\n"
            "time.sleep(600)")
        child = worker.ask("open 1", WAIT_SECONDS)["pids"][0]
        self.assertIn(child, trees([worker.process.pid]))
        with mock.patch.object(workers, "END_SECONDS", 0.2):
            self.assertFalse(worker.end())
        until(lambda: not lives(child), "its child still lives")

    def test_what_was_started_by_one_that_was_killed_ends_too(self):
        worker = self.python(
            "import json, subprocess, sys\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            "input(); print(json.dumps({'pids': [child.pid]}), flush=True)\n"
            "sys.stdin.read()")
        child = worker.ask("open 1", WAIT_SECONDS)["pids"][0]
        worker.process.kill()
        worker.process.wait()
        self.assertFalse(worker.end())
        until(lambda: not lives(child), "its child still lives")

    def test_one_system_s_failure_is_its_own(self):
        answers = "import json, sys\nfor line in sys.stdin: print(json.dumps({'seconds': [0.5]}), flush=True)"
        floor, good = self.python(answers), self.python(answers)
        bad = self.python("import sys; sys.exit('fell over')")
        bad.key = "bad"
        measure = measures(QUICK)[0]
        figures = {figure.system: figure for figure in take(measure, floor, [bad, good])}
        self.assertEqual((figures["test"].ratio, len(figures["test"].seconds)), (1.0, measure.rounds))
        self.assertIn("fell over", figures["bad"].failed)
        self.assertFalse(figures["bad"].measured)


# Answers everything with the same, and tells of its end. Hangs when asked for a word that the test chose.
FAKE = """#!/bin/sh
while read -r line; do
  if [ "$line" = "$FAKE_HANGS" ]; then
    sleep 600 &
    echo $! > "$FAKE_PLACE/hanging.new"
    mv "$FAKE_PLACE/hanging.new" "$FAKE_PLACE/hanging"
    wait
  fi
  echo '{"version": "0", "seconds": [0.002], "all": 0.1, "pids": []}'
done
touch "$FAKE_PLACE/ended-$2"
"""


class Whole(WithWorkers):
    def start(self, hangs, *more):
        place = self.directory.name
        for name in ("carrel", "carrel-bench"):
            with open(os.path.join(place, name), "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
                file.write(FAKE)
        environment = {**os.environ, "PYTHONPATH": BENCH, "FAKE_PLACE": place, "FAKE_HANGS": hangs, "TMPDIR": place,
                       "CARGO_TARGET_DIR": os.path.join(place, "target")}
        argv = [sys.executable, "-m", "comparison", "--quick", "--carrel", os.path.join(place, "carrel"), *more]
        return subprocess.Popen(argv, env=environment, preexec_fn=interruptible, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def there(self, name):
        return os.path.exists(os.path.join(self.directory.name, name))

    def test_it_measures_prints_and_writes(self):
        comparison = self.start("never", "--systems", "carrel-engine,carrel-socket")
        out, err = comparison.communicate(timeout=WAIT_SECONDS)
        self.assertEqual(comparison.returncode, 0, err)
        self.assertIn("carrel, unix socket", out)
        for name in ("target/compare/figures.json", "target/compare/chart.svg", "ended-engine", "ended-socket", "ended-floor"):
            self.assertTrue(self.there(name), name)
        self.assertEqual([name for name in os.listdir(self.directory.name) if name.startswith("carrel-compare-")], [])

    def test_interrupted_it_ends_everything_and_writes_nothing(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            comparison = self.start("fork", "--systems", "carrel-engine")
            until(lambda: self.there("hanging") or comparison.poll() is not None, "it never came to the last measure")
            # Twice, as somebody in a hurry does: what is being ended is ended all the same.
            comparison.send_signal(number)
            until(lambda: "ending" in comparison.stderr.readline(), "it does not end anything")
            comparison.send_signal(signal.SIGINT)
            with open(os.path.join(self.directory.name, "hanging")) as file:
                hanging = int(file.read())
            os.kill(hanging, signal.SIGTERM)
            comparison.communicate(timeout=WAIT_SECONDS)
            self.assertEqual(comparison.returncode, {signal.SIGINT: 130, signal.SIGTERM: 143}[number])
            self.assertTrue(self.there("ended-engine") and self.there("ended-floor"))
            self.assertFalse(self.there("target/compare/chart.svg"))
            self.assertEqual([name for name in os.listdir(self.directory.name) if name.startswith("carrel-compare-")], [])
            for name in ("hanging", "ended-engine", "ended-floor"):
                os.unlink(os.path.join(self.directory.name, name))

    def test_an_unknown_name_is_refused_and_the_known_ones_are_named(self):
        for option, known in (("--systems", "bubblewrap"), ("--measures", "warm-python")):
            comparison = self.start("never", option, "nonsense")
            _, err = comparison.communicate(timeout=WAIT_SECONDS)
            self.assertEqual(comparison.returncode, 2)
            self.assertIn(known, err)


if __name__ == "__main__":
    unittest.main()
