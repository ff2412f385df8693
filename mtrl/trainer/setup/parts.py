"""Creation of the parts of a run from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.config.schema import Config
from mtrl.datasets import Splits
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World
from mtrl.environments.factory import Task, load_task
from mtrl.environments.family import Family
from mtrl.errors import UserError
from mtrl.models.gguf import as_folder
from mtrl.models.weight_files import model_digest
from mtrl.trainer.loading import cast_parameters, compute_dtype
from mtrl.trainer.setup.connect import ConnectedModel, connect
from mtrl.trainer.setup.engine import shared_engine, training_engine
from mtrl.trainer.setup.frozen import frozen_engine
from mtrl.trainer.setup.machine import with_machine_settings
from mtrl.trainer.setup.model_parallel import check_division
from mtrl.trainer.setup.models import make_learner, set_threads
from mtrl.trainer.setup.placement import has_copy
from mtrl.trainer.setup.sequence_parallel import check_heads
from mtrl.trainer.setup.servers import check_servers
from mtrl.trainer.setup.start import depends_on_start, tokenizer_of_run
from mtrl.trainer.setup.teacher import check_teacher, served_teacher
from mtrl.trainer.setup.warm_start import OnStep, WarmStartResult, success_of, warm_start
from mtrl.trainer.update.distillation import ServedTeacher
from mtrl.trainer.update.learner import Learner, Learners
from mtrl.trainer.update.policy import Policy


@dataclass
class RunParts(ConnectedModel):
    """The parts of a run."""

    family: Family
    splits: Splits
    learner: Learner
    """This process's share of the models that are trained."""
    rank_group: RankGroup
    """The learners of all ranks."""
    sends_weights: bool
    """Whether the engine has its own copy of the weights, so that new weights must be sent to it."""
    warm_start_result: WarmStartResult | None = None
    """Result of the warm start; None if the policy had none."""
    start_digest: str = ""
    """Digest of the weights before training, if a resumed run needs them (`depends_on_start`); else empty."""
    served_teacher: ServedTeacher | None = None
    """The teacher of distillation if it is behind a server."""

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def learners(self) -> Learners:
        learner = self.learner
        return Learners(self.rank_group, learner.flops, learner.layout, learner.ranks_per_batch)


def set_up(
    config: Config,
    on_warm_start: OnStep = lambda step, success: None,
    task: Task | None = None,
    world: World | None = None,
    stored_tokenizer: Path | None = None,
) -> RunParts:
    """Load the model, and the task unless it is given, and connect engine and environments. Only the leader calls this.

    Args:
        stored_tokenizer: folder of the tokenizer of the run that is resumed.

    Raises:
        UserError: a model or a data set of the configuration cannot be loaded, or settings do not fit together.
    """
    world, config = world or World(), with_machine_settings(config)
    task = task or load_task(config)
    if not task.splits.train and (config.trainer.max_steps or config.model.name == "tiny"):
        raise UserError(
            "there are no training rows: check data.path and data.train_split, or evaluate only, with "
            "trainer.max_steps=0 and model=hf"
        )
    if not task.splits.held_out:
        raise UserError(
            "there are no held-out rows, and every run ends with an evaluation: check data.path and data.test_split, "
            "set data.validation_rows, or let load return Splits with test rows"
        )
    check_servers(config, world)
    check_teacher(config)
    check_heads(config)
    check_division(config)
    set_threads(config, world)
    path, warm_start_result = prepared_start(config, task, on_warm_start)
    world.broadcast((config, path))
    learner = make_learner(config, world, path)
    rank_group, policy = RankGroup(world, learner), learner.policy
    if stored_tokenizer is not None:
        policy.tokenizer = tokenizer_of_run(config, stored_tokenizer, policy.tokenizer)
    # The call returns when all ranks have moved their shards: servers on the same GPUs measure the free memory at their
    # start, and would otherwise reserve what a rank still needs.
    rank_group.run("release")
    teacher = served_teacher(config, policy.tokenizer)
    rows = [*task.splits.train, *task.splits.validation, *task.splits.test]
    engine = partial(training_engine, config, world, path, policy)
    player = connect(config, task, policy.model.config, policy.tokenizer, rows, engine, frozen_engine(config, path))
    return RunParts(
        **vars(player),
        family=task.family,
        splits=task.splits,
        learner=learner,
        rank_group=rank_group,
        sends_weights=has_copy(config, world),
        warm_start_result=warm_start_result,
        start_digest=model_digest(path) if depends_on_start(config) else "",
        served_teacher=teacher,
    )


def start_of(config: Config, task: Task, on_warm_start: OnStep = lambda step, success: None) -> str:
    """Return the folder or Hub name of the policy before training. A warm start, if enabled, is made now unless it is
    in the cache."""
    return prepared_start(with_machine_settings(config), task, on_warm_start)[0]


def prepared_start(config: Config, task: Task, on_warm_start: OnStep) -> tuple[str, WarmStartResult | None]:
    """Return the folder or Hub name of the policy before training, and the result of its warm start, None without
    one."""
    if config.model.name != "tiny" and not config.model.warm_start.enabled:
        return as_folder(config.model.path or "", "model.path"), None

    def connected(model: Any, tokenizer: Any) -> ConnectedModel:
        model = cast_parameters(model, compute_dtype(config))  # as in training
        return connect(config, task, model.config, tokenizer, [], partial(shared_engine, config, model, tokenizer))

    return warm_start(config, task, partial(success_of, config, task, connected), on_warm_start)


def preparation(config: Config) -> tuple[str, int | None]:
    """Return the title of the progress bar until the policy is loaded, and the smallest number of steps, or None if the
    steps are unknown."""
    if config.model.name != "tiny" and not config.model.warm_start.enabled:
        return "loading the model", None
    settings = config.model.warm_start
    return "warm start", min(max(settings.min_steps, settings.check_every), settings.max_steps)
