"""The examples of docs/custom_environments.md are targets, and get the rewards that the guide describes."""

from pathlib import Path

import pytest
from foreign import observed, real

from mtrl.config.schema import DataConfig
from mtrl.environments.tool_calls import format_call

ROW = {"reward_spec": {"ground_truth": "42"}, "answer": "42", "question": "6 * 7?", "seed": 0}
EXAMPLES = {
    "skyrl_multiply.Multiply": ("skyrl_gym", "skyrl-gym", ["41", "42"], [0.0, 1.0], "Not yet. Try again."),
    "gym_number.Number": ("gymnasium", "gymnasium", ["0", "9", "8"], [0.0, 0.0, 1.0], "higher"),
    "openenv_echo.Echo": ("openenv.core", "openenv", ["abcde"], [0.5], "abcde"),
    "trl_counter.Counter": (None, None, [format_call("add", {"n": 42}), "done"], [0.0, 1.0], "42"),
    "tinker_quiz.Quiz": ("tinker_cookbook", "tinker", ["41", "42"], [0.0, 1.0], "Are you sure?"),
    "verifiers_words.load_environment": ("verifiers", "verifiers", ["fig", "apple"], [0.0, 1.0], "It begins with a."),
}
"""Target -> (package, extra, responses, rewards, the observation after the first response)."""


@pytest.mark.parametrize("target", EXAMPLES)
def test_the_example_runs(target, example, play, row):
    module, extra, responses, rewards, observation = EXAMPLES[target]
    if module:
        real(module, extra)
    family = example(target)
    if family.name == "load_environment":
        row = next(row for row in family.load(DataConfig()).train if row["answer"] == "apple")
    else:
        row = {**row, **ROW}
    trajectory = play(family.environment, responses, row)
    assert trajectory.error is None
    assert trajectory.rewards == rewards
    assert observed(trajectory)[1] == [observation]


def test_every_example_is_tested():
    files = {path.stem for path in (Path(__file__).parent / "examples").glob("*.py")}
    assert files == {target.partition(".")[0] for target in EXAMPLES}


def test_the_guide_shows_the_examples():
    guide = (Path(__file__).parents[3] / "docs" / "custom_environments.md").read_text()
    assert all(path.read_text() in guide for path in (Path(__file__).parent / "examples").glob("*.py"))
