"""From a configuration to the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtrl.config.agent_checks import plays_agent
from mtrl.config.schema import Config, SamplingConfig
from mtrl.distributed.crew import Crew
from mtrl.distributed.world import World
from mtrl.environments.factory import Task, load_task
from mtrl.environments.family import Family, Splits
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.generator.conversation import Codec, Conversation, SingleMessageConversation
from mtrl.generator.engines.base import Engine, SamplingParams
from mtrl.generator.episode import EpisodeLoop, Episodes, Limits
from mtrl.models.plain_tokenizer import plain
from mtrl.models.renderer import make_renderer
from mtrl.trainer.engine import has_copy, shared_engine, training_engine
from mtrl.trainer.learner import Learner
from mtrl.trainer.learners import Learners
from mtrl.trainer.models import make_learner, set_threads
from mtrl.trainer.policy import Policy
from mtrl.trainer.warm_start import Foothold, OnStep, success_of, warm_start
from mtrl.types import Row


@dataclass
class Player:
    """A model that plays episodes."""

    codec: Codec
    engine: Engine
    loop: Episodes[Any]
    sampling: SamplingParams
    eval_sampling: SamplingParams


@dataclass
class Parts(Player):
    """What a run is made of, once it is set up."""

    family: Family
    splits: Splits
    learner: Learner
    """What this process holds of the models that are trained."""
    crew: Crew
    """The learners of all ranks."""
    sends_weights: bool
    """Whether the engine has weights of its own, which new ones are sent to."""
    foothold: Foothold | None = None
    """What the warm start reached, where the policy took one."""

    @property
    def policy(self) -> Policy:
        return self.learner.policy.policy

    @property
    def learners(self) -> Learners:
        return Learners(self.crew, self.learner.flops)


def set_up(
    config: Config,
    on_warm_start: OnStep = lambda step, success: None,
    task: Task | None = None,
    world: World | None = None,
) -> Parts:
    """Load the model, and the task unless it is given, and connect engine and environments; on the leader.

    Raises:
        UserError: what the configuration names cannot be had, or does not fit together.
    """
    world = world or World()
    task = task or load_task(config)
    if not task.splits.train and (config.trainer.max_steps or config.model.name == "tiny"):
        raise UserError(
            "there are no training rows: check data.path and data.train_split, or evaluate only, with "
            "trainer.max_steps=0 and model=hf"
        )
    set_threads(config, world)
    path, foothold = prepared_start(config, task, on_warm_start)
    world.broadcast((config, path))
    learner = make_learner(config, world, path)
    policy = learner.policy.policy
    rows = [*task.splits.train, *task.splits.validation, *task.splits.test]
    engine = partial(training_engine, config, world, path, policy)
    player = connect(config, task, policy.model.config, policy.tokenizer, rows, engine)
    return Parts(
        **vars(player),
        family=task.family,
        splits=task.splits,
        learner=learner,
        crew=Crew(world, learner),
        sends_weights=has_copy(config, world),
        foothold=foothold,
    )


def connect(
    config: Config,
    task: Task,
    model_config: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    make_engine: Callable[[int], Engine],
) -> Player:
    """What lets a model play these rows of a task.

    Args:
        model_config: Hugging Face configuration of the model.
        make_engine: from the tokens of a whole conversation.

    Raises:
        UserError: a prompt does not fit, or the engine cannot run the model.
    """
    tokenizer = plain(tokenizer)
    codec = Codec(tokenizer, make_renderer(tokenizer, config.model.renderer))
    limit = context_limit(config, model_config)
    check_prompts(codec, rows, limit)
    make_loop = partial(agent_loop if plays_agent(config) else environment_loop, config, task, codec)
    loop = make_loop(limits(config, limit), lambda: make_engine(limit))
    sampling = sampling_params(config.generator.sampling_params, codec.stop_token_ids)
    return Player(codec, loop.engine, loop, sampling, eval_sampling_params(config, codec.stop_token_ids))


def environment_loop(
    config: Config, task: Task, codec: Codec, limits: Limits, make_engine: Callable[[], Engine]
) -> EpisodeLoop:
    """Episodes in which the task's environment answers."""
    layout = Conversation if config.generator.use_conversation_multi_turn else SingleMessageConversation
    pool = EnvironmentPool(config.environment.max_workers)
    return EpisodeLoop(make_engine(), task.make_environment, partial(layout, codec), pool, limits)


def agent_loop(
    config: Config, task: Task, codec: Codec, limits: Limits, make_engine: Callable[[], Engine]
) -> Episodes[Any]:
    """Episodes that the program of `generator.agent` plays.

    Raises:
        UserError: it is not there.
    """
    from mtrl.gateway.server import Gateway
    from mtrl.gateway.session import SessionLimits
    from mtrl.generator.agents.loop import AgentLoop
    from mtrl.generator.agents.start import make_runner

    agent = config.generator.agent
    runner = make_runner(agent)  # before an engine takes its minute
    calls = SessionLimits(
        agent.max_calls or limits.max_turns,
        agent.max_calls_at_once,
        limits.max_context_length,
        agent.max_requests_per_second,
    )
    gateway = Gateway(make_engine(), codec, calls, agent.host, agent.port)
    return AgentLoop(gateway, runner, limits, agent.max_concurrent)


def limits(config: Config, context: int) -> Limits:
    """What an episode may take, with a conversation of at most `context` tokens."""
    return Limits(
        max_turns=config.generator.max_turns,
        max_context_length=context,
        step_timeout=config.environment.step_timeout,
        episode_timeout=config.environment.episode_timeout,
        retries=config.environment.retries,
    )


def start_of(config: Config, task: Task, on_warm_start: OnStep = lambda step, success: None) -> str:
    """The folder or Hub name of the policy before training; where it takes a warm start, that is made now unless it is
    in the cache."""
    return prepared_start(config, task, on_warm_start)[0]


def prepared_start(config: Config, task: Task, on_warm_start: OnStep) -> tuple[str, Foothold | None]:
    """The folder or Hub name of the policy before training, and what its warm start reached, where it took one."""
    if config.model.name != "tiny" and not config.model.warm_start.enabled:
        return config.model.path or "", None

    def connected(model: Any, tokenizer: Any) -> Player:
        return connect(config, task, model.config, tokenizer, [], partial(shared_engine, config, model, tokenizer))

    return warm_start(config, task, partial(success_of, config, task, connected), on_warm_start)


def preparation(config: Config) -> tuple[str, int | None]:
    """What goes on until the policy is there, and in how many steps at least, where they can be counted."""
    if config.model.name != "tiny" and not config.model.warm_start.enabled:
        return "loading the model", None
    settings = config.model.warm_start
    return "warm start", min(max(settings.min_steps, settings.check_every), settings.max_steps)


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


def context_limit(config: Config, model_config: Any) -> int:
    """Tokens of a whole conversation: what the model holds, or less where the configuration says so."""
    holds = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 4096
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
