"""The check that a model can be divided among ranks, before a warm start or the loading of weights takes minutes."""

from __future__ import annotations

import torch

from mtrl.config.schema import Config
from mtrl.distributed.meshes import ModelParallel
from mtrl.distributed.plans import check_version, plans_of
from mtrl.trainer.loading import load_shape


def check_division(config: Config) -> None:
    """Check the policy of a configuration against `trainer.tensor_parallel` and `trainer.expert_parallel`. Of a
    pretrained model only the configuration is read. The tiny policy has a plan, and its heads were checked with the
    configuration.

    Raises:
        UserError: Transformers is too old, or cannot divide the model (`plans_of`).
    """
    parallel, path = ModelParallel.of(config.trainer), config.model.path
    check_version(parallel)
    if not parallel.is_used or config.model.name == "tiny" or path is None:
        return
    from transformers import AutoModelForCausalLM

    shape, _ = load_shape(config, path)
    with torch.device("meta"):
        plans_of(AutoModelForCausalLM.from_config(shape), parallel)
