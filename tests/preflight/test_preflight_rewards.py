"""The checks of the reward: no more of it after much filler than after little, and numbers that are finite."""

import re

import pytest

from mtrl.environments.base import StepResult
from mtrl.preflight.agreement import agreement
from mtrl.preflight.result import Status
from mtrl.preflight.rewards import gold, growth, reward_range
from tests.preflight.broken.sound import Lookup
from tests.preflight.broken.sound import score as sound_score
from tests.preflight.test_preflight_optimum import broken


class Thinking(Lookup):
    """Allows text before the answer, and adds what `pay_length` returns to the last reward."""

    ANSWER = re.compile(r".*<final_output>(\d+)</final_output>\s*", re.DOTALL)

    def step(self, response, ground_truth):
        result = super().step(response, ground_truth)
        if result.done:
            result.reward += self.pay_length(len(response), result.reward == 1.0)
        return result

    def pay_length(self, characters, right):
        return 0.0


def score(trajectory, row):
    """Return 1.0 if the last response ends with the right answer."""
    answer = f"<final_output>{row['ground_truth']['answer']}</final_output>"
    return float(bool(trajectory.turns) and trajectory.turns[-1].text.rstrip().endswith(answer))


def growth_of(pay_length):
    return growth(broken("sound", environment=type("Paid", (Thinking,), {"pay_length": pay_length}), score=score))


BONUSES = {
    "threshold": (lambda n, right: 0.9 * (n >= 600 and not right), "a wrong answer: 0.00, 0.90 after 1,000 characters"),
    "window": (lambda n, right: 0.9 * (600 <= n < 9000), "a wrong answer: 0.00, 0.90 after 1,000 characters"),
    "high": (lambda n, right: 0.9 * (n >= 9000 and not right), "a wrong answer: 0.00, 0.90 after 20,000 characters"),
    "penalty": (lambda n, right: -0.9 * (n < 600 and not right), "a wrong answer: -0.90, 0.00 after 1,000 characters"),
    "right": (lambda n, right: 0.2 * (n >= 600 and right), "the right answer: 1.00, 1.20 after 1,000 characters"),
}
"""Name -> the reward for a number of characters, and a part of the evidence."""


@pytest.mark.parametrize(("pay", "evidence"), BONUSES.values(), ids=BONUSES)
def test_a_bonus_for_length_is_found_at_its_threshold(pay, evidence):
    result = growth_of(lambda self, characters, right: pay(characters, right))
    assert result.status == Status.FAIL and evidence in result.evidence, result
    assert result.evidence.startswith("longer responses get more reward. row ")


def test_a_length_that_is_not_rewarded_passes():
    assert growth_of(Thinking.pay_length).status == Status.PASS
    assert growth_of(lambda self, characters, right: -0.1 * (characters >= 600)).status == Status.PASS


def test_a_penalty_for_wrong_answers_that_unreadable_text_evades_is_no_reward_for_length():
    """The parser allows no text before the answer, so that a word of filler evades the penalty as well."""

    class Strict(Lookup):
        def pay(self, answer, ground_truth):
            return 1.0 if answer == ground_truth["answer"] else -0.5

    result = growth(broken("sound", environment=Strict))
    assert result.status == Status.PASS, result


def test_a_long_response_that_solves_the_task_is_no_finding():
    """The task is to write much: the filler makes the wrong answer right."""

    class Essay(Thinking):
        def step(self, response, ground_truth):
            if len(response) >= 600:
                return StepResult(1.0, None, done=True)
            return super().step(response, ground_truth)

    def scored(trajectory, row):
        return float(sound_score(trajectory, row) or any(len(turn.text) >= 600 for turn in trajectory.turns))

    assert growth(broken("sound", environment=Essay, score=scored)).status == Status.PASS


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_score_that_is_no_number_is_not_blamed_on_the_reward(value):
    result = reward_range(broken("sound", score=lambda trajectory, row: value))
    assert result.status == Status.FAIL and "episodes have a score that is no finite number. row " in result.evidence
    assert result.fix == "return a float from score; 1.0 is success"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"\s*<final_output>(\d+|nan)</final_output>\s*", "nan for the number"),
        (r"(?:<final_output>)?(\d+|nan)(?:</final_output>)?", "fuzz 'nan'"),
    ],
)
def test_a_comparison_that_nan_passes_is_found(pattern, found):
    """No comparison with NaN is true, so a reward for a small error has to ask for it the other way round."""

    class Near(Lookup):
        ANSWER = re.compile(pattern)

        def pay(self, answer, ground_truth):
            return 0.0 if abs(float(answer) - float(ground_truth["answer"])) > 0.5 else 1.0

    result = agreement(broken("sound", environment=Near))
    assert result.status == Status.FAIL and found in result.evidence + "".join(result.details), result


@pytest.mark.parametrize(("right", "wrong"), [(10.0, 2.0), (0.5, 0.0)])
def test_the_claim_threshold_gives_the_scale_of_the_reward(right, wrong):
    """As in the metrics of a run: a reward counts an episode as solved from `evaluation.claim_threshold` on."""

    class Scaled(Lookup):
        def pay(self, answer, ground_truth):
            return right if answer == ground_truth["answer"] else wrong

    context = broken("sound", environment=Scaled)
    assert Status.FAIL in (gold(context).status, agreement(context).status)
    context.config.evaluation.claim_threshold = right
    assert (gold(context).status, agreement(context).status) == (Status.PASS, Status.PASS)
    context.config.evaluation.claim_threshold = 2 * right
    assert f"gold: the reward is {right:g}" in gold(context).evidence


def contains(messages, row):
    """Reward any last response that contains the right answer."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return float(row["ground_truth"]["answer"] in said[-1])


def test_claims_are_those_of_the_reward_of_training():
    """The environment's own reward is sound, and no part of the reward of training."""
    context = broken("sound")
    context.config.reward.components = {f"{__name__}.contains": 1.0}
    found = agreement(context)
    assert found.status == Status.FAIL and "text before: 4 of 4" in "".join(found.details), found
    context = broken("sound")
    context.config.reward.components = {"environment": 1.0, "turn_penalty": 0.1}
    assert (gold(context).status, agreement(context).status) == (Status.PASS, Status.PASS)


class Hiding(Lookup):
    """Stores its state in the row of the episode."""

    def reset(self, row=None):
        super().reset(row)
        row["ground_truth"]["looked_up"] = 0


def reads_the_state(messages, row):
    """Read what only the environment's own copy of the row holds."""
    return float(row["ground_truth"]["looked_up"])


def test_the_reward_gets_the_row_without_the_changes_of_the_environment():
    """As in a run, where such a reward fails. The pre-flight passed it."""
    context = broken("sound", environment=Hiding)
    context.config.reward.components = {"environment": 1.0, f"{__name__}.reads_the_state": 1.0}
    found = gold(context)
    assert found.status == Status.FAIL and "'looked_up'" in found.evidence, found
