"""Rows of the terminal family: one per task folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.terminal.backend import ENGINES, Backend
from envs.terminal.task import TerminalTask, read_task
from mtrl.datasets import HELD_OUT, Splits, cap
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from mtrl.types import Row

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "tasks"
"""Two small tasks without an image, of which the first is held out."""
IDLE = {
    "sandbox": {"cpus": "cpus", "storage_mb": "storage_mb"},
    "swerex": {
        "cpus": "cpus",
        "memory_mb": "memory_mb",
        "storage_mb": "storage_mb",
        "wants_network": "network_mode",
    },
}
"""Backend -> fields of `TerminalTask` that have no effect on it, with their keys in task.toml."""
SYSTEM = (
    "You solve a task in a Linux container. Run commands with the tool bash. When the task is done, answer without a "
    "call: then tests check the state of the container."
)


def load(
    data: Any,
    seed: int,
    backend: str = "sandbox",
    memory_mb: int = 2048,
    cpus: float | None = None,
    processes: int = 256,
    disk_mb: int = 10240,
    network: bool = False,
    servers: Sequence[str] = (),
    warm_containers: int = 0,
    **config: Any,
) -> Splits:
    """Return the rows of `data.path`, a folder that holds task folders at any depth; without a path those of two small
    tasks of this package.

    If the folder has subfolders named as `data.train_split` and `data.test_split`, these are the splits; else each
    eighth task in alphabetical order, beginning with the first, is held out.

    Args:
        data: the `data` section of the config.
        seed: not used, since the order of the rows is that of their names.
        backend, memory_mb, cpus, processes, disk_mb, network, servers, warm_containers: see `Backend`.
        config: the environment's own keys.

    Raises:
        UserError: the folder has too few tasks, or a task cannot be read or does not fit the backend.
    """
    place = Backend(backend, memory_mb, cpus, processes, disk_mb, network, servers, warm_containers)
    path = SHIPPED if data.path is None else Path(str(data.path)).expanduser()
    if not path.is_dir():
        raise UserError(f"data.path={data.path} is no folder; environment=terminal reads a folder of task folders")
    folders = [path / name for name in (data.train_split, data.test_split)]
    if all(folder.is_dir() for folder in folders):
        parts = [_tasks(folder, folder) for folder in folders]
    else:
        tasks = _tasks(path, path)
        parts = [
            [task for index, task in enumerate(tasks) if (index % HELD_OUT == 0) == held] for held in (False, True)
        ]
    if not all(parts):
        raise UserError(
            f"data.path={path} has {sum(map(len, parts))} tasks, and training and evaluation need at least one each; "
            "add task folders, which hold a task.toml"
        )
    for task in (*parts[0], *parts[1]):
        place.check(task)
    _warn([*parts[0], *parts[1]], place)
    train, test = ([_row(task, split) for task in part] for split, part in zip(("train", "test"), parts, strict=True))
    return cap(Splits(train, test), data)


def gold(row: Row) -> Sequence[str]:
    """Return the responses that run solution/solve.sh of the task and end the episode.

    Raises:
        UserError: the task has no solution.
    """
    truth = row["ground_truth"]
    solution = read_task(Path(truth["folder"]), truth["task"]).solution
    if solution is None:
        raise UserError(f"task {truth['task']} has no solution/solve.sh; add one, or leave the check of solutions out")
    return [format_call("bash", {"command": solution}), "done"]


def _tasks(root: Path, base: Path) -> list[TerminalTask]:
    """Return the tasks below a folder, sorted by name. A task folder is not searched for further tasks."""
    found: list[TerminalTask] = []
    for folder, below, files in os.walk(root):
        if {"task.toml", "task.yaml"} & set(files):
            found.append(read_task(Path(folder), Path(folder).relative_to(base).as_posix()))
            below.clear()
    return sorted(found, key=lambda task: task.name)


def _above_memory(tasks: list[TerminalTask], place: Backend) -> dict[str, list[TerminalTask]]:
    """Return the complaint about the memory of tasks."""
    return {
        f"ask for more memory than environment.config.memory_mb={place.memory_mb}": [
            task for task in tasks if (task.memory_mb or 0) > place.memory_mb
        ]
    }


def _limited(tasks: list[TerminalTask], place: Backend) -> dict[str, list[TerminalTask]]:
    """Return the complaints about tasks that ask for more than their container gets from a container engine."""
    return {
        "ask for the network, and environment.config.network=false starts their containers without it": [
            task for task in tasks if task.wants_network and not place.network
        ],
        **_above_memory(tasks, place),
        f"ask for more storage than environment.config.disk_mb={place.disk_mb}": [
            task for task in tasks if (task.storage_mb or 0) > place.disk_mb
        ],
    }


def _warn(tasks: list[TerminalTask], place: Backend) -> None:
    """Warn of settings of tasks that have no effect, or not their whole effect."""
    complaints = _limited(tasks, place) if place.name in ENGINES else {}
    if place.name == "sandbox":
        complaints = {
            "ask for the network, which environment.config.backend=sandbox does not have": [
                task for task in tasks if task.wants_network
            ],
            **_above_memory(tasks, place),
        }
    idle = IDLE.get(place.name, {})
    if idle:
        complaints[
            f"have keys in [environment] that have no effect with environment.config.backend={place.name} "
            f"({', '.join(idle.values())})"
        ] = [task for task in tasks if any(getattr(task, field) is not None for field in idle)]
    complaints |= {
        "have keys in [environment] that have no effect here (healthcheck, skills_dir)": [
            task for task in tasks if task.idle
        ],
    }
    for complaint, those in complaints.items():
        if those:
            log.warning("%d tasks, such as %s, %s", len(those), those[0].name, complaint)


def _row(task: TerminalTask, split: str) -> Row:
    return {
        "id": task.name,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}],
        "ground_truth": {"task": task.name, "folder": str(task.folder.resolve())},
        "source": "harbor",
        "split": split,
    }
