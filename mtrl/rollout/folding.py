"""Folds of a long context (`generator.context`): an episode goes on with a shorter context instead of ending.

A fold happens before a turn whose context has reached the threshold. The turns that stay in the context keep the ids
that were sampled, and only messages are rendered. The context after a fold no longer extends the tokens of the last
turn, so that a new sample begins there, with the break reason `fold`. Every sampled token is therefore trained once,
after exactly the context in which it was sampled; in later samples it is context without a loss.

The prompt is never folded. The record of an episode (`Turn.observation`) has all observations as the environment gave
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from mtrl.errors import UserError
from mtrl.rollout.conversation import Conversation
from mtrl.types import Message, Turn

FOLDED = "[old observation removed]"
"""Text that replaces the content of a folded message."""
REQUEST: Message = {
    "role": "user",
    "content": "The conversation is about to be removed, except for the first prompt and your answer to this message. "
    "Summarise what you have done and found, and what you plan to do next.",
}
"""Message that asks the policy for a summary."""

Sample = Callable[[], Awaitable[Turn | None]]
"""Samples the next turn of a conversation; None if the episode is over instead."""


@dataclass(frozen=True)
class Fold(ABC):
    """Base class of the folds."""

    threshold: int
    """Number of tokens of a turn's context from which it is folded."""

    @abstractmethod
    async def apply(self, conversation: Conversation, sample: Sample) -> bool:
        """Fold the context of the next turn. Return False if the episode is over instead.

        Args:
            conversation: conversation with at least one turn, and the observation after it.
            sample: function that samples a turn which the environment does not receive.
        """


@dataclass(frozen=True)
class KeepLast(Fold):
    """Replaces the text of all observations but the last ones, as SWE-agent's history processor `last_n_observations`
    does (2405.15793). All turns stay."""

    observations: int
    """Number of observations that keep their text, at least 1."""

    async def apply(self, conversation: Conversation, sample: Sample) -> bool:
        """See `Fold.apply`. No turn is sampled. Without an older observation the context stays as it is."""
        turns = conversation.turns
        observations = [*(turn.observation for turn in turns[1:]), conversation.observation]
        old = len(observations) - self.observations
        if old > 0:
            kept = [*map(folded, observations[:old]), *observations[old:]]
            conversation.fold(list(zip(turns, kept, strict=True)))
        return True


@dataclass(frozen=True)
class Summarise(Fold):
    """Asks the policy for a summary, which replaces everything between the prompt and the last observation (as
    MemAgent's memory, 2507.02259, whose turns are trained by the outcome of the episode too)."""

    async def apply(self, conversation: Conversation, sample: Sample) -> bool:
        """See `Fold.apply`. The policy is asked before it sees the last observation, which then follows the summary; so
        a large observation leaves the summary its room, and is not lost in it."""
        observation = conversation.observation
        conversation.add_observation([REQUEST])
        summary = await sample()
        if summary is None:
            return False
        summary.is_summary = True
        conversation.fold([(summary, observation)])
        return True


def folded(observation: list[Message]) -> list[Message]:
    """Return the messages with `FOLDED` as their content; a message that is no longer than this stays."""
    return [
        message | {"content": FOLDED} if len(str(message.get("content") or "")) > len(FOLDED) else message
        for message in observation
    ]


def fold_of(generator: Any, context: int) -> Fold | None:
    """Return the fold of `generator.context`; None without one.

    Args:
        generator: the section `generator` of the configuration.
        context: maximum length of a whole conversation, in tokens.

    Raises:
        UserError: the threshold is not below the limit of the context, or the layout is a single message.
    """
    settings = generator.context
    if settings.fold == "none":
        return None
    if not generator.use_conversation_multi_turn:
        raise UserError(
            f"generator.context.fold={settings.fold} needs every turn as a message of its own; set "
            "generator.use_conversation_multi_turn=true, or generator.context.fold=none"
        )
    room = 2 * generator.sampling_params.max_generate_length
    threshold = settings.threshold or max(context - room, context // 2)
    if threshold >= context:
        raise UserError(
            f"generator.context.threshold={threshold} is not below the {context} tokens at which an episode ends; "
            "lower it, or raise generator.max_context_length"
        )
    if settings.fold == "keep_last":
        return KeepLast(threshold, settings.keep_observations)
    return Summarise(threshold)
