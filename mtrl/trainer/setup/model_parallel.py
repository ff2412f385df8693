"""The check that a model can be divided among ranks, before a warm start or the loading of weights takes minutes."""

from __future__ import annotations

import torch

from mtrl.config.derived import distils
from mtrl.config.schema import Config
from mtrl.distributed.meshes import ModelParallel
from mtrl.distributed.plans import check_version, plans_of
from mtrl.models.gguf import as_folder
from mtrl.trainer.loading import make_structure


def check_division(config: Config) -> None:
    """Check the policy and the teacher of a configuration against `trainer.tensor_parallel` and
    `trainer.expert_parallel`. Only the configurations of pretrained models are read. The tiny policy has a plan, and
    its heads were checked with the configuration.

    Raises:
        UserError: Transformers is too old, or cannot divide one of the models (`plans_of`).
    """
    parallel = ModelParallel.of(config.trainer)
    check_version(parallel)
    if not parallel.is_used:
        return
    paths = {"model.path": None if config.model.name == "tiny" else config.model.path}
    paths |= {"distillation.teacher.path": config.distillation.teacher.path if distils(config) else None}
    for key, path in paths.items():
        if path is not None:
            plans_of(make_structure(config, as_folder(path, key), key, torch.float32), parallel)
