"""Studies: the tables of every page equal the stored results of the runs."""

from pathlib import Path
from statistics import stdev

import pytest

import mtrl
from experiments.study import (
    Arm,
    Study,
    evaluated_steps_to,
    has_ended,
    known,
    paired_table,
    seeds_of,
    short_table,
    show_table,
    statistics,
    steps_to,
    tables,
)

ROOT = Path(mtrl.__file__).parent.parent
STUDIES = sorted((ROOT / "experiments").glob("*/study.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_every_page_shows_the_tables_of_the_results(path):
    study = Study.read(path)
    for page, text in tables(study, known(study)).items():
        assert f"<!-- table -->\n{text}<!-- /table -->" in (ROOT / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_results_have_only_seeds_of_the_study(path):
    """A result with another seed could be selected by its outcome."""
    study = Study.read(path)
    for arm in study.arms:
        assert {int(seed) for seed in known(study).get(arm.name, {})} <= set(arm.seeds)


def test_a_stopped_run_is_resumed_although_it_has_a_summary(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    assert not has_ended(tmp_path) and not has_ended(tmp_path / "none")
    for status, ended in (("running", False), ("stopped", False), ("finished", True)):
        (tmp_path / "status.txt").write_text(f"{status}\n")
        assert has_ended(tmp_path) == ended


def test_an_arm_may_have_seeds_of_its_own(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("seeds: 3-5\ncommon: [a=1]\narms:\n  one: [b=2]\n  two: {overrides: [b=3], seeds: [7, 9]}\n")
    study = Study.read(path)
    assert study.arms == [Arm("one", ["b=2"], [3, 4, 5]), Arm("two", ["b=3"], [7, 9])]
    assert seeds_of(4) == [4] and seeds_of("4") == [4]


@pytest.mark.parametrize(("n", "quantile"), [(5, 2.776), (10, 2.262), (40, 2.023)])
def test_statistics_by_hand(n, quantile):
    values = [(i * 7 % n) / n for i in range(n)]
    half = 100 * quantile * stdev(values) / n**0.5
    count, middle, worst, best, mean = statistics("greedy after", values)
    assert (count, worst, best) == (str(n), "0 %", f"{100 * (n - 1) / n:.3g} %")
    assert middle == f"{50 * (n - 1) / n:.3g} %"
    shown, spread = mean.removesuffix(" %").split(" ± ")
    assert float(shown) == pytest.approx(50 * (n - 1) / n, rel=5e-3) and float(spread) == pytest.approx(half, rel=0.03)


def test_the_worst_value_is_the_largest_if_less_is_better():
    assert statistics("steps to 90 %", [3.0, 1.0, 2.0])[:4] == ["3", "2", "3", "1"]


def test_a_short_table_without_runs_and_with_one():
    found = {"one": {"1": {"sampled before": 0.25, "greedy after": 1.0, "sampled after": 0.985}}}
    assert short_table(found, ["one", "two"]).splitlines()[2:] == [
        "| one | 1 | 25 % (25 % to 25 %) | 100 % (100 % to 100 %) | 98.5 % (98.5 % to 98.5 %) |",
        "| two | 0 | – (– to –) | – (– to –) | – (– to –) |",
    ]


def test_a_table_stands_between_its_marks(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    for _ in range(2):
        show_table(page, "| new |\n")
    assert page.read_text() == "before\n<!-- table -->\n| new |\n<!-- /table -->\nafter\n"


def test_steps_to_a_share_are_counted_from_one_and_never_is_one_more():
    rows = [{"success": share} for share in (0.5, 0.9, 1.0, 1.0)]
    assert steps_to(0.79, "success")(rows, {}) == 3.0 and steps_to(0.99, "success")(rows, {}) == 5.0


def test_differences_are_taken_seed_by_seed(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("columns: [sampled after, steps to 90 %]\narms: {a: [], b: []}\npairs: [[a, b]]\n")
    found = {
        "a": {"1": {"sampled after": 0.8, "steps to 90 %": 3.0}, "2": {"sampled after": 0.6, "steps to 90 %": 5.0}},
        "b": {"2": {"sampled after": 0.5, "steps to 90 %": 9.0}, "1": {"sampled after": 0.5, "steps to 90 %": 5.0}},
    }
    sampled, steps = paired_table(Study.read(path), found).splitlines()[3:]
    assert sampled.startswith("| a − b | sampled after | 2 | 20 ± ") and sampled.endswith(" points | 2 |")
    assert steps.startswith("| a − b | steps to 90 % | 2 | -3 ± ") and steps.endswith(" | 2 |")


def test_steps_to_a_share_held_out_are_those_of_the_evaluation():
    rows = [{"step": 0, "v": 0.2}, {"step": 1}, {"step": 5, "v": 0.9}, {"step": 10, "v": 0.8}]
    assert evaluated_steps_to(0.9, "v")(rows, {}) == 5.0 and evaluated_steps_to(0.95, "v")(rows, {}) == 11.0
    assert evaluated_steps_to(0.9, "v")([{"step": 1}], {}) is None
