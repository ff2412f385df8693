"""The scorer of mini_swe against the reward: independent code with the same results."""

import ast
import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.mini_swe import FAMILY
from envs.mini_swe.environment import parse_command
from envs.mini_swe.package import mini_swe_agent
from envs.mini_swe.scorer import command_of, is_editable
from envs.mini_swe.sources import is_source, merged
from mtrl.types import StopReason

ROOT = Path(__file__).parents[3]


def test_the_scorer_imports_nothing_of_the_family():
    tree = ast.parse((ROOT / "envs/mini_swe/scorer.py").read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module.startswith("envs")]


WORDS = ["```bash", "```mswea_bash_command", "```", "````", "```bash ", "```bash\r", "x ```bash", "</think>", "<think>"]
WORDS += ["cat f.py", "", " ", "```python", "\t", "\x0b", "\u2028", "`", "\r"]
RESPONSES = st.lists(st.sampled_from(WORDS), max_size=8).flatmap(
    lambda words: st.sampled_from(["\n".join(words), "".join(words), "\n".join(words) + "\n"])
)


@settings(max_examples=1500, deadline=None)
@given(RESPONSES)
def test_both_parsers_read_the_same_command(response):
    assert parse_command(response) == command_of({"role": "assistant", "content": response})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["thought", "```bash", "ls", "cat x | head", "```", ""]), max_size=7))
def test_mini_swe_agent_reads_the_same_commands(lines):
    """The package reads every command that mtrl reads."""
    parse_regex_actions = mini_swe_agent("models.utils.actions_text").parse_regex_actions
    format_error = mini_swe_agent("exceptions").FormatError
    response = "\n".join(lines)
    command = parse_command(response)
    if command is not None:
        regex = r"```bash\s*\n(.*?)\n```"
        try:
            (action,) = parse_regex_actions(response, action_regex=regex, format_error_template="")
        except format_error:
            raise AssertionError(f"the package reads no command in {response!r}") from None
        assert action["command"] == command


NAMES = ["f.py", "conftest.py", "Conftest.PY", "test_x.py", "x_test.py", "tests", "test", "src", ".hidden", "setup.py"]
NAMES += [
    "__pycache__",
    "a b.py",
    "é.py",
    "x.pyc",
    "sitecustomize.py",
    ".py",
    "testing",
    "contest.py",
    "TESTS",
    "n\n.py",
]


@settings(max_examples=800, deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
def test_reward_and_scorer_grade_the_same_files(parts):
    path = "/".join(parts)
    assert is_source(path) == is_editable(path), path


def test_graded_files_of_a_workspace():
    original = {"f.py": "a", "g.py": "b", "tests/t.py": "c", "setup.cfg": "d"}
    left = {"f.py": b"A", "new/x.py": b"n", "tests/t.py": b"C", "setup.cfg": None, "link.py": None, "conftest.py": b"!"}
    assert merged(original, left) == {"tests/t.py": b"c", "setup.cfg": b"d", "f.py": b"A", "new/x.py": b"n"}
    assert merged(original, {"f.py": b"x" * 2**21}) is None


def test_reward_and_score_agree_on_demonstrations_and_fuzz(splits, judged, say, submit):
    rng = random.Random(0)
    rewards = []
    for row in splits.train[::100]:
        reward, score = judged(row, FAMILY.demonstrate(row, rng).responses)
        assert reward == score
        rewards.append(reward)
        look, mend = FAMILY.gold(row)
        pieces = [look, mend, mend.replace(f" && {submit}", ""), say(submit), "?", f"{look}\n{look}", say("exit 1"), ""]
        reward, score = judged(row, rng.choices(pieces, k=3))
        assert reward == score
        rewards.append(reward)
    assert 0 < sum(rewards) < len(rewards)


def test_the_size_of_a_repository_is_counted_in_bytes(make_row, judged, say, submit):
    """Counted in characters, this one would have grown by more than a mebibyte before the first command."""
    row = make_row(files={"f.py": "def add(a, b): return a - b\n", "words.txt": "\u4e2d" * 600_000})
    assert judged(row, [say(f"sed -i 's/ - / + /' f.py && {submit}")]) == (1.0, 1.0)


def test_an_episode_that_was_cut_off_is_no_success(make_row, make_trajectory, say, submit):
    """The context limit stopped the episode before its last turn, so no reward was computed."""
    mended = [say("sed -i 's|-|+|' f.py")]
    verdicts = {reason: FAMILY.score(make_trajectory(mended, reason), make_row()) for reason in StopReason}
    assert [reason for reason, verdict in verdicts.items() if verdict] == [StopReason.MAX_TURNS]
    assert FAMILY.score(make_trajectory([*mended, say(submit)], StopReason.DONE), make_row()) == 1.0


def test_commands_after_a_submission_are_not_run(make_row, score, say, submit):
    assert score([say(submit), say("sed -i 's|-|+|' f.py")], make_row()) == 0.0
    assert score([say(f"sed -i 's|-|+|' f.py && {submit}"), say("rm f.py")], make_row()) == 1.0


def test_commands_of_other_roles_are_ignored(make_row, make_trajectory, say, submit):
    """Only commands of the assistant are run."""
    trajectory = make_trajectory([say(submit)])
    trajectory.turns[0].observation = [{"role": "user", "content": say("sed -i 's|-|+|' f.py")}]
    assert FAMILY.score(trajectory, make_row()) == 0.0
