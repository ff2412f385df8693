"""Environments of verifiers 0.4, with their code unchanged: tasks, tools, conversations and rewards.

    python -m venv verifiers && verifiers/bin/pip install 'verifiers>=0.4,<0.5' PACKAGE_OF_THE_ENVIRONMENT
    export MTRL_VERIFIERS_PYTHON=$PWD/verifiers/bin/python
    mtrl train experiment=null environment=agent name=words \
        environment.target=examples.agents.verifiers_agent.FAMILY environment.config.taskset.id=words \
        model=hf model.path=Qwen/Qwen2.5-0.5B-Instruct trainer.optimizer.lr=1e-6 \
        generator.agent.target=examples.agents.verifiers_agent.run

`environment.config` is verifiers' own `[env]` block: `taskset.id` names the package of the environment, and the other
keys are its settings, such as `agent.max_turns`. Two keys are mtrl's: `tasks` is the number of tasks to take, and
`held_out` holds the settings of the taskset that give the held-out rows, such as `held_out.split=test`; without it one
row of each eight is held out. verifiers runs in an interpreter of its own (`verifiers_worker.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from examples.agents.verifiers_worker import INSTALL, PYTHON, VerifiersWorker
from mtrl.agents.runner import AgentError
from mtrl.datasets import HELD_OUT, Splits, cap
from mtrl.environments.agent import agent_family
from mtrl.errors import UserError
from mtrl.types import Row

log = logging.getLogger(__name__)

START_TIMEOUT = 300.0
"""Seconds for the import of verifiers, which takes minutes from a cold network disk."""
_lock = threading.Lock()
_worker: VerifiersWorker | None = None


async def run(row: Row, client: Any) -> dict[str, Any]:
    """Play one episode for `generator.agent.target`.

    Returns:
        The weighted sum of the environment's rewards, and its metrics and single rewards as metrics.

    Raises:
        AgentError: the environment failed, or its process ended.
    """
    process = await asyncio.to_thread(worker)
    fields = {"env": row["env"], "task": row["task"], "base_url": client.base_url, "model": client.model}
    number, answer = process.request("play", **fields)
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        process.cancel(number)
        raise


def load(data: Any, seed: int, tasks: int | None = None, held_out: Any = None, **block: Any) -> Splits:
    """Load the tasks of an environment as rows.

    Args:
        tasks: number of tasks to take from each taskset; None: all.
        held_out: settings of the taskset whose tasks are held out; None: one task of each eight is held out.
        block: verifiers' `[env]` block.

    Raises:
        UserError: the interpreter or the environment is missing or has no tasks.
    """
    if not (block.get("taskset") or {}).get("id"):
        raise UserError("environment.config.taskset.id is not set; set it to the name of a verifiers environment")
    if data.path is not None:
        raise UserError(f"data.path={data.path} is not read, since the environment has its own tasks; set it to null")
    rows = _rows(block, "train", tasks)
    if held_out is None:
        test = [{**row, "id": f"test-{row['task']['idx']}", "split": "test"} for row in rows[::HELD_OUT]]
        rows = [row for number, row in enumerate(rows) if number % HELD_OUT]
    else:
        test = _rows({**block, "taskset": {**block["taskset"], **held_out}}, "test", tasks)
    known = {_content(row) for row in test}
    train = [row for row in rows if _content(row) not in known]
    if not train:
        raise UserError(
            f"environment.config.taskset.id={block['taskset']['id']}: every one of the {len(rows)} training tasks is "
            "held out as well; set environment.config.held_out to settings that give other tasks"
        )
    if len(train) < len(rows):
        log.warning("dropped %d training tasks that are held out as well", len(rows) - len(train))
    return cap(Splits(train, test), data)


FAMILY = agent_family("verifiers", load=load)
"""The task. Success is a reward of at least 1, because the environment's rewards are its only judgement."""


def worker() -> VerifiersWorker:
    """Return the worker of this process. It is started at the first call, and again after it has ended.

    Raises:
        UserError: the interpreter is missing, or has no verifiers 0.4.
    """
    global _worker
    with _lock:
        if _worker is None or not _worker.alive:
            started = VerifiersWorker()
            try:
                version = started.ready.result(START_TIMEOUT)
            except (AgentError, TimeoutError) as error:
                started.end()
                problem = str(error) or f"it has not answered for {START_TIMEOUT:g} s"
                raise UserError(f"{PYTHON}: {problem}; make an interpreter with: {INSTALL}") from error
            if not version.startswith("0.4."):
                started.end()
                raise UserError(f"{PYTHON} has verifiers {version} instead of 0.4; make an interpreter with: {INSTALL}")
            _worker = started
        return _worker


def _rows(block: dict[str, Any], split: str, limit: int | None) -> list[Row]:
    process = worker()
    try:
        tasks = process.request("rows", env=block, limit=limit)[1].result()
    except AgentError as error:
        raise UserError(str(error)) from error
    if not tasks:
        raise UserError(f"environment.config.taskset.id={block['taskset']['id']} has no tasks; check its settings")
    return [_row(task, block, split) for task in tasks]


def _row(task: dict[str, Any], block: dict[str, Any], split: str) -> Row:
    text = task.pop("prompt_text") or task.get("description") or task.get("name") or ""
    system = task.get("system_prompt")
    prompt = [{"role": "system", "content": system}] if system else []
    return {
        "id": f"{split}-{task['idx']}",
        "prompt": [*prompt, {"role": "user", "content": text}],
        "ground_truth": {},
        "split": split,
        "env": block,
        "task": task,
    }


def _content(row: Row) -> str:
    return str({name: value for name, value in row["task"].items() if name != "idx"})
