"""Rows, games and episodes for the tests of the games."""

import pytest

from envs.games import FAMILY
from mtrl.config.schema import DataConfig
from tests.envs.episodes import play_responses, trajectory_of

TRUTHS = {
    "mastermind": {"game": "mastermind", "code": "725", "symbols": "25789"},
    "maze": {"game": "maze", "grid": ["..#G", "S.#.", "#..."]},
}


def row_of(truth, row_id="row"):
    return {"id": row_id, "prompt": [{"role": "user", "content": "play"}], "ground_truth": truth}


def play_family(row, responses, **settings):
    return play_responses(FAMILY, row, responses, **settings)


# Session fixtures that return functions, because hypothesis does not support fixtures of one test.


@pytest.fixture(scope="session")
def truths():
    return TRUTHS


@pytest.fixture(scope="session")
def make_row():
    return row_of


@pytest.fixture(scope="session")
def play():
    return play_family


@pytest.fixture(scope="session")
def score():
    """Return the success of these responses, by the scorer."""
    return lambda responses, row: FAMILY.score(trajectory_of(responses), row)


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(max_test_rows=None), seed=0)
