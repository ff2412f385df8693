"""Division of a model's modules among ranks, by the plans that Transformers has for its architecture.

A plan maps names of modules to styles (`base_model_tp_plan`, `base_model_ep_plan`). Transformers shards the parameters
that it names, and adds the communication to the forward of their modules: `colwise` and `rowwise` matrices
(Megatron-LM, Shoeybi et al. 2019, 1909.08053, section 3), and experts to which tokens are sent by all-to-alls. mtrl has
no rules of its own. The divided module is then given to `fully_shard` over the other dimension of the mesh.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import nn

from mtrl.distributed.meshes import Meshes, ModelParallel
from mtrl.distributed.ties import aliases_of, tie, untie
from mtrl.errors import UserError

EXPERTS = "ep_dispatch_experts"
"""Style of the modules of experts."""
STYLES = frozenset(
    {
        "colwise",
        "rowwise",
        "colwise_gather_output",
        "embedding_rowwise",
        "replicated_with_grad_allreduce",
        "grouped_gemm",
        EXPERTS,
    }
)
"""Styles whose gradients and checkpoints tests have proven. PyTorch's checkpoints cannot name the slices of
`packed_colwise`, in which a rank has a part of each of two matrices in one tensor (torch 2.13)."""

Plan = dict[str, str]
"""Styles by the name of a module or a parameter."""


def divide(module: Any, meshes: Meshes, parallel: ModelParallel) -> list[nn.Module]:
    """Divide the modules of a causal LM of Transformers in place. Return its modules of experts, if they are divided:
    they are to be sharded over `meshes.expert_data`.

    All ranks must call it with the same weights, or on the meta device. Parameters become DTensors, of which each rank
    has its slice; forwards take and return plain tensors that are equal on all ranks of `meshes.tensor`.

    Raises:
        UserError: see `plans_of`, or the plan divides tied parameters in different ways.
    """
    tensor_plan, expert_plan = plans_of(module, parallel)
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    assert meshes.tensor is not None and meshes.expert is not None
    aliases = aliases_of(module)
    untie(module, aliases)  # a plan names a parameter of each module
    if tensor_plan:
        apply_tensor_parallelism(module, meshes.tensor, tensor_plan)
    if expert_plan:
        apply_expert_parallelism(module, meshes.expert, meshes.tensor, expert_plan)
    for alias, first in aliases.items():
        one, other = (_placements(module.get_parameter(name)) for name in (alias, first))
        if one != other:
            raise UserError(
                f"trainer.tensor_parallel={parallel.tensor}: Transformers' plan for {type(module).__name__} divides "
                f"{first} by {other} and {alias}, which is the same parameter, by {one}; set trainer.tensor_parallel=1"
            )
    tie(module, aliases)
    return [module.get_submodule(name) for name, style in expert_plan.items() if style == EXPERTS]


def plans_of(module: Any, parallel: ModelParallel) -> tuple[Plan, Plan]:
    """Return the plans for the matrices and for the experts of a model, which may be on the meta device. A module that
    the second one names is not in the first.

    Raises:
        UserError: Transformers is too old or has no plan for the model, a style of the plan is not known to train, or
            heads or experts cannot be divided equally.
    """
    check_version(parallel)
    for key, plan, number in (("tensor", "tp", parallel.tensor), ("expert", "ep", parallel.expert)):
        if number > 1 and not getattr(module, f"{plan}_plan", None):
            raise UserError(
                f"trainer.{key}_parallel={number}: Transformers has no plan (base_model_{plan}_plan) for "
                f"{type(module).__name__}; set trainer.{key}_parallel=1"
            )
    tensor_plan, expert_plan = _resolved(module, parallel)
    _check_styles(f"trainer.tensor_parallel={parallel.tensor}", tensor_plan, module)
    _check_styles(f"trainer.expert_parallel={parallel.expert}", expert_plan, module)
    _check_heads(module, parallel.tensor)
    _check_experts(module, parallel.expert, expert_plan)
    return tensor_plan, expert_plan


def check_version(parallel: ModelParallel) -> None:
    """Check that the installed Transformers and PyTorch can divide models that exist already.

    Raises:
        UserError: one of them is too old.
    """
    if not parallel.is_used:
        return
    from transformers import PreTrainedModel

    if torch.__version__ < "2.13":  # gathering, saving and loading of parts were tested with 2.13 only
        needed, installed = "PyTorch 2.13", str(torch.__version__)
    elif not hasattr(PreTrainedModel, "_resolve_parallel_plans"):
        needed, installed = "Transformers 5.23", importlib.metadata.version("transformers")
    else:
        return
    key, number = ("tensor", parallel.tensor) if parallel.tensor > 1 else ("expert", parallel.expert)
    raise UserError(
        f"trainer.{key}_parallel={number} needs {needed} or later, and {installed} is installed; install a newer one, "
        f"or set trainer.{key}_parallel=1"
    )


def _check_styles(setting: str, plan: Plan, module: Any) -> None:
    unknown = sorted({*plan.values()} - STYLES)
    if not unknown:
        return
    key, _, number = setting.partition("=")
    fix = f"{key}=1"
    if "moe_tp_experts" in unknown and module.ep_plan:  # the experts, which then have no rule in this plan
        fix = f"trainer.expert_parallel to a multiple of {number}"
    raise UserError(
        f"{setting}: Transformers' plan for {type(module).__name__} has the style {unknown[0]}, with which mtrl cannot "
        f"train and save a model; set {fix}"
    )


def _check_heads(module: Any, ranks: int) -> None:
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    config = module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if get_kv_heads_per_rank(module.tp_plan or {}, heads, ranks) is None:
        raise UserError(
            f"trainer.tensor_parallel={ranks} does not divide the {heads} heads of keys and values of "
            f"{type(module).__name__}; use a divisor of {heads}"
        )


def _check_experts(module: Any, ranks: int, plan: Plan) -> None:
    for name in (name for name, style in plan.items() if style == "grouped_gemm"):
        experts = module.get_parameter(name).shape[0]
        if experts % ranks:
            raise UserError(
                f"trainer.expert_parallel={ranks} does not divide the {experts} experts of a layer of "
                f"{type(module).__name__}; use a divisor of {experts}"
            )


def _resolved(module: Any, parallel: ModelParallel) -> tuple[Plan, Plan]:
    """Return Transformers' plans for these numbers of ranks, with the names of each layer in place of `*`."""
    from transformers.distributed import DistributedConfig

    sizes = DistributedConfig(
        tp_size=parallel.tensor, ep_size=parallel.expert, fsdp_size=max(1, parallel.expert // parallel.tensor)
    )
    try:
        tensor_plan, expert_plan, _ = module._resolve_parallel_plans(sizes)
    except ValueError as error:
        raise UserError(
            f"trainer.tensor_parallel={parallel.tensor} and trainer.expert_parallel={parallel.expert}: Transformers "
            f"cannot divide {type(module).__name__} ({error}); set them to 1"
        ) from error
    return tensor_plan, expert_plan


def _placements(parameter: Any) -> str:
    return str(getattr(parameter, "placements", "no division"))
