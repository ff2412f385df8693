"""The commands that a run suggests at its end."""

import pytest

from mtrl.config.schema import Config, EnvironmentConfig
from mtrl.config.trainer_schema import TrainerConfig
from mtrl.record.run_dir import RunDir
from mtrl.trainer.run import hints


def hints_of(tmp_path, steps=10):
    config = Config(
        environment=EnvironmentConfig(name="gsm8k"),
        trainer=TrainerConfig(max_steps=steps),
    )
    return hints(config, RunDir(tmp_path))


@pytest.mark.parametrize(("steps", "further"), [(10, 20), (0, 1)])
def test_the_command_to_train_further_has_more_steps(tmp_path, steps, further):
    assert f"trainer.max_steps={further}" in hints_of(tmp_path, steps=steps)["train on from here"].split()
