"""The table of results, on worked examples and against published critical values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.figures.compare import compare_seeds, paired, tail, welch
from mtrl.figures.groups import SeedGroup
from mtrl.figures.results import latex, markdown, result, rows
from tests.figures.made import MadeUpRun


def group(label, *values, seeds=None, before=0.25):
    """Return a group of runs with these final success rates."""

    def run(seed, value):
        found = [{"step": 0, "val/success/mean": before}, {"step": 9, "val/success/mean": value}, {"step": 10}]
        return MadeUpRun(f"run{seed}", {"seed": seed}, found)

    return SeedGroup(
        label, tuple(run(seed, value) for seed, value in zip(seeds or range(len(values)), values, strict=True))
    )


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(12.706, 1, 0.05), (2.776, 4, 0.05), (3.169, 10, 0.01), (1.0, 1, 0.5), (0.0, 3, 1.0), (1.984, 100, 0.05)],
)
def test_tail_of_students_distribution(t, freedom, p):
    assert tail(t, freedom) == pytest.approx(p, abs=2e-4)


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 50), st.integers(2, 40))
def test_tail_agrees_with_the_closed_form_of_whole_degrees_of_freedom(t, freedom):
    """Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for k in range(freedom % 2, freedom - 1, 2):
        total += term * cosine**k
        term *= (k + 1) / (k + 2)
    central = math.sin(angle) * total if freedom % 2 == 0 else 2 / math.pi * (angle + math.sin(angle) * total)
    assert tail(t, freedom) == pytest.approx(1 - central, abs=1e-5)


def test_welch_of_a_worked_example():
    """Means 2 and 6, squared errors 1/3 and 4/3: t = 4 / sqrt(5/3) = 3.0984 at (5/3)^2 / (1/18 + 8/9) = 2.9412."""
    assert welch([1, 2, 3], [4, 6, 8]) == pytest.approx(tail(3.09839, 2.94118), abs=1e-5)


def test_paired_of_a_worked_example():
    """Mean 2, squared error 1/3: t = 2 sqrt(3) = 3.4641 at 2 degrees of freedom, p = 1 - t / sqrt(2 + t^2)."""
    assert paired([1, 2, 3]) == pytest.approx(1 - 3.4641016 / math.sqrt(14), abs=1e-6)


def test_too_few_seeds_give_no_p_value_and_equal_results_show_no_difference():
    assert paired([0.5]) is None and welch([1.0], [2.0, 3.0]) is None
    assert paired([0.0, 0.0]) == 1.0 and welch([1, 1], [1, 1]) == 1.0


def test_different_means_without_spread_give_no_p_value():
    """Two seeds with the same gain are no evidence of p < 0.001, and neither is their rounding."""
    assert paired([0.5, 0.5]) is None and welch([0.9, 0.9], [1.0, 1.0]) is None
    assert paired([0.05, 0.05 + 4e-17, 0.05 - 4e-17]) is None and paired([0.0, 1e-17]) == 1.0


def test_the_same_seeds_are_pairs():
    assert compare_seeds({0: 1.0, 1: 2.0}, {1: 2.5, 0: 1.25}).method == "paired"
    found = compare_seeds({0: 1.0, 1: 2.0}, {1: 2.5, 2: 1.25})
    assert found.method == "Welch" and found.difference == pytest.approx(0.375)


def test_rows_of_the_table():
    first, second = group("grpo", 0.5, 0.7), group("rloo", 0.6, 0.9)
    assert rows([first, second]) == [
        ["grpo", "2", "9", "0.250 ± 0.000", "0.600 ± 0.141", "–", "–"],
        ["rloo", "2", "9", "0.250 ± 0.000", "0.750 ± 0.212", "+0.150", "0.205'"],
    ]


def test_a_group_without_evaluations_has_no_numbers():
    empty = SeedGroup("none", (MadeUpRun("run", {"seed": 0}, [{"step": 3}]),))
    assert rows([group("grpo", 0.5), empty])[1] == ["none", "0", "–", "–", "–", "–", "–"]
    assert rows([empty, group("grpo", 0.5)])[1] == ["grpo", "1", "9", "0.250", "0.500", "–", "–"]


def test_a_seed_that_ran_twice_is_one_draw():
    twice = group("grpo", 0.4, 0.6, 0.8, seeds=[0, 0, 1])
    assert len(result(twice).after) == 3
    assert rows([twice])[0][1:5] == ["2", "9", "0.250 ± 0.000", "0.650 ± 0.212"]


def test_markdown_and_latex_escape_special_characters():
    evil = group("a|b_50%&{x}", 0.5)
    assert "| a\\|b_50%&{x} | 1 | 9 | 0.250 | 0.500 | – | – |" in markdown([evil])
    text = latex([evil])
    assert r"a|b\_50\%\&\{x\} & 1 & 9 & 0.250 & 0.500 & -- & -- \\" in text
    assert text.count("\\begin{tabular}") == 1 and text.startswith("% ")
    assert r"0.600 $\pm$ 0.141" in latex([group("g", 0.5, 0.7)])
