"""Rows, episodes and hostile files for the tests of mini_swe."""

import pytest

from envs.mini_swe import FAMILY
from envs.mini_swe.prompts import SUBMIT
from mtrl.config.schema import DataConfig
from mtrl.types import StopReason
from tests.envs.episodes import play_responses, trajectory_of

FILES = {"f.py": "def add(a, b): return a - b\n"}
CALLS = [["f.add", [2, 3], 5], ["f.add", [0, 0], 0], ["f.add", [10, -4], 6], ["f.add", [7, 7], 14]]


def row_of(style="short", **truth):
    truth = {"files": FILES, "calls": CALLS, "seconds": [5, 5], **truth}
    return {"id": "row", "prompt": [{"role": "user", "content": "add 2 3"}], "ground_truth": truth, "style": style}


def bash(command):
    return f"```bash\n{command}\n```"


def play_family(row, responses, **settings):
    return play_responses(FAMILY, row, responses, **{"max_turns": 3, **settings})


def cut_off(responses, stop_reason=StopReason.MAX_TURNS, final=()):
    return trajectory_of(responses, stop_reason=stop_reason, final=final)


@pytest.fixture(scope="session")
def make_row():
    return row_of


@pytest.fixture(scope="session")
def play():
    return play_family


@pytest.fixture(scope="session")
def score():
    """Return the success of these responses, by the scorer."""
    return lambda responses, row: FAMILY.score(cut_off(responses), row)


@pytest.fixture(scope="session")
def judged():
    """Return the reward and the score of one episode."""

    def both(row, responses, **settings):
        results = play_family(row, responses, **settings)
        given = responses[: len(results)]
        return sum(result.reward for result in results), FAMILY.score(cut_off(given), row)

    return both


@pytest.fixture(scope="session")
def say():
    return bash


@pytest.fixture(scope="session")
def submit():
    """Return the command that submits."""
    return f"echo {SUBMIT}"


@pytest.fixture(scope="session")
def make_trajectory():
    return cut_off


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(synthetic_train_rows=1024, synthetic_test_rows=128), seed=0)
