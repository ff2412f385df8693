"""Creation of the engine of a frozen opponent in self-play, and of the rows of self-play."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mtrl.config.schema import Config
from mtrl.engines.local.frozen import FrozenEngine
from mtrl.environments.roles import SELF_PLAY
from mtrl.errors import UserError
from mtrl.trainer.loading import cast_parameters, compute_dtype, load_model, load_tokenizer, pick_device
from mtrl.trainer.setup.connect import check_context
from mtrl.types import Row

PATH = "environment.opponent_path"


def frozen_engine(config: Config, path: str) -> Callable[[int], FrozenEngine] | None:
    """Return a function from the maximum length of a conversation, in tokens, to the engine of the frozen roles; None
    without frozen roles.

    Args:
        path: folder or Hub name of the policy at the start of the run, also of a resumed run.
    """
    return partial(_make, config, path) if config.environment.opponent == "frozen" else None


def _make(config: Config, start: str, context: int) -> FrozenEngine:
    path = config.environment.opponent_path or start
    if path != start:
        own, wanted = (load_tokenizer(config, each, PATH).get_vocab() for each in (path, start))
        if own != wanted:
            raise UserError(
                f"{PATH}={path} has another tokenizer than the policy; give an opponent with the policy's tokenizer, "
                "such as the export of a run with the same start"
            )
    model, tokenizer = load_model(config, path, PATH, device="cpu")
    check_context(model.config, context, f"{PATH}={path}")
    model = cast_parameters(model, compute_dtype(config)).to(pick_device(config.model.device))
    return FrozenEngine(model.requires_grad_(False), tokenizer, context, config.generator.local.fused)


def self_play_rows(next_row: Callable[[], Row], config: Config) -> Callable[[], Row]:
    """Return `next_row` for the training rows of a run, which are marked as those of self-play if they are."""
    if config.environment.opponent == "scripted":
        return next_row
    return lambda: next_row() | {SELF_PLAY: True}
