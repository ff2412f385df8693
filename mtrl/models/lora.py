"""Low-rank adapters (LoRA, 2106.09685): a frozen matrix W0 acts as W0 + alpha / rank * B A, and A and B are trained.

The trainer's module is peft's, so that adapters are what everyone else's are. An engine never sees peft: it samples
from a plain module whose matrices hold the merged weights, and adapters alone travel to it (`LoraWeights`).
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.config.model_schema import ModelConfig
from mtrl.errors import UserError, missing_extra

ADAPTER = "default"
"""What peft calls the one adapter of each matrix."""
_WRAPPER = "base_model.model."
"""What peft's wrapper puts before the names of the model's own modules."""
_NAME = re.compile(rf"(?:{re.escape(_WRAPPER)})?(?P<matrix>.+)\.lora_(?P<half>[AB])(?:\.{ADAPTER})?\.weight")


def add_adapters(model: Any, config: ModelConfig, seed: int = 0) -> Any:
    """Wrap a causal LM into peft's module: its weights frozen, an adapter beside each linear layer but the head.

    B starts at 0, so the first log-probs are the model's own; A is random by `seed` alone. There is no dropout, which
    would make the log-probs of training others than those of sampling. Adapters are float32 whatever the model is: an
    update is often smaller than bfloat16 resolves, and would be lost. Experts of mixtures that are no linear layers of
    their own (one block per layer) get none.

    Args:
        model: changed in place; take copies for engines before.

    Raises:
        UserError: peft is missing; a target names no linear layer; the rank is more than any of them can use.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise missing_extra("peft", "lora") from error
    layers = _linear_layers(model)
    chosen = _chosen(layers, config, type(model).__name__)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(config.lora_target_modules) or sorted({_last(name) for name in chosen}),
        task_type="CAUSAL_LM",
    )
    before = set(model.modules())
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between the libraries, and nothing that a user can do about
        torch.default_generator.manual_seed(seed)  # the CPU's only, where peft makes adapters
        adapted = get_peft_model(model, settings)
    if (found := set(_pairs(adapter_state(adapted)))) != set(chosen):
        raise UserError(
            f"model.lora_target_modules={_last_names(found ^ set(chosen))} names other modules of "
            f"{type(model).__name__} as well as linear layers; give longer names, such as self_attn.q_proj"
        )
    for module in set(adapted.modules()) - before:
        module.training = False  # as the rest is; layers in training mode are those that recompute activations
    return adapted


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    """By name, without the head: its weights are often those of the embeddings too, and it is the widest of all."""
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _chosen(layers: Mapping[str, nn.Linear], config: ModelConfig, architecture: str) -> dict[str, nn.Linear]:
    """The layers that get adapters."""
    wanted = config.lora_target_modules
    if not layers:
        raise UserError(
            f"model.lora_rank={config.lora_rank} finds no linear layers in {architecture} to adapt; set it to 0, which "
            "trains all weights"
        )
    for target in wanted:
        if not any(_matches(name, target) for name in layers):
            raise UserError(
                f"model.lora_target_modules={target} names no linear layer of {architecture} (its head stays as it "
                f"is); there are {_last_names(layers)}"
            )
    chosen = {n: m for n, m in layers.items() if not wanted or any(_matches(n, target) for target in wanted)}
    most = max(min(module.weight.shape) for module in chosen.values())
    if config.lora_rank > most:
        raise UserError(
            f"model.lora_rank={config.lora_rank} is more than the rank {most} of the matrices that it adapts; take at "
            f"most {most}, or model.lora_rank=0, which trains the matrices themselves"
        )
    return chosen


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _last_names(names: Any) -> str:
    return ", ".join(sorted({_last(name) for name in names}))


def adapter_state(module: Any) -> dict[str, Tensor]:
    """What is trained, by the names of `named_parameters()`: the parameters themselves (DTensors where sharded).

    Raises:
        ValueError: something else than adapters is trained, or nothing is.
    """
    # Through the module's state, which brings FSDP2's parameters back from gathered to sharded.
    state = {name: p.detach() for name, p in module.state_dict(keep_vars=True).items() if p.requires_grad}
    if not state or (others := [name for name in state if not _NAME.fullmatch(name)]):
        raise ValueError(f"{type(module).__name__} trains {others[0] if state else 'nothing'}, and no adapters alone")
    return state


def scaling_of(module: Any) -> float:
    """How many times the product of its adapters counts."""
    settings = module.peft_config[ADAPTER]
    return settings.lora_alpha / settings.r


@contextmanager
def without_adapters(module: Any) -> Iterator[None]:
    """The model as it was before training, for a while: the reference of the KL without a second copy.

    peft's own `disable_adapter` also takes `requires_grad` away and gives it back. Under FSDP2 that reaches the sharded
    or the gathered parameters, whichever are there at the time, and training goes on without gradients. So here the
    layers are told to leave their adapters out, and nothing else changes.
    """
    from peft.tuners.lora import LoraLayer

    layers = {layer: layer.disable_adapters for layer in module.modules() if isinstance(layer, LoraLayer)}
    if not layers:
        raise ValueError(f"{type(module).__name__} has no adapters to leave out")
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, before in layers.items():
            layer._disable_adapters = before


@dataclass
class LoraWeights:
    """Loads adapters into a plain module: an engine's `apply_weights`, picklable.

    Every load starts from W0, so that the same adapters give the same bits however often they are loaded, and whatever
    was loaded between. The merged matrices are written in place: who shares their storage sees them.

    In half precision the merged matrices are rounded once, to the nearest: changes far below 1/500 of a weight wait
    until they have grown, as if the engine were a few updates behind (`analysis/logprob_drift` shows by how much).
    """

    scaling: float
    matrices: tuple[str, ...]
    """Names of the adapted layers in the plain module; each load must bring the adapters of all of them."""
    base: dict[str, Tensor] = field(default_factory=dict)
    """W0 by layer. Where the trainer's frozen ones can be had, they are shared; else the first load keeps the matrices
    of the module, which must be as they were before training."""
    _told: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, module: Any) -> LoraWeights:
        """For the adapters of a peft module, sharded or not."""
        from torch.distributed.tensor import DTensor

        matrices = tuple(_pairs(adapter_state(module)))
        layers = {name: module.base_model.model.get_submodule(name).base_layer.weight.detach() for name in matrices}
        shared = not any(isinstance(weight, DTensor) for weight in layers.values())
        return cls(scaling_of(module), matrices, layers if shared else {})

    @torch.no_grad()
    def __call__(self, module: nn.Module, adapters: Mapping[str, Tensor]) -> None:
        """Make each adapted matrix of `module` W0 + scaling * B A.

        Args:
            adapters: as `adapter_state` names them.

        Raises:
            ValueError: adapters and matrices are not one to one; the module is as before.
        """
        pairs = _pairs(adapters)
        targets = {name: _matrix(module, name, pairs[name]) for name in self._agreed(pairs)}
        for name, weight in targets.items():
            self.base.setdefault(name, weight.detach().clone())
        lost = 0
        for name, weight in targets.items():
            a, b = pairs[name]
            weight.copy_(_merged(self.base[name].to(weight.device), a, b, self.scaling))
            lost += bool(b.any()) and torch.equal(weight, self.base[name].to(weight.device))
        if lost and not self._told:
            self._told = True
            warnings.warn(
                f"the engine's {str(next(iter(targets.values())).dtype).removeprefix('torch.')} weights round the whole"
                f" change of {lost} of {len(targets)} adapted matrices away, so that it samples as if they had learnt "
                "nothing; raise trainer.optimizer.lr, or take model.dtype=float32",
                stacklevel=2,
            )

    def _agreed(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[str, ...]:
        """The adapted layers, once it is certain that adapters came for exactly them."""
        absent, odd = set(self.matrices) - set(pairs), set(pairs) - set(self.matrices)
        if absent or odd:
            raise ValueError(
                f"adapters came for {len(self.matrices) - len(absent)} of {len(self.matrices)} adapted matrices and "
                f"for {len(odd)} others, among them {min(absent or odd)}"
            )
        return self.matrices


def merged_state(module: Any) -> dict[str, Tensor]:
    """The state of the merged model, by the names of the plain one: what an export holds."""
    return merged_state_of(module.state_dict(), adapter_state(module), scaling_of(module))


@torch.no_grad()
def merged_state_of(state: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The same from whole tensors that were gathered before.

    Args:
        state: of the plain module, or of peft's; adapters in it are left out.

    Raises:
        ValueError: an adapter has no matrix.
    """
    plain = {plain_name(name): value.detach() for name, value in state.items() if not _NAME.fullmatch(name)}
    for name, (a, b) in _pairs(adapters).items():
        weight = f"{name}.weight"
        if weight not in plain:
            raise ValueError(f"the adapter of {name} has no matrix among {len(plain)} weights")
        plain[weight] = _merged(plain[weight], a, b, scaling)
    return plain


def plain_name(name: str) -> str:
    """What the model calls a weight that peft's module calls `name`."""
    return name.removeprefix(_WRAPPER).replace(".base_layer.", ".")


def save_adapter(module: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write peft's folder of an adapter, which `PeftModel.from_pretrained` and inference servers load.

    Args:
        state: the adapters gathered from all ranks; None: the module's own.
    """
    from safetensors.torch import save_file

    state = adapter_state(module) if state is None else state
    files = {name.replace(f".{ADAPTER}.", "."): value.cpu().contiguous() for name, value in state.items()}
    settings = copy.copy(module.peft_config[ADAPTER])
    settings.target_modules = sorted(settings.target_modules)  # a set is written in another order by each process
    settings.save_pretrained(str(folder))
    save_file(files, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def save_adapter_files(adapters: Mapping[str, Tensor], scaling: float, model: str, folder: Path) -> None:
    """Write peft's folder from the tensors alone, for servers: where there is no module of peft's.

    Args:
        adapters: as `adapter_state` names them.
        model: folder or Hub name of the model that they belong to.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    pairs = _pairs(adapters)
    rank = next(iter(pairs.values()))[0].shape[0]
    settings = LoraConfig(
        r=rank,
        lora_alpha=scaling * rank,  # type: ignore[arg-type] # which may be no whole number
        target_modules=sorted({_last(name) for name in pairs}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model,
        inference_mode=True,
    )
    settings.target_modules = sorted(settings.target_modules or ())
    settings.save_pretrained(str(folder))
    files = {
        f"{_WRAPPER}{name}.lora_{half}.weight": value.detach().cpu().contiguous()
        for name, pair in pairs.items()
        for half, value in zip("AB", pair, strict=True)
    }
    save_file(files, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W0 + scaling * B A, computed in float32 or better and rounded once."""
    precise = torch.promote_types(weight.dtype, torch.float32)
    a, b = (half.to(weight.device, precise) for half in (a, b))
    return torch.add(weight.to(precise), b @ a, alpha=scaling).to(weight.dtype)


def _pairs(adapters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, in] and B [out, rank] by the name of their layer in the plain module.

    Raises:
        ValueError: a tensor is no half of an adapter, or its other half is missing.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, value in adapters.items():
        if (match := _NAME.fullmatch(name)) is None:
            raise ValueError(f"{name} is no adapter of a linear layer")
        halves.setdefault(match["matrix"], {})[match["half"]] = value
    if single := [name for name, found in halves.items() if len(found) != 2]:
        raise ValueError(f"the adapter of {single[0]} came without its other half")
    return {name: (found["A"], found["B"]) for name, found in halves.items()}


def _matrix(module: nn.Module, name: str, pair: tuple[Tensor, Tensor]) -> Tensor:
    """The weight [out, in] that an adapter belongs to."""
    try:
        weight = module.get_parameter(f"{name}.weight")
    except AttributeError:
        raise ValueError(f"the adapter of {name} has no matrix in {type(module).__name__}") from None
    a, b = pair
    if (b.shape[0], a.shape[1]) != tuple(weight.shape) or a.shape[0] != b.shape[1]:
        shapes = f"{tuple(b.shape)} x {tuple(a.shape)}"
        raise ValueError(f"the adapter of {name} has the shape {shapes} and its matrix {tuple(weight.shape)}")
    return weight
