"""A task folder of Harbor (https://github.com/harbor-framework/harbor), which is also that of Terminal-Bench 2.

The layout is that of `harbor.models.task.paths`, and the keys of task.toml are those of `harbor.models.task.config`
(Harbor 0.26): instruction.md, task.toml, environment/Dockerfile, tests/test.sh and solution/solve.sh.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.errors import UserError

DEFAULT_SECONDS = 600.0
"""Harbor's default time limit for the tests and for the build of an image, in seconds."""
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
"""Suffix of the older keys memory and storage -> MiB."""


@dataclass(frozen=True)
class TerminalTask:
    """One task folder."""

    name: str
    folder: Path
    instruction: str
    image: str | None
    """Name of the ready image; None if the task has none."""
    has_dockerfile: bool
    cwd: str | None
    """Working directory of the commands; None: that of the image."""
    agent_seconds: float | None
    """Wall time of all commands of the agent together, in seconds; None: no limit."""
    tests_seconds: float
    """Wall time of the tests, in seconds."""
    build_seconds: float
    """Wall time of the build of the image, in seconds."""
    cpus: float | None
    memory_mb: int | None
    """Memory that the task asks for, in MiB; None: it names none."""
    storage_mb: int | None
    """Size of files that the task asks for, in MiB; None: it names none."""
    wants_network: bool | None
    """Whether the task asks for the network; None: it does not say."""
    env: Mapping[str, str]
    """Environment variables of the agent's commands and of the tests."""
    tests_env: Mapping[str, str]
    """Further environment variables of the tests."""
    idle: tuple[str, ...] = ()
    """Keys of task.toml that have no effect here."""

    @property
    def needs_image(self) -> bool:
        """Whether the task can run in a container of docker or podman only."""
        return self.has_dockerfile or self.image is not None

    @property
    def solution(self) -> str | None:
        """The text of solution/solve.sh; None if the task has no solution."""
        file = self.folder / "solution" / "solve.sh"
        return file.read_text(encoding="utf-8") if file.is_file() else None


def read_task(folder: Path, name: str = "") -> TerminalTask:
    """Return the task of a folder.

    Args:
        name: name of the task; by default that of the folder.

    Raises:
        UserError: a file is missing, task.toml cannot be read, or the task needs something that is not supported.
    """
    name = name or folder.name
    settings = _settings(folder / "task.toml", name)
    _refuse_unsupported(settings, folder, name)
    instruction = _text(folder / "instruction.md", name, "write the task for the agent into it")
    _text(folder / "tests" / "test.sh", name, "write the script that judges the episode")
    place, tests, agent = (_table(settings, key, name) for key in ("environment", "verifier", "agent"))
    limit = agent.get("timeout_sec")
    return TerminalTask(
        name=name,
        folder=folder,
        instruction=instruction.strip(),
        image=_optional_text(place, "docker_image", name),
        has_dockerfile=(folder / "environment" / "Dockerfile").is_file(),
        cwd=_workdir(place, name),
        agent_seconds=None if limit is None else _positive(limit, "agent.timeout_sec", name),
        tests_seconds=_positive(tests.get("timeout_sec", DEFAULT_SECONDS), "verifier.timeout_sec", name),
        build_seconds=_positive(place.get("build_timeout_sec", DEFAULT_SECONDS), "environment.build_timeout_sec", name),
        cpus=None if place.get("cpus") is None else _positive(place["cpus"], "environment.cpus", name),
        memory_mb=_size(place, "memory", name),
        storage_mb=_size(place, "storage", name),
        wants_network=_wants_network(place, name),
        env=_variables(place, "environment.env", name),
        tests_env=_variables(tests, "verifier.env", name),
        idle=tuple(key for key in ("healthcheck", "skills_dir") if place.get(key) is not None),
    )


def _settings(file: Path, name: str) -> dict[str, Any]:
    if not file.is_file() and (file.parent / "task.yaml").is_file():
        raise UserError(
            f"task {name} has a task.yaml, which is the format of Terminal-Bench 1; convert it with: "
            "harbor tasks migrate -i FOLDER -o NEW_FOLDER"
        )
    try:
        return tomllib.loads(_text(file, name, "write one, which may be empty"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"task {name} has a task.toml that is not valid TOML ({error}); correct it") from error


def _text(file: Path, name: str, fix: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        missing = "/".join(file.parts[-2:]) if file.parent.name == "tests" else file.name
        raise UserError(f"task {name} has no {missing}; {fix}") from error
    except (OSError, UnicodeError) as error:
        raise UserError(f"task {name} has a file {file.name} that cannot be read ({error}); correct it") from error


def _table(settings: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    found = settings.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"task {name} has {key}={found!r} in task.toml; write a table [{key}]")
    return found


def _refuse_unsupported(settings: dict[str, Any], folder: Path, name: str) -> None:
    place, tests, agent = (_table(settings, key, name) for key in ("environment", "verifier", "agent"))
    kinds = {
        "several steps": settings.get("steps"),
        "a container for its tests alone": tests.get("environment") or tests.get("environment_mode") == "separate",
        "Windows": str(place.get("os", "linux")).lower() != "linux",
        "GPUs": place.get("gpus"),
        "TPUs": place.get("tpu"),
        "MCP servers": place.get("mcp_servers"),
        "several containers": (folder / "environment" / "docker-compose.yaml").exists(),
        "a user of its own": agent.get("user") is not None or tests.get("user") is not None,
        "a list of allowed hosts": any(
            table.get("network_mode") == "allowlist" or table.get("allowed_hosts") for table in (place, tests, agent)
        ),
    }
    if needs := [kind for kind, needed in kinds.items() if needed]:
        raise UserError(f"task {name} needs {', '.join(needs)}, which mtrl does not support; leave the task out")


def _positive(value: Any, key: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"task {name} has {key}={value!r} in task.toml; write a number above 0")
    return float(value)


def _size(place: dict[str, Any], key: str, name: str) -> int | None:
    """Return the value of `KEY_mb`, or that of the older key, such as 2G, in MiB."""
    value = place.get(f"{key}_mb", place.get(key))
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)([KMG])", value.strip().upper())
        if found is None:
            raise UserError(f"task {name} has environment.{key}={value!r} in task.toml; write a size such as 2G")
        value = float(found[1]) * _UNITS[found[2]]
    return None if value is None else max(1, int(_positive(value, f"environment.{key}_mb", name)))


def _optional_text(place: dict[str, Any], key: str, name: str) -> str | None:
    value = place.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"task {name} has environment.{key}={value!r} in task.toml; write a text")
    return value or None


def _workdir(place: dict[str, Any], name: str) -> str | None:
    value = _optional_text(place, "workdir", name)
    if value is not None and (not value.startswith("/") or ".." in value.split("/") or "\0" in value):
        raise UserError(f"task {name} has environment.workdir={value!r} in task.toml; write a whole path such as /app")
    return value


def _wants_network(place: dict[str, Any], name: str) -> bool | None:
    mode, older = place.get("network_mode"), place.get("allow_internet")
    if mode not in (None, "public", "no-network"):
        raise UserError(f"task {name} has environment.network_mode={mode!r}; write public or no-network")
    return mode == "public" if mode is not None else older


def _variables(table: dict[str, Any], key: str, name: str) -> dict[str, str]:
    found = table.get("env", {})
    if not isinstance(found, dict):
        raise UserError(f"task {name} has {key}={found!r} in task.toml; write a table of variables")
    for variable, value in found.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise UserError(f"task {name} has the variable {variable!r} in {key}; write letters, digits and _")
        if "${" in str(value):
            raise UserError(
                f"task {name} has {key}.{variable}={value!r}, and mtrl passes no variable of this machine into a "
                "container; write the value itself"
            )
    return {variable: str(value) for variable, value in found.items()}
