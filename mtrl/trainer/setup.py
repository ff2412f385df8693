"""From a configuration to the parts of a run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtrl.config.schema import Config, SamplingConfig
from mtrl.environments.factory import Task, load_task
from mtrl.environments.family import Family, Splits
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.generator.conversation import Codec, Conversation, SingleMessageConversation
from mtrl.generator.engines.base import Engine, SamplingParams
from mtrl.generator.engines.local.engine import LocalEngine
from mtrl.generator.episode import EpisodeLoop, Limits
from mtrl.models.checkpointing import checkpoint_gradients
from mtrl.models.renderer import make_renderer
from mtrl.models.tiny import TinyRecipe, WarmStart, tiny_policy
from mtrl.trainer.batching import check_packing
from mtrl.trainer.policy import Policy
from mtrl.types import Row

SMALL_MODEL = 5_000_000
"""Up to this many parameters one CPU thread beats several: the barriers between them cost more than they save."""


@dataclass
class Player:
    """A model that plays episodes."""

    codec: Codec
    engine: Engine
    loop: EpisodeLoop
    pool: EnvironmentPool
    sampling: SamplingParams
    eval_sampling: SamplingParams


@dataclass
class Parts(Player):
    """What a run is made of, once it is set up."""

    family: Family
    splits: Splits
    policy: Policy
    reference: Policy | None


def set_up(
    config: Config,
    on_warm_start: Callable[[int, float], None] = lambda step, loss: None,
    task: Task | None = None,
) -> Parts:
    """Load the model, and the task unless it is given, and connect engine and environments.

    Raises:
        UserError: what the configuration names cannot be had, or does not fit together.
    """
    task = task or load_task(config)
    if not task.splits.train and (config.trainer.max_steps or config.model.name == "tiny"):
        raise UserError(
            "there are no training rows: check data.path and data.train_split, or evaluate only, with "
            "trainer.max_steps=0 and model=hf"
        )
    family, splits = task.family, task.splits
    # The warm start decides nothing that a later number of threads could change: small models use one from the start.
    torch.set_num_threads(config.trainer.threads or (1 if config.model.name == "tiny" else os.cpu_count() or 1))
    model, tokenizer = load_model(config, start_of(config, task, on_warm_start))
    if config.trainer.gradient_checkpointing:
        checkpoint_gradients(model)
    temperature = config.generator.sampling_params.temperature
    policy = Policy(model, tokenizer, temperature, entropy_gradient=config.algorithm.entropy_coef != 0)
    if config.trainer.packing:
        check_packing(model)
    if config.trainer.threads is None and policy.parameters <= SMALL_MODEL:
        torch.set_num_threads(1)
    player = connect(config, task, model, tokenizer, [*splits.train, *splits.validation, *splits.test])
    return Parts(**vars(player), family=family, splits=splits, policy=policy, reference=load_reference(config, policy))


def connect(config: Config, task: Task, model: Any, tokenizer: Any, rows: Sequence[Row]) -> Player:
    """What lets a model play these rows of a task.

    Raises:
        UserError: a prompt does not fit, or the engine cannot run the model.
    """
    codec = Codec(tokenizer, make_renderer(tokenizer, config.model.renderer))
    limit = context_limit(config, model)
    check_prompts(codec, rows, limit)
    engine = make_engine(config, model, tokenizer, limit)
    layout = Conversation if config.generator.use_conversation_multi_turn else SingleMessageConversation
    pool = EnvironmentPool(config.environment.max_workers)
    loop = EpisodeLoop(engine, task.make_environment, partial(layout, codec), pool, limits(config, limit))
    sampling = sampling_params(config.generator.sampling_params, codec.stop_token_ids)
    return Player(codec, engine, loop, pool, sampling, eval_sampling_params(config, codec.stop_token_ids))


def limits(config: Config, context: int) -> Limits:
    """What an episode may take, with a conversation of at most `context` tokens."""
    return Limits(
        max_turns=config.generator.max_turns,
        max_context_length=context,
        step_timeout=config.environment.step_timeout,
        episode_timeout=config.environment.episode_timeout,
        retries=config.environment.retries,
    )


def start_of(config: Config, task: Task, on_warm_start: Callable[[int, float], None] = lambda step, loss: None) -> str:
    """The folder or Hub name of the policy before training; the tiny one is made if it is not there yet."""
    if config.model.name != "tiny":
        return config.model.path or ""
    return str(tiny_folder(config, task, on_warm_start))


def load_model(config: Config, path: str, key: str = "model.path") -> tuple[Any, Any]:
    """Module and tokenizer of a folder or Hub name; without dropout, for sampled and trained log-probs must agree.

    Raises:
        UserError: it cannot be had; `key` is the setting that named it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = pick_device(config.model.device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}={path} cannot be loaded ({first}); give a folder or a Hub name of a causal LM"
        ) from error
    return model.eval().to(device), tokenizer


def tiny_folder(config: Config, task: Task, on_warm_start: Callable[[int, float], None]) -> Path:
    """The warm-started tiny policy of this family, seed and recipe."""
    family = task.family
    if family.demonstrate is None:
        raise UserError(f"model=tiny needs a demonstrator, which {family.name} has not; use model=hf model.path=FOLDER")
    settings = {"environment": dict(config.environment.config), "max_turns": config.generator.max_turns}
    start = WarmStart(
        family, task.make_environment, task.splits.train, config.seed, tiny_recipe(config), settings,
        config.environment.step_timeout,
    )  # fmt: skip
    return tiny_policy(start, on_warm_start)


def tiny_recipe(config: Config) -> TinyRecipe:
    """
    Raises:
        UserError: `model.tiny` has a key that there is not.
    """
    try:
        return TinyRecipe(**config.model.tiny)
    except TypeError as error:
        known = ", ".join(TinyRecipe.__dataclass_fields__)
        raise UserError(f"model.tiny={dict(config.model.tiny)} has an unknown key; it takes {known}") from error


def load_reference(config: Config, policy: Policy) -> Policy | None:
    """A frozen reference for the KL, or None where it counts neither in the loss nor in the reward."""
    if not config.algorithm.kl_loss_coef and not config.algorithm.kl_reward_coef:
        return None
    model = copy.deepcopy(policy.model)
    if config.algorithm.kl_reference:
        model = type(model).from_pretrained(config.algorithm.kl_reference, dtype=model.dtype).to(model.device)
    return Policy(model.eval().requires_grad_(False), policy.tokenizer, policy.temperature)


def make_engine(config: Config, model: Any, tokenizer: Any, context: int) -> Engine:
    """The engine that `generator.backend` names."""
    generator = config.generator
    if generator.backend == "local":
        local = generator.local
        return LocalEngine(model, tokenizer, generator.max_num_seqs, context, local.fused, local.deterministic)
    raise UserError(f"generator.backend={generator.backend} cannot train; use generator.backend=local")


def sampling_params(config: SamplingConfig, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(
        max_generate_length=config.max_generate_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=tuple(config.stop),
        stop_token_ids=stop_token_ids,
    )


def eval_sampling_params(config: Config, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    """Those of evaluations; where they have none of their own, those of training."""
    generator = config.generator
    return sampling_params(generator.eval_sampling_params or generator.sampling_params, stop_token_ids)


def context_limit(config: Config, model: Any) -> int:
    """Tokens of a whole conversation: what the model holds, or less where the configuration says so."""
    holds = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    wanted = config.generator.max_context_length
    if wanted is not None and wanted > holds:
        raise UserError(
            f"generator.max_context_length={wanted} is more than the {holds} tokens that the model holds; lower it"
        )
    return wanted or holds


def check_prompts(codec: Codec, rows: Sequence[Row], limit: int) -> None:
    """Find prompts that leave no room before anything runs.

    Raises:
        UserError: the first row whose prompt does not fit.
    """
    for row in rows:
        tokens = prompt_tokens(codec, row, limit)
        if tokens >= limit:
            raise UserError(
                f"row {row['id']} has a prompt of {tokens} tokens, which does not fit "
                f"generator.max_context_length={limit}; raise it or leave the row out"
            )


def prompt_tokens(codec: Codec, row: Row, limit: int) -> int:
    """Tokens of a row's prompt; a bound from its characters where that already shows that it fits."""
    characters = sum(len(str(message.get("content") or "").encode()) for message in row["prompt"])
    if characters + 64 * (len(row["prompt"]) + 1) < limit:
        return characters  # no tokenizer makes more tokens than bytes; 64 covers the template's own
    return len(codec.renderer.render_ids(row["prompt"], add_generation_prompt=True))


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"model.device={name} needs a GPU, and this machine shows none; use model.device=cpu")
    return torch.device(name)
