"""mtrl doctor --propose: a layout of ranks, servers and micro-batches for a model on given GPUs, by the memory plan.

The layouts of all combinations are planned, and the preferred one of those that fit is proposed. Speed is not
estimated: the preferences are those of `LayoutOption.preference`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from omegaconf import OmegaConf

from mtrl.command.compose import merge
from mtrl.config import keys
from mtrl.config.derived import overlaps, serves
from mtrl.config.keys import typed
from mtrl.config.messages import check_values
from mtrl.config.overrides import normalise
from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture, find
from mtrl.doctor.changes import Change, apply
from mtrl.doctor.layout import GIB, MemoryLayout, can_share_sequences, context_of, needs_critic, teacher_of
from mtrl.doctor.memory import Memory, Moment
from mtrl.doctor.plan import Plan, plan_of, refuse_tiny
from mtrl.doctor.recomputation import fewest_recomputed
from mtrl.errors import UserError

PARTS = (1, 2, 4, 8)
"""Numbers of ranks that may share a sequence, and of GPUs that may share a server."""
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of a GPU's memory that a server may take beside a rank."""
OWN_SHARE = 0.9
"""Share of a GPU's memory that a server without a rank takes."""
BATCHES = (4, 2, 1)
"""Tokens of a micro-batch, in conversations of the maximum length."""
OFFLOADS = ("trainer.optimizer.offload", "trainer.fsdp.cpu_offload")
AWAY = {
    "": {"trainer.optimizer.offload": False, "trainer.fsdp.cpu_offload": False},
    "moments of Adam": {"trainer.optimizer.offload": True, "trainer.fsdp.cpu_offload": False},
    "all states": {"trainer.optimizer.offload": False, "trainer.fsdp.cpu_offload": True},
}
"""The states that are kept in main memory, and the settings for it."""
GIVEN = "the given states"
"""Name of the choice of `AWAY` if the user has given it."""
ENOUGH = 1 / 8
"""Share of a step's conversations that the servers should hold at once."""
PLENTY = 1 / 2
"""Share of a step's conversations beyond which more room in the servers is not preferred."""
ALWAYS: Change = {
    "trainer.gradient_checkpointing": True,
    "trainer.recomputed_layers": None,
    "trainer.fsdp.param_dtype": "bfloat16",
}
"""Settings of every layout; the chosen one then recomputes as few layers as fit (`RECOMPUTATION`)."""
RECOMPUTATION = ("trainer.gradient_checkpointing", "trainer.recomputed_layers")
"""Keys of the number of layers that are recomputed."""
DIVISION = ("trainer.sequence_parallel", "trainer.tensor_parallel", "trainer.expert_parallel")
"""Keys of the numbers of ranks that compute together."""
OF_MACHINE = ("placement.", "generator.", "trainer.gradient_checkpointing")
"""Sections and keys of the settings whose defaults depend on the machine of the command."""
ENGINE = "generator=vllm"
"""Engine of a layout if the user chooses none."""
MOST_REASONS = 4


@dataclass(frozen=True)
class LayoutOption:
    """A layout that the run would take, whether it fits or not."""

    change: Change
    away: str
    tightest: Moment
    held: int | None
    """Number of conversations of maximum length that the servers hold at once; None without servers of the run."""
    wanted: int
    """Number of conversations of a step."""
    gpus: int
    """Number of GPUs of each machine."""
    machines: int
    """Number of machines."""

    @property
    def fits(self) -> bool:
        """Whether the layout fits and leaves `COMFORT` of the memory."""
        return self.tightest.is_comfortable

    @property
    def colocated(self) -> bool:
        return self.change["placement.ranks"] == self.gpus

    @property
    def kind(self) -> tuple[Any, ...]:
        """The choices that a reason names."""
        return self.away, *(self.change[key] for key in DIVISION), self.colocated

    @property
    def idle(self) -> int:
        """Number of GPUs that neither rank nor server uses: the run starts servers on the first machine only."""
        return (self.machines - 1) * (self.gpus - self.change["placement.ranks"])

    @property
    def preference(self) -> tuple[float, ...]:
        """Sort key; the least is preferred. In this order: little in main memory, servers that hold an eighth of a
        step's conversations, few ranks that compute together (sequence parallelism before the others), servers that
        hold half of the conversations, few idle GPUs, all GPUs for both training and sampling (or half of the GPUs
        each), small servers, copies of the model on each machine, large micro-batches, and a large share for
        servers."""
        change = self.change
        share = 1.0 if self.held is None else min(1.0, self.held / self.wanted)
        apart = -1.0 if self.colocated else abs(change["placement.ranks"] - self.gpus / 2)
        size = next((value for key, value in change.items() if key.endswith(".tensor_parallel_size")), 1)
        return (
            [*AWAY, GIVEN].index(self.away),
            share < ENOUGH,
            math.prod(change[key] for key in DIVISION),
            -change["trainer.sequence_parallel"],
            -round(min(share, PLENTY), 1),
            self.idle,
            apart,
            size,
            -change["trainer.fsdp.replicas"],
            -change["trainer.max_tokens_per_microbatch"],
            -change.get("generator.gpu_memory_utilization", 0.0),
        )

    def name(self) -> str:
        """Return the choices that a reason names."""
        divided = [f"{key}={self.change[key]}" for key in DIVISION if self.change[key] > 1]
        together = ", ".join(divided) or "each rank computes alone"
        where = "all GPUs train" if self.colocated else f"{self.change['placement.ranks']} of {self.gpus} GPUs train"
        kept = f"{self.away} in main memory" if self.away else "all states on the GPUs"
        return f"{kept}, {together}, {where}"


@dataclass(frozen=True)
class LayoutProposal:
    """The proposed layout, or if none fits the one that lacks the least memory."""

    option: LayoutOption
    words: tuple[str, ...]
    """The settings of the layout that the configuration does not have yet."""
    plan: Plan
    reasons: tuple[str, ...]
    """Sentences: what rules out the layouts that would be preferred."""


def propose(overrides: Sequence[str], config_dir: str | None = None) -> LayoutProposal:
    """Propose a layout for the run that `mtrl train OVERRIDES` would start. Settings in `overrides` are not changed.

    Raises:
        UserError: the configuration is invalid, `placement.gpus` is not set, the model's sizes are unknown, or no
            layout agrees with the settings that the user has given.
    """
    words = normalise(overrides, config_dir)
    given, cfg = _given(words), merge(words, config_dir)
    # An experiment may leave the choice of the engine to the machine of this command.
    is_chosen = "experiment" in given and not OmegaConf.is_interpolation(cfg.generator, "backend")
    engine = [] if is_chosen or {"generator", "generator.backend"} & given else [ENGINE]
    cfg = merge([*words, *engine], config_dir) if engine else cfg
    refuse_tiny(cfg)
    if cfg.model.device not in ("auto", "cuda"):
        raise UserError(
            f"model.device={cfg.model.device} is not for a layout on several GPUs; set model.device=auto, or plan this "
            "run with --plan"
        )
    if cfg.placement.gpus is None:
        raise UserError(
            "placement.gpus is not set, and a layout is proposed for a number of GPUs; write that of each machine, "
            "such as placement.gpus=8"
        )
    OmegaConf.resolve(cfg)
    check_values(keys.plain(cfg))
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    model = find(str(config.model.path))
    options = sorted(_options(config, model, given), key=lambda option: option.preference)
    if not options:
        raise _no_option(config, given)
    chosen = next((option for option in options if option.fits), min(options, key=lambda option: option.tightest.over))
    if not given & {*RECOMPUTATION}:
        chosen = _with_fewest_recomputed(chosen, config, model)
    # Defaults that depend on the machine of this command (`config.derived.of_machine`) are always replaced.
    differing = {k: v for k, v in chosen.change.items() if k.startswith(OF_MACHINE) or v != _value(config, k)}
    added = [*engine, *(f"{key}={typed(value)}" for key, value in differing.items() if key not in given)]
    plan = plan_of(merge([*words, *normalise(added, config_dir)], config_dir))
    return LayoutProposal(chosen, tuple(added), plan, tuple(_reasons(options, chosen)))


def _options(config: Config, model: Architecture, given: set[str]) -> Iterator[LayoutOption]:
    """Yield every layout that agrees with the settings `given` by the user."""
    context, changed = context_of(config, model), copy.deepcopy(config)
    wanted, machines = config.trainer.prompts_per_step * config.algorithm.group_size, config.placement.machines
    assert config.placement.gpus is not None
    axes: dict[str, Sequence[Any]] = {
        "trainer.fsdp.replicas": sorted({1, machines}),
        "trainer.max_tokens_per_microbatch": [batch * context for batch in BATCHES],
        **{key: [value] for key, value in ALWAYS.items()},
    }
    axes |= {key: [_value(config, key)] for key in axes if key in given}
    kept = {GIVEN: {key: _value(config, key) for key in OFFLOADS}} if given & {*OFFLOADS} else AWAY
    choices = [list(_placements(config, model, given)), list(_divisions(config, model, given)), kept, *axes.values()]
    for placed, division, away, *values in product(*choices):
        change = {**placed, **division, **dict(zip(axes, values, strict=True)), **kept[away]}
        if any(key in given and value != _value(config, key) for key, value in change.items()):
            continue
        here, together = change["placement.ranks"], max(division.values())
        if here % together or here * machines // together % change["trainer.fsdp.replicas"]:
            continue
        apply(changed, change)
        memory = Memory(changed, model)
        tightest = max(memory.moments(), key=lambda moment: moment.over)
        yield LayoutOption(change, away, tightest, memory.conversations(), wanted, config.placement.gpus, machines)


def _with_fewest_recomputed(option: LayoutOption, config: Config, model: Architecture) -> LayoutOption:
    """Return the layout with as few recomputed layers as fit; the same one if it needs to recompute all of them, or
    does not fit."""
    changed = copy.deepcopy(config)
    apply(changed, option.change)
    fewer = fewest_recomputed(Memory(changed, model)) if option.fits else {}
    if not fewer:
        return option
    apply(changed, fewer)
    tightest = max(Memory(changed, model).moments(), key=lambda moment: moment.over)
    return replace(option, change={**option.change, **fewer}, tightest=tightest)


def _given(words: Sequence[str]) -> set[str]:
    """Return the keys that normalised overrides set, also those inside of mappings such as `{lr: 1e-6}`."""
    found = set()
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        found |= {key, *(f"{key}.{name}" for name in re.findall(r"(\w+)\s*:", value) if value.startswith("{"))}
    return found


def _no_option(config: Config, given: set[str]) -> UserError:
    gpus, machines = config.placement.gpus, config.placement.machines
    if gpus == 1 and overlaps(config):
        return UserError(
            f"async_config.max_steps_off_policy={config.async_config.max_steps_off_policy} needs a GPU for the servers "
            "beside that of a rank, and placement.gpus=1; set placement.gpus=2 or async_config.max_steps_off_policy=0"
        )
    varied = ("placement.", "generator.", "trainer.")
    named = ", ".join(sorted(key for key in given if key.startswith(varied) and not key.startswith("placement.g")))
    return UserError(
        f"no layout of placement.gpus={gpus} and placement.machines={machines} agrees with the settings that are given"
        + (f"; leave out one of {named}" if named else "; set placement.gpus to a power of 2")
    )


def _divisions(config: Config, model: Architecture, given: set[str]) -> Iterator[Change]:
    """Yield the numbers of ranks that share sequences, matrices or experts, of which one is used at a time, or those
    that are given."""
    if given & {*DIVISION}:
        yield {key: _value(config, key) for key in DIVISION}
        return
    heads, experts = model.num_attention_heads, model.num_local_experts
    is_shared = can_share_sequences(config)
    sizes = {"trainer.sequence_parallel": [n for n in PARTS if n == 1 or (is_shared and not heads % n)]}
    has_others = config.model.lora_rank or needs_critic(config) or teacher_of(config)
    if not (has_others or config.trainer.compile):
        if experts:
            sizes["trainer.expert_parallel"] = [parts for parts in PARTS[1:] if not experts % parts]
        else:
            kv_heads = model.num_key_value_heads
            sizes["trainer.tensor_parallel"] = [parts for parts in PARTS[1:] if not kv_heads % parts]
    for key, numbers in sizes.items():
        for number in numbers:
            yield {**dict.fromkeys(DIVISION, 1), key: number}


def _placements(config: Config, model: Architecture, given: set[str]) -> Iterator[Change]:
    """Yield the divisions of a machine's GPUs among ranks and servers, and the share of a GPU that a server takes."""
    gpus = config.placement.gpus
    assert gpus is not None
    if not serves(config) or not MemoryLayout.of(config).servers_here:
        yield {"placement.ranks": gpus}
        return
    engine = f"generator.{config.generator.backend}"
    settings = getattr(config.generator, config.generator.backend)
    sync, devices = settings.weight_sync, settings.devices  # a server that receives tensors shares the GPU of rank 0
    share_key = "generator.gpu_memory_utilization"
    fixed = (_value(config, share_key),) if share_key in given else ()
    sizes = [size for size in PARTS if size <= gpus and not model.num_attention_heads % size]
    for size in sizes:
        servers = {f"{engine}.replicas": gpus // size, f"{engine}.tensor_parallel_size": size}
        can_colocate = not gpus % size and not overlaps(config) and sync != "distributed"
        for share in (fixed or SHARES) if can_colocate and (sync != "tensor" or gpus == size) else ():
            together = {f"{engine}.colocate": True, share_key: share}
            if devices is None or len(devices) == gpus:
                yield {"placement.ranks": gpus, **servers, **together}
        for ranks in (ranks for ranks in range(1, gpus) if not (gpus - ranks) % size and sync != "tensor"):
            servers = {f"{engine}.replicas": (gpus - ranks) // size, f"{engine}.tensor_parallel_size": size}
            apart = {f"{engine}.colocate": False, share_key: fixed[0] if fixed else OWN_SHARE}
            if devices is None or len(devices) == gpus - ranks:
                yield {"placement.ranks": ranks, **servers, **apart}


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _reasons(options: Sequence[LayoutOption], chosen: LayoutOption) -> Iterator[str]:
    """Yield what rules out each kind of layout that would be preferred: its member that lacks the least memory."""
    before = [option for option in options if option.preference < chosen.preference and option.kind != chosen.kind]
    best: dict[tuple[Any, ...], LayoutOption] = {}
    for option in before:
        if option.kind not in best or option.tightest.over < best[option.kind].tightest.over:
            best[option.kind] = option
    if len(best) > MOST_REASONS:
        yield f"({len(best) - MOST_REASONS} others)"
    for option in list(best.values())[-MOST_REASONS:]:
        moment = option.tightest
        short = (
            f"is {moment.over / GIB:,.1f} GiB short"
            if moment.over > 0
            else f"has only {-moment.over / GIB:,.1f} GiB left"
        )
        yield f"{option.name()}: the {moment.where} {short} ({moment.when})"
