"""The conversations of a program's calls: which is the main one, and which calls are beside it.

A conversation is a tree of calls that continue each other. A call that continues none still belongs to an earlier
conversation if it has the same tools and shares a message with it beyond the system prompt, as after a compaction.
"""

from __future__ import annotations

from bisect import bisect_left
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

    @property
    def requests(self) -> int:
        """Number of different requests; a program may send one again, and one may have several answers."""
        return len({call.key for call in self.calls})

    def shares(self, call: ModelCall) -> bool:
        """Whether a call without a parent belongs to this conversation."""
        return call.tools == self.tools and not self.seen.isdisjoint({call.key, *call.content_hashes})

    def is_beside(self, other: CallSequence) -> bool:
        """Whether an earlier conversation waits for this one, as a program waits for its sub-agent.

        It waits if the latest of its calls that began before this conversation was answered by then with a call of a
        tool, and if it goes on after the end of this conversation or never. A conversation that repeats an answer of
        the other in its first request, as after a handoff, continues the other one and is not beside it.
        """
        first, last = self.calls[0], self.calls[-1]
        place = bisect_left(other.calls, first.index, key=lambda call: call.index)
        if place == 0 or not other.answers.isdisjoint(first.content_hashes):
            return False
        latest = other.calls[place - 1]
        if not latest.message.get("tool_calls") or latest.ended > first.asked:
            return False
        return place == len(other.calls) or other.calls[-1].index > last.index


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

    A conversation that an earlier one waits for is not the main one. The main one has the most different requests
    of the others. If several have as many, it is the first with tools, or else the first.

    Args:
        conversations: all conversations, in the order in which they began.
    """
    outer: list[CallSequence] = []
    for each in conversations:
        if not any(each.is_beside(other) for other in outer):
            outer.append(each)
    return min(outer, key=lambda each: (-each.requests, not each.tools), default=None)


def kinds_of(calls: Sequence[ModelCall]) -> dict[ModelCall, str | None]:
    """Return the kind of each call, one of `CALL_KINDS`, and None for those of the main conversation.

    side: a conversation of one request, such as that for a title, or for a summary without the tools. sub_agent:
    another conversation of several requests. retried: a call of the main conversation whose request was sent again and
    whose answer no call continues.

    Args:
        calls: all calls of a trajectory, in the order in which they began.
    """
    conversations = conversations_of(calls)
    main = main_conversation(conversations)
    latest = {call.key: call for call in calls if not call.choice}
    kinds: dict[ModelCall, str | None] = {}
    for each in conversations:
        beside = None if each is main else "side" if each.requests == 1 else "sub_agent"
        for call in each.calls:
            sent_again = not call.choice and not call.children and latest[call.key] is not call
            kinds[call] = beside or ("retried" if sent_again else None)
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
