"""What a run says at its end that one could try next."""

import pytest

from mtrl.config.schema import AlgorithmConfig, Config, EnvironmentConfig, TrainerConfig
from mtrl.tracking.run_dir import RunDir
from mtrl.trainer.run import hints


def hints_of(tmp_path, method="grpo", steps=10):
    config = Config(
        environment=EnvironmentConfig(name="gsm8k"),
        algorithm=AlgorithmConfig(advantage_method=method),
        trainer=TrainerConfig(max_steps=steps),
    )
    return hints(config, RunDir(tmp_path))


def test_credit_per_turn_is_offered_to_whom_has_it_not(tmp_path):
    assert hints_of(tmp_path)["credit per turn"].endswith("algorithm=group_based_per_turn")
    assert "credit per turn" not in hints_of(tmp_path, "group_based_per_turn")


@pytest.mark.parametrize(("steps", "further"), [(10, 20), (0, 1)])
def test_training_on_takes_more_steps_than_there_were(tmp_path, steps, further):
    assert f"trainer.max_steps={further}" in hints_of(tmp_path, steps=steps)["train on from here"].split()
