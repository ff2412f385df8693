"""The local optimum: a strategy that never solves the task must earn less than the successes of the initial policy."""

import copy
import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.environments.base import StepResult
from mtrl.environments.factory import environment_factory
from mtrl.environments.family import get_family
from mtrl.preflight.checklist import CHECKS, run
from mtrl.preflight.context import METHODS, CheckContext
from mtrl.preflight.optimum import best_unsolved, compare, local_optimum
from mtrl.preflight.policy_checks import CHECKS as MODEL_CHECKS
from mtrl.preflight.policy_checks import Baseline, policy_optimum
from mtrl.preflight.result import Status
from mtrl.types import Group, StopReason, Trajectory
from tests.preflight.broken import sound
from tests.preflight.broken.sound import Lookup


@functools.cache
def composed(*overrides):
    return OmegaConf.to_object(compose([*overrides, "preflight.model=false"]))


def context_of(*overrides, target=None, **changes):
    """Return the context of the checklist, with other parts of the family."""
    config = copy.deepcopy(composed(*overrides))
    config.environment.target = target
    family = replace(get_family(config.environment.name, config.environment.target), **changes)
    splits = family.load(config.data, config.seed, **config.environment.config)
    make = environment_factory(config, family, config.generator.max_turns)
    return CheckContext(config, family, splits, make, max_rows=4, seconds=20.0)


FEW_ROWS = ("data.synthetic_train_rows=128", "data.synthetic_test_rows=32")
"""More rows than the demonstrator plays."""
BROKEN = ("experiment=null", "environment.name=x", f"environment.target={sound.__name__}.FAMILY")


def broken(name, **changes):
    return context_of(*BROKEN, target=f"tests.preflight.broken.{name}.FAMILY", **changes)


def test_it_is_a_check_with_and_without_a_policy():
    assert CHECKS["local_optimum"] is local_optimum
    assert dict(MODEL_CHECKS)["policy_optimum"] is policy_optimum


@pytest.mark.parametrize("experiment", ["gsm8k", "sop", "triviaqa", "games", "service"])
def test_rewards_of_the_task_alone_pass(experiment):
    result = local_optimum(context_of(f"experiment={experiment}", *FEW_ROWS))
    assert result.status == Status.PASS and "that never solve the task earns 0.00" in result.evidence, result
    assert "solving earns 1.00, and the demonstrator solves" in result.evidence and not result.fix


def test_rewards_for_single_fields_fail():
    """Five right fields of six have a reward of 0.83, more than a demonstrator gets that is right in less than half."""
    result = local_optimum(context_of("experiment=sop", "reward.scheme=dense", *FEW_ROWS))
    assert result.status == Status.FAIL and "earns 0.83 (a wrong answer, repeated)" in result.evidence, result
    assert result.evidence.endswith("A policy that starts there learns not to solve it")
    assert result.fix.startswith("reward the task alone")


def test_a_small_reward_for_the_format_is_a_warning():
    """With the guide's reward, wrong answers in the right form get 0.2, and the demonstrator's successes get more."""
    result = local_optimum(context_of("experiment=gsm8k", "reward=guide", *FEW_ROWS))
    assert result.status == Status.WARN and "earns 0.20 (a wrong answer, repeated)" in result.evidence, result
    assert result.evidence.endswith("A policy that starts lower may end there") and result.fix


@pytest.mark.parametrize(
    ("success", "status"), [(1.0, Status.WARN), (0.51, Status.WARN), (0.49, Status.FAIL), (0.0, Status.FAIL)]
)
def test_it_depends_on_where_the_policy_starts(success, status):
    """The format gets 0.5, more than a policy gets that succeeds in less than half of its episodes."""
    result = compare(broken("form_beats_success"), success, "another policy")
    assert result.status == status and f"and another policy: {success:.2f}" in result.evidence


def policy(*scores):
    """Return a baseline of episodes with these scores."""
    played = [Trajectory("t", "g", i, [], StopReason.DONE, score=score) for i, score in enumerate(scores)]
    return Baseline([Group("g", {}, played)], 4096)


@pytest.mark.parametrize(("wins", "status"), [(2, Status.FAIL), (7, Status.WARN)])
def test_a_policy_is_judged_by_its_own_successes(wins, status):
    result = policy_optimum(broken("form_beats_success"), policy(*[1.0] * wins, *[0.0] * (10 - wins)))
    assert result.status == status and f"and the policy solves {wins} of 10: {wins / 10:.2f}" in result.evidence


def test_episodes_that_solve_the_task_do_not_count():
    """The repeated answer of one row solves that row; without another rewarded strategy, nothing is found."""
    context = broken("sound")
    found = best_unsolved(context)
    assert found.reward == 0.0 and found.kinds > 5
    assert local_optimum(context).status == Status.PASS


def test_rewarded_silence_is_found():
    found = best_unsolved(broken("stalling_pays"))
    assert found.how == "silence" and found.reward == pytest.approx(0.08)


def test_failures_of_the_demonstrator_are_one_strategy():
    """A rewarded word that no other strategy tries is found among the demonstrator's failures."""

    class Whisper(Lookup):
        def step(self, response, ground_truth):
            return StepResult(0.7, None, done=True) if response == "psst" else super().step(response, ground_truth)

    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: "psst")

    context = broken("sound", environment=Whisper, demonstrate=demonstrate)
    found = best_unsolved(context)
    assert (found.reward, found.how) == (pytest.approx(0.7), "the failures of the demonstrator")
    result = local_optimum(context)
    assert result.status == Status.FAIL and "the demonstrator solves 0 of 40: 0.00" in result.evidence


ASKED = CHECKS.keys() - {"hermetic", "leaks", "concurrency", "worked_example"}
"""Without the checks that run episodes in fresh processes and need no method, and the check of full prompts, which
these rows are not."""


def left_out(names=ASKED, **methods):
    """Return the skipped lines for a class with only these methods: name -> reason."""
    context = broken("sound", **{**dict.fromkeys(METHODS), **methods})
    results = run(context, [(name, check) for name, check in CHECKS.items() if name in names])
    return {result.name: result.evidence for result in results if result.status == Status.SKIP}


def test_every_line_that_a_bare_class_lacks_names_the_methods_that_bring_it_back():
    lines = left_out()
    assert len(lines) >= 10, lines
    named = {}
    for name, reason in lines.items():
        methods = frozenset(re.findall(r"no `(\w+)`", reason))
        assert methods and all(METHODS[method] in reason for method in methods), f"{name}: {reason}"
        named.setdefault(methods, []).append(name)
    for methods, names in named.items():
        still = left_out(names, **{method: getattr(sound.FAMILY, method) for method in methods})
        assert not still, f"{set(methods)} was to bring these lines back: {still}"


def test_without_a_demonstrator_or_gold_it_is_left_out():
    result = local_optimum(broken("sound", demonstrate=None))
    assert result.status == Status.SKIP and "has no `demonstrate`; a method demonstrate(row, rng)" in result.evidence
    context = broken("form_beats_success", gold=None)
    for result in (local_optimum(context), policy_optimum(context, policy(1.0))):
        assert result.status == Status.SKIP and "has no `gold`; a method gold(row)" in result.evidence
