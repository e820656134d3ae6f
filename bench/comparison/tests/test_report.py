"""The table, the JSON and the chart, from figures that are made up."""

import json
import unittest
import xml.etree.ElementTree as ElementTree

from comparison import chart, report
from comparison.adapter import Adapter
from comparison.figures import MB, Figure, at
from comparison.measures import LONG, QUICK, measures

FLOOR = [0.001, 0.001, 0.002]


class Ours(Adapter):
    key, title, ours = "ours", "ours & <theirs>", True


class Other(Adapter):
    key, title, languages = "other", "other", ("bash",)


class Floor(Adapter):
    key, title = "floor", "floor"


class Gone(Adapter):
    key, title = "gone", "gone"


SYSTEMS = {adapter.key: adapter for adapter in (Floor(), Ours(), Other(), Gone())}
FIGURES = [
    Figure("create-python", "ours", [0.004, 0.002, 0.003], FLOOR),
    Figure("create-python", "other", [0.3], FLOOR),
    Figure("warm-python", "ours", [0.0001] * 100, FLOOR),
    Figure("warm-bash", "other", [0.01] * 3, FLOOR),
    Figure("warm-python", "other", floor=FLOOR, cannot="it has no python"),
    Figure("together", "ours", [0.096], FLOOR, per_sample=48),
    Figure("burst", "other", floor=FLOOR, failed="it fell over"),
    Figure("flood", "ours", [0.5], FLOOR, flood=64_000_000),
    Figure("memory", "ours", memory=3 * MB),
    Figure("memory", "other", memory=60 * MB),
]
MISSING = {"gone": "no such thing here"}


class Numbers(unittest.TestCase):
    def test_percentiles_are_samples_and_do_not_depend_on_their_order(self):
        samples = list(range(100, 0, -1))
        self.assertEqual([at(samples, part) for part in (0, 0.5, 0.99, 1)], [1, 51, 99, 100])
        self.assertEqual(at([7], 0.99), 7)
        self.assertIsNone(at([], 0.5))

    def test_a_ratio_is_the_median_against_the_floor_s(self):
        self.assertAlmostEqual(Figure("m", "s", [0.004, 0.002, 0.003], FLOOR).ratio, 3)

    def test_of_many_at_a_time_the_ratio_is_of_one(self):
        figure = Figure("m", "s", [0.096], FLOOR, per_sample=48)
        self.assertAlmostEqual(figure.ratio, 2)
        self.assertAlmostEqual(figure.rate, 500)

    def test_what_was_not_measured_has_no_ratio(self):
        self.assertIsNone(Figure("m", "s", [], FLOOR).ratio)
        self.assertIsNone(Figure("m", "s", [1.0], []).ratio)
        self.assertIsNone(Figure("m", "s", [1.0], FLOOR, flood=1).ratio)
        self.assertFalse(Figure("m", "s", cannot="no").measured)


class Table(unittest.TestCase):
    def setUp(self):
        self.text = report.table(SYSTEMS, measures(LONG), FIGURES)

    def line(self, start):
        return next(line for line in self.text.splitlines() if line.strip().startswith(start))

    def test_it_has_ratios_times_and_counts(self):
        self.assertEqual(self.line("ours").split()[3:], ["3.00x", "2", "ms", "3", "ms", "4", "ms", "3"])
        self.assertIn("300x", self.text)
        self.assertIn("128 MB/s", self.text)
        self.assertIn("3.00 MB", self.text)
        self.assertIn("500/s", self.text)

    def test_the_floor_is_the_first_row(self):
        self.assertEqual(self.text.splitlines()[1].split()[:2], ["floor", "1.00x"])

    def test_a_failure_is_shown_where_the_figure_would_be(self):
        self.assertIn("failed: it fell over", self.text)

    def test_measures_without_a_figure_are_left_out(self):
        self.assertNotIn("first node result", self.text)

    def test_what_is_left_out_is_said_with_its_reason(self):
        text = report.left_out(SYSTEMS, MISSING, measures(LONG), FIGURES)
        self.assertIn("gone: not here: no such thing here", text)
        self.assertIn("other: it has no python: warm python call", text)

    def test_numbers_have_as_many_digits_as_mean_something(self):
        said = [report.digits(number) for number in (1305.19, 28.63, 1, 0.25, 0.0213)]
        self.assertEqual(said, ["1305", "28.6", "1.00", "0.25", "0.021"])

    def test_durations_have_a_unit_that_fits(self):
        said = [report.duration(seconds) for seconds in (2.5, 0.0123, 0.000045, 1e-8, 123.4)]
        self.assertEqual(said, ["2.5 s", "12.3 ms", "45 µs", "0.01 µs", "123 s"])


class Json(unittest.TestCase):
    def setUp(self):
        about = {"quick": False, "machine": report.machine()}
        self.document = json.loads(report.as_json(SYSTEMS, {"ours": "1.2"}, MISSING, measures(QUICK), FIGURES, about))

    def test_every_figure_is_there_with_its_count(self):
        figures = {(figure["measure"], figure["system"]): figure for figure in self.document["figures"]}
        self.assertEqual(len(figures), len(FIGURES))
        create = figures["create-python", "ours"]
        self.assertEqual((create["n"], create["best"], create["p50"], create["p99"]), (3, 0.002, 0.003, 0.004))
        self.assertEqual((create["floor_n"], create["floor_p50"]), (3, 0.001))
        self.assertEqual(figures["memory", "ours"]["memory"], 3 * MB)
        self.assertEqual(figures["burst", "other"]["failed"], "it fell over")
        self.assertNotIn("ratio", figures["burst", "other"])

    def test_systems_say_their_version_or_why_they_are_missing(self):
        systems = {system["key"]: system for system in self.document["systems"]}
        self.assertEqual(systems["ours"]["version"], "1.2")
        self.assertEqual(systems["gone"]["missing"], "no such thing here")

    def test_the_machine_is_described_without_its_name(self):
        self.assertEqual(set(self.document["machine"]), {"cpus", "model", "memory", "kernel", "python", "load"})


class Chart(unittest.TestCase):
    def setUp(self):
        self.svg = chart.chart(SYSTEMS, FIGURES, "1 CPU & more")
        self.root = ElementTree.fromstring(self.svg)
        self.bars = [part for part in self.root if part.tag.endswith("rect")]
        self.texts = ["".join(part.itertext()) for part in self.root if part.tag.endswith("text")]

    def test_every_figure_has_a_bar_within_the_picture(self):
        # Two of create, two of warm, one of many at a time, two of memory; what failed or cannot has none.
        self.assertEqual(len(self.bars), 7)
        for bar in self.bars:
            self.assertGreater(float(bar.get("width")), 0)
            self.assertLess(float(bar.get("x")) + float(bar.get("width")), chart.WIDTH)
            self.assertLess(float(bar.get("y")) + float(bar.get("height")), float(self.root.get("height")))

    def test_the_faster_is_above_and_shorter(self):
        first, second = self.bars[:2]
        self.assertLess(float(first.get("y")), float(second.get("y")))
        self.assertLess(float(first.get("width")), float(second.get("width")))
        self.assertEqual((first.get("class"), second.get("class")), ("ours", "bar"))

    def test_a_figure_of_another_language_says_so(self):
        self.assertIn("other (bash)", self.texts)
        self.assertIn("ours & <theirs>", self.texts)
        self.assertIn("1 CPU & more", self.texts)

    def test_it_needs_nothing_from_elsewhere_and_reads_in_the_dark(self):
        self.assertIn("prefers-color-scheme: dark", self.svg)
        for foreign in ("href", "url(", "@import", "<script", "@font-face"):
            self.assertNotIn(foreign, self.svg)

    def test_without_figures_it_is_still_a_picture(self):
        ElementTree.fromstring(chart.chart(SYSTEMS, [], "nothing"))


if __name__ == "__main__":
    unittest.main()
