"""Setup of a run from a configuration: errors before any model is created, and the order of its parts over ranks."""

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.datasets import Splits
from mtrl.environments.factory import Task, load_task
from mtrl.errors import UserError
from mtrl.trainer.setup.parts import preparation, set_up
from tests.distributed.rank_groups import run_ranks_of

HF = ["experiment=gsm8k_multi_turn", "model=hf", "model.path=here"]


@pytest.mark.parametrize("override", ["trainer.max_steps=5", "trainer.max_steps=0"])
def test_no_training_rows_is_an_error(override):
    config = OmegaConf.to_object(compose(["experiment=gsm8k", override]))
    task = load_task(config)
    empty = Task(task.family, Splits([], task.splits.test), task.make_environment)
    with pytest.raises(UserError, match="there are no training rows: check data.path and data.train_split"):
        set_up(config, task=empty)


def test_no_held_out_rows_is_an_error():
    config = OmegaConf.to_object(compose(["experiment=gsm8k"]))
    task = load_task(config)
    empty = Task(task.family, Splits(task.splits.train, []), task.make_environment)
    with pytest.raises(UserError, match="there are no held-out rows.*: check data.path and data.test_split, set data"):
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


RANK = """
import os, sys, time
from contextlib import closing
from types import SimpleNamespace
from omegaconf import OmegaConf
import mtrl.trainer.setup.models as models, mtrl.trainer.setup.parts as parts
from mtrl.command.compose import compose
from mtrl.distributed.world import World
from mtrl.environments.factory import load_task
from mtrl.trainer.run import follow

class Learner:
    policy = SimpleNamespace(model=SimpleNamespace(config=None), tokenizer=None)
    def release(self):
        pass

def make_learner(config, world, path):
    if not world.is_leader:
        time.sleep(2)
        open(moved, "w").close()
    return Learner()

def connect(*args):
    print("all shards were moved" if os.path.exists(moved) else "a shard was not moved", flush=True)
    return parts.ConnectedModel(None, None, None, None, None)

moved = os.path.join(FOLDER, "moved")
models.make_learner = parts.make_learner = make_learner
parts.connect, parts.prepared_start = connect, lambda *args: ("path", None)
if os.environ["RANK"] == "0":
    config = OmegaConf.to_object(compose(["experiment=gsm8k"]))
    with closing(World.join(60.0)) as world:
        parts.set_up(config, task=load_task(config), world=world).rank_group.dismiss()
else:
    follow()
"""


def test_servers_start_after_all_ranks_have_moved_their_shards(tmp_path):
    """Only a GPU can show that servers then measure the memory that is free."""
    leader, follower = run_ranks_of(tmp_path, f"FOLDER = {str(tmp_path)!r}\n{RANK}", 2)
    assert (leader.status, follower.status) == (0, 0), leader.err + follower.err
    assert leader.out == ["all shards were moved"]
