"""An answer as server-sent events, in OpenAI's chunks.

An engine samples whole turns, so a stream delivers no text earlier. It supports programs that request a stream, and
keeps their connections alive meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrl.gateway.exchange import CancelOnDisconnect, Receive, RequestError, Send, to_bytes
from mtrl.gateway.respond import Answer, chat_logprobs, completion_choice, usage, wire_message

if TYPE_CHECKING:
    from mtrl.gateway.calls import Call
    from mtrl.rollout.conversation import Codec

log = logging.getLogger(__name__)

SECONDS_BEFORE_STREAM = 0.05
"""Seconds to wait for an answer, or for a refusal with its own status, before the stream begins."""
SECONDS_BETWEEN_COMMENTS = 10.0
"""Seconds between two keep-alive comments."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass
class EventStream:
    """A reply that may begin before the answer exists."""

    opening: list[dict[str, Any]]
    work: Callable[[], Any]
    """Function that returns the coroutine of the calls."""
    chunks: Callable[[Sequence[Call]], Iterator[dict[str, Any]]]

    async def send(self, receive: Receive, send: Send) -> None:
        """Send the events of the answer.

        Raises:
            RequestError: the call was refused before anything was sent.
            ClientDisconnectedError: the client disconnected.
        """
        async with CancelOnDisconnect(receive, self.work()) as work:
            if await work.wait(SECONDS_BEFORE_STREAM):
                await work.result()  # raises while a status can still be sent
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async for event in self._events(work):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self, work: CancelOnDisconnect[Sequence[Call]]) -> AsyncIterator[bytes]:
        for chunk in self.opening:
            yield _event(chunk)
        while not await work.wait(SECONDS_BETWEEN_COMMENTS):
            yield b": sampling\n\n"
        try:
            calls = await work.result()
        except RequestError as error:
            yield _event(error.body())
            return
        except Exception:
            log.exception("a call failed")
            yield _event(RequestError(500, "the call failed; the log of the gateway has the reason").body())
            return
        for chunk in self.chunks(calls):
            yield _event(chunk)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + to_bytes(chunk) + b"\n\n"


@dataclass(frozen=True)
class ChatChunks:
    """The chunks of a `/v1/chat/completions` answer."""

    answer: Answer
    n: int
    codec: Codec | None
    """Codec that decodes the tokens, if log-probs are requested."""
    include_usage: bool

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.n)]

    def chunks(self, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
        for index, call in enumerate(calls):
            message = wire_message(call.message)
            if "reasoning_content" in message:
                yield self._chunk(index, {"reasoning_content": message["reasoning_content"]})
            if message["content"] or self.codec:
                logprobs = chat_logprobs(call, self.codec) if self.codec else None
                yield self._chunk(index, {"content": message["content"] or ""}, logprobs=logprobs)
            for number, tool_call in enumerate(message.get("tool_calls", ())):
                yield self._chunk(index, {"tool_calls": [{"index": number, **tool_call}]})
            yield self._chunk(index, {}, finish=call.finish_reason)
        if self.include_usage:
            yield {**self.answer.head("chat.completion.chunk"), "choices": [], "usage": usage(calls)}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self.answer.head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk


@dataclass(frozen=True)
class CompletionChunks:
    """The chunks of a `/v1/completions` answer."""

    answer: Answer
    codec: Codec | None
    include_usage: bool

    def chunks(self, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
        for index, call in enumerate(calls):
            chunk = {**self.answer.head(), "choices": [completion_choice(index, call, self.codec)]}
            yield {**chunk, "usage": None} if self.include_usage else chunk
        if self.include_usage:
            yield {**self.answer.head(), "choices": [], "usage": usage(calls)}
