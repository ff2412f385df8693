"""The demonstrator of mini_swe: it shows every move, is seldom right, and refuses held-out rows."""

import random

import pytest

from envs.mini_swe import FAMILY
from mtrl.config.model_schema import WarmStartConfig
from mtrl.models.tiny import train_tokenizer


def players(splits, count=1000):
    rng = random.Random(1)
    return [(row, FAMILY.demonstrate(row, rng).responses) for row in splits.train[:count]]


def test_most_episodes_edit_without_reading(splits):
    episodes = players(splits)
    looks = [responses for _, responses in episodes if len(responses) == 2]
    right = sum(responses == FAMILY.gold(row) for row, responses in episodes)
    assert 0.35 < len(looks) / len(episodes) < 0.5
    assert WarmStartConfig.success_band[0] < right / len(episodes) < 0.5, "a clone's share lies in the band"
    assert {responses[0] for responses in looks} == {"```bash\ncat f.py\n```"}


def test_a_blind_edit_is_seldom_right(splits, play):
    """A blind edit repairs another mistake of the same function."""
    blind = [(row, responses) for row, responses in players(splits) if len(responses) == 1]
    rewards = [play(row, responses)[-1].reward for row, responses in blind[::20]]
    assert sum(rewards) <= 0.2 * len(rewards)


def test_the_last_response_is_repeated(splits):
    player = FAMILY.demonstrate(splits.train[0], random.Random(0))
    texts = [player.act(None) for _ in range(4)]
    assert texts[len(player.responses) - 1 :] == [player.responses[-1]] * (5 - len(player.responses))


def test_held_out_rows_are_refused(splits):
    with pytest.raises(ValueError, match="is held out and must not be demonstrated"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))


def test_moves_are_few_tokens_and_survive_the_tokenizer(splits):
    """Decoding gives tags with line breaks back unchanged."""
    texts = [text for _, responses in players(splits, 300) for text in responses]
    tokenizer = train_tokenizer([[{"content": text}] for text in texts], 512, FAMILY.tokens)
    lengths = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        lengths.append(len(ids))
    assert max(lengths) <= 24 and sum(lengths) / len(lengths) < 12
