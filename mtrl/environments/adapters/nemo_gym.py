"""NeMo Gym: a resources server, which holds the tools, the state and the reward of a task.

`environment.target=mtrl.environments.adapters.nemo_gym.NemoGym`. `environment.config.base_url` is the address of the
server, which `scripts/nemo_gym_server.py` starts. `data.path` names rows of NeMo Gym: `responses_create_params` holds
the messages and the tools, and the other columns are for the server.

The requests of an episode are those of NeMo Gym's own `simple_agent`: `POST /seed_session` with the row, `POST /TOOL`
with the arguments of each call, and `POST /verify` with the row and the response, whose items are the messages, calls
and results of all turns. A cookie holds the session. The first turn without a call, or the last of
`generator.max_turns`, ends the episode with the reward of `/verify`; other turns have no reward. Numbers that `/verify`
returns under names that the row does not have are metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from http.client import HTTPException
from http.cookiejar import CookieJar
from threading import TIMEOUT_MAX
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, ProxyHandler, Request, build_opener

from mtrl.datasets import Splits, load_splits
from mtrl.environments.adapters.base import metrics_of
from mtrl.environments.base import StepResult
from mtrl.environments.tools import NAME, Tool, ToolEnvironment, ToolError, toolbox
from mtrl.errors import UserError
from mtrl.types import Message, Row
from mtrl.utils.strict_json import strict_loads

MAX_BYTES = 4 * 2**20
"""Maximum size of a server's response, in bytes."""
RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp"})
"""Paths of a server that are no tools."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of an item of the input -> role of the message."""


class NemoGym(ToolEnvironment):
    """One episode of a task whose tools and reward a resources server of NeMo Gym has."""

    def __init__(self, max_turns: int = 5, base_url: str = "", request_timeout: float = 60.0, **config: Any):
        """
        Args:
            base_url: address of the server, such as http://127.0.0.1:8000.
            request_timeout: time limit of one request, in seconds; a call of a tool also has `tool_timeout`.

        Raises:
            UserError: `base_url` is no address.
        """
        super().__init__(max_turns, **config)
        if not str(base_url).startswith(("http://", "https://")):
            raise UserError(
                f"environment.config.base_url={base_url!r} is no address of a NeMo Gym resources server; write "
                "http://127.0.0.1:PORT"
            )
        self.base_url, self.request_timeout = str(base_url).rstrip("/"), request_timeout

    @staticmethod
    def load(data: Any, seed: int = 0, **config: Any) -> Splits:
        """Load rows of NeMo Gym from `data.path`.

        Raises:
            UserError: `data.path` is not set, or a row has another form.
        """
        if data.path is None:
            raise UserError(
                "data.path=null, and a NeMo Gym resources server has no rows; set data.path to its JSONL file, whose "
                "rows have responses_create_params"
            )
        return load_splits(data, row_of)

    def reset(self, row: Row | None = None) -> list[Message]:
        """Start a session of the server for the row.

        Raises:
            UserError: the row is none of NeMo Gym, or the server does not accept it.
        """
        super().reset(row)
        if row is None or "task" not in row:
            raise UserError("a row of NeMo Gym has its columns in task; load the rows by the environment's own load")
        self.task, self.output = row["task"], list[dict[str, Any]]()
        self.session = NemoGymSession(self.base_url, self.request_timeout)
        self._required("seed_session", self.task)
        self.toolbox = toolbox(*(self._tool(each) for each in self.task["responses_create_params"].get("tools") or ()))
        return list(row["prompt"])

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> Any:
        calls = message.get("tool_calls") or []
        start = len(self.output)  # makes the names of the items unique
        sent = {place: item for place, call in enumerate(calls) if (item := call_item(call, f"call_{start}_{place}"))}
        self.output += [*message_items(message, f"msg_{start}"), *sent.values()]
        result = await super().respond(message, response, ground_truth)
        if not calls:
            return result
        self.output += [result_item(item, result.observation[place]) for place, item in sent.items()]
        if not result.done:
            return result
        verified = await self._call(self._verify, TIMEOUT_MAX)
        return replace(result, reward=verified.reward, metrics={**verified.metrics, **result.metrics})

    def answer(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        return self._verify()

    def truncate(self, ground_truth: dict[str, Any]) -> dict[str, float]:
        """Return the reward of an episode that a limit of the run cuts, as NeMo Gym's agent verifies it too."""
        return {"verify": self._verify().reward}

    def _verify(self) -> StepResult:
        settings = self.task["responses_create_params"]
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": 0,  # a clock would make equal episodes differ
            "model": "policy",
            "output": self.output,
            "tools": settings.get("tools") or [],
            "tool_choice": settings.get("tool_choice") or "auto",
            "parallel_tool_calls": settings.get("parallel_tool_calls") is not False,
        }
        verdict = self._required("verify", {**self.task, "response": response})
        reward = verdict.get("reward") if isinstance(verdict, dict) else None
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{self.base_url}/verify returned the reward {reward!r:.80}; it must be a finite number")
        known = {"reward", "response", *self.task}
        metrics = metrics_of({name: value for name, value in verdict.items() if name not in known})
        return StepResult(float(reward), None, done=True, metrics=metrics)

    def _required(self, path: str, body: Any) -> Any:
        """Return the parsed response to a request without which the episode cannot go on."""
        status, text = self.session.post(path, body)
        if status >= 400:
            raise UserError(f"{self.base_url}/{path} answered with status {status}: {' '.join(text.split())[:300]}")
        try:
            return strict_loads(text)
        except ValueError as error:
            raise UserError(f"{self.base_url}/{path} returned no JSON: {' '.join(text.split())[:80]}") from error

    def _tool(self, offered: Any) -> Tool:
        fields = offered if isinstance(offered, Mapping) else {}
        name = fields.get("name")
        if fields.get("type") != "function" or not NAME.fullmatch(str(name)) or name in RESERVED:
            raise UserError(
                f"responses_create_params.tools has {str(offered)[:80]}; each tool needs type=function and a name of "
                f"letters, digits, _ or - other than {', '.join(sorted(RESERVED))}"
            )

        def call(**arguments: Any) -> str:
            status, text = self.session.post(str(name), arguments)
            if status >= 400:
                raise ToolError(text)
            return text

        function = {
            "name": name,
            "description": fields.get("description") or name,
            "parameters": fields.get("parameters") or {"type": "object", "properties": {}},
        }
        return Tool(str(name), {"type": "function", "function": function}, call)


class NemoGymSession:
    """The requests of one episode, which share cookies."""

    def __init__(self, base_url: str, timeout: float):
        self.base_url, self.timeout = base_url, timeout
        direct = [ProxyHandler({})] if urlsplit(base_url).hostname in LOOPBACK else []
        self._opener = build_opener(HTTPCookieProcessor(CookieJar()), *direct)

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Send JSON, and return the status and the text of the response.

        Raises:
            UserError: the server cannot be reached, or its response is too large.
        """
        url = f"{self.base_url}/{path}"
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                status, content = response.status, response.read(MAX_BYTES + 1)
        except HTTPError as error:
            with error:
                status, content = error.code, error.read(MAX_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise UserError(
                f"{url} cannot be reached ({error or type(error).__name__}); start the server, or set "
                "environment.config.base_url"
            ) from error
        if len(content) > MAX_BYTES:
            raise UserError(f"{url} returned more than {MAX_BYTES} bytes")
        return status, content.decode(errors="replace")


# -- rows -------------------------------------------------------------------------------------------------------------


def row_of(raw: dict[str, Any], split: str, index: int) -> Row:
    """Return a row whose `task` holds all columns for the server, and whose prompt is the input of the response.

    Raises:
        UserError: the row has no `responses_create_params`, or an input that is no text.
    """
    settings = raw.get("responses_create_params")
    if not isinstance(settings, dict) or not settings.get("input"):
        raise UserError(
            f"row {index} of data.path has no responses_create_params.input; a row of NeMo Gym needs it, and this one "
            f"has {', '.join(map(str, raw))}"
        )
    prompt = [{"role": "system", "content": settings["instructions"]}] if settings.get("instructions") else []
    given = settings["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    prompt += [_message(item, index) for item in items]
    return {"id": f"{split}-{index}", "prompt": prompt, "ground_truth": {}, "split": split, "task": raw}


def _message(item: Any, index: int) -> Message:
    role = ROLES.get(item.get("role", "")) if isinstance(item, dict) else None
    text = _text(item.get("content")) if role else None
    if text is None:
        raise UserError(
            f"row {index} of data.path has the item {str(item)[:80]} in responses_create_params.input; each item must "
            f"be a message of text with role {', '.join(ROLES)}"
        )
    return {"role": role, "content": text}


def _text(content: Any) -> str | None:
    """Return the text of a content, which is a text or a list of parts; None if a part is no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else None


# -- items of the response --------------------------------------------------------------------------------------------


def message_items(message: Message, name: str) -> Iterable[dict[str, Any]]:
    """Return the item of a message's text; no item if it has none and makes calls."""
    text = _text(message.get("content")) or ""
    if not text and message.get("tool_calls"):
        return []
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return [{"type": "message", "id": name, "role": "assistant", "status": "completed", "content": content}]


def call_item(call: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the item of a call; None for a call that cannot be read, which never reaches a server."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = strict_loads(arguments)
        except ValueError:
            return None
    if call.get("malformed") or not function.get("name") or not isinstance(arguments, dict):
        return None
    return {
        "type": "function_call",
        "id": name,
        "call_id": name,
        "name": str(function["name"]),
        "arguments": json.dumps(arguments),
        "status": "completed",
    }


def result_item(call: dict[str, Any], message: Message) -> dict[str, Any]:
    """Return the item of a call's result."""
    return {"type": "function_call_output", "call_id": call["call_id"], "output": message["content"]}
