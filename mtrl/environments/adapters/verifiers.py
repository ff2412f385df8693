"""verifiers: `MultiTurnEnv` and its subclasses (`verifiers>=0.2,<0.4`).

The target is the class, or the function `load_environment` of an environment package with an annotated return type;
`environment.config` holds its arguments. One object serves the whole run, as it does in verifiers, and every episode
has a `state` of its own. The steps are those of verifiers' `rollout`: `setup_state`, then `env_response` after every
turn until `is_completed`, then the clean-up and the rubric.

Rows come from the environment's own data set, or from `data.path`, and provide `answer` and `info`. The rubric's
weighted sum is added to the reward of the last turn. A `reward` that the environment sets in a step of its trajectory
is the reward of that turn. Every function of the rubric is a component of the last turn, so that `reward.components`
can weight them differently. An episode is a success if the sum is at least the environment's `pass_threshold`, however
the reward is composed.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mtrl.datasets import Splits
from mtrl.environments.adapters.base import EnvironmentAdapter, metrics_of, plain_message
from mtrl.environments.base import StepResult
from mtrl.errors import UserError, missing_extra
from mtrl.types import Message, Row, Trajectory
from mtrl.utils.arrow_rows import check_json, write_times

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PASS_THRESHOLD = 0.5
"""Default threshold of verifiers, for an environment that sets none."""


class VerifiersAdapter(EnvironmentAdapter):
    """One episode of a verifiers environment."""

    shared: ClassVar[Any] = None
    """The environment that all episodes share."""

    def __init__(self, max_turns: int = 5, **config: Any):
        """
        Raises:
            UserError: the environment cannot be made, is not a `MultiTurnEnv`, or compares the rollouts of a group.
        """
        super().__init__(max_turns, **config)
        self.env = self.build(**config)
        self.state: Any = None
        self.prompt: list[Any] = []

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the environment's tools, in OpenAI's form."""
        definitions = self.env.tool_defs if self.state is None else self.state.get("tool_defs")
        return [_schema(each) for each in definitions or ()]

    @classmethod
    def build(cls, **config: Any) -> Any:
        """Return the environment of the run. The first call makes it, and must be on the main thread, because the
        environment sets signal handlers."""
        if cls.shared is None:
            env = _keeping_signals(cls.foreign, config)
            if not hasattr(env, "get_prompt_messages"):
                raise UserError(
                    f"{cls.__name__} is a {type(env).__name__}; only a MultiTurnEnv of verifiers can be run"
                )
            if env.requires_group_rollouts:
                raise UserError(
                    f"the rubric of {cls.__name__} compares the rollouts of a group; "
                    "give it functions of one rollout, and let algorithm compare"
                )
            cls.shared = env
        return cls.shared

    @classmethod
    def load(cls, data: Any, seed: int = 0, **config: Any) -> Splits:
        """Return the rows of `data.path`, or of the environment's own data sets."""
        from mtrl.datasets import HELD_OUT, cap, load_rows

        env = cls.build(**config)
        if data.path is not None:
            return _with_system_prompt(load_rows(data, seed), env.system_prompt)
        if env.build_dataset() is None:
            raise UserError(f"{cls.__name__} has no data set to train on; set data.path")
        rows = cls._rows(env.get_dataset(), "train")
        if env.build_eval_dataset() is None:
            return cap(Splits([r for n, r in enumerate(rows) if n % HELD_OUT], rows[::HELD_OUT]), data)
        test = cls._rows(env.get_eval_dataset(), "test")
        held_out = {json.dumps(row["prompt"]) for row in test}
        return cap(Splits([row for row in rows if json.dumps(row["prompt"]) not in held_out], test), data)

    @classmethod
    def _rows(cls, dataset: Iterable[Mapping[str, Any]], split: str) -> list[Row]:
        from mtrl.datasets import to_row

        raws = [dict(raw) for raw in dataset]
        for raw in raws:
            write_times([raw], raw)
        rows = [to_row(raw, split, n) for n, raw in enumerate(raws)]
        for row in rows:
            check_json(row, f"the data set of {cls.__name__}")
        return rows

    @staticmethod
    def score(trajectory: Trajectory, row: Row) -> float:
        """Return 1.0 if the rubric's sum, before any composition of rewards, reached the threshold, else 0.0."""
        return trajectory.turns[-1].metrics.get("rubric_passed", 0.0)

    async def reset(self, row: Row | None = None) -> list[Message]:  # type: ignore[override]
        super().reset()
        task = {"example_id": 0, **{name: v for name, v in (row or {"prompt": []}).items() if name != "id"}}
        self.state = await self.env.init_state(task, _no_client(), "policy", {})
        self.state = await self.env.setup_state(self.state) or self.state
        await self.env.is_completed(self.state)
        self.prompt = list(await self.env.get_prompt_messages(self.state))
        return [plain_message(message) for message in self.prompt]

    async def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:  # type: ignore[override]
        return await self.respond({"role": "assistant", "content": response}, response, ground_truth)

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        env, state = self.env, self.state
        await env.add_model_response(state, self.prompt, _response(message, self.current_turn))
        last = state["trajectory"][-1]
        reward = last["reward"] or 0.0
        known = len(self.prompt) + len(last["completion"])
        done = await env.is_completed(state)
        new: list[Any] = []
        if not done:
            self.prompt = list(await env.get_prompt_messages(state))
            new = self.prompt[known:]
            done = await env.is_completed(state)  # `env_response` may have ended it
            new = _as_messages(state["final_env_response"]) if state.get("final_env_response") else new
        if state.get("error") is not None:
            raise RuntimeError(f"{type(self).__name__} failed: {state['error']!r}") from state["error"]
        observation = [plain_message(each) for each in new]
        cut = state.get("stop_condition") == "max_turns_reached"
        if not done and self.current_turn < self.max_turns:
            return StepResult(reward, observation)
        scored = await self._finish()
        return replace(scored, reward=reward + scored.reward, observation=observation, truncated=cut or not done)

    async def truncate(self, ground_truth: dict[str, Any]) -> StepResult:  # type: ignore[override]
        """Score an episode that a limit of the run cuts after a turn that did not end it."""
        return await self._finish()

    async def _finish(self) -> StepResult:
        """Clean up and score. The reward is the rubric's weighted sum, and each of its functions is a component."""
        state, env = self.state, self.env
        self.env = None  # so that `close` does not clean up again
        await env.cleanup(state)
        if state["completion"] is None:
            await env.render_completion(state)
        await env.rubric.score_rollout(state)
        await env.rubric.cleanup(state)
        rubric = float(state["reward"])
        passed = rubric >= getattr(env, "pass_threshold", PASS_THRESHOLD)
        components = {name: value for name, value in metrics_of(state["metrics"]).items() if name != "environment"}
        metrics = {"rubric": rubric, "rubric_passed": float(passed)}
        return StepResult(rubric, None, True, components, metrics, truncated=True)

    def close(self) -> Any:
        """Close the episode. If it did not reach its end, return the awaitable that cleans up its state."""
        super().close()
        env, self.env = self.env, None
        return None if env is None or self.state is None else env.cleanup(self.state)


def _keeping_signals(make: Any, arguments: dict[str, Any]) -> Any:
    """Call `make` and then restore the signal handlers: verifiers sets its own, and the trainer has one."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("verifiers can make environments on the main thread alone")
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return make(**arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _no_client() -> Any:
    """Return a client that refuses every request, because the policy of the run answers."""
    try:
        from verifiers.clients import Client
    except ImportError as error:
        raise missing_extra("verifiers", "verifiers") from error

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("an environment asked verifiers' client; only the policy of the run answers")

    return type("PolicyClient", (Client,), dict.fromkeys(Client.__abstractmethods__, refuse))(None)


def _response(message: Message, turn: int) -> Any:
    from verifiers.types import Response, ResponseMessage, ToolCall

    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=_text(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    sampled = ResponseMessage(
        content=message.get("content") or "",
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id=f"turn-{turn}", created=0, model="policy", message=sampled)


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _as_messages(response: Any) -> list[Any]:
    return [{"role": "user", "content": response}] if isinstance(response, str) else list(response)


def _schema(tool: Any) -> dict[str, Any]:
    definition = tool if isinstance(tool, dict) else tool.model_dump(exclude_none=True)
    return {"type": "function", "function": {name: definition[name] for name in ("name", "description", "parameters")}}


def _with_system_prompt(splits: Splits, text: str | None) -> Splits:
    for row in (*splits.train, *splits.test):
        if text and row["prompt"][0]["role"] != "system":
            row["prompt"] = [{"role": "system", "content": text}, *row["prompt"]]
    return splits
