"""The commands that a run suggests at its end, and what a resumed run tells at its start."""

import pytest

from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config, EnvironmentConfig
from mtrl.config.trainer_schema import TrainerConfig
from mtrl.record.run_dir import RunDir
from mtrl.trainer.run import adapted_weight, hints


def hints_of(tmp_path, steps=10):
    config = Config(
        environment=EnvironmentConfig(name="gsm8k"),
        trainer=TrainerConfig(max_steps=steps),
    )
    return hints(config, RunDir(tmp_path))


@pytest.mark.parametrize(("steps", "further"), [(10, 20), (0, 1)])
def test_the_command_to_train_further_has_more_steps(tmp_path, steps, further):
    assert f"trainer.max_steps={further}" in hints_of(tmp_path, steps=steps)["train on from here"].split()


@pytest.mark.parametrize("key", ["kl_loss_coef", "kl_reward_coef"])
def test_a_resumed_run_tells_that_it_goes_on_with_the_adapted_weight_of_the_kl(key):
    def note(coefficient, **settings):
        return adapted_weight(Config(algorithm=AlgorithmConfig(**{key: 5.0}, **settings)), coefficient)

    assert f"goes on at 0.0125, to which algorithm.kl_target=0.1 has adapted it; algorithm.{key}=5 is the weight" in (
        note(0.0125, kl_target=0.1)
    )
    assert note(5.0, kl_target=0.1) is note(0.0125) is None
