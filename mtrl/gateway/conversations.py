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

    A conversation is beside another one, however many calls it has, if it begins and ends between two calls of that,
    since the program waits for it as for a sub-agent, or if its first call repeats an answer of that with other tools,
    as the search of a finished conversation for what to remember. Of the others, the main one has the most calls; of
    several, it is the first with tools, or else the first.

    Args:
        conversations: all conversations, in the order in which they began.
    """
    outer: list[CallSequence] = []
    answers: set[int] = set()
    for each in conversations:
        is_within = bool(outer) and each.calls[-1].index < outer[-1].calls[-1].index
        if not is_within and answers.isdisjoint(each.calls[0].content_hashes):
            outer.append(each)
        answers |= each.answers
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
