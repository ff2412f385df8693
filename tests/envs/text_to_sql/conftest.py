"""Rows and episodes for the tests of text_to_sql."""

import pytest

from envs.text_to_sql import FAMILY
from mtrl.config.schema import DataConfig
from tests.envs.episodes import play_responses, trajectory_of

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


def play(row, responses, **config):
    """Return the step results of an episode up to its end."""
    return play_responses(FAMILY, row, responses, **config)


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
