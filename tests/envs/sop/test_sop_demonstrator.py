"""The demonstrator of sop: the content and the success rate of its demonstrations."""

import asyncio
import random

import pytest

from envs.sop import FAMILY
from envs.sop.output import parse_final_output


def episode(row, rng):
    """The responses of a demonstrator."""
    player = FAMILY.demonstrate(row, rng)
    environment = FAMILY.environment()
    environment.reset(row)
    responses, observation = [], None
    while True:
        responses.append(player.act(observation))
        result = asyncio.run(environment.step(responses[-1], row["ground_truth"]))
        if result.done:
            environment.close()
            return responses, result
        observation = "".join(message["content"] for message in result.observation)


pytestmark = pytest.mark.xdist_group("demonstrations of sop")  # which share 900 episodes


@pytest.fixture(scope="module")
def episodes(splits):
    rng = random.Random(0)
    found = {}
    for row in splits.train[:900]:
        found.setdefault(row["domain"], []).append((row, *episode(row, rng)))
    return found


def test_the_success_rate_is_low_and_not_zero(episodes, score):
    for domain, played in episodes.items():
        won = [score(responses, row) for row, responses, _ in played]
        assert won == [float(result.reward == 1.0) for *_, result in played]
        assert 0.12 < sum(won) / len(won) < 0.45, domain


def test_most_episodes_answer_at_once_and_fail(episodes, score):
    for played in episodes.values():
        hasty = [(row, responses) for row, responses, _ in played if len(responses) == 1]
        assert len(hasty) / len(played) > 0.5
        assert sum(score(responses, row) for row, responses in hasty) / len(hasty) < 0.15


def test_demonstrations_contain_every_call_and_the_answer_form(episodes):
    for played in episodes.values():
        shown = {call for row, responses, _ in played for call in responses[:-1]}
        assert len(shown) > 100
        for row, responses, _ in played:
            assert responses[:-1] == FAMILY.gold(row)[: len(responses) - 1]
            assert parse_final_output(responses[-1]).keys() == row["ground_truth"].keys()


def test_the_same_seed_gives_the_same_demonstrations(splits):
    for row in splits.train[:20]:
        assert episode(row, random.Random(5)) == episode(row, random.Random(5))


def test_held_out_rows_are_not_demonstrated(splits):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))
