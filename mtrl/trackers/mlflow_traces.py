"""A trajectory as an MLflow trace: a span for the episode, one for each turn, one for each tool call.

Ids are derived from the run, the location and the content of the trajectory, so a trace that is sent twice is stored
once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mtrl.scoring.measures import episode_tokens
from mtrl.trackers.items import SentTrajectory
from mtrl.trackers.mlflow_names import presentable, short_text
from mtrl.types import FAILED, Message, StopReason, Turn

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

PREVIEW = 1000
WITHOUT_END = (*FAILED, StopReason.ABORTED)


@dataclass(frozen=True)
class TraceWriter:
    """Builds the traces of one run."""

    run: str
    """Id of the run in mtrl (`Identity.id`)."""
    mlflow_run: str
    experiment: str

    def trace_id(self, episode: SentTrajectory) -> str:
        return f"tr-{self._hex(episode, 'trace', 32)}"

    def spans(self, episode: SentTrajectory) -> list[Span]:
        """Return the span of the episode, then the spans of its turns, each followed by those of its tool calls."""
        return [*_Spans(self, episode).all()]

    def info(self, episode: SentTrajectory) -> TraceInfo:
        """Return the entry of the list of traces. It names the run and the group (as a session), and has reward, score
        and verdict as feedback."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        trajectory, place = episode.trajectory, _place(episode)
        prompt, response = _ends(episode)
        metadata = {
            "mlflow.sourceRun": self.mlflow_run,
            "mlflow.trace.session": short_text(f"{episode.file}/{trajectory.group_id}", 250),
        }
        tags = {
            "mlflow.traceName": episode.kind,
            "mtrl.kind": episode.kind,
            "mtrl.step": str(episode.step),
            "mtrl.place": place,
            "mtrl.task": trajectory.task_id,
            "mtrl.group": trajectory.group_id,
            "mtrl.index": str(trajectory.index),
            "mtrl.stop_reason": str(trajectory.stop_reason),
            "mtrl.verdict": episode.verdict,
        }
        milliseconds = round(1000 * _seconds(episode))
        return TraceInfo(
            trace_id=self.trace_id(episode),
            trace_location=TraceLocation.from_experiment_id(self.experiment),
            request_time=episode.milliseconds - milliseconds,
            execution_duration=milliseconds,
            state=TraceState.ERROR if trajectory.stop_reason in WITHOUT_END else TraceState.OK,
            request_preview=short_text(_text(prompt), PREVIEW),
            response_preview=short_text(_text(response), PREVIEW),
            trace_metadata=metadata,
            tags={name: short_text(value, 250) for name, value in tags.items()},
            assessments=self._assessments(episode),
        )

    def span(self, episode: SentTrajectory, name: str, parent: str | None, shown: Shown) -> Span:
        """Return one span; `name` is unique within its trace."""
        from mlflow.entities import Span

        whole = _place(episode)
        attributes = {
            "mlflow.traceRequestId": self.trace_id(episode),
            "mlflow.spanType": shown.type,
            "mlflow.spanInputs": presentable(shown.inputs, whole),
            "mlflow.spanOutputs": presentable(shown.outputs, whole),
            **{key: presentable(value, whole) for key, value in shown.attributes.items()},
        }
        return Span.from_dict(
            {
                "trace_id": _base64(self._hex(episode, "trace", 32)),
                "span_id": _base64(self._hex(episode, name, 16)),
                "parent_span_id": _base64(self._hex(episode, parent, 16)) if parent else None,
                "name": short_text(name, 250),
                "start_time_unix_nano": shown.start,
                "end_time_unix_nano": shown.end,
                "events": [],
                "links": [],
                "status": {"code": f"STATUS_CODE_{'ERROR' if shown.failed else 'OK'}", "message": ""},
                "attributes": {key: json.dumps(value) for key, value in attributes.items()},
            }
        )

    def _assessments(self, episode: SentTrajectory) -> list[Any]:
        from mlflow.entities import AssessmentSource, Feedback

        values = {"reward": episode.trajectory.reward, "score": episode.trajectory.score, "verdict": episode.verdict}
        found = []
        for name, value in values.items():
            if isinstance(value, str) or (value is not None and math.isfinite(value)):
                source = AssessmentSource(source_type="CODE", source_id="mtrl")
                feedback = Feedback(name=name, value=value, source=source, trace_id=self.trace_id(episode))
                feedback.assessment_id = f"a-{self._hex(episode, name, 32)}"
                feedback.create_time_ms = feedback.last_update_time_ms = episode.milliseconds
                found.append(feedback)
        return found

    def _hex(self, episode: SentTrajectory, part: str, digits: int) -> str:
        words = "\n".join([self.run, self.experiment, episode.key, episode.digest, part])
        return hashlib.sha256(words.encode("utf-8", "backslashreplace")).hexdigest()[:digits]


@dataclass(frozen=True)
class Shown:
    """Content of a span. Times are in nanoseconds since 1970."""

    type: str
    start: int
    end: int
    inputs: Any
    outputs: Any
    attributes: dict[str, Any]
    failed: bool = False


class _Spans:
    """Places the spans of one trajectory in time by its recorded seconds, so that the last turn ends when its step
    ends."""

    def __init__(self, writer: TraceWriter, episode: SentTrajectory):
        self.writer, self.episode = writer, episode
        self.end = episode.milliseconds * 1_000_000
        self.start = self.end - round(1e9 * _seconds(episode))

    def all(self) -> Iterator[Span]:
        yield self._root()
        turns, now = self.episode.trajectory.turns, self.start
        later = {turn.parent: turn.observation for turn in turns if turn.parent is not None}
        for number, (turn, context) in enumerate(zip(turns, self.episode.trajectory.contexts, strict=True)):
            following = turns[number + 1].observation if number + 1 < len(turns) else None
            answered = later.get(number, following)
            answer = self.episode.trajectory.final_observation if answered is None else answered
            generated = now + round(1e9 * turn.seconds_generate)
            after = generated + round(1e9 * turn.seconds_environment)
            yield self._turn(number, turn, context, now, after)
            yield from self._tools(number, turn, answer, generated, after)
            now = after

    def _span(self, name: str, parent: str | None, shown: Shown) -> Span:
        return self.writer.span(self.episode, name, parent, shown)

    def _root(self) -> Span:
        episode, trajectory = self.episode, self.episode.trajectory
        prompt, response = _ends(episode)
        attributes = {
            "task_id": trajectory.task_id,
            "group_id": trajectory.group_id,
            "index": trajectory.index,
            "step": episode.step,
            "kind": episode.kind,
            "reward": trajectory.reward,
            "score": trajectory.score,
            "verdict": episode.verdict,
            "stop_reason": str(trajectory.stop_reason),
            "turns": len(trajectory.turns),
            "tokens": episode_tokens(trajectory),
            "trainable": trajectory.trainable,
            "metrics": trajectory.metrics,
            "final_observation": trajectory.final_observation,
            "error": trajectory.error,
            "place": _place(episode),
        }
        failed = trajectory.stop_reason in WITHOUT_END
        inputs, outputs = {"messages": prompt}, _answer(response)
        shown = Shown("AGENT", self.start, self.end, inputs, outputs, attributes, failed)
        return self._span("episode", None, shown)

    def _turn(self, number: int, turn: Turn, context: int, start: int, end: int) -> Span:
        sampled = len(turn.action_ids)
        attributes = {
            "text": turn.text,  # the raw text, because MLflow renders messages as Markdown
            "reward": turn.reward,
            "components": turn.components,
            "metrics": turn.metrics,
            "tokens": sampled,
            "finish": str(turn.finish),
            "versions": [list(span) for span in turn.version_spans],
            "logprob_mean": _mean(turn.action_logprobs),
            "advantage_mean": _mean(turn.advantages),
            "trainer_logprob_mean": _mean(turn.trainer_logprobs),
            "break_reason": turn.break_reason,
            "seconds_generate": turn.seconds_generate,
            "seconds_environment": turn.seconds_environment,
            "mlflow.chat.tokenUsage": {
                "input_tokens": context,
                "output_tokens": sampled,
                "total_tokens": context + sampled,
            },
        }
        shown = Shown("CHAT_MODEL", start, end, {"messages": turn.observation}, _answer(turn.message), attributes)
        return self._span(f"turn {number}", "episode", shown)

    def _tools(self, number: int, turn: Turn, answer: list[Message], start: int, end: int) -> Iterator[Span]:
        calls = turn.message.get("tool_calls")
        replies = [m for m in answer if m.get("role") == "tool"] or answer
        for place, call in enumerate(calls if isinstance(calls, list) else []):
            function = call.get("function", call) if isinstance(call, dict) else {"name": str(call)}
            name = function.get("name") if isinstance(function, dict) else function
            arguments = function.get("arguments") if isinstance(function, dict) else None
            id_ = call.get("id") if isinstance(call, dict) else None
            reply = [m for m in replies if id_ and m.get("tool_call_id") == id_] or replies[place : place + 1]
            shown = Shown("TOOL", start, end, _parsed(arguments), reply[0].get("content") if reply else None, {})
            yield self._span(f"turn {number} tool {place} {name}", f"turn {number}", shown)


def _ends(episode: SentTrajectory) -> tuple[list[Message], Any]:
    """Return the prompt and the last message of the model."""
    turns = episode.trajectory.turns
    return (turns[0].observation, turns[-1].message) if turns else ([], None)


def _answer(message: Message | None) -> Any:
    """Return a message in the form of OpenAI's responses, which MLflow shows as a conversation."""
    return None if message is None else {"choices": [{"message": message}]}


def _text(content: Any) -> str:
    """Return the text of the last message, or its tool calls if it has no text."""
    message = content[-1] if isinstance(content, list) and content else content
    content = message.get("content") if isinstance(message, dict) else message
    if not content and isinstance(message, dict) and message.get("tool_calls"):
        content = message["tool_calls"]
    return content if isinstance(content, str) else json.dumps(content, default=str)


def _seconds(episode: SentTrajectory) -> float:
    return sum(turn.seconds_generate + turn.seconds_environment for turn in episode.trajectory.turns)


def _place(episode: SentTrajectory) -> str:
    return f"trajectories/{episode.file}.jsonl line {episode.line}"


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _base64(digits: str) -> str:
    return base64.b64encode(bytes.fromhex(digits)).decode("ascii")
