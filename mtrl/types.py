"""The data types of mtrl. Read this first.

A data row becomes an episode. An episode is a `Trajectory` of `Turn`s, for each of which an engine samples a
`Generation`. The trajectories of one prompt are a `Group`; the trainer consumes `Sample`s. Everything up to `Sample` is
plain Python: ids, floats and text, no tensors. Only the `TopTokens` of a sample, and the ids of experts of samples and
generations, are arrays.

Shape letters used across the code base::

    P  prompts of a step      G  trajectories of a group      T  turns of a trajectory      L  tokens of a sample

Ids, masks, rewards and log-probs are derived from turns, here and in `mtrl/trainer/data/samples.py`, and are never
stored beside them as parallel lists. Every type that is stored converts to JSON and back without loss (`to_json`,
`trajectory_from_dict`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    ExpertIds = NDArray[np.signedinteger]

Message = dict[str, Any]
"""One chat message in OpenAI's format: `{"role": "user", "content": "…"}`, optionally with `tool_calls`. Messages of
environments may hold images: their content is then a list of parts, `{"type": "text", "text": "…"}` and
`{"type": "image", "image": "data:image/png;base64,…"}` (`mtrl.utils.images.image_part`)."""

Tools = list[dict[str, Any]]
"""Schemas of tools in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""

ROLES = ("system", "user", "assistant", "tool")
"""The roles that a message may have."""

Row = dict[str, Any]
"""One task of a data set. `id` (str), `prompt` (list of messages) and `ground_truth` (dict) always exist after loading;
all other columns of the data stay beside them and reach the environment."""

EPSILON = 1e-9
"""Tolerance of thresholds and of equal rewards, because a sum of rewards that should be 1 may be below it by
rounding."""
LARGEST_REWARD = 1e12
"""Limit of a reward's magnitude. Training computes in float32, and the sum of the squares of a batch of such rewards
still fits; every code path that accepts a reward refuses a larger one."""

ENVIRONMENT = "environment"
"""Name of the component for the reward that `step` returned. Environments may not use it for another component."""


@dataclass(frozen=True)
class Demonstration:
    """A conversation that fine-tuning imitates."""

    messages: list[Message]
    tools: Tools = field(default_factory=list)
    """Tools that its prompt shows."""


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    TURN_TOKEN_LIMIT = "turn_token_limit"
    CONTEXT_LIMIT = "context_limit"
    PARSE_ERROR = "parse_error"
    ENV_ERROR = "env_error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"


FAILED = (StopReason.ENV_ERROR, StopReason.TIMEOUT, StopReason.PARSE_ERROR)
"""Stop reasons of episodes that failed for reasons other than the policy: these episodes are retried; if they still
fail, their group is replaced."""


BREAKS = ("template", "retoken", "edited", "other", "fold", "branch", "retry", "fresh")
"""Reasons why a turn's context extends no earlier turn: see `Turn.break_reason`."""


class FinishReason(StrEnum):
    """Why the engine stopped sampling one turn."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass
class Generation:
    """What an engine samples in one turn."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-softmax of the logits divided by the temperature (1 when greedy), at each sampled id."""
    finish: FinishReason
    version_spans: list[tuple[int, int]]
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were already cached."""
    experts: ExpertIds | None = field(default=None, compare=False, repr=False)
    """[tokens - 1, layers, k] ids of the experts that computed each token of prompt and action but the last one, which
    was not computed yet; None if the engine records none."""


@dataclass
class Turn:
    """One exchange: the new context, the action that the model sampled, and the environment's reward for it."""

    observation_ids: list[int]
    """New context before the action (mask 0): the prompt on the first turn, then the closing token of a cut turn, the
    environment's messages and the generation prompt. With `break_reason` set it is the *whole* context instead."""
    action_ids: list[int]
    """Ids that the engine sampled and that stay in the context, unchanged (mask 1)."""
    action_logprobs: list[float]
    """Log-probability of each action id under the policy that sampled it, at the sampling temperature; same length."""
    version_spans: list[tuple[int, int]]
    """`(policy version, tokens)` runs in order; their tokens sum to `len(action_ids)`."""
    finish: FinishReason
    text: str
    """The action decoded, without its closing token."""
    message: Message
    """The action parsed into an assistant message."""
    observation: list[Message] = field(default_factory=list)
    """The messages that `observation_ids` encode."""
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, as the environment or the reward composition reported them."""
    metrics: dict[str, float] = field(default_factory=dict)
    break_reason: str | None = None
    """Reason why this turn's context does not extend the tokens of an earlier turn exactly; `None` while it does. The
    renderer sets template, retoken, edited or other; a folded context (`generator.context`) sets fold. For a program
    that calls the model itself, the reason is branch (another turn already extends those tokens), retry (the same
    request again), edited (the request shares messages with earlier requests) or fresh (it shares none beyond the
    system prompt). A break starts a new sample."""
    is_summary: bool = False
    """Whether the policy summarised the conversation in this turn (`generator.context.fold=summarise`). The environment
    does not receive a summary, and rewards and scorers do not see it."""
    parent: int | None = None
    """Index of the turn whose tokens the context extends; None for the turn before this one."""
    seconds_generate: float = 0.0
    seconds_environment: float = 0.0
    advantages: list[float] = field(default_factory=list)
    """Advantages used by the update: one number for the turn, or one per action token; empty for a turn that was not
    trained on."""
    trainer_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each action id under the trainer's weights before the first update on it; empty where the
    trainer computed none."""
    experts: str | None = field(default=None, repr=False)
    """For each token of observation and action, the ids of the experts that computed the token before it, as text
    (`mtrl.utils.expert_ids`); None where the engine recorded none. Records of a run leave it out."""

    def before(self, index: int) -> int | None:
        """Return the index of the turn that this turn (number `index` of its trajectory) extends; None where a sample
        starts."""
        if self.break_reason is not None or index == 0:
            return None
        return index - 1 if self.parent is None else self.parent

    @property
    def versions(self) -> list[int]:
        """Policy version of each action token."""
        return [version for version, count in self.version_spans for _ in range(count)]


@dataclass
class Trajectory:
    """The turns of one episode."""

    task_id: str
    group_id: str
    index: int
    """Index of the trajectory within its group."""
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = StopReason.ABORTED
    final_observation: list[Message] = field(default_factory=list)
    """Messages of the environment after the last action, which no action answers; never tokenised."""
    metrics: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    """Score by the scorer (1.0 is success), independent of the reward; `None` if the trajectory was not scored."""
    answered: bool | None = None
    """Whether the policy gave an answer that the task can read, right or wrong; `None` where the task cannot tell."""
    trainable: bool = True
    error: str | None = None
    """Message and traceback of the error that ended the episode; `None` without an error."""
    role: str | None = None
    """Role that took the turns, in self-play, where an episode gives one trajectory per trained role; else `None`."""

    @property
    def reward(self) -> float:
        """Sum of the turn rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def rewards(self) -> list[float]:
        """One reward per turn, length T."""
        return [turn.reward for turn in self.turns]

    @property
    def environment_rewards(self) -> list[float]:
        """The environment's own reward of each turn, length T: the component `environment`, or the turn's reward if no
        composition has replaced it yet."""
        return [turn.components.get(ENVIRONMENT, turn.reward) for turn in self.turns]

    @property
    def environment_turns(self) -> list[Turn]:
        """The turns that the environment received: all but the summaries."""
        return [turn for turn in self.turns if not turn.is_summary]

    @property
    def actions(self) -> list[list[Turn]]:
        """The turns that share one advantage, A lists for the A `environment_turns`: each of these after the summary
        before it, if there is one. A summary after the last environment turn belongs to that turn."""
        actions: list[list[Turn]] = [[]]
        for turn in self.turns:
            actions[-1].append(turn)
            if not turn.is_summary:
                actions.append([])
        unanswered = actions.pop()
        if actions:
            actions[-1] += unanswered
        return actions

    @property
    def action_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.action_ids) for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the whole conversation up to the end of the last action."""
        return self.contexts[-1] + len(self.turns[-1].action_ids) if self.turns else 0

    @property
    def contexts(self) -> list[int]:
        """Number of tokens of the whole context before each action, length T."""
        contexts: list[int] = []
        for index, turn in enumerate(self.turns):
            before = turn.before(index)
            seen = 0 if before is None else contexts[before] + len(self.turns[before].action_ids)
            contexts.append(seen + len(turn.observation_ids))
        return contexts

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this trajectory; None without tokens."""
        return min((version for turn in self.turns for version, _ in turn.version_spans), default=None)

    def without_summaries(self) -> Trajectory:
        """Return the trajectory as rewards and scorers see it: the same turns without the summaries."""
        turns = self.environment_turns
        return self if len(turns) == len(self.turns) else replace(self, turns=turns)

    def images_of(self, index: int) -> list[str]:
        """Return the images of `turns[index].observation_ids`, in the order of their tokens: those of the turn's
        observation or, where a break repeats the whole context, those of all observations so far."""
        turn = self.turns[index]
        shown = [turn] if turn.break_reason is None else self.turns[: index + 1]
        return images_in(message for each in shown for message in each.observation)

    @property
    def messages(self) -> list[Message]:
        """The messages of the whole conversation, including the last observation."""
        exchanged = chain.from_iterable([*turn.observation, turn.message] for turn in self.turns)
        return [*exchanged, *self.final_observation]


@dataclass
class Group:
    """The trajectories of one prompt, which group advantage estimators compare."""

    group_id: str
    row: Row
    trajectories: list[Trajectory]

    @property
    def role(self) -> str | None:
        """Role of the first trajectory."""
        return next((trajectory.role for trajectory in self.trajectories), None)

    def by_role(self) -> list[Group]:
        """Return one group per role, in the order of their first trajectories; the group itself if there is one role.
        Only rewards of the same role can be compared: two sides of a game have different chances."""
        roles = dict.fromkeys(trajectory.role for trajectory in self.trajectories)
        if len(roles) < 2:
            return [self]
        own = ([trajectory for trajectory in self.trajectories if trajectory.role == role] for role in roles)
        return [Group(self.group_id, self.row, trajectories) for trajectories in own]


@dataclass(eq=False)
class TopTokens:
    """The k most probable tokens of a model at each of A sampled tokens: arrays, since lists of a step's A x k numbers
    would need gigabytes."""

    ids: NDArray[np.int64]
    """[A, k] token ids."""
    logprobs: NDArray[np.float64]
    """[A, k] their log-probs."""


@dataclass
class Sample:
    """One token sequence for the trainer; every list has length L."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True where the policy sampled the token."""
    logprobs: list[float]
    """Behaviour log-probs; 0.0 where the mask is False (never read there)."""
    advantages: list[float]
    """0.0 where the mask is False."""
    versions: list[int]
    """Policy version per token; -1 where the mask is False."""
    turns: list[int]
    """Index of the turn that sampled the token; -1 where the mask is False."""
    group_id: str = ""
    trajectory: int = 0
    """Index of the trajectory within its group; one trajectory can give several samples."""
    teacher: TopTokens | None = None
    """The most probable tokens of the teacher of distillation at each sampled token; None without a teacher."""
    experts: ExpertIds | None = field(default=None, compare=False, repr=False)
    """[L, layers, k] ids of the experts that computed the token before each token, when that token was sampled; -1
    where they are unknown, None without router replay."""
    images: list[str] = field(default_factory=list, repr=False)
    """Images of the messages, in the order of their tokens."""

    @property
    def action_tokens(self) -> int:
        return sum(self.loss_mask)


def images_in(messages: Iterable[Message]) -> list[str]:
    """Return the images of messages, in order, as they are written in their parts. A text that is no image is refused
    when it is read (`mtrl.utils.images.pixels_of`)."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [str(part.get("image")) for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def to_json(value: Trajectory | Group | Sample) -> str:
    """Return one line of JSON. Floats keep all their bits (Python prints the shortest text that parses to the same
    float)."""
    return json.dumps(to_dict(value), ensure_ascii=False)


def to_dict(value: Trajectory | Group | Sample | Turn) -> dict[str, Any]:
    """Return the fields as `dataclasses.asdict` does, but without copying lists and dicts, since copying a million
    numbers takes a second. Ids of experts and images are left out where there are none, and ids of experts always of
    samples."""
    data = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if data.get("experts", 0) is None:
        del data["experts"]
    if data.get("images") == []:
        del data["images"]
    if isinstance(value, Trajectory):
        data["turns"] = [to_dict(turn) for turn in value.turns]
    elif isinstance(value, Group):
        data["trajectories"] = [to_dict(trajectory) for trajectory in value.trajectories]
    elif isinstance(value, Sample):
        data.pop("experts", None)  # longer than everything else
        if value.teacher is not None:
            data["teacher"] = {name: array.tolist() for name, array in vars(value.teacher).items()}
    return data


def trajectory_from_dict(data: dict[str, Any]) -> Trajectory:
    """Build a trajectory from the dict that `to_dict` returns.

    Raises:
        ValueError, KeyError, TypeError: `data` is not a trajectory.
    """
    turns = [
        Turn(
            **{
                **turn,
                "finish": FinishReason(turn["finish"]),
                "version_spans": [tuple(s) for s in turn["version_spans"]],
            }
        )
        for turn in data["turns"]
    ]
    if any(turn.parent is not None and turn.parent not in range(index) for index, turn in enumerate(turns)):
        raise ValueError("a turn extends one that is not before it")
    return Trajectory(**{**data, "turns": turns, "stop_reason": StopReason(data["stop_reason"])})


def group_from_dict(data: dict[str, Any]) -> Group:
    return Group(data["group_id"], data["row"], [trajectory_from_dict(t) for t in data["trajectories"]])


def write_jsonl(path: Path, values: Iterable[Trajectory | Group | Sample], mode: str = "a") -> None:
    """Write one value per line."""
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(to_json(value) + "\n" for value in values)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a JSONL file, in order."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield trajectory_from_dict(json.loads(line))
