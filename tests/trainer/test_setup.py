"""Setup of a run from a configuration: errors before any model is created."""

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.datasets import Splits
from mtrl.environments.factory import Task, load_task
from mtrl.errors import UserError
from mtrl.trainer.setup.parts import preparation, set_up

HF = ["experiment=gsm8k_multi_turn", "model=hf", "model.path=here"]


@pytest.mark.parametrize("override", ["trainer.max_steps=5", "trainer.max_steps=0"])
def test_no_training_rows_is_an_error(override):
    config = OmegaConf.to_object(compose(["experiment=gsm8k", override]))
    task = load_task(config)
    empty = Task(task.family, Splits([], task.splits.test), task.make_environment)
    with pytest.raises(UserError, match="there are no training rows: check data.path and data.train_split"):
        set_up(config, task=empty)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experiment=gsm8k"], ("warm start", 350)),
        (["experiment=gsm8k", "model.warm_start.max_steps=7"], ("warm start", 7)),
        ([*HF, "model.warm_start.enabled=false"], ("loading the model", None)),
        ([*HF, "model.warm_start.enabled=true"], ("warm start", 50)),
    ],
    ids=["default", "shorter", "hf", "hf with a warm start"],
)
def test_the_progress_bar_before_the_first_step(words, expected):
    assert preparation(OmegaConf.to_object(compose(words))) == expected
