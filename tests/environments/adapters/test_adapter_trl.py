"""Environment classes of TRL in the episode loop. They have no base class, so no package is needed."""

from typing import ClassVar

import pytest
from foreign import observed

from mtrl.environments.adapters import adapt
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from mtrl.types import StopReason


class Counter:
    """The example of the TRL documentation, with a reward."""

    made: ClassVar[list] = []

    def __init__(self, start=0):
        self.start, self.closed = start, 0
        Counter.made.append(self)

    def reset(self, **row) -> str | None:
        self.value, self.row = self.start, row
        return " Count to 3."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        if step < 0:
            raise ValueError("only up")
        self.value += step
        return self.value

    async def look(self) -> str:
        """The value."""
        return f"it is {self.value}"

    def get_reward(self) -> float:
        return float(self.value == 3)

    def close(self):
        self.closed += 1

    def _hidden(self):
        raise AssertionError


@pytest.fixture
def counter():
    Counter.made = []
    return adapt(Counter)


def test_public_methods_are_tools_with_schemas(counter, row):
    env = counter()
    env.reset(row)
    schemas = {schema["function"]["name"]: schema["function"] for schema in env.tools}
    assert schemas.keys() == {"increment", "look"}
    assert schemas["increment"]["parameters"]["properties"] == {"step": {"type": "integer"}}
    assert schemas["increment"]["parameters"]["required"] == ["step"]
    assert "How much to add." in schemas["increment"]["description"]
    env.close()


def test_calls_are_answered_and_the_reward_is_on_the_last_turn(play, counter, row):
    calls = [format_call("increment", {"step": 2}), format_call("increment", {"step": 1}) + format_call("look", {})]
    trajectory = play(counter, [*calls, "done"], row)
    assert trajectory.error is None
    assert observed(trajectory)[1:] == [["2"], ["3", "it is 3"], []]
    assert trajectory.turns[0].observation[-1]["content"].endswith("Q Count to 3.")
    assert trajectory.rewards == [0.0, 0.0, 1.0] and trajectory.stop_reason == StopReason.DONE
    (env,) = Counter.made
    assert env.row["answer"] == "42" and env.closed == 1


def test_get_reward_is_called_when_the_turns_run_out(play, counter, row):
    trajectory = play(counter, [format_call("increment", {"step": 3})] * 2, row, max_turns=1)
    assert trajectory.rewards == [1.0] and trajectory.stop_reason == StopReason.MAX_TURNS


@pytest.mark.parametrize(
    ("limits", "stop_reason"),
    [
        ({}, StopReason.DONE),
        ({"max_turns": 2}, StopReason.MAX_TURNS),
        ({"max_context_length": 1700}, StopReason.CONTEXT_LIMIT),
    ],
)
def test_get_reward_counts_once_however_the_episode_ends(play, row, limits, stop_reason):
    class Long(Counter):
        asked = 0

        def look(self) -> str:
            """The value, in many words."""
            self.value += 1
            return "x" * 600

        async def get_reward(self) -> float:
            self.asked += 1
            return 0.25 * self.value

    trajectory = play(adapt(Long), [format_call("look", {})] * 4 + ["done"], row, **limits)
    assert (trajectory.error, trajectory.stop_reason) == (None, stop_reason)
    calls = sum(turn.metrics["tool_calls"] for turn in trajectory.turns)
    assert trajectory.rewards == [0.0] * (len(trajectory.turns) - 1) + [0.25 * calls] and calls
    assert Counter.made[-1].asked == 1


def test_mistakes_of_the_model_are_error_observations(play, counter, row):
    wrong = [
        format_call("reset", {}),
        format_call("_hidden", {}),
        format_call("get_reward", {}),
        format_call("close", {}),
        format_call("increment", {"step": "many"}),
        format_call("increment", {"step": -1}),
    ]
    trajectory = play(counter, [*wrong, "x"], row, max_turns=7, max_tool_calls=1)
    texts = [text for turn in observed(trajectory)[1:-1] for text in turn]
    assert len(texts) == 6 and all(text.startswith("Error: ") for text in texts)
    assert "only up" in texts[-1]
    assert trajectory.rewards == [0.0] * 7 and Counter.made[-1].closed == 1


def test_an_attribute_is_the_reward_where_there_is_no_method(play, row):
    class Plain:
        def reset(self, **kwargs):
            self.reward = 0.0

        def guess(self, word: str) -> str:
            """Guess."""
            self.reward = 0.5
            return "noted"

    trajectory = play(adapt(Plain), [format_call("guess", {"word": "x"}), "end"], row)
    assert trajectory.rewards == [0.0, 0.5]


def test_an_environment_without_a_reward_fails_with_the_fix(play, row):
    class Poor:
        def reset(self):
            pass

        def look(self) -> str:
            """Look."""
            return "nothing"

    assert "define get_reward" in play(adapt(Poor), ["end"], row).error


def test_a_tool_without_types_is_a_user_error():
    class Untyped:
        def reset(self):
            pass

        def look(self, where) -> str:
            """Look."""

    with pytest.raises(UserError, match="has no type for where"):
        adapt(Untyped)()
