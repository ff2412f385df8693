"""docs/algorithms.md agrees with the code: names, traits, bounds and worked numbers are looked up and recomputed."""

import re
from decimal import Decimal

import pytest

from mtrl.algorithms import registry
from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.batch import CreditBatch
from mtrl.command.algorithm_checks import NEEDS_OLD
from mtrl.config.algorithm_schema import PUBLISHED_BOUNDS, AlgorithmConfig
from mtrl.config.keys import find, words
from mtrl.config.overrides import CONF
from mtrl.types import FinishReason, Group, Trajectory, Turn

TEXT = (CONF.parent / "docs/algorithms.md").read_text(encoding="utf-8")
QUOTED = re.compile(r"`([^`]+)`")


def rows(first: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this heading."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert table, f"no table of {first}"
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table[1].splitlines()]


def named(first: str) -> list[str]:
    """Return all names in the first column."""
    return sorted(name for cells in rows(first) for name in QUOTED.findall(cells[0]))


def built_in(known: registry.Registry) -> list[str]:
    return [name for name in known.names() if known.find(name).function.__module__.startswith("mtrl.")]


@pytest.mark.parametrize(
    ("first", "known"),
    [
        ("name", registry.ESTIMATORS),
        ("`loss_fn`", registry.LOSSES),
        ("`off_policy_correction`", registry.CORRECTIONS),
        ("`kl_estimator`", registry.KL_ESTIMATORS),
        ("`loss_reduction`", registry.REDUCTIONS),
    ],
)
def test_every_function_has_a_row_with_all_its_names(first, known):
    assert named(first) == built_in(known)


def test_the_words_of_passk_have_a_row():
    assert named("`passk.estimator`") == sorted(words("algorithm.passk.estimator"))


def test_methods_have_the_credits_and_needs_that_the_table_says():
    for names, _, credits, _, needs, _ in rows("name"):
        entry = registry.find_estimator(QUOTED.findall(names)[0])
        assert tuple(QUOTED.findall(credits)) == entry.credits, entry.name
        assert bool(re.search(r"\bgroup\b", needs)) == entry.needs_group, entry.name
        assert ("critic" in needs) == entry.needs_critic, entry.name


def test_the_worked_advantages():
    def turn(place, reward):
        return Turn([1], [2, 3], [0.0] * 2, [(0, 2)], FinishReason.STOP, "", {}, [], reward, {})

    paid = [[0.2, 1.0], [0.0], [0.2, 0.0], [0.1, 1.0]]
    played = [Trajectory("t", "g", i, [turn(n, r) for n, r in enumerate(one)]) for i, one in enumerate(paid)]
    batch = CreditBatch.of([Group("g", {}, played)])
    for method, credit, *numbers in rows("`advantage_method`"):
        config = AlgorithmConfig(advantage_method=method.strip("`"), credit=credit.strip("`"))
        assert credit.strip("`") in registry.find_estimator(config.advantage_method).credits
        assert [f"{value:.3f}" for value in estimate(batch, config)[batch.mask]] == numbers, method


def test_the_bounds_and_anchors_of_corrections():
    for name, _, bounds, anchor in rows("`off_policy_correction`"):
        name = name.strip("`")
        assert tuple(float(bound) for bound in bounds.split(",") if bound) == PUBLISHED_BOUNDS.get(name, ()), name
        assert (anchor == "`old`") == (name in NEEDS_OLD), name


def test_the_documented_reward_of_stalling():
    from envs.gsm8k.reward import TurnReward

    def earned(scheme, wrong):
        reward = TurnReward(scheme, max_turns=5)
        turns = [reward.components(Decimal(answer), Decimal(7)) for answer in [0] * wrong + [7]]
        return sum(value for turn in turns for value in turn.values())

    assert "earn 1.16, the right one at once 1.00" in TEXT
    assert (round(earned("guide", 4), 12), earned("guide", 0)) == (1.16, 1.0)
    assert (round(earned("default", 4), 12), earned("default", 0)) == (1.0, 1.0)


def test_every_key_that_is_quoted_exists():
    keys = {word.partition("=")[0] for word in QUOTED.findall(re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))}
    ours = [key for key in keys if re.match(r"(algorithm|trainer|reward|critic|passk|sapo|dppo)\.\w", key)]
    for key in ours:
        assert find(key) or find(f"algorithm.{key}") or key == "algorithm.adv_estimator", key
    assert len(ours) > 30


def test_the_decorators_and_their_keys():
    for key, decorator, _ in rows("key"):
        name = decorator.strip("`").rpartition(".")[2]
        if key.strip("`") == "reward.components":
            from mtrl.rewards.shaping import shaping as found
        else:
            found = getattr(registry, name)
        assert found.__self__.key == key.strip("`")
