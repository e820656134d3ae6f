"""The table for people and the JSON for programs."""

import datetime
import json
import os
import platform

from .figures import MB, Figure, at

FORMAT = 1
MAX_REASON = 160
"""Of a reason in the table; the JSON has all of it."""


def duration(seconds):
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    return ""


def digits(number):
    """As many as mean something."""
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2 if number >= 0.1 else 3}f}"


def value(figure):
    """A figure in one word: a ratio where it has one."""
    if figure.memory is not None:
        return f"{digits(figure.memory / MB)} MB"
    if figure.flood:
        return f"{digits(figure.rate / 1e6)} MB/s"
    return f"{digits(figure.ratio)}x" if figure.ratio is not None else "–"


def shortened(reason):
    line = reason.partition("\n")[0]
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + "…"


def row(title, figure):
    if figure.failed:
        return f"  {title:<28} failed: {shortened(figure.failed)}"
    times = "" if not figure.seconds else " ".join(f"{duration(at(figure.seconds, part)):>9}" for part in (0, 0.5, 0.99))
    rate = f"  {figure.rate:.0f}/s" if figure.rate and not figure.flood else ""
    count = f"{len(figure.seconds):>6}" if figure.seconds else ""
    return f"  {title:<28} {value(figure):>10} {times:<29} {count}{rate}".rstrip()


def table(systems, measures, figures):
    """`systems`: adapters by key; `figures`: all of them."""
    lines = [f"{'':<30} {'to floor':>10} {'best':>9} {'p50':>9} {'p99':>9} {'n':>6}"]
    # Of the whole run; every ratio is against the floor of its own measure.
    floors = {figure.measure: figure.floor for figure in figures}
    floor = [sample for samples in floors.values() for sample in samples]
    lines.append(row(systems["floor"].title, Figure("floor", "floor", floor, floor)))
    for measure in measures:
        shown = [figure for figure in figures if figure.measure == measure.key and (figure.measured or figure.failed)]
        if not shown:
            continue
        lines += ["", measure.title]
        lines += [row(systems[figure.system].title, figure) for figure in shown]
    return "\n".join(lines) + "\n"


def left_out(systems, missing, measures, figures):
    """What is not in the table, and why."""
    titles = {measure.key: measure.title for measure in measures}
    lines = [f"{systems[key].title}: not here: {reason}" for key, reason in missing.items()]
    for key, adapter in systems.items():
        reasons = {}
        for figure in figures:
            if figure.system == key and figure.cannot:
                reasons.setdefault(figure.cannot, []).append(titles[figure.measure])
        lines += [f"{adapter.title}: {reason}: {'; '.join(what)}" for reason, what in reasons.items()]
    return "\n".join(lines)


def machine():
    """What the figures depend on. No names."""
    model = memory = ""
    with open("/proc/cpuinfo") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    with open("/proc/meminfo") as lines:
        memory = next((line.partition(":")[2].strip() for line in lines if line.startswith("MemTotal")), "")
    return {"cpus": os.cpu_count(), "model": model, "memory": memory, "kernel": platform.release(),
            "python": platform.python_version(), "load": [round(load, 2) for load in os.getloadavg()]}


def as_json(systems, versions, missing, measures, figures, about):
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    said = [{"key": key, "title": adapter.title, "walls": adapter.walls, "note": adapter.note, "ours": adapter.ours,
             "version": versions.get(key, ""), "missing": missing.get(key, "")} for key, adapter in systems.items()]
    document = {
        "format": FORMAT, "when": when, **about, "systems": said,
        "measures": [{"key": measure.key, "title": measure.title} for measure in measures],
        "figures": [figure.as_json() for figure in figures],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
