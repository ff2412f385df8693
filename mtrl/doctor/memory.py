"""What a run needs of a GPU's memory, moment by moment. docs/machines.md has the formulas and where they come from.

States (weights, gradients, moments) are exact, up to the rows that a shard is padded by; activations of a layer are
exact too; what runs beside them is allowed for: `PROCESS`, `ENGINE`, `IN_FLIGHT` and `SLACK`. Nothing of it was
measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtrl.config.schema import Config
from mtrl.doctor.activations import FLOAT32, adapter_bytes, layer_bytes
from mtrl.doctor.architecture import Architecture
from mtrl.doctor.layout import GIB, Layout, context_of, needs_critic, needs_reference

PROCESS = 2 * GIB
"""A process on a GPU: CUDA's context, workspaces of cuBLAS, buffers of NCCL. An allowance."""
ENGINE = 4 * GIB
"""Of a server's share what is neither weights nor keys and values: context, prefill, CUDA graphs. An allowance."""
IN_FLIGHT = 0.5
"""Gradients of a layer's activations while its backward runs, as a share of these. An allowance."""
SLACK = 0.05
"""Share of a GPU that the allocator cannot use, for blocks of other sizes lie between. An allowance."""
GATHERED = 3
"""Layers whose weights are whole at once: the present one, the next, and the buffer that this arrives in."""


@dataclass(frozen=True)
class Part:
    """Something that takes memory, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """One kind of GPU at the time when it holds most of something."""

    where: str
    when: str
    parts: tuple[Part, ...]
    room: int
    """Bytes of the GPU."""

    @property
    def needed(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def over(self) -> int:
        """Bytes too many; below 0: what is left."""
        return self.needed - self.room


class Memory:
    """A configuration and the sizes of its model, asked for bytes. All are of one GPU; a rank is rank 0."""

    def __init__(self, config: Config, model: Architecture):
        self.config, self.model, self.layout = config, model, Layout.of(config)
        lora = config.model
        self.targets = tuple(lora.lora_target_modules)
        self.adapters = model.adapters(lora.lora_rank, self.targets) if lora.lora_rank else 0
        self.trained = self.adapters * FLOAT32 if self.adapters else model.parameters * self.layout.stored
        """Bytes of all parameters that have a gradient."""
        self.context = context_of(config, model)
        self.tokens = max(config.trainer.max_tokens_per_microbatch, self.context)
        """Of a micro-batch: a conversation is never cut."""
        self.room = int(config.placement.gpu_memory * GIB)

    # What a rank holds from step to step

    def states(self) -> dict[str, int]:
        """Weights, gradients and moments of all models of a rank, wherever they are: bytes of this rank's share."""
        layout, frozen = self.layout, self.model.parameters * self.layout.stored if self.adapters else 0
        parts = {
            "weights": frozen + self.trained,
            "gradients": self.trained,
            "moments of Adam": 2 * self.trained,
            "reference": self.model.parameters * layout.stored * needs_reference(self.config),
            "critic": 4 * self._critic() * layout.stored,
        }
        return {name: size // layout.shards for name, size in parts.items()}

    def _critic(self) -> int:
        """Parameters of the value model: the body, and a head of one output."""
        if not needs_critic(self.config):
            return 0
        untied = 0 if self.model.tie_word_embeddings else self.model.head
        return self.model.parameters - untied + self.model.hidden_size + 1

    def held(self, learning: bool) -> Iterator[Part]:
        """What lies on a rank's GPU all the time; gradients only while it is learning."""
        trainer = self.config.trainer
        yield Part("process", PROCESS)
        yield Part("slack", int(SLACK * self.room))
        for name, size in self.states().items():
            away = trainer.fsdp.cpu_offload or (name == "moments of Adam" and trainer.optimizer.offload)
            if not away and (learning or name != "gradients"):
                yield Part(name, size)
        yield from self.local_engine()

    def local_engine(self) -> Iterator[Part]:
        """The embedded engine of rank 0: a copy of the weights where it has one, and the keys and values."""
        if self.layout.servers is not None:
            return
        config, model, size = self.config, self.model, self.layout.computed
        overlap = config.async_config.max_steps_off_policy > 0
        process = overlap if config.generator.local.process is None else config.generator.local.process
        if self.layout.sharded or process or self.adapters:
            yield Part("engine's copy of the weights", model.parameters * size)
        if process:
            yield Part("engine's process", PROCESS)
        capacity = 1 << max(6, (self.context - 1).bit_length())  # as SlotCache rounds it
        yield Part("engine's keys and values", config.generator.max_num_seqs * capacity * model.cached(size))

    # What comes and goes while it learns

    def gathered(self) -> int:
        """Whole weights of a sharded model: embedding and head throughout, layers when it is their turn."""
        if not self.layout.sharded:
            return 0
        fsdp, layers = self.config.trainer.fsdp, self.model.num_hidden_layers
        whole = GATHERED if fsdp.reshard_after_forward else layers + 1
        reference = self.model.root + 2 * self.model.layer if needs_reference(self.config) else 0
        return (self.model.root + whole * self.model.layer + reference) * self.layout.computed

    def layer_activations(self) -> int:
        """What one layer keeps of a micro-batch."""
        size, lora = self.layout.computed, self.config.model
        token = layer_bytes(self.model, size, self.context, lora.attn_implementation)
        if self.adapters:
            cast = not self.layout.sharded and size != FLOAT32  # else adapters compute in what the model does
            token += adapter_bytes(self.model, lora.lora_rank, FLOAT32 if cast else size, self.targets, cast)
        return self.tokens * token

    def kept_activations(self) -> int:
        """What the forward pass leaves for the backward pass."""
        each = self.tokens * self.model.hidden_size * self.layout.computed
        layers = self.model.num_hidden_layers
        return layers * (each if self.config.trainer.gradient_checkpointing else self.layer_activations()) + 4 * each

    def logits(self) -> int:
        """The log-probs of a micro-batch in which every token was sampled (`mtrl/models/logprobs.py`)."""
        limit, wide = self.config.trainer.max_logits_per_chunk, self.tokens * self.model.vocab_size
        if wide <= limit:
            return 5 * FLOAT32 * wide
        arrays = 3 if self.config.algorithm.entropy_coef else 2
        head = 0 if self.adapters else self.model.head * (FLOAT32 + self.layout.computed)
        return arrays * FLOAT32 * max(limit, self.model.vocab_size) + head

    def whole_gradients(self, parameters: int) -> int:
        """Gradients of parameters of a sharded model before they are summed over ranks: whole, and once more in what
        they are summed in."""
        if not self.layout.sharded or self.adapters:
            return 0
        reduced = 2 if self.config.trainer.fsdp.reduce_dtype == "bfloat16" else FLOAT32
        return parameters * (self.layout.computed + reduced)

    # The moments

    def moments(self) -> list[Moment]:
        """All that can be the tightest."""
        found = [*self._learning()]
        if self.layout.colocated:
            found += [self._sampling()]
        if self.layout.servers is not None:
            found += [self._serving()]
        return found

    def _learning(self) -> Iterator[Moment]:
        where = "GPU of rank 0" if self.layout.servers is None else "GPU of a rank"
        held = [*self.held(learning=True)]
        if self.layout.colocated:
            held.append(Part("sleeping server", PROCESS))
        weights, kept = Part("gathered weights", self.gathered()), Part("activations kept", self.kept_activations())
        work = int((1 + IN_FLIGHT) * self.layer_activations())
        head = 0 if self.adapters else self.model.head * self.layout.computed
        of_layer = self.whole_gradients(self.model.layer) + (head if self.layout.sharded else 0)
        root = self.whole_gradients(self.model.root)
        offloaded = self.config.trainer.optimizer.offload and not self.config.trainer.fsdp.cpu_offload
        share = 0 if self.config.trainer.fsdp.cpu_offload else self.trained // self.layout.shards
        step = [Part("scratch of the optimiser", share)]
        step += [Part("moments of Adam", 2 * share)] if offloaded else []
        for when, parts in {
            "log-probs": [weights, kept, Part("logits", self.logits())],
            "backward of a layer": [
                weights,
                kept,
                Part("activations of a layer", work),
                Part("gradients in flight", of_layer),
            ],
            "end of backward": [weights, Part("gradients in flight", root)],
            "optimiser step": step,
        }.items():
            yield Moment(where, when, tuple(part for part in [*held, *parts] if part.bytes), self.room)

    def _sampling(self) -> Moment:
        """The server is awake beside what the rank keeps, and is being sent new weights, tensor by tensor."""
        share = Part("server", int(self.config.generator.gpu_memory_utilization * self.room))
        sent = Part("tensor on its way", self.model.largest * self.layout.stored)
        parts = (part for part in [*self.held(learning=False), share, sent] if part.bytes)
        return Moment("GPU of a rank and a server", "sampling", tuple(parts), self.room)

    def _serving(self) -> Moment:
        """A server must hold its weights and one whole conversation; what is left is for others."""
        assert self.layout.servers is not None
        share = int(self.config.generator.gpu_memory_utilization * self.room)
        parts = (
            Part("weights", self.model.parameters * self.layout.computed // self.layout.servers.tensor_parallel_size),
            Part("one conversation", self.conversation()),
            Part("engine", ENGINE),
        )
        return Moment("share of a server", "sampling", parts, share)

    def conversation(self) -> int:
        """Keys and values of the longest conversation on one GPU of a server."""
        assert self.layout.servers is not None
        heads = self.model.num_key_value_heads  # whole ones: more GPUs than these hold copies
        return (
            self.context
            * self.model.cached(self.layout.computed)
            // min(self.layout.servers.tensor_parallel_size, heads)
        )

    def conversations(self) -> int | None:
        """Longest conversations that all servers of the run hold at once; None where none are started."""
        servers = self.layout.servers
        if servers is None or not self.layout.servers_here:
            return None
        serving = self._serving()
        each = self.conversation()
        return servers.replicas * max(0, (serving.room - serving.needed + each) // each)

    # The memory of the machine

    def host(self) -> dict[str, int]:
        """Bytes of the first machine's own memory: while models are loaded, every rank whole ones; and in a step."""
        layout, model = self.layout, self.model
        copies = 1 + needs_reference(self.config) + (self._critic() > 0)
        loading = layout.ranks_here * copies * model.parameters * layout.stored
        away = sum(self.states().values()) if self.config.trainer.fsdp.cpu_offload else 0
        if self.config.trainer.optimizer.offload and not away:
            away = self.states()["moments of Adam"]
        sent = self.adapters * FLOAT32 if self.adapters else model.parameters * layout.stored
        files = 3 * model.parameters * layout.computed if self._by_shared_memory() else 0
        return {"loading": loading, "step": layout.ranks_here * away + sent + files}

    def _by_shared_memory(self) -> bool:
        servers = self.layout.servers
        return servers is not None and servers.weight_sync == "disk" and servers.sync_folder is None
