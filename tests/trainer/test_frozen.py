"""The engine of a frozen opponent in self-play."""

import pytest

from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.models.tiny import save
from mtrl.trainer.setup.frozen import frozen_engine


def test_an_opponent_that_holds_fewer_tokens_than_a_conversation_is_refused(make_tiny_model, tiny_tokenizer, tmp_path):
    short = make_tiny_model(1)
    short.config.max_position_embeddings = 100
    save(short, tiny_tokenizer, tmp_path)
    config = Config(run_dir="unused")
    config.model.device = "cpu"
    config.environment.opponent, config.environment.opponent_path = "frozen", str(tmp_path)
    make = frozen_engine(config, str(tmp_path))
    make(100)
    with pytest.raises(
        UserError, match=r"^environment\.opponent_path=\S+ takes at most the 100 tokens that .* up to 101"
    ):
        make(101)
