"""The calls of one trajectory: the earlier call that each continues, and their conversion to turns.

A program's requests contain whole histories. A request that begins with the history of an earlier call *and* its answer
continues that call: its context consists of that call's tokens, exactly as sampled, and the new tokens. The calls
therefore form a tree, and `turns_of` divides it into sequences of turns that extend each other.
"""

from __future__ import annotations

import json
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any

from mtrl.environments.tool_calls import parse_calls
from mtrl.gateway.requests import BaseRequest
from mtrl.rollout.conversation import Codec, classify_break
from mtrl.types import FinishReason, Generation, Message, Turn
from mtrl.utils.expert_ids import before_last_tokens
from mtrl.utils.strict_json import canonical

INVALID_JSON = "INVALID_JSON"
"""Name of the only argument in which clients send arguments back that are no JSON object. Anthropic's documentation of
tools recommends it, and Pydantic AI does so for every API."""
_CHAT, _TEXT, _IDS = b"c", b"t", b"i"
_ID_BYTES = 8


@dataclass(frozen=True)
class CallContext:
    """The context of a request, and the earlier call that the request continues."""

    ids: list[int]
    """Token ids of the whole context."""
    history: bytes
    """The whole request as bytes; equal requests have equal bytes."""
    parent: ModelCall | None
    """The earlier call that the request continues, if any."""
    prefix_break: str | None
    """Why `ids` do not begin with the parent's tokens; None if they do, or if there is no parent."""
    observation: list[Message]
    """Messages of the request that are new."""
    content_hashes: frozenset[int]
    """Hashes by which the request is compared with earlier ones: those of its new messages without system messages, or,
    for a text or token ids, those of the request and of the earlier requests that it begins with."""
    tools: list[dict[str, Any]] | None = None


class ModelCall:
    """One answer of the model; it becomes a turn once its client has it."""

    def __init__(self, index: int, context: CallContext, choice: int = 0, overrides: tuple[str, ...] = ()):
        """
        Args:
            index: index in the order in which the calls of the trajectory began; it seeds the sampling.
            choice: index among the answers to one request.
            overrides: names of the sampling parameters that the request set and the run overrides.
        """
        self.index, self.choice, self.overrides = index, choice, overrides
        self.parent, self.prefix_break = context.parent, context.prefix_break
        self.observation, self.content_hashes = context.observation, context.content_hashes
        self.tools = context.tools
        self.key = _digest(context.history)
        self.new_ids = context.ids[self.parent.length :] if self.parent and not self.prefix_break else context.ids
        """The tokens after the parent's tokens; the whole context if it does not extend them."""
        self.prompt_tokens = len(context.ids)
        self.children = 0
        """Number of calls that continue this one."""
        self.generation = Generation([], [], FinishReason.ABORT, [])
        self.message: Message = {}
        """The answer for the client: stop strings are cut off, and tool calls are in `tool_calls` only."""
        self.text = ""
        """The answer as text, for clients of the completions API."""
        self.sampled_message: Message = {}
        """The answer as the model gave it; `decoded` is its raw text."""
        self.decoded = ""
        self.reward = 0.0
        self.asked = time.perf_counter()
        """When the request arrived, in seconds. The sampling `began` later if other requests were sampled first."""
        self.began = self.ended = 0.0

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the whole context before the answer."""
        parts: list[list[int]] = []
        call: ModelCall = self
        while call.parent is not None and call.prefix_break is None:
            parts.append(call.new_ids)
            call = call.parent
            parts.append(call.generation.token_ids)
        return list(chain(call.new_ids, *reversed(parts)))

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole context and the answer."""
        return self.prompt_ids + self.generation.token_ids

    @property
    def length(self) -> int:
        """Number of tokens of the context and the answer."""
        return self.prompt_tokens + len(self.generation.token_ids)

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason: length, tool_calls or stop."""
        if self.generation.finish == FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def answer(self, generation: Generation, codec: Codec, context: CallContext, request: BaseRequest) -> None:
        """Store the sampled answer; the request's own stop strings are cut off for the client.

        Raises:
            ValueError: the renderer cannot parse the sampled ids into a message.
        """
        ids = generation.token_ids
        self.decoded = codec.decode(codec.without_stop(ids))
        self.sampled_message = codec.parse(ids, context.ids, context.tools, self.index)
        # Some renderers find calls even if the request has no tools; such a client receives the plain text.
        has_undeclared_calls = bool(self.sampled_message.get("tool_calls")) and not context.tools
        plain = {"role": "assistant", "content": self.decoded}
        found = client_message(plain if has_undeclared_calls else self.sampled_message, request.stop)
        self.message = request.to_client(found)
        self.text = truncate_at_stop(self.decoded, request.stop)
        self.generation = generation


class PrefixIndex:
    """Finds which of the added byte strings are prefixes of another one, in time proportional to its length and to the
    number of lengths that a prefix may have."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[ModelCall]] = {}
        self._lengths: list[int] = []

    def add(self, data: bytes, call: ModelCall) -> None:
        position = bisect_left(self._lengths, len(data))
        if self._lengths[position : position + 1] != [len(data)]:
            self._lengths.insert(position, len(data))
        self._calls.setdefault(_digest(data), []).append(call)

    def prefixes(self, data: bytes, ends: Iterable[int] | None = None) -> Iterator[tuple[int, list[ModelCall]]]:
        """Yield the length of each added prefix of `data` and the calls that added it, the shortest prefix first.

        Args:
            ends: lengths that a prefix may have, in ascending order; None: any.
        """
        hasher, read = blake2b(digest_size=16), 0
        for length in self._lengths if ends is None else ends:
            if length > len(data):
                return
            hasher.update(data[read:length])
            read = length
            if found := self._calls.get(hasher.copy().digest()):
                yield length, found


class CallTree:
    """Finds the earlier call that a request continues, among the calls that were added.

    The call with the longest matching history wins. Among equal histories, a call whose answer came back unchanged is
    preferred, then a call that no other call continues yet, then the newest. Messages are compared by `message_key`,
    and requests with different tools have different histories.
    """

    def __init__(self, codec: Codec):
        self.codec = codec
        self._histories, self._requests = PrefixIndex(), PrefixIndex()
        self._tools: dict[str, list[dict[str, Any]] | None] = {}
        """The tools of the requests by their JSON. Requests with equal tools share one list, because each request of a
        program repeats them, and because `conversations_of` compares them often."""

    def add(self, call: ModelCall, history: bytes) -> None:
        """Add a call whose client has received the answer to the request with this history."""
        if history[:1] == _CHAT:
            self._histories.add(history + message_key(call.message), call)
            return
        self._requests.add(history, call)
        answer = call.decoded.encode() if history[:1] == _TEXT else _as_bytes(call.generation.token_ids)
        self._histories.add(history + answer, call)

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> CallContext:
        """Return the context of a conversation. Exceptions of the renderer pass through."""
        tools = self._tools.setdefault(json.dumps(tools), tools)
        keys = [_CHAT + json.dumps(tools, sort_keys=True).encode() + b"\n", *map(message_key, messages)]
        history, ends = b"".join(keys), list(accumulate(map(len, keys)))
        length, calls = self._longest(history, ends)
        known = ends.index(length) if calls else 0
        parent = _continued_call(calls, messages[known - 1]["content"])
        new, new_keys = messages[known:], keys[1 + known :]
        content_hashes = frozenset(
            hash(key) for key, message in zip(new_keys, new, strict=True) if message["role"] != "system"
        )
        if parent is None:
            return CallContext(self.codec.render(messages, tools), history, None, None, new, content_hashes, tools)
        previous = parent.tokens
        extended = self.codec.extend(previous[: parent.prompt_tokens], parent.generation.token_ids, new, tools)
        ids = self.codec.render(messages, tools) if extended is None else extended
        prefix_break = None
        if ids[: len(previous)] != previous:
            prefix_break = self._prefix_break(previous, ids, new, extended is None)
        return CallContext(ids, history, parent, prefix_break, new, content_hashes, tools)

    def _prefix_break(self, previous: list[int], ids: list[int], new: list[Message], rerendered: bool) -> str:
        """Classify why `ids` do not begin with the previous tokens.

        Args:
            rerendered: whether the whole conversation was rendered again.
        """
        if not rerendered:
            return classify_break(previous, ids, self.codec)
        return "edited" if any(message["role"] == "assistant" for message in new) else "template"

    def text(self, prompt: str) -> CallContext:
        """Return the context of a text without messages."""
        history = _TEXT + prompt.encode()
        length, calls = self._longest(history)
        parent, prefix_break = _continued_call(calls), None
        if parent is None:
            ids, new = self.codec.encode(prompt), prompt
        else:
            new = history[length:].decode()
            previous = parent.tokens
            # A text has no closing token unless the program writes it. Without that token the context does not begin
            # with all the sampled tokens.
            answer_ids = self.codec.without_stop(parent.generation.token_ids)
            ids = previous[: parent.prompt_tokens] + answer_ids + self.codec.encode(new)
            prefix_break = None if ids[: len(previous)] == previous else "template"
        observation = [{"role": "user", "content": new}]
        return CallContext(ids, history, parent, prefix_break, observation, self._content_hashes(history))

    def tokens(self, ids: list[int]) -> CallContext:
        """Return the context of token ids, which are used unchanged."""
        history = _IDS + _as_bytes(ids)
        length, calls = self._longest(history)
        parent = _continued_call(calls)
        new = ids if parent is None else ids[(length - 1) // _ID_BYTES :]
        observation = [{"role": "user", "content": self.codec.decode(new)}]
        return CallContext(list(ids), history, parent, None, observation, self._content_hashes(history))

    def _longest(self, history: bytes, ends: list[int] | None = None) -> tuple[int, list[ModelCall]]:
        """Find the longest prefix of `history` that is an earlier request with its answer.

        Returns:
            The length of the prefix in bytes, and its calls; 0 and no calls if there is none.
        """
        return [(0, []), *self._histories.prefixes(history, ends)][-1]

    def _content_hashes(self, history: bytes) -> frozenset[int]:
        """Return hashes of a text or of token ids, and of the earlier requests that it begins with as a whole."""
        return frozenset(
            map(hash, [_digest(history), *(calls[0].key for _, calls in self._requests.prefixes(history))])
        )


def _continued_call(calls: list[ModelCall], content: str | None = None) -> ModelCall | None:
    """Return the call to continue among calls with equal histories; `content` is the answer that came back."""

    def rank(call: ModelCall) -> tuple[bool, bool, int]:
        return content not in (None, call.message["content"]), call.children > 0, -call.index

    return min(calls, key=rank, default=None)


def turns_of(calls: Iterable[ModelCall]) -> list[Turn]:
    """Return the turns of these calls, which come in the order in which they began; their rewards are the caller's.

    Only one turn extends the tokens of an earlier turn. A further turn with the same parent, and a turn whose parent is
    not among the calls, repeats its whole context as a break, so that every sampled token is in exactly one sample,
    behind its own context.
    """
    turns: list[Turn] = []
    turn_indices: dict[ModelCall, int] = {}
    extended: set[ModelCall] = set()
    seen_requests: set[bytes] = set()
    seen_hashes: set[int] = set()
    for call in calls:
        parent = call.parent
        if parent in turn_indices and call.prefix_break is None and parent not in extended:
            extended.add(parent)
            reason, observation_ids = None, call.new_ids
        else:
            reason = _break_reason(call, seen_requests, seen_hashes) if turns else None
            observation_ids = call.prompt_ids
        turns.append(_turn(call, observation_ids, reason))
        if parent in turn_indices:
            parent_turn = turns[turn_indices[parent]]
            parent_turn.seconds_environment = parent_turn.seconds_environment or max(0.0, call.began - parent.ended)
            if reason is None and turn_indices[parent] != len(turns) - 2:
                turns[-1].parent = turn_indices[parent]
        turn_indices[call] = len(turns) - 1
        seen_requests.add(call.key)
        seen_hashes |= call.content_hashes
    return turns


def _break_reason(call: ModelCall, seen_requests: set[bytes], seen_hashes: set[int]) -> str:
    """Return the break reason of a call that extends no turn. `seen_requests` and `seen_hashes` hold the keys and
    hashes of the calls before it."""
    if call.choice:
        return "branch"
    if call.key in seen_requests:
        return "retry"
    if call.parent is not None:
        return call.prefix_break or "branch"
    return "fresh" if seen_hashes.isdisjoint(call.content_hashes) else "edited"


def _turn(call: ModelCall, observation_ids: list[int], reason: str | None) -> Turn:
    generation = call.generation
    return Turn(
        observation_ids=list(observation_ids),
        action_ids=list(generation.token_ids),
        action_logprobs=list(generation.logprobs),
        version_spans=list(generation.version_spans),
        finish=generation.finish,
        text=call.decoded,
        message=call.sampled_message,
        observation=call.observation,
        break_reason=reason,
        seconds_generate=call.ended - call.began,
        experts=before_last_tokens(generation.experts, len(observation_ids) + len(generation.token_ids)),
    )


def client_message(sampled_message: Message, stop: Sequence[str]) -> Message:
    """Return an assistant's message for a client: tool calls are in `tool_calls` only, texts end at a stop string."""
    content = sampled_message.get("content") or ""
    if sampled_message.get("tool_calls"):
        content = parse_calls(content)[0]
    message = {**sampled_message, "content": truncate_at_stop(content, stop)}
    if "reasoning_content" in sampled_message:
        message["reasoning_content"] = truncate_at_stop(sampled_message["reasoning_content"], stop)
    return message


def first_stop_string(text: str, stop: Sequence[str]) -> str | None:
    """Return the stop string that occurs first in the text; None if there is none."""
    return min((word for word in stop if word in text), key=text.find, default=None)


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first occurrence of a stop string."""
    found = first_stop_string(text, stop)
    return text if found is None else text[: text.find(found)]


def message_key(message: Message) -> bytes:
    """Return a message as bytes; equal messages have equal bytes.

    Programs send an answer back without its reasoning, without the surrounding white space, with None for an empty
    text, with differently formatted arguments, with the last of repeated arguments alone, with arguments that are no
    JSON object inside an object (`INVALID_JSON`), or with new call ids. All of these count as the same answer.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.strip()
    calls = [
        [call["function"]["name"], _arguments_key(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message["role"], message.get("name"), content, calls]).encode() + b"\n"


def _arguments_key(arguments: Any) -> str:
    if isinstance(arguments, dict) and len(arguments) == 1 and isinstance(arguments.get(INVALID_JSON), str):
        arguments = arguments[INVALID_JSON]
    try:
        return canonical(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
    except (ValueError, TypeError, RecursionError):  # the model wrote arguments that are not valid JSON
        return str(arguments)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _as_bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
