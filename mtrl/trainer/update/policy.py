"""The model that is trained, and its log-probs of sampled tokens. Under sequence parallelism a rank computes a part of
each row of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrl.distributed.sharding import (
    compute_device,
    full_layout,
    full_state,
    is_sharded,
    load_state,
    named_tensors,
    plain_class,
    reshard,
)
from mtrl.models.attention import takes_boundaries
from mtrl.models.logprobs import PLAIN, Kernels, token_logprobs, top_logprobs
from mtrl.models.router_replay import RouterReplay
from mtrl.models.sequence_parallel import HeadExchange, SequenceGroup
from mtrl.models.vision import image_inputs, processor_of
from mtrl.trainer.data.batching import MicroBatch


class Policy:
    """The trainer's causal LM: plain, sharded over ranks, or with adapters that are trained instead of the weights.

    If it is sharded, all ranks must call `logprobs`, `all_logprobs`, `weights` and `export` at the same time.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        max_logits: int = 2**27,
        kernels: Kernels = PLAIN,
        sent_dtype: torch.dtype | None = None,
        sent_device: torch.device | None = None,
        sequence_group: SequenceGroup | None = None,
        router_replay: RouterReplay | None = None,
    ):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.entropy_gradient = entropy_gradient
        """Whether entropies have a gradient; else they are only metrics and need no graph."""
        self.max_logits = max_logits
        """Maximum number of logits (tokens x vocabulary) in memory at once."""
        self.kernels = kernels
        """The functions that read logits."""
        self.sent_dtype = sent_dtype
        """Dtype of the engine's weights; weights are sent in it if it is smaller than their own. None: in their own."""
        self.sent_device = sent_device
        """Device on which weights for the engine are gathered. None: CPU memory."""
        self.sequence_group = sequence_group
        """The ranks that share each micro-batch, and call the methods with the same ones. None: this rank alone."""
        self.images = processor_of(tokenizer)
        """The image processor of a model that reads images. None: the model reads text only."""
        self.router_replay = router_replay
        """The routers that replay the engine's choices of experts. None: each pass chooses by itself."""

    @property
    def device(self) -> torch.device:
        """Device for the inputs, which differs from the device of offloaded weights."""
        return compute_device(self.model)

    @property
    def parameters(self) -> int:
        """Number of parameters over all ranks."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def vocabulary(self) -> int:
        """Number of ids of the model's vocabulary."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return hasattr(self.model, "get_base_model")

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-prob [N] of each sampled token at the sampling temperature, and the entropy [N] of its
        distribution.

        Padding is on the right and attention is causal, so no real token attends to it and no mask is needed; samples
        in one row are kept apart by their positions. Logits are computed only at the sampled positions, and converted
        to float32 or better after the head.
        """
        return self._logprobs_of(batch, batch.targets)

    def logprobs_beside(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return `logprobs` and, from the same pass, the log-probs [N, k] of the teacher's most probable tokens, which
        are -inf for ids that this model does not have."""
        ids = batch.teacher_ids
        missing = ids >= self.vocabulary
        found, entropy = self._logprobs_of(batch, torch.cat([batch.targets[:, None], ids.masked_fill(missing, 0)], 1))
        return found[:, 0], entropy, found[:, 1:].masked_fill(missing, -math.inf)

    def _logprobs_of(self, batch: MicroBatch, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of `ids`, [N] or [N, C], at the sampled tokens, and the entropies [N]."""
        part = self._part(batch)
        logprobs, entropy = token_logprobs(
            self.model,
            part.mask,
            part.own(ids),
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            max_logits=self.max_logits,
            kernels=self.kernels,
            use_cache=False,
            **part.inputs,
        )
        return part.join(logprobs), part.join(entropy)

    def _part(self, batch: MicroBatch) -> WholeBatch:
        """Return the part of a micro-batch that this rank computes, with the images of its samples."""
        part = part_of(batch, self.model, self.sequence_group)
        if self.images is None:
            return part
        patches = [self.images.patches(image) for sample in batch.samples for image in sample.images]
        shown = batch.token_ids[:, :-1] == self.images.placeholder
        shown[:, 1:] &= ~batch.action_mask[:, :-1]  # a placeholder that was sampled is an ordinary token
        return replace(part, inputs={**part.inputs, **image_inputs(shown, patches)})

    def replaying(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Return a context in which passes over this micro-batch, and their backward passes, send tokens to the experts
        that the engine chose. Without router replay and for micro-batches without recorded experts it does nothing."""
        if self.router_replay is None or batch.experts is None:
            return nullcontext()
        experts, group = batch.experts, self.sequence_group
        return self.router_replay.replaying(experts if group is None else _own_experts(experts, group))

    @torch.no_grad()
    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs [N] of each micro-batch without gradients, for an old policy or a reference."""
        found = [self.logprobs(batch)[0] for batch in batches]
        reshard(self.model)
        return found

    def top_logprobs(self, batch: MicroBatch, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probs [N] without gradients, and ids and log-probs [N, k] of the most probable tokens."""
        part = self._part(batch)
        logprobs, ids, top = top_logprobs(
            self.model,
            part.mask,
            part.own(batch.targets),
            k,
            temperature=self.temperature,
            max_logits=self.max_logits,
            use_cache=False,
            **part.inputs,
        )
        reshard(self.model)
        return part.join(logprobs), part.join(ids), part.join(top)

    def state(self) -> dict[str, Tensor]:
        """Return the weights for a checkpoint, tied weights once: DTensors if sharded, and only the adapters of a model
        with adapters.

        Plain tensors are copies with their own storage, since the local engine lets weights share storage.
        """
        tensors = named_tensors(self.model, trainable_only=self.adapted)
        return {name: value if isinstance(value, DTensor) else value.clone() for name, value in tensors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights in place, so that an engine that shares them uses them too. `state` is from `state()`, or holds
        whole tensors on every rank.

        Raises:
            ValueError: names or shapes differ from the model's; no weight was changed.
        """
        load_state(self.model, state, trainable_only=self.adapted)

    def layout(self) -> dict[str, Tensor]:
        """Return the shapes and dtypes of `weights` by name, as tensors on the meta device. Any rank may call it
        alone."""
        return full_layout(self.model, trainable_only=self.adapted, dtype=self._sent_dtype())

    def weights(self, names: Sequence[str] | None = None) -> dict[str, Tensor] | None:
        """Return weights for an engine with its own copy: whole copies of the tensors of `state`, on rank 0; None on
        other ranks. Unless they are adapters, they are cast to `sent_dtype`, and lie on `sent_device`.

        Args:
            names: names of the tensors; None: all.
        """
        device = None if self.adapted else self.sent_device
        return full_state(self.model, self.adapted, self._sent_dtype(), names, device)

    def _sent_dtype(self) -> torch.dtype | None:
        return None if self.adapted else self.sent_dtype

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder, on rank 0. Adapters are merged into the weights, and also written separately to
        `adapter/`."""
        from mtrl.models.tiny import save

        if not is_sharded(self.model) and not self.adapted:
            save(self.model, self.tokenizer, folder)
            return
        state = full_state(self.model)
        if state is None:
            return
        save(self._plain(state), self.tokenizer, folder)
        if self.adapted:
            from mtrl.models.lora import save_adapter

            adapters = {name: state[name] for name in named_tensors(self.model, trainable_only=True)}
            save_adapter(self.model, folder / "adapter", adapters)

    def _plain(self, state: dict[str, Tensor]) -> Any:
        """Return the model with these whole weights, without sharding and adapters, for saving only: it cannot run.
        With adapters, only they stay in `state`."""
        model = self.model
        if self.adapted:
            from mtrl.models.lora import merged_state_of, scaling_of

            adapters = {name: state[name] for name in named_tensors(model, trainable_only=True)}
            state, model = merged_state_of(state, adapters, scaling_of(model)), model.get_base_model()
        with torch.device("meta"):
            plain = plain_class(model)(model.config)
        plain.load_state_dict(state, strict=False, assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        return plain


@dataclass(frozen=True)
class WholeBatch:
    """A micro-batch of N sampled tokens that this rank computes alone."""

    mask: Tensor
    """[B, l] bool mask of the computed positions that predict a sampled token."""
    inputs: dict[str, Any]
    """Inputs of the model for the l computed positions of each row."""

    def own(self, values: Tensor) -> Tensor:
        """Return the rows of `values` [N, ...] for the sampled tokens of `mask`."""
        return values

    def join(self, values: Tensor) -> Tensor:
        """Return the values of all sampled tokens, [N, ...], from those of `mask`."""
        return values


@dataclass(frozen=True)
class BatchPart(WholeBatch):
    """A part of each row of a micro-batch, of which the other ranks of a group compute the other parts."""

    chosen: Tensor
    """[N] bool mask of the sampled tokens of this part."""
    group: SequenceGroup

    def own(self, values: Tensor) -> Tensor:
        return values[self.chosen]

    def join(self, values: Tensor) -> Tensor:
        return self.group.join(values, self.chosen)


def part_of(batch: MicroBatch, model: Any, group: SequenceGroup | None) -> WholeBatch:
    """Return the part of a micro-batch that this rank computes by `model`.

    Args:
        group: the ranks that share the micro-batch; None: this rank computes it alone.
    """
    if group is not None:
        return _split(batch, group)
    return WholeBatch(batch.action_mask, batch.flash_inputs if takes_boundaries(model) else dict(batch.inputs))


def _own_experts(experts: Tensor, group: SequenceGroup) -> Tensor:
    """Return the experts [B, l, layers, k] of this rank's part of each row, from those [B, L-1, layers, k] of whole
    rows; -1 for padding (`_split`)."""
    padding = -experts.shape[1] % group.size
    return F.pad(experts, (0, 0, 0, 0, 0, padding), value=-1).chunk(group.size, 1)[group.rank]


def _split(batch: MicroBatch, group: SequenceGroup) -> BatchPart:
    """Return this rank's part. Rows are padded to a multiple of the number of parts.

    Tokens were shifted against their targets before (`MicroBatch.action_mask`), so that the last position of a part
    predicts the first token of the next part.
    """
    ids = batch.inputs["input_ids"]
    rows, width = ids.shape
    positions = batch.inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(width, device=ids.device).expand(rows, width)
    padding = -width % group.size
    # No token attends to the padding after it. Its positions begin at 0, since later positions may not exist.
    positions = torch.cat([positions, torch.arange(padding, device=ids.device).expand(rows, padding)], 1)
    length = (width + padding) // group.size
    part = slice(group.rank * length, (group.rank + 1) * length)
    columns = batch.action_mask.nonzero()[:, 1]
    return BatchPart(
        mask=F.pad(batch.action_mask, (0, padding))[:, part],
        inputs={
            "input_ids": F.pad(ids, (0, padding))[:, part],
            "position_ids": positions[:, part],
            "head_exchange": HeadExchange(group, positions),
        },
        chosen=(columns >= part.start) & (columns < part.stop),
        group=group,
    )
