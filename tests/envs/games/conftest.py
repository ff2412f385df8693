"""Rows, games and players for the tests of the games."""

import pytest

from envs.games import FAMILY
from mtrl.config.schema import DataConfig
from mtrl.types import FinishReason, Trajectory, Turn

TRUTHS = {
    "mastermind": {"game": "mastermind", "code": "725", "symbols": "25789"},
    "maze": {"game": "maze", "grid": ["..#G", "S.#.", "#..."]},
}


def row_of(truth, row_id="row"):
    return {"id": row_id, "prompt": [{"role": "user", "content": "play"}], "ground_truth": truth}


def play_responses(row, responses, **settings):
    """The step results of an episode, up to its end."""
    environment = FAMILY.environment(**settings)
    environment.reset(row)
    results = []
    for response in responses:
        results.append(environment.step(response, row["ground_truth"]))
        if results[-1].done:
            break
    return results


def trajectory_of(responses):
    """A trajectory that said this; the scorer reads nothing else of it."""
    turns = [Turn([], [], [], [], FinishReason.STOP, t, {"role": "assistant", "content": t}) for t in responses]
    return Trajectory("row", "group", 0, turns)


# Session fixtures that return functions, for hypothesis does not mix with fixtures of one test.


@pytest.fixture(scope="session")
def truths():
    return TRUTHS


@pytest.fixture(scope="session")
def make_row():
    return row_of


@pytest.fixture(scope="session")
def play():
    return play_responses


@pytest.fixture(scope="session")
def score():
    """Success of these responses, by the scorer."""
    return lambda responses, row: FAMILY.score(trajectory_of(responses), row)


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(max_test_rows=None), seed=0)
