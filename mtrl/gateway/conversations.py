"""The conversations of a program's calls: which is the main one, and which calls are beside it.

A conversation is a tree of calls that continue each other. A call that continues none still belongs to an earlier
conversation if it has the same tools and shares a message with it beyond the system prompt, as after a compaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrl.gateway.calls import ModelCall, message_key


@dataclass
class CallSequence:
    """The calls of a conversation in the order in which they began; all of them have the same tools."""

    tools: list[dict[str, Any]] | None
    calls: list[ModelCall] = field(default_factory=list)
    seen: set[bytes | int] = field(default_factory=set)
    """Keys and content hashes of the calls, and hashes of their answers."""
    answers: set[int] = field(default_factory=set)
    """Hashes of the answers, comparable with content hashes."""

    def add(self, call: ModelCall) -> None:
        answer = hash(message_key(call.message))
        self.calls.append(call)
        self.answers.add(answer)
        self.seen |= {call.key, answer, *call.content_hashes}

    def shares(self, call: ModelCall) -> bool:
        """Whether a call without a parent belongs to this conversation."""
        return call.tools == self.tools and not self.seen.isdisjoint({call.key, *call.content_hashes})

    def is_beside(self, other: CallSequence) -> bool:
        """Whether it is beside an earlier conversation, however many calls it has: if it has a history of its own,
        begins after an answer of that with a call of a tool, and ends before that goes on, as a sub-agent; or if it
        repeats an answer of that under other instructions and with fewer tools, as the search of a finished
        conversation for what to remember. A program that changes the tools of a conversation repeats answers too, but
        keeps the instructions or adds tools."""
        begin, earlier = self.calls[0], other.calls[0]
        if other.answers.isdisjoint(begin.content_hashes):
            before = [call for call in other.calls if call.index < begin.index]
            return bool(before[-1].message.get("tool_calls")) and self.calls[-1].index < other.calls[-1].index
        return _instructions(begin) != _instructions(earlier) and len(self.tools or ()) < len(other.tools or ())


def conversations_of(calls: Sequence[ModelCall]) -> list[CallSequence]:
    """Return the conversations, in the order in which they began."""
    conversations: list[CallSequence] = []
    homes: dict[ModelCall, CallSequence] = {}
    for call in calls:
        home = homes.get(call.parent) if call.parent else next((c for c in conversations if c.shares(call)), None)
        if home is None:
            home = CallSequence(call.tools)
            conversations.append(home)
        home.add(call)
        homes[call] = home
    return conversations


def main_conversation(conversations: Sequence[CallSequence]) -> CallSequence | None:
    """Return the main conversation; None if there is none.

    Of those that are beside no other one, it has the most calls; of several, it is the first with tools, or else the
    first.

    Args:
        conversations: all conversations, in the order in which they began.
    """
    outer: list[CallSequence] = []
    for each in conversations:
        if not any(each.is_beside(other) for other in outer):
            outer.append(each)
    return min(outer, key=lambda each: (-len(each.calls), not each.tools), default=None)


def kinds_of(calls: Sequence[ModelCall]) -> dict[ModelCall, str | None]:
    """Return the kind of each call, one of `CALL_KINDS`, and None for those of the main conversation.

    side: a conversation of one call, such as the request for a title, or for a summary without the tools. sub_agent:
    another conversation of several calls. retried: a call whose request was sent again and whose answer no call
    continues.

    Args:
        calls: all calls of a trajectory, in the order in which they began.
    """
    conversations = conversations_of(calls)
    main = main_conversation(conversations)
    latest = {call.key: call for call in calls if not call.choice}
    kinds: dict[ModelCall, str | None] = {}
    for each in conversations:
        beside = None if each is main else "side" if len(each.calls) == 1 else "sub_agent"
        for call in each.calls:
            sent_again = not call.choice and not call.children and latest[call.key] is not call
            kinds[call] = "retried" if sent_again else beside
    return kinds


def rewards_of(calls: Sequence[ModelCall], kept: Sequence[ModelCall]) -> list[float]:
    """Return the rewards of the calls that are kept. The reward of any other call is added to the next one that is
    kept, or else to the last one, so that their sum is that of all calls."""
    rewards: list[float] = []
    carried, chosen = 0.0, set(kept)
    for call in calls:
        carried += call.reward
        if call in chosen:
            rewards.append(carried)
            carried = 0.0
    if rewards:
        rewards[-1] += carried
    return rewards


def _instructions(call: ModelCall) -> list[Any]:
    """Return the contents of the system messages of a call that continues none."""
    return [message["content"] for message in call.observation if message["role"] == "system"]
