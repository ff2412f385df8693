"""The worker process of `examples/agents/verifiers_agent.py`: it makes verifiers environments and plays their episodes.

It runs in verifiers' own interpreter and imports nothing of mtrl. Requests arrive as JSON lines on the standard input,
and answers leave as JSON lines on what was the standard output::

    {"id": 1, "do": "rows", "env": {…}, "limit": null}                  -> {"id": 1, "value": [{…}, …]}
    {"id": 2, "do": "play", "env": {…}, "task": {…}, "base_url": "…", "model": "…"}
                                                                        -> {"id": 2, "value": {"reward": 1.0, …}}
    {"id": 2, "do": "cancel"}                                           -> no answer
    a request that failed                                               -> {"id": 2, "error": "one sentence"}

`env` is verifiers' own `[env]` block. The process ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from itertools import islice
from typing import Any

HARNESS, RUNTIME = {"id": "mtrl_chat"}, {"type": "subprocess"}
"""Harness and runtime of an agent whose environment names none: verifiers' own defaults run commands of the policy, and
rent a machine for it."""
UNREACHABLE = ("ConnectionError", "ConnectError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "URLError")
"""Classes of errors by which a data set or a package cannot be downloaded."""

LONGEST_REQUEST = 2**28
"""Maximum number of bytes of one request."""


class RequestError(Exception):
    """A request cannot be answered; the message is one sentence with the fix."""


class Environment:
    """One environment of verifiers, with its tool servers that all episodes share."""

    def __init__(self, block: dict[str, Any]):
        """
        Raises:
            RequestError: the environment is not installed, or its settings are not valid.
        """
        from verifiers.v1.utils.loaders import load_environment

        self.name = str((block.get("taskset") or {}).get("id"))
        try:
            self.env = load_environment(_config(block))
        except Exception as error:
            raise _failure(error, self.name) from error
        self.policy = self._policy()
        self.serving: asyncio.Task[None] | None = None
        self.ready, self.closing = asyncio.Event(), asyncio.Event()

    def rows(self, limit: int | None) -> list[dict[str, Any]]:
        """Return the data of the tasks, at most `limit`.

        Raises:
            RequestError: the tasks cannot be loaded, or never end.
        """
        taskset = self.env.taskset
        if limit is None and not taskset.bounded:
            raise RequestError(
                f"environment.config.taskset.id={self.name} has tasks without an end; set environment.config.tasks to "
                "the number of tasks to take"
            )
        try:
            return [_plain(task.data) for task in islice(taskset, limit)]
        except Exception as error:
            raise _failure(error, self.name) from error

    async def play(self, task: dict[str, Any], base_url: str, model: str) -> dict[str, Any]:
        """Play one episode, and return its reward and metrics.

        Raises:
            RequestError: the environment or its agent failed, or the reward is not a finite number.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        await self._start()
        # The address holds the trajectory's token, so no key is needed.
        client = EvalClientConfig(base_url=base_url, api_key_var="MTRL_NO_KEY")
        kind = type(self.env.taskset).task_type()
        made = kind(kind.data_type().model_validate(task), self.env.config.taskset.task)
        episode = await self.env.run_episode(made, ModelContext(client=client, model=model, sampling=SamplingConfig()))
        return self._outcome(episode)

    async def close(self) -> None:
        """End the tool servers."""
        self.closing.set()
        if self.serving is not None:
            await asyncio.wait((self.serving,))

    async def _start(self) -> None:
        """Start what all episodes share, at the first episode."""
        if self.serving is None:
            self.serving = asyncio.ensure_future(self._serve())
        ready = asyncio.ensure_future(self.ready.wait())
        try:
            await asyncio.wait((self.serving, ready), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self.serving.done():
            self.serving.result()

    async def _serve(self) -> None:
        async with self.env.serving():
            # verifiers would keep one HTTP client for every address, and each episode has an address of its own.
            # Without this server, each episode starts and closes its own.
            self.env._interception = None
            self.ready.set()
            await self.closing.wait()

    def _policy(self) -> str:
        """Return the name of the only agent that the policy plays."""
        from verifiers.v1.configs.agent import agent_config_fields

        agents = agent_config_fields(self.env.config)
        played = [name for name, agent in agents.items() if agent.client is None]
        if len(played) == 1:
            return played[0]
        raise RequestError(
            f"environment.config.taskset.id={self.name}: the policy would play {len(played)} agents "
            f"({', '.join(agents)}), and exactly one can be trained; give the others an endpoint, as in "
            "environment.config.NAME.client.base_url"
        )

    def _outcome(self, episode: Any) -> dict[str, Any]:
        traces = [trace for trace in episode.traces if trace.agent.name == self.policy]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            problem = f"{errors[-1].type}: {_line(errors[-1].message)}" if errors else "it names no error"
            if "float" in problem:  # verifiers converts the values of the environment's functions
                problem += "; let the functions of @vf.reward and @vf.metric return numbers"
            raise RequestError(f"an episode of {self.name} failed: {problem}")
        if len(traces) != 1:
            raise RequestError(f"{self.name}: agent {self.policy} ran {len(traces)} times in one episode, not once")
        (trace,) = traces
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        if not scores:
            raise RequestError(f"{self.name} gave no reward; mark a method of its task with @vf.reward")
        metrics = {**{name: value for name, value in trace.metrics.items() if value is not None}, **scores}
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise RequestError(f"the function {name} of {self.name} gave {value}; let it return a finite number")
        return {"reward": trace.reward, "metrics": metrics}


def _config(block: dict[str, Any]) -> Any:
    """Return verifiers' configuration of an `[env]` block, in which agents without a harness and runtime get ours."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    taskset = str((block.get("taskset") or {}).get("id") or "")
    ships_harness = default_harness_id(taskset) != "bash"
    block = dict(block)
    for name, field in env_config_type(taskset, block.get("id") or "").model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        agent = block[name] = dict(block.get(name) or {})
        theirs = field.default.harness
        if theirs.id == "null" if theirs else not ships_harness:  # `null` is the same chat in a process of its own
            agent.setdefault("harness", HARNESS)
        if "runtime" not in field.default.model_fields_set:
            agent.setdefault("runtime", RUNTIME)
    return resolve_env_config(block)


def _plain(data: Any) -> dict[str, Any]:
    """Return a task's data without default values, and with the text of its prompt as `prompt_text`."""
    return {**data.model_dump(mode="json", exclude_defaults=True, exclude_none=True), "prompt_text": data.prompt_text}


def _failure(error: BaseException, name: str) -> RequestError:
    """Return the sentence about an environment that cannot be made or has no tasks."""
    chain, seen = error, []
    while chain is not None and chain not in seen:
        seen.append(chain)
        chain = chain.__cause__ or chain.__context__  # type: ignore[assignment]
    if any(kind.__name__ in UNREACHABLE for each in seen for kind in type(each).__mro__):
        return RequestError(
            f"environment.config.taskset.id={name} needs a download that failed ({_line(error)}); run it once where "
            "the network can be reached, and set HF_HOME to the folder that then holds the data"
        )
    missing = next((each.name for each in seen if isinstance(each, ModuleNotFoundError) and each.name), None)
    if missing is not None:
        return RequestError(
            f"environment.config.taskset.id={name} needs the module {missing}, which is not installed; install the "
            f"environment's package with: {sys.executable} -m pip install PACKAGE"
        )
    if type(error).__name__ == "ValidationError":
        first = error.errors()[0]  # type: ignore[attr-defined]
        key = ".".join(map(str, ("environment.config", *first["loc"])))
        return RequestError(
            f"{key}={first['input']!r:.100} is refused by verifiers ({first['msg']}); correct it by the settings of "
            f"{name}"
        )
    return RequestError(f"environment.config.taskset.id={name} cannot be made: {type(error).__name__}: {_line(error)}")


def _line(error: object) -> str:
    """Return the text of an error on one line, of at most 300 characters."""
    return " ".join(str(error).split())[:300]


class Worker:
    """Answers requests, many at once."""

    def __init__(self, output: Any):
        self.output = output
        self.environments: dict[str, Environment] = {}
        self.running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Read requests until the end of the input or SIGTERM, and then close the environments."""
        loop, requests = asyncio.get_running_loop(), asyncio.StreamReader(limit=LONGEST_REQUEST)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
        loop.add_signal_handler(signal.SIGTERM, requests.feed_eof)
        try:
            while line := await requests.readline():
                request = json.loads(line)
                if request["do"] == "cancel":
                    if task := self.running.get(request["id"]):
                        task.cancel()
                    continue
                task = self.running[request["id"]] = asyncio.ensure_future(self.answer(request))
                task.add_done_callback(lambda _, number=request["id"]: self.running.pop(number))
        finally:
            for task in (running := [*self.running.values()]):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*(environment.close() for environment in self.environments.values()))

    async def answer(self, request: dict[str, Any]) -> None:
        """Answer one request. A failure of the environment's code, of any kind, is an answer too."""
        try:
            answer = json.dumps({"id": request["id"], "value": await self.value(request)})
        except asyncio.CancelledError:
            raise
        except RequestError as error:
            answer = json.dumps({"id": request["id"], "error": str(error)})
        except (Exception, SystemExit) as error:
            answer = json.dumps({"id": request["id"], "error": f"{type(error).__name__}: {_line(error)}"})
        print(answer, file=self.output, flush=True)

    async def value(self, request: dict[str, Any]) -> Any:
        environment = self.environment(request["env"])
        if request["do"] == "rows":
            return environment.rows(request["limit"])
        return await environment.play(request["task"], request["base_url"], request["model"])

    def environment(self, block: dict[str, Any]) -> Environment:
        """Return the environment of an `[env]` block, made at its first use."""
        key = json.dumps(block, sort_keys=True)
        if key not in self.environments:
            self.environments[key] = Environment(block)
        return self.environments[key]


def main() -> None:
    """Import verifiers, report its version, and answer requests."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an environment prints is not an answer
    try:
        import verifiers.v1  # noqa: F401
        from verifiers import __version__ as version
    except ImportError as error:
        ready = {"error": f"{sys.executable} has no verifiers 0.4 ({_line(error)})"}
    else:
        ready = {"value": version}
    print(json.dumps({"id": 0, **ready}), file=output, flush=True)
    asyncio.run(Worker(output).run())


if __name__ == "__main__":
    main()
