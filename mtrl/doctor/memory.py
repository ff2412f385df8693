"""Estimate of the memory of a run, by phase: that of its GPUs, or main memory if its ranks compute on a CPU.

States (weights, gradients, moments of Adam: ZeRO, 1910.02054, section 3.1) are exact, up to the padding of shards;
activations of a layer (Korthikanti et al., 2205.05198, section 4) are exact too. Other memory is covered by the
allowances `PROCESS`, `SERVER_ALLOWANCE`, `IN_FLIGHT` and `SLACK`. Peaks of an update were measured on one GPU
(docs/machines.md); memory of servers and of several ranks was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtrl.config.derived import (
    COPY_BUCKET,
    PREFILL_TOKENS,
    SERVER_ALLOWANCE,
    WEIGHT_BUCKET,
    cache_budget,
    cache_capacity,
    doubled_capacity,
    max_logits,
    overlaps,
    sequences,
)
from mtrl.config.schema import Config
from mtrl.doctor.activations import FLOAT32, adapter_bytes, layer_bytes
from mtrl.doctor.architecture import DENSE, Architecture
from mtrl.doctor.layout import (
    BYTES,
    GIB,
    MemoryLayout,
    context_of,
    needs_critic,
    needs_reference,
    recomputed_layers,
    teacher_of,
)

PROCESS = 2 * GIB
"""Allowance for a process on a GPU, in bytes: CUDA's context, workspaces of cuBLAS, buffers of NCCL."""
IN_FLIGHT = 0.5
"""Allowance for gradients of a layer's activations during its backward pass, as a share of the activations."""
SLACK = 0.05
"""Allowance for fragmentation: share of a GPU's memory that the allocator cannot use."""
CPU_PROCESS = int(0.7 * GIB)
"""Allowance for a process on a CPU, in bytes: Python, PyTorch and the code of the run."""
CPU_SLACK = 0.1
"""Allowance for fragmentation of main memory: share of the other memory, as measured (docs/machines.md)."""
COMFORT = 0.05
"""Share of a device's memory that must remain free in a proposal, since the plan is an estimate."""
GATHERED_FORWARD, GATHERED_BACKWARD = 3, 2
"""Number of layers whose weights FSDP2 gathers at the same time: the current layer and the receive buffer of the next
one, and in a forward pass the receive buffer of the current one as well, which is freed after the next copy."""


@dataclass(frozen=True)
class Device:
    """The properties of the device of a rank on which the estimate depends."""

    kind: str
    """`cuda` or `cpu`."""
    name: str
    """Name of its memory in a plan."""
    room: int
    """Its memory, in bytes."""
    process: int
    """Allowance for a process, in bytes."""
    slack: float
    """Allowance for fragmentation: a share of a GPU's memory, or of the main memory that a rank needs."""
    bfloat16: bool = True
    """Whether it multiplies bfloat16."""


def gpu(config: Config) -> Device:
    """Return a GPU of the placement."""
    return Device("cuda", "GPU", int(config.placement.gpu_memory * GIB), PROCESS, SLACK)


def main_memory(size: int, ranks: int = 1) -> Device:
    """Return the part of a rank in `size` bytes of this machine's main memory."""
    import torch  # a plan for GPUs and the help of the command need no PyTorch

    from mtrl.models.attention import multiplies

    return Device("cpu", "main memory", size // ranks, CPU_PROCESS, CPU_SLACK, multiplies(torch.bfloat16))


@dataclass(frozen=True)
class Part:
    """A named amount of memory, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """The memory of one kind of GPU in one phase of a run."""

    where: str
    when: str
    parts: tuple[Part, ...]
    room: int
    """Available memory, in bytes."""

    @property
    def needed(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def over(self) -> int:
        """Number of bytes above the available memory; if negative, its magnitude is the remaining memory."""
        return self.needed - self.room

    @property
    def is_comfortable(self) -> bool:
        """Whether the phase leaves `COMFORT` of the memory."""
        return self.over <= -COMFORT * self.room


class Memory:
    """Memory of a configuration and its model, in bytes. All numbers are for one device; the rank is rank 0."""

    def __init__(self, config: Config, model: Architecture, device: Device | None = None):
        """
        Args:
            device: device of a rank; None: a GPU of the placement.
        """
        self.config, self.model, self.device = config, model, device or gpu(config)
        self.layout = MemoryLayout.of(config, self.device.bfloat16)
        self.teacher = teacher_of(config)
        divided = config.trainer.tensor_parallel, config.trainer.expert_parallel
        self.part, self.teacher_part = model.part(*divided), self.teacher and self.teacher.part(*divided)
        """The parts of policy and teacher that a rank computes."""
        lora = config.model
        self.targets = tuple(lora.lora_target_modules)
        self.adapters = model.adapters(lora.lora_rank, self.targets) if lora.lora_rank else 0
        self.trained = self.adapters * FLOAT32 if self.adapters else self.parameters_of_a_copy * self.layout.stored
        """Bytes of all parameters with a gradient, over the ranks that share one copy of the model."""
        self.context = context_of(config, model)
        self.tokens = max(config.trainer.max_tokens_per_microbatch, self.context)
        """Number of tokens of a micro-batch, which is at least the context because a conversation is never cut."""
        self.own_tokens = -(-self.tokens // config.trainer.sequence_parallel)
        """Number of tokens of a micro-batch that a rank computes."""
        self.recomputed_layers = recomputed_layers(config, model)
        """Number of layers that the backward pass recomputes."""
        self.room = self.device.room

    # Memory that a rank holds permanently

    def states(self) -> dict[str, int]:
        """Return the bytes of a rank's share of weights, gradients and moments of all models, on the GPU or
        offloaded."""
        layout, frozen = self.layout, self.model.parameters * self.layout.stored if self.adapters else 0
        parts = {
            "weights": frozen + self.trained,
            "gradients": self.trained,
            "moments of Adam": 2 * self.trained,
            "reference": self.parameters_of_a_copy * layout.stored * needs_reference(self.config),
            "teacher": self._parameters(self.teacher) * layout.computed if self.teacher else 0,
            "critic": 4 * self._critic() * layout.stored,
        }
        return {name: size // layout.shards for name, size in parts.items()}

    @property
    def parameters_of_a_copy(self) -> int:
        """Number of parameters of the policy over the ranks that share one copy of it."""
        return self._parameters(self.model)

    def _parameters(self, model: Architecture) -> int:
        """Return the number of parameters over the ranks that share one copy of a model. Ranks that divide its matrices
        hold the other parameters, such as norms, once each."""
        tensor, expert = self.config.trainer.tensor_parallel, self.config.trainer.expert_parallel
        part = model.part(tensor, expert)
        experts = part.num_hidden_layers * part.experts
        return (part.parameters - experts) * tensor + experts * max(tensor, expert)

    def _critic(self) -> int:
        """Return the number of parameters of the value model: the body, and a head of one output."""
        if not needs_critic(self.config):
            return 0
        untied = 0 if self.model.tie_word_embeddings else self.model.head
        return self.model.parameters - untied + self.model.hidden_size + 1

    def held(self, learning: bool, server: int = 0) -> Iterator[Part]:
        """Yield the memory that a rank's GPU holds permanently; gradients only during training.

        Args:
            server: bytes of the GPU that an awake server takes, whose own allocator manages them.
        """
        trainer = self.config.trainer
        yield Part("process", self.device.process)
        if self.device.kind == "cuda":
            yield Part("slack", int(self.device.slack * (self.room - server)))
        for name, size in self.states().items():
            away = trainer.fsdp.cpu_offload or (name == "moments of Adam" and trainer.optimizer.offload)
            if not away and (learning or name != "gradients"):
                yield Part(name, size)
        yield from self.local_engine(learning)

    def local_engine(self, learning: bool) -> Iterator[Part]:
        """Yield the memory of the embedded engine: a copy of the weights if it needs one, the packed matrices of a CPU,
        and the keys and values. In main memory it frees the latter two when no trajectory is open."""
        if self.layout.servers is not None:
            return
        config, model, size = self.config, self.model, self.layout.computed
        replicas = self._replicas()
        here = 1 if self.device.kind == "cuda" else replicas  # each replica has a GPU of its own
        if self._has_copy() and not (learning and self._frees_copy()):
            yield Part("engine's copy of the weights", here * model.parameters * size)
        if self._in_process():
            yield Part("engine's process", here * self.device.process)
        if learning and self._frees_cache():
            return
        if self._packs():
            yield Part("engine's packed matrices", here * (model.num_hidden_layers * model.layer + model.head) * size)
        rounded = doubled_capacity if self.device.kind == "cuda" else cache_capacity
        slot = rounded(self.context) * model.cached(size)
        slots = here * -(-sequences(config) // replicas)
        if self.device.kind == "cuda":
            slots = min(slots, max(1, self._cache_budget() // slot))
        yield Part("engine's keys and values", slots * slot)

    def _cache_budget(self) -> int:
        """Return the bytes that the embedded engine may use for keys and values (`cache_budget`)."""
        states, trainer = self.states(), self.config.trainer
        later = ("gradients", "moments of Adam")
        loaded = 0 if trainer.fsdp.cpu_offload else sum(size for name, size in states.items() if name not in later)
        copy = self.model.parameters * self.layout.computed if self.layout.sharded or self.adapters else 0
        free = self.room - int(self.device.slack * self.room) - self.device.process - loaded - copy
        return cache_budget(free, 0 if trainer.fsdp.cpu_offload else sum(states[name] for name in later))

    # Temporary memory during training

    def gathered(self, layers: int = GATHERED_FORWARD) -> int:
        """Return the bytes of gathered weights of a sharded model: embedding and head permanently, layers only while
        they are used.

        Args:
            layers: number of layers that are gathered at the same time, if they are freed after the forward pass.
        """
        if not self.layout.sharded:
            return 0
        is_freed = self.config.trainer.fsdp.reshard_after_forward
        whole = layers if is_freed else self.model.num_hidden_layers + 1
        reference = self.part.root + 2 * self.part.layer if needs_reference(self.config) else 0
        teacher = self.teacher_part.root + 2 * self.teacher_part.layer if self.teacher_part else 0
        return (self.part.root + whole * self.part.layer + reference + teacher) * self.layout.computed

    def layer_activations(self) -> int:
        """Return the bytes of activations that one layer saves for a micro-batch. Keys and values that sequence
        parallelism repeats, for more ranks than heads, are not counted."""
        size, lora = self.layout.computed, self.config.model
        token = layer_bytes(self.part, size, self.context, lora.attn_implementation)
        if self.adapters:
            cast = not self.layout.sharded and size != FLOAT32  # otherwise adapters compute in the model's data type
            token += adapter_bytes(self.model, lora.lora_rank, FLOAT32 if cast else size, self.targets, cast)
        return self.own_tokens * token

    @property
    def layer_input(self) -> int:
        """Bytes of the input of one layer, which is all that a recomputed layer saves."""
        return self.own_tokens * self.model.hidden_size * self.layout.computed

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of recomputed layers are in main memory until the backward pass."""
        return self.device.kind == "cuda" and self.config.trainer.activation_offload and self.recomputed_layers > 0

    def stored_activations(self) -> int:
        """Return the bytes that the forward pass saves for the backward pass. Of the inputs in main memory, those of
        two layers are on the GPU at once: one is used, and the other is copied."""
        recomputed = self.recomputed_layers
        stored = self.model.num_hidden_layers - recomputed
        inputs = min(2, recomputed) if self.offloads_inputs else recomputed
        return stored * self.layer_activations() + (inputs + 4) * self.layer_input

    def logits(self) -> int:
        """Return the bytes for the log-probs of a micro-batch in which every token was sampled
        (`mtrl/models/logprobs.py`)."""
        limit, wide = max_logits(self.config, self.device.kind), self.own_tokens * self.model.vocab_size
        if wide <= limit:
            return 5 * FLOAT32 * wide
        arrays = 3 if self.config.algorithm.entropy_coef else 2
        head = 0 if self.adapters else self.part.head * (FLOAT32 + self.layout.computed)
        return arrays * FLOAT32 * max(limit, self.model.vocab_size) + head

    def whole_gradients(self, parameters: int) -> int:
        """Return the bytes of unsharded gradients of a sharded model before their sum over ranks: once in the data type
        of the computation, and once in that of the sum."""
        if not self.layout.sharded or self.adapters:
            return 0
        reduced = 2 if self.config.trainer.fsdp.reduce_dtype == "bfloat16" else FLOAT32
        return parameters * (self.layout.computed + reduced)

    # The phases

    def moments(self) -> list[Moment]:
        """Return all phases that may need the most memory."""
        found = [*self._learning()]
        if self.layout.colocated:
            found += [self._sampling()]
        if self.layout.servers is not None:
            found += [self._serving()]
        elif self.device.kind == "cpu":
            found += [self._rollouts()]
        return found

    def _learning(self) -> Iterator[Moment]:
        where = f"{self.device.name} of {'rank 0' if self.layout.servers is None else 'a rank'}"
        held = [*self.held(learning=True)]
        if self.layout.colocated:
            held.append(Part("sleeping server", PROCESS))
        weights = Part("gathered weights", self.gathered())
        weights_of_backward = Part("gathered weights", self.gathered(GATHERED_BACKWARD))
        stored = Part("stored activations", self.stored_activations())
        work = int((1 + IN_FLIGHT) * self.layer_activations())
        head = 0 if self.adapters else self.part.head * self.layout.computed
        of_layer = self.whole_gradients(self.part.layer) + (head if self.layout.sharded else 0)
        root = self.whole_gradients(self.part.root)
        offloaded = self.config.trainer.optimizer.offload and not self.config.trainer.fsdp.cpu_offload
        share = 0 if self.config.trainer.fsdp.cpu_offload else self.trained // self.layout.shards
        step = [Part("moments of Adam", 2 * share)] if offloaded else []  # fused AdamW needs no other memory
        for when, parts in {
            "log-probs": [weights, stored, Part("logits", self.logits())],
            "backward of a layer": [
                weights_of_backward,
                stored,
                Part("activations of a layer", work),
                Part("gradients in flight", of_layer),
            ],
            "end of backward": [weights_of_backward, Part("gradients in flight", root)],
            "optimiser step": step,
        }.items():
            found = [part for part in [*held, *parts] if part.bytes]
            yield Moment(where, when, self._with_slack(found), self.room)

    def _rollouts(self) -> Moment:
        """Return the phase in which the embedded engine samples in main memory: all trajectories may have the maximum
        length, and a prefill pass computes the new tokens of many."""
        model = self.model
        tokens = min(PREFILL_TOKENS, sequences(self.config) * self.context)
        width = 3 * model.intermediate_size + 2 * model.hidden_size  # the widest point, within the MLP
        found = [*self.held(learning=False), Part("prefill", tokens * width * FLOAT32)]
        return Moment(f"{self.device.name} of rank 0", "rollouts", self._with_slack(found), self.room)

    def _with_slack(self, parts: list[Part]) -> tuple[Part, ...]:
        """Return the parts, on a CPU with the allowance for fragmentation, which is a share of them."""
        if self.device.kind != "cpu":
            return tuple(parts)
        return (*parts, Part("slack", int(self.device.slack * sum(part.bytes for part in parts))))

    def _sampling(self) -> Moment:
        """Return the phase in which the server is awake beside the rank's permanent memory. It receives new weights
        tensor by tensor, and then the ranks compute log-probs for the canary, for which they gather weights."""
        share = Part("server", int(self.config.generator.gpu_memory_utilization * self.room))
        sent = Part("tensor on its way", 2 * self.model.largest * self.layout.computed)  # the slices, and the whole
        gathered = Part("gathered weights", self.gathered())
        parts = (*self.held(False, share.bytes), share, max(sent, gathered, key=lambda part: part.bytes))
        return Moment("GPU of a rank and a server", "sampling", tuple(part for part in parts if part.bytes), self.room)

    def _serving(self) -> Moment:
        """Return the minimum of a server: its weights and one whole conversation. The remaining memory holds further
        conversations."""
        assert self.layout.servers is not None
        share = int(self.config.generator.gpu_memory_utilization * self.room)
        parts = (
            Part("weights", self.model.parameters * self.layout.computed // self.layout.servers.tensor_parallel_size),
            Part("one conversation", self.conversation()),
            Part("engine", SERVER_ALLOWANCE),
        )
        return Moment("share of a server", "sampling", parts, share)

    def conversation(self) -> int:
        """Return the bytes of keys and values of the longest conversation on one GPU of a server."""
        assert self.layout.servers is not None
        heads = self.model.num_key_value_heads  # heads are not split: with more GPUs than heads, GPUs hold copies
        return (
            self.context
            * self.model.cached(self.layout.computed)
            // min(self.layout.servers.tensor_parallel_size, heads)
        )

    def conversations(self) -> int | None:
        """Return the number of conversations of maximum length that all servers of the run hold at once; None if the
        run starts no servers."""
        servers = self.layout.servers
        if servers is None or not self.layout.servers_here:
            return None
        serving = self._serving()
        each = self.conversation()
        return servers.replicas * max(0, (serving.room - serving.needed + each) // each)

    # The main memory of the machine

    def host(self) -> dict[str, int]:
        """Return the bytes of the first machine's main memory: while models are loaded, during a step, and at most
        during the export, for which rank 0 gathers the whole weights and `mtrl.models.tiny.save` copies them."""
        layout, model = self.layout, self.model
        loading = self._in_rank_0()
        if self.config.trainer.fsdp.cpu_offload:
            loading += layout.ranks_here * self._loaded() // layout.shards
        away = sum(self.states().values()) if self.config.trainer.fsdp.cpu_offload else 0
        if self.config.trainer.optimizer.offload and not away:
            away = self.states()["moments of Adam"]
        if self.offloads_inputs:  # PyTorch rounds page-locked memory up to powers of two
            away += self.recomputed_layers * (1 << (self.layer_input - 1).bit_length())
        files = 3 * model.parameters * layout.computed if self._by_shared_memory() else 0
        step = layout.ranks_here * away + self._sent()
        whole = 2 * model.parameters * layout.stored if layout.sharded or self.adapters else 0
        return {"loading": loading, "step": step + self._changes() + files, "export": step + whole}

    def _loaded(self) -> int:
        """Return the bytes of the weights of all models."""
        copies = 1 + needs_reference(self.config) + (self._critic() > 0)
        whole = copies * self.model.parameters * self.layout.stored
        return whole + (self.teacher.parameters * self.layout.computed if self.teacher else 0)

    def _in_rank_0(self) -> int:
        """Return the bytes of weights that rank 0 holds in main memory while models are loaded.

        Several ranks read their slices of a model from its safetensors files, and rank 0 reads the embedding, the head
        and one layer of each kind to check the attention: tensor by tensor, as in the files and then in the dtype of
        the model."""
        if self.layout.ranks == 1:
            return self._loaded()
        checked = _checked(self.model, self.layout.stored)
        if self.layout.servers is None and self._has_copy():  # the embedded engine's copy is loaded whole
            checked = max(checked, self.model.parameters * self.layout.stored)
        return max(checked, _checked(self.teacher, self.layout.computed) if self.teacher else 0)

    def _sent(self) -> int:
        """Return the bytes of main memory for weights on their way to the engine. They are gathered bucket by bucket;
        servers' weights are kept for servers that are restarted, the old ones until the new ones have arrived."""
        whole = self.model.parameters * self.layout.computed
        servers = self.layout.servers
        if servers is None:
            block = whole if self._in_process() else 0
            bucket = min(WEIGHT_BUCKET if self.layout.ranks > 1 else COPY_BUCKET, whole)
            return self.adapters * FLOAT32 if self.adapters else block + bucket * self._has_copy()
        bucket = min(WEIGHT_BUCKET, whole)
        if not self.adapters:
            return 2 * whole + bucket
        if servers.lora == "adapter":
            return 2 * self.adapters * FLOAT32
        return 2 * self.adapters * FLOAT32 + (whole if servers.weight_sync == "disk" else bucket)

    def _changes(self) -> int:
        """Return the bytes of main memory for changes of weights (`sync_delta`): a message in the trainer, and the
        weights that each worker of the servers of this machine keeps."""
        servers, whole = self.layout.servers, self.model.parameters * self.layout.computed
        if servers is None or not servers.sync_delta or servers.weight_sync != "distributed":
            return 0
        if self.adapters and servers.lora == "adapter":
            return 0
        workers = servers.replicas * servers.tensor_parallel_size if self.layout.servers_here else 0
        return min(WEIGHT_BUCKET, whole) + workers * whole

    def _in_process(self) -> bool:
        """Return whether the embedded engine runs in separate processes."""
        overlap, process = self.config.async_config.max_steps_off_policy > 0, self.config.generator.local.process
        return overlap or self._replicas() > 1 if process is None else process

    def _replicas(self) -> int:
        """Return the number of copies of the embedded engine, see `mtrl.config.derived.local_replicas`."""
        local, layout = self.config.generator.local, self.layout
        on_each_gpu = self.device.kind == "cuda" and layout.ranks > 1 and local.process is not False
        return local.replicas or (layout.ranks_here if on_each_gpu else 1)

    def _has_copy(self) -> bool:
        """Return whether the embedded engine has its own copy of the weights."""
        return self.layout.sharded or self._in_process() or bool(self.adapters)

    def _frees_copy(self) -> bool:
        """Return whether the embedded engine frees its copy of the weights during updates."""
        elsewhere = self._in_process() or self.config.rollouts.workers > 0
        return self.device.kind == "cpu" and not (elsewhere or self.adapters or overlaps(self.config))

    def _frees_cache(self) -> bool:
        """Return whether no trajectory is open during updates, so that an engine in main memory has no cache then. A
        GPU's was not measured."""
        return self.device.kind == "cpu" and not overlaps(self.config)

    def _packs(self) -> bool:
        """Return whether the embedded engine packs its matrices for the processor (`mtrl/engines/local/fused.py`)."""
        return self.device.kind == "cpu" and self.model.model_type in DENSE and not self.adapters

    def _by_shared_memory(self) -> bool:
        servers = self.layout.servers
        return servers is not None and servers.weight_sync == "disk" and servers.sync_folder is None


def _checked(model: Architecture, size: int) -> int:
    """Return the bytes of the weights that rank 0 reads to check the attention of a model, with `size` bytes for each,
    and of the largest tensor as in files of half precision."""
    kinds = 2 if model.model_type == "gpt_oss" else 1  # with and without a sliding window
    return (model.root + kinds * model.layer) * size + model.largest * BYTES["bfloat16"]
