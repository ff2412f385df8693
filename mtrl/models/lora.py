"""Low-rank adapters (LoRA, 2106.09685): a frozen matrix W0 acts as W0 + alpha / rank * B A, and A and B are trained.

The trainer's module is peft's, so that adapters have the common format. An engine does not use peft: it samples from a
plain module whose matrices hold the merged weights, and only the adapters are sent to it (`LoraWeights`).
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.config.model_schema import ModelConfig
from mtrl.errors import UserError, missing_extra

ADAPTER = "default"
"""peft's name of the single adapter of each matrix."""
_WRAPPER = "base_model.model."
"""Prefix that peft's wrapper adds to the names of the model's own modules."""
OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of linear layers that peft takes for those of experts which Transformers has stacked. Dense layers and shared
experts of a mixture have these names too."""
_NAME = re.compile(rf"(?:{re.escape(_WRAPPER)})?(?P<matrix>.+)\.lora_(?P<half>[AB])(?:\.{ADAPTER})?\.weight")


def add_adapters(model: Any, config: ModelConfig, seed: int = 0) -> Any:
    """Wrap a causal LM in peft's module, with frozen weights and an adapter for each linear layer except the head.

    B starts at 0, so the first log-probs equal the model's; A is random and depends only on `seed`. There is no
    dropout, which would make the log-probs of training differ from those of sampling. Adapters are float32 for a model
    of any dtype, since an update is often smaller than the resolution of bfloat16 and would be lost. Experts that are
    not separate linear layers (one block per layer) get no adapters.

    Args:
        model: changed in place; make copies for engines before the call. It may be on the meta device; the adapters are
            then on the CPU.

    Raises:
        UserError: peft is missing, a target names no linear layer, or the rank exceeds that of all adapted matrices.
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
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _on_the_cpu(chosen.values()):
        warnings.simplefilter("ignore", FutureWarning)  # a warning between the libraries, which users cannot fix
        torch.default_generator.manual_seed(seed)  # only the CPU's generator, since peft creates adapters on the CPU
        try:
            adapted = get_peft_model(model, settings)
        except ValueError as error:  # some, but not all, of `OF_EXPERTS` are targets
            raise _only_for_experts(layers, model) from error
    if (found := set(_pairs(adapter_state(adapted)))) != set(chosen):
        if settings.target_parameters:
            raise _only_for_experts(layers, model)
        raise UserError(
            f"model.lora_target_modules={_last_names(found ^ set(chosen))} names other modules of "
            f"{type(model).__name__} as well as linear layers; give longer names, such as self_attn.q_proj"
        )
    for module in set(adapted.modules()) - before:
        module.training = False  # as in all other modules; training mode marks layers that recompute activations
    return adapted


def _only_for_experts(layers: Mapping[str, nn.Linear], model: Any) -> UserError:
    """Return the error for a mixture in which peft takes `OF_EXPERTS` for the names of the stacked experts."""
    names = {_last(name) for name in layers}
    return UserError(
        f"model.lora_target_modules cannot have {', '.join(sorted(names & OF_EXPERTS))} in {type(model).__name__}, "
        "where peft takes these names for those of the stacked experts; set "
        f"model.lora_target_modules=[{','.join(sorted(names - OF_EXPERTS))}], which adapts the other linear layers"
    )


@contextmanager
def _on_the_cpu(layers: Iterable[nn.Linear]) -> Iterator[None]:
    """Within this context, layers on the meta device have weights on the CPU that take no memory, since peft creates an
    adapter on the device of its layer, and an adapter needs values also where the layer has no weights in memory."""
    empty = {layer: layer.weight for layer in layers if layer.weight.is_meta}
    for layer, weight in empty.items():
        layer.weight = nn.Parameter(torch.empty((), dtype=weight.dtype).expand(weight.shape), weight.requires_grad)
    try:
        yield
    finally:
        for layer, weight in empty.items():
            layer.weight = weight.requires_grad_(layer.weight.requires_grad)


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers by name, without the head, whose weights are often tied to the embeddings and which is
    the widest layer."""
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _chosen(layers: Mapping[str, nn.Linear], config: ModelConfig, architecture: str) -> dict[str, nn.Linear]:
    """Return the layers that get adapters."""
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
    """Return the trained parameters by the names of `named_parameters()`, without copies (DTensors where sharded).

    Raises:
        ValueError: a trained parameter is not an adapter, or no parameter is trained.
    """
    # `state_dict` is used because it brings FSDP2's parameters back from gathered to sharded.
    state = {name: p.detach() for name, p in module.state_dict(keep_vars=True).items() if p.requires_grad}
    if not state or (others := [name for name in state if not _NAME.fullmatch(name)]):
        raise ValueError(f"{type(module).__name__} trains {others[0] if state else 'nothing'}, and no adapters alone")
    return state


def scaling_of(module: Any) -> float:
    """Return the scale of the product of the module's adapters, alpha / rank."""
    settings = module.peft_config[ADAPTER]
    return settings.lora_alpha / settings.r


@contextmanager
def without_adapters(module: Any) -> Iterator[None]:
    """Within this context, the model computes without its adapters, as before training: this is the reference of the
    KL without a second copy of the model.

    peft's own `disable_adapter` also clears `requires_grad` and sets it again. Under FSDP2 that changes either the
    sharded or the gathered parameters, depending on the current state, so that training would continue without
    gradients. Here only the flag of each layer that disables its adapters is set.
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
    """Picklable function that loads adapters into a plain module, for an engine's `apply_weights`.

    Every load starts from W0, so that the same adapters give the same bits, independent of earlier loads. The merged
    matrices are written in place, so modules that share their storage use them too.

    In half precision the merged matrices are rounded once, to the nearest: changes far below 1/500 of a weight have no
    effect until they have grown, as if the engine were a few updates behind (`analysis/logprob_drift` measures the
    effect).
    """

    scaling: float
    matrices: tuple[str, ...]
    """Names of the adapted layers in the plain module; each load must contain the adapters of all of them."""
    base: dict[str, Tensor] = field(default_factory=dict)
    """W0 by layer. The trainer's frozen matrices are shared if they are not sharded; else the first load copies the
    matrices of the module, which must have their values from before training."""
    _warned: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, module: Any) -> LoraWeights:
        """Create the loader for the adapters of a peft module, sharded or not."""
        from torch.distributed.tensor import DTensor

        matrices = tuple(_pairs(adapter_state(module)))
        layers = {name: module.base_model.model.get_submodule(name).base_layer.weight.detach() for name in matrices}
        shared = not any(isinstance(weight, DTensor) for weight in layers.values())
        return cls(scaling_of(module), matrices, layers if shared else {})

    @torch.no_grad()
    def __call__(self, module: nn.Module, adapters: Mapping[str, Tensor]) -> None:
        """Set each adapted matrix of `module` to W0 + scaling * B A.

        Args:
            adapters: adapters by the names of `adapter_state`.

        Raises:
            ValueError: adapters and matrices do not correspond one to one; the module is unchanged.
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
        if lost and not self._warned:
            self._warned = True
            warnings.warn(
                f"the engine's {str(next(iter(targets.values())).dtype).removeprefix('torch.')} weights round the whole"
                f" change of {lost} of {len(targets)} adapted matrices away, so that it samples as if they had learnt "
                "nothing; raise trainer.optimizer.lr, or take model.dtype=float32",
                stacklevel=2,
            )

    def _agreed(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[str, ...]:
        """Check that the adapters are for exactly the adapted layers, and return the names of these layers."""
        absent, odd = set(self.matrices) - set(pairs), set(pairs) - set(self.matrices)
        if absent or odd:
            raise ValueError(
                f"adapters came for {len(self.matrices) - len(absent)} of {len(self.matrices)} adapted matrices and "
                f"for {len(odd)} others, among them {min(absent or odd)}"
            )
        return self.matrices


@torch.no_grad()
def merged_state_of(state: dict[str, Tensor], adapters: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Return the state of the merged model from whole tensors that were gathered before.

    Args:
        state: state of the plain module, or of peft's module. Only the adapters in it stay in it: each matrix is
            removed when it is merged, so that no more than one of them exists twice.

    Raises:
        ValueError: an adapter has no matrix.
    """
    plain = {plain_name(name): state.pop(name) for name in list(state) if not _NAME.fullmatch(name)}
    check_matrices(plain, adapters)
    return dict(merged_tensors(((name, plain.pop(name)) for name in list(plain)), adapters, scaling))


def check_matrices(names: Collection[str], adapters: Mapping[str, Tensor]) -> None:
    """Check that each adapter has its matrix among these names of weights.

    Raises:
        ValueError: an adapter has no matrix.
    """
    for name in _pairs(adapters):
        if f"{name}.weight" not in names:
            raise ValueError(f"the adapter of {name} has no matrix among {len(names)} weights")


@torch.no_grad()
def merged_tensors(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield these weights of the plain model; adapters are merged into each matrix when it is taken."""
    pairs = {f"{name}.weight": pair for name, pair in _pairs(adapters).items()}
    for name, value in weights:
        yield name, _merged(value.detach(), *pairs[name], scaling) if name in pairs else value.detach()


def plain_name(name: str) -> str:
    """Return the model's own name of a weight that peft's module calls `name`."""
    return name.removeprefix(_WRAPPER).replace(".base_layer.", ".")


def save_adapter(module: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a folder in peft's format, which `PeftModel.from_pretrained` and inference servers load.

    Args:
        state: the adapters gathered from all ranks; None: the module's own.
    """
    from safetensors.torch import save_file

    state = adapter_state(module) if state is None else state
    files = {name.replace(f".{ADAPTER}.", "."): value.cpu().contiguous() for name, value in state.items()}
    settings = copy.copy(module.peft_config[ADAPTER])
    settings.target_modules = sorted(settings.target_modules)  # the order of a set differs between processes
    settings.save_pretrained(str(folder))
    save_file(files, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def save_adapter_files(adapters: Mapping[str, Tensor], scaling: float, model: str, folder: Path) -> None:
    """Write a folder in peft's format from the tensors alone, for servers, without a module of peft.

    Args:
        adapters: adapters by the names of `adapter_state`.
        model: folder or Hub name of the model that the adapters belong to.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    pairs = _pairs(adapters)
    rank = next(iter(pairs.values()))[0].shape[0]
    settings = LoraConfig(
        r=rank,
        lora_alpha=scaling * rank,  # type: ignore[arg-type] # the product need not be a whole number
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
    """Return W0 + scaling * B A, computed in float32 or better and rounded once."""
    precise = torch.promote_types(weight.dtype, torch.float32)
    a, b = (half.to(weight.device, precise) for half in (a, b))
    return torch.add(weight.to(precise), b @ a, alpha=scaling).to(weight.dtype)


def _pairs(adapters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, in] and B [out, rank] by the name of their layer in the plain module.

    Raises:
        ValueError: a tensor is not a half of an adapter, or its other half is missing.
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
    """Return the weight [out, in] that an adapter belongs to.

    Raises:
        ValueError: the module has no such weight, or the shapes do not fit.
    """
    try:
        weight = module.get_parameter(f"{name}.weight")
    except AttributeError:
        raise ValueError(f"the adapter of {name} has no matrix in {type(module).__name__}") from None
    a, b = pair
    if (b.shape[0], a.shape[1]) != tuple(weight.shape) or a.shape[0] != b.shape[1]:
        shapes = f"{tuple(b.shape)} x {tuple(a.shape)}"
        raise ValueError(f"the adapter of {name} has the shape {shapes} and its matrix {tuple(weight.shape)}")
    return weight
