"""What an environment returns: the names of the parts of its reward."""

import pytest

from mtrl.environments.results import StepResult, add_truncation, as_step_result
from mtrl.types import FinishReason, Turn


class Game:
    """An environment, of which only the name is read."""


def test_a_component_with_the_name_of_the_reward_itself_is_refused():
    """It replaced the reward that `step` returned."""
    message = "^Game.step returned the component 'environment', .*; give it another name$"
    with pytest.raises(TypeError, match=message):
        as_step_result(StepResult(0.0, components={"environment": 1.0}), Game())
    assert as_step_result(StepResult(0.0, components={"environments": 1.0}), Game()).reward == 0.0


@pytest.mark.parametrize("value", [{"environment": 1.0}, StepResult(1.0, components={"environment": 1.0})])
def test_truncate_may_not_use_that_name_either(value):
    turn = Turn([1], [2], [-0.1], [(0, 1)], FinishReason.STOP, "", {})
    with pytest.raises(TypeError, match="^Game.truncate returned the component 'environment'"):
        add_truncation(turn, value, Game())
    assert (turn.reward, turn.components) == (0.0, {})
