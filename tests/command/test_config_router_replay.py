"""Router replay: the settings that training refuses, and an evaluation does not."""

import pytest
from omegaconf import OmegaConf

from mtrl.command.algorithm_checks import check_algorithm
from mtrl.command.checks import check_training
from mtrl.command.compose import compose
from mtrl.errors import UserError


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        *(
            (
                f"generator.backend={name}",
                "algorithm.router_replay=true needs an engine that returns the experts which it chose, and "
                f"generator.backend={name} does not return them to mtrl; set generator.backend=local, or "
                "algorithm.router_replay=false",
            )
            for name in ("vllm", "sglang")
        ),
        (
            "trainer.compile=true",
            "algorithm.router_replay=true does not work with trainer.compile=true, whose layers are compiled with "
            "their own choice of experts; set one of them to false",
        ),
    ],
)
def test_router_replay_is_refused_in_training_only(override, sentence):
    """An evaluation of a run that replayed routers may sample by any engine."""
    cfg = compose(["algorithm.router_replay=true"])
    OmegaConf.update(cfg, *override.split("="))  # only then, since the engine may not be installed here
    check_algorithm(cfg)
    with pytest.raises(UserError) as error:
        check_training(cfg)
    assert str(error.value) == sentence
