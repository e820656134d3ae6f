"""`bench/compare`: installs, measures, prints the table, writes JSON and chart, and ends everything it has started."""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from . import chart, report
from .adapter import Missing
from .adapters import ALL
from .measures import ANSWER_SECONDS, LONG, QUICK, measures, take
from .place import Place
from .workers import Broken, Worker

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
QUICK_SYSTEMS = ("floor", "c-floor", "bare", "carrel-engine", "carrel-socket", "carrel-mcp-stdio", "carrel-mcp-http")
CLOSE_SECONDS = 120


def arguments():
    keys = [adapter.key for adapter in ALL]
    parser = argparse.ArgumentParser(prog="bench/compare", description="carrel beside other ways to run code, in one run")
    parser.add_argument("--quick", action="store_true", help="a smoke test: carrel and the floors, few samples")
    parser.add_argument("--systems", metavar="A,B", help=f"only these: {', '.join(keys)}")
    parser.add_argument("--measures", metavar="A,B", help="only these, by their names in the JSON")
    parser.add_argument("--rounds", type=int, metavar="N", help="in place of the usual number")
    parser.add_argument("--carrel", metavar="PATH", help="a carrel with carrel-bench beside it (default: built for release)")
    parser.add_argument("--no-install", action="store_true", help="with what is there; fetches nothing")
    parser.add_argument("--out", metavar="DIR", help="where figures.json and chart.svg go (default: target/compare)")
    args = parser.parse_args()
    for key in filter(None, (args.systems or "").split(",")):
        if key not in keys:
            parser.error(f"there is no adapter `{key}`; there are {', '.join(keys)}")
    known = [measure.key for measure in measures(LONG)]
    for key in filter(None, (args.measures or "").split(",")):
        if key not in known:
            parser.error(f"there is no measure `{key}`; there are {', '.join(known)}")
    return args


def say(text):
    # Nobody may be listening any more, and there may still be something to end.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def programs(args, target):
    """carrel, and carrel-bench beside it."""
    if args.carrel:
        carrel = os.path.abspath(args.carrel)
    else:
        subprocess.run(["cargo", "build", "--quiet", "--release", "--package", "carrel", "--package", "carrel-bench"],
                       cwd=TOP, check=True)
        carrel = os.path.join(target, "release", "carrel")
    bench = os.path.join(os.path.dirname(carrel), "carrel-bench")
    for program in (carrel, bench):
        if not os.access(program, os.X_OK):
            sys.exit(f"error: {program} is not there\nhint: cargo build --package carrel --package carrel-bench")
    return carrel, bench


def chosen(args):
    keys = args.systems.split(",") if args.systems else QUICK_SYSTEMS if args.quick else [adapter.key for adapter in ALL]
    # The floor is always there: everything is measured against it.
    return {adapter.key: adapter() for adapter in ALL if adapter.key in keys or adapter.key == "floor"}


def close_what_is_left(carrel, directory):
    """The sandboxes of adapters that could not do it themselves."""
    for base, below, files in os.walk(directory):
        if "registry.db" in files:
            below.clear()
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                subprocess.run([carrel, "--state", base, "close", "--all"], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CLOSE_SECONDS)


def start(adapter, place, directory):
    """A worker that has answered. Raises `Missing`."""
    adapter.prepare(place)
    # Everything that adapters keep for the run is in one directory, which is removed at the end.
    environment = {**os.environ, "PYTHONPATH": os.path.join(TOP, "bench"), "TMPDIR": directory}
    worker = Worker(adapter.key, adapter.command(place), environment, os.path.join(directory, f"{adapter.key}.log"))
    try:
        return worker, worker.ask("hello", ANSWER_SECONDS)["version"]
    except BaseException as error:
        worker.end()
        if isinstance(error, Broken):
            raise Missing(str(error)) from None
        raise


def end_all(workers):
    # Whoever is in a hurry would leave sandboxes and engines behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for worker in workers:
        worker.leave()
    for worker in workers:
        worker.end()


def compare(args, systems, place, directory):
    workers, versions, missing, figures = [], {}, {}, []
    wanted = [measure for measure in plan(args) if not args.measures or measure.key in args.measures.split(",")]
    about = {"quick": args.quick, "machine": report.machine()}
    try:
        for key, adapter in systems.items():
            try:
                worker, versions[key] = start(adapter, place, directory)
                workers.append(worker)
            except Missing as reason:
                missing[key] = str(reason)
                say(f"without {adapter.title}: {reason}")
        floor = next((worker for worker in workers if worker.key == "floor"), None)
        if floor is None:
            sys.exit("error: the floor cannot be measured, so nothing can")
        others = [worker for worker in workers if worker is not floor]
        for number, measure in enumerate(wanted, 1):
            say(f"[{number}/{len(wanted)}] {measure.title}")
            figures += take(measure, floor, others)
        about["load_after"] = report.machine()["load"]
    finally:
        say("ending what was started")
        end_all(workers)
    return wanted, versions, missing, figures, about


def plan(args):
    effort = QUICK if args.quick else LONG
    if args.rounds:
        effort = type(effort)(**{**vars(effort), "rounds": args.rounds, "slow_rounds": args.rounds})
    return measures(effort)


def main():
    args = arguments()
    # Ended by a signal, everything that was started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    target = os.environ.get("CARGO_TARGET_DIR") or os.path.join(TOP, "target")
    carrel, bench = programs(args, target)
    place = Place(os.path.join(target, "compare"), carrel, bench, install=not args.no_install and not args.quick)
    systems = chosen(args)
    directory = tempfile.mkdtemp(prefix="carrel-compare-")
    try:
        wanted, versions, missing, figures, about = compare(args, systems, place, directory)
    finally:
        close_what_is_left(carrel, directory)
        shutil.rmtree(directory, ignore_errors=True)
    print(report.table(systems, wanted, figures), flush=True)
    rest = report.left_out(systems, missing, wanted, figures)
    if rest:
        print(f"not measured\n{rest}\n", flush=True)
    out = args.out or place.root
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "figures.json"), "w") as file:
        file.write(report.as_json(systems, versions, missing, wanted, figures, about))
    with open(os.path.join(out, "chart.svg"), "w") as file:
        file.write(chart.chart(systems, figures, caption(about)))
    say(f"written: {os.path.join(out, 'figures.json')}, {os.path.join(out, 'chart.svg')}")
    failed = [figure for figure in figures if figure.failed and systems[figure.system].ours]
    return 1 if failed or any(systems[key].ours for key in missing) else 0


def caption(about):
    machine = about["machine"]
    return (f"p50 against fork+exec of /bin/true in the same run (1x), logarithmic bars; memory is PSS. "
            f"{machine['cpus']} CPUs, Linux {machine['kernel']}.")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted: everything that was started has been ended")
        sys.exit(130)
