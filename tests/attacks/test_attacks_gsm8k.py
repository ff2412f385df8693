"""Hostile turns in the environment of gsm8k: none is right, none is slow, and the episode continues."""

import gsm8k_attacks
import pytest
from attack_kit import MEGABYTE, distinct, measured

from envs.gsm8k import FAMILY
from mtrl.environments.results import as_messages
from mtrl.types import FinishReason, Trajectory, Turn

TRUTH = {"answer": "72"}
TURNS = gsm8k_attacks.turns()


def score(response):
    message = {"role": "assistant", "content": response}
    turn = Turn([], [], [], [], FinishReason.STOP, response, message)
    return FAMILY.score(Trajectory("row", "group", 0, [turn]), {"id": "row", "ground_truth": TRUTH})


@pytest.mark.parametrize("scheme", ["default", "guide"])
@pytest.mark.parametrize("family", ["calculator", "answers"])
def test_hostile_turns_are_wrong_and_cheap(family, scheme, outside):
    for attack in [attack for attack in TURNS if attack.family == family]:
        environment = FAMILY.environment(max_turns=4, reward=scheme, calculator=True)
        with measured() as usage:
            first = environment.step(attack.text, TRUTH)
            right = score(attack.text)
        assert first.components["correct"] == 0.0 and first.reward <= 0.05 and right == 0.0, attack.text[:100]
        assert not first.done and len(first.observation) < 400
        as_messages(first.observation)[0]["content"].encode()
        assert usage.seconds < 60.0 and usage.bytes < 64 * MEGABYTE, attack.text[:100]
        assert environment.step("<calc>6*12</calc>", TRUTH).observation == "72"
        last = environment.step("#### 72", TRUTH)
        assert last.done and last.reward == 1.0 - (first.reward if scheme == "default" else 0.0)
        environment.close()
    outside.check()
    assert distinct(TURNS) == len(TURNS) >= 100
