"""Rewards from a user's file: the published signature, and an error for every mistake."""

import os
import re
from pathlib import Path

import pytest

import envs.triviaqa
from envs.triviaqa import FAMILY
from mtrl.errors import UserError

OWN = """
def tool_execution_reward_func(completions, **kwargs):
    return [0.1 * sum(m["role"] == "user" for m in c) for c in completions]

def length_reward(completions, answer, **kwargs):
    return [float(len(answer[0][0]))]

TURN_REWARD_FUNCS = [tool_execution_reward_func]
OUTCOME_REWARD_FUNCS = [length_reward]
"""


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "rewards.py"
        path.write_text(text)
        return str(path)

    return to_file


def test_a_custom_file_replaces_the_scheme(write, play, make_row):
    answer = "<answer>Rome</answer>"
    results = play(make_row(["Paris"]), ["hm", "hm", answer], max_turns=4, reward_file=write(OWN))
    assert [r.components for r in results] == [
        {"tool_execution": pytest.approx(0.1), "length": 0.0},
        {"tool_execution": pytest.approx(0.1), "length": 0.0},
        {"tool_execution": 0.0, "length": 5.0},
    ]


def test_the_shipped_files_are_files_like_any_other(play, make_row):
    responses = ["<tool>1</tool>", "<reasoning>r</reasoning><answer>Paris</answer>"]
    by_file = play(
        make_row(["Paris"]), responses, reward_file=str(Path(envs.triviaqa.__file__).parent / "rewards" / "aws.py")
    )
    assert by_file == play(make_row(["Paris"]), responses, reward="aws")


def test_the_files_of_the_readme_work(tmp_path, splits, play):
    readme = Path(envs.triviaqa.__file__).with_name("README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    config = {}
    for text in shown:
        key = "tools_file" if "TOOL_FUNCTIONS" in text else "reward_file"
        config[key] = str(tmp_path / f"{key}.py")
        Path(config[key]).write_text(text)
    row = splits.train[0]
    first, last = play(row, FAMILY.gold(row), **config)
    assert config.keys() == {"tools_file", "reward_file"}
    assert row["ground_truth"]["answers"][0] in first.observation
    assert first.components == {"called": 0.1, "brevity": 0.0} and last.components == {"called": 0.0, "brevity": 1.0}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("TURN_REWARD_FUNCS = []", "TURN_REWARD_FUNCS is empty; list at least one function"),
        (OWN.replace("OUTCOME_REWARD_FUNCS", "OTHER"), "does not define OUTCOME_REWARD_FUNCS; add"),
        (OWN.replace("[length_reward]", "(length_reward,)"), "OUTCOME_REWARD_FUNCS is a tuple; it must be a list"),
        (OWN.replace("[length_reward]", "[length_reward, 1.0]"), r"OUTCOME_REWARD_FUNCS\[1\] is a float; it must be"),
        (OWN.replace("def length", "async def length"), "length_reward, is async; write it with def alone"),
        (OWN.replace("[length_reward]", "[tool_execution_reward_func]"), "the name tool_execution is taken"),
        (OWN.replace("length_reward", "environment_reward"), "the name environment is taken"),
        ("import no_such_module", r"cannot be run \(ModuleNotFoundError: No module named 'no_such_module'\)"),
        ("def f(:", "cannot be run .SyntaxError"),
        ("raise SystemExit(3)", r"cannot be run \(SystemExit: 3\)"),
    ],
)
def test_every_mistake_is_reported_in_one_sentence(write, text, sentence):
    path = write(text)
    with pytest.raises(UserError, match=sentence) as error:
        FAMILY.environment(reward_file=path)
    assert str(error.value).startswith(f"environment.config.reward_file={path}")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"reward_file=.*no.py does not exist; give a Python file"):
        FAMILY.environment(reward_file=str(tmp_path / "no.py"))


def test_a_file_and_a_scheme_exclude_each_other(write):
    with pytest.raises(UserError, match="reward.scheme=aws and environment.config.reward_file=.* exclude each other"):
        FAMILY.environment(reward="aws", reward_file=write(OWN))


@pytest.mark.parametrize("value", ["1.0", "[]", "[1.0, 2.0]", "[float('nan')]", "['1']", "None", "[None]"])
def test_rewards_that_are_no_numbers_are_refused(write, play, make_row, value):
    path = write(OWN.replace("[float(len(answer[0][0]))]", value))
    with pytest.raises(UserError, match="length returned .* for one conversation; return a list with one finite num"):
        play(make_row(["Paris"]), ["<answer>Rome</answer>"], reward_file=path)


def test_a_file_that_changed_is_read_again(write, play, make_row):
    answer = ["<answer>Rome</answer>"]
    path = write(OWN)
    assert play(make_row(["Paris"]), answer, reward_file=path)[0].reward == 5.0
    write(OWN.replace("float(len", "-float(len"))
    os.utime(path, ns=(1, 1))
    assert play(make_row(["Paris"]), answer, reward_file=path)[0].reward == -5.0
