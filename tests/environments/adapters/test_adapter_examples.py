"""The files of examples/environments are targets, and get the rewards of their frameworks."""

from pathlib import Path

import pytest
from foreign import observed, real

from mtrl.config.schema import DataConfig
from mtrl.environments.tool_calls import format_call

ROOT = Path(__file__).parents[3]
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


def test_every_example_is_tested_and_named_by_the_page():
    files = {path.stem for path in (ROOT / "examples" / "environments").glob("*.py")}
    assert files == {target.partition(".")[0] for target in EXAMPLES}
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    assert all(f"../examples/environments/{name}.py" in page for name in files)
