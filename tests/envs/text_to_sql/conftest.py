"""Rows and episodes for the tests of text_to_sql."""

import pytest

from envs.text_to_sql import FAMILY
from mtrl.config.schema import DataConfig
from mtrl.types import FinishReason, Trajectory, Turn

SCRIPT = """
create table goods (fee integer, hue text, label text, qty integer);
insert into goods values (12, 'RED', 'CUP', 3), (40, 'BLUE', 'HAT', 1), (25, 'RED', 'BAG', 7), (25, 'RED', 'BAG', 9);
"""


def make_row(sql="select max(fee) from goods where hue = 'RED'", style="short", **truth):
    return {
        "id": "row",
        "prompt": [{"role": "user", "content": "highest price if red in goods"}],
        "ground_truth": {"sql": sql, "script": SCRIPT, **truth},
        "style": style,
    }


def trajectory_of(responses):
    """Return a trajectory with these responses; scorers read nothing else of it."""
    turns = [
        Turn([], [], [], [], FinishReason.STOP, text, {"role": "assistant", "content": text}) for text in responses
    ]
    return Trajectory("row", "group", 0, turns)


def play(row, responses, **config):
    """Return the step results of an episode up to its end."""
    environment = FAMILY.environment(**config)
    try:
        environment.reset(row)
        results = []
        for response in responses:
            results.append(environment.step(response, row["ground_truth"]))
            if results[-1].done:
                break
        return results
    finally:
        environment.close()


def reward_of(row, responses, **config):
    return sum(result.reward for result in play(row, responses, **config))


# Session fixtures that return functions, because hypothesis does not support fixtures of one test.


@pytest.fixture(scope="session", name="make_row")
def _make_row():
    return make_row


@pytest.fixture(scope="session", name="trajectory_of")
def _trajectory_of():
    return trajectory_of


@pytest.fixture(scope="session", name="play")
def _play():
    return play


@pytest.fixture(scope="session", name="reward_of")
def _reward_of():
    return reward_of


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(max_test_rows=None), seed=0)
