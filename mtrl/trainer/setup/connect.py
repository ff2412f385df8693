"""The connection of a model with the engine that samples for it and the loop that runs its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mtrl.config.derived import runs_agent
from mtrl.config.mixture import in_source, source_configs, source_of
from mtrl.config.schema import Config, SamplingConfig
from mtrl.engines.base import Engine, SamplingParams
from mtrl.engines.local.frozen import FrozenEngine
from mtrl.environments.factory import Task
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.models.plain_tokenizer import plain
from mtrl.models.renderer import make_renderer
from mtrl.models.vision import processor_of
from mtrl.rollout.conversation import NO_IMAGES, Codec, Conversation, SingleMessageConversation
from mtrl.rollout.episode import BaseLoop, EpisodeLimits, EpisodeLoop
from mtrl.rollout.folding import fold_of
from mtrl.rollout.image_conversation import ImageCodec, ImageConversation
from mtrl.rollout.self_play import SelfPlayLoop
from mtrl.types import Row, images_in


@dataclass
class ConnectedModel:
    """A model with the engine and the loop that run its episodes."""

    codec: Codec
    engine: Engine
    loop: BaseLoop[Any]
    sampling: SamplingParams
    eval_sampling: SamplingParams


def connect(
    config: Config,
    task: Task,
    model_config: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    make_engine: Callable[[int], Engine],
    make_frozen: Callable[[int], FrozenEngine] | None = None,
) -> ConnectedModel:
    """Return the engine and the loop that run a model's episodes on these rows of a task.

    Args:
        model_config: Hugging Face configuration of the model.
        make_engine: function from the maximum length of a conversation, in tokens, to the engine.
        make_frozen: the same for the engine of the roles that are frozen in self-play; None if there are none.

    Raises:
        UserError: a prompt does not fit, or the engine cannot run the model.
    """
    tokenizer = plain(tokenizer)
    codec = make_codec(tokenizer, config.model.renderer)
    if task.family.shows_images and not isinstance(codec, ImageCodec):
        raise UserError(f"environment.name={task.family.name}: {NO_IMAGES}")
    limit = context_limit(config, model_config)
    sources = limits_of_sources(config, limit)
    for name, own in sources.items():
        with in_source(name):
            mine = [row for row in rows if source_of(str(row["id"])) == name]
            check_prompts(codec, mine, own.max_context_length)
    if not sources:
        check_prompts(codec, rows, limit)
    make_loop = partial(agent_loop if runs_agent(config) else environment_loop, config, task, codec)
    loop = make_loop(limits(config, limit), lambda: make_engine(limit))
    loop.limits_of_sources = sources
    if isinstance(loop, SelfPlayLoop) and make_frozen is not None:
        loop.frozen = make_frozen(limit)
    sampling = sampling_params(config.generator.sampling_params, codec.stop_token_ids)
    return ConnectedModel(codec, loop.engine, loop, sampling, eval_sampling_params(config, codec.stop_token_ids))


def make_codec(tokenizer: Any, renderer: str) -> Codec:
    """Return the codec of a tokenizer, which reads images if an image processor accompanies it."""
    kind = Codec if processor_of(tokenizer) is None else ImageCodec
    return kind(tokenizer, make_renderer(tokenizer, renderer))


def environment_loop(
    config: Config, task: Task, codec: Codec, limits: EpisodeLimits, make_engine: Callable[[], Engine]
) -> EpisodeLoop:
    """Return the loop of episodes with the task's environment.

    Raises:
        UserError: the context cannot be folded so.
    """
    layout: type[Conversation] = ImageConversation
    if not isinstance(codec, ImageCodec):
        layout = Conversation if config.generator.use_conversation_multi_turn else SingleMessageConversation
    pool = EnvironmentPool(config.environment.max_workers)
    fold = fold_of(config.generator, limits.max_context_length)
    parts = make_engine(), task.make_environment, partial(layout, codec), pool, limits
    if config.environment.opponent == "scripted":
        return EpisodeLoop(*parts, fold=fold)
    return SelfPlayLoop(*parts, fold=fold, roles=task.family.environment.roles)  # type: ignore[attr-defined]


def agent_loop(
    config: Config, task: Task, codec: Codec, limits: EpisodeLimits, make_engine: Callable[[], Engine]
) -> BaseLoop[Any]:
    """Return the loop of episodes that the program of `generator.agent` runs.

    Raises:
        UserError: the program does not exist.
    """
    from mtrl.agents.loop import AgentLoop, make_runner
    from mtrl.gateway.server import Gateway
    from mtrl.gateway.session import SessionLimits

    agent = config.generator.agent
    runner = make_runner(agent)  # before the engine, which takes a minute to start
    calls = SessionLimits(
        agent.max_calls or limits.max_turns,
        agent.max_calls_at_once,
        limits.max_context_length,
        agent.max_requests_per_second,
        tuple(agent.leave_out),
    )
    gateway = Gateway(make_engine(), codec, calls, agent.host, agent.port)
    return AgentLoop(gateway, runner, limits, agent.max_concurrent)


def limits(config: Config, context: int) -> EpisodeLimits:
    """Return the limits of an episode, with a conversation of at most `context` tokens."""
    return EpisodeLimits(
        max_turns=config.generator.max_turns,
        max_context_length=context,
        step_timeout=config.environment.step_timeout,
        episode_timeout=config.environment.episode_timeout,
        retries=config.environment.retries,
    )


def limits_of_sources(config: Config, context: int) -> dict[str, EpisodeLimits]:
    """Return the limits of an episode of each source of a mixture, with conversations of at most `context` tokens;
    empty without a mixture."""
    found = {}
    for name, own in source_configs(config).items():
        shortest = min(context, own.generator.max_context_length or context)
        length = own.generator.sampling_params.max_generate_length
        is_own = length != config.generator.sampling_params.max_generate_length
        found[name] = replace(limits(own, shortest), max_generate_length=length if is_own else None)
    return found


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
    """Return the sampling parameters of evaluations; if none are configured, those of training."""
    generator = config.generator
    return sampling_params(generator.eval_sampling_params or generator.sampling_params, stop_token_ids)


def context_limit(config: Config, model_config: Any) -> int:
    """Return the maximum length of a whole conversation, in tokens: the model's limit, or a smaller configured one.

    Raises:
        UserError: the configured limit is larger than the model's.
    """
    holds, reason = positions(model_config)
    wanted = config.generator.max_context_length
    if wanted is not None and wanted > holds:
        raise UserError(f"generator.max_context_length={wanted} is more than the {holds} tokens {reason}; lower it")
    return wanted or holds


def positions(model_config: Any) -> tuple[int, str]:
    """Return the maximum number of tokens of a conversation with a model, and what limits it."""
    text = model_config.get_text_config()
    holds = getattr(text, "max_position_embeddings", None) or 4096
    if (steady := steady_positions(text)) is not None and steady < holds:
        return steady, "after which the model's longrope changes the frequencies of all tokens of a batch"
    return holds, "that the model holds"


def check_context(model_config: Any, context: int, where: str) -> None:
    """Check that a second model, such as a teacher, holds the conversations of the policy.

    Args:
        context: maximum length of a conversation of the policy, in tokens.
        where: key and value that name the second model.

    Raises:
        UserError: the model holds fewer tokens.
    """
    holds, reason = positions(model_config)
    if holds < context:
        raise UserError(
            f"{where} takes at most the {holds} tokens {reason}, and a conversation of the policy has up to {context}; "
            f"set generator.max_context_length={holds}"
        )


def steady_positions(text_config: Any) -> int | None:
    """Return the number of positions up to which a model's rotary frequencies do not depend on its batch; None: any.

    With `longrope` (Phi-3.5, Phi-4-mini) one longer sequence changes the frequencies of the whole batch, and of tokens
    after cached ones. The log-probs of engine and trainer would then differ.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    entries = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]  # by type of layer
    default = getattr(text_config, "original_max_position_embeddings", None)
    limits = [e.get("original_max_position_embeddings", default) for e in entries if e.get("rope_type") == "longrope"]
    return min((limit for limit in limits if limit), default=None)


def check_prompts(codec: Codec, rows: Sequence[Row], limit: int) -> None:
    """Check the lengths of all prompts before anything runs.

    Raises:
        UserError: a prompt leaves no room for a response, or has an image that cannot be read; the message names the
            first such row.
    """
    for row in rows:
        try:
            tokens = prompt_tokens(codec, row, limit)
        except ValueError as error:
            raise UserError(
                f"row {row['id']} cannot be shown to the model: {error}; give a PNG or JPEG image"
            ) from error
        if tokens >= limit:
            raise UserError(
                f"row {row['id']} has a prompt of {tokens} tokens, which does not fit "
                f"generator.max_context_length={limit}; raise it or leave the row out"
            )


def prompt_tokens(codec: Codec, row: Row, limit: int) -> int:
    """Return the number of tokens of a row's prompt, or an upper bound from its bytes if that already shows that the
    prompt fits."""
    shows = bool(images_in(row["prompt"]))
    characters = sum(len(str(message.get("content") or "").encode()) for message in row["prompt"])
    if not shows and characters + 64 * (len(row["prompt"]) + 1) < limit:
        return characters  # a text has at most as many tokens as bytes; 64 covers the template's tokens per message
    if shows:
        return len(codec.render(row["prompt"]))
    return len(codec.renderer.render_ids(row["prompt"], add_generation_prompt=True))
