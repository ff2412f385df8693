"""Agents that are programs: each episode has one process tree, in an empty folder, and the tree ends with the episode.

The program receives environment variables: `OPENAI_BASE_URL` and `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
`ANTHROPIC_API_KEY`, `MTRL_MODEL`, `MTRL_ROW` (file with the row as JSON), `MTRL_RESULT` (file to which it may write
`{"reward": …}`, or another value that `as_outcome` takes, as JSON) and `MTRL_FEEDBACK_URL` (address to which it may
report instead). An episode succeeds when its program ends with status 0.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

from mtrl.agents.output import Output
from mtrl.agents.runner import AgentError, Assignment, ProgramResult, as_outcome
from mtrl.config.derived import program_path
from mtrl.engines.server.environment import agent_environment, secrets_of
from mtrl.engines.server.log_errors import error_line
from mtrl.engines.server.supervised_process import KILL_TIMEOUT, SupervisedProcess
from mtrl.environments.pool import EnvironmentPool
from mtrl.utils.text import redacted

SECONDS_TO_EXIT = 2.0
"""Seconds that a program has to end by itself after SIGTERM."""
MAX_RESULT_BYTES = 2**20
"""Maximum number of bytes that a program may write to `MTRL_RESULT`."""
RESULT_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open `MTRL_RESULT`: a link is refused, and a pipe without a writer does not block."""
SECONDS_FOR_OUTPUT = 5.0
"""Maximum number of seconds for reading the remaining output of a program that has ended."""


class ProgramRunner:
    """Starts a command for every episode, under a supervisor (`mtrl/engines/server/supervisor.py`).

    All processes that the command has started end with the episode, and also when the trainer ends in any way.
    """

    ends_by_report = False

    def __init__(self, command: Sequence[str], env: Mapping[str, str], max_concurrent: int, passed: Sequence[str] = ()):
        """
        Args:
            command: program and arguments. An argument that names an existing file becomes an absolute path, because
                the program starts in its own folder.
            env: variables in addition to those of the trainer's environment that the program gets (`AGENT_VARIABLES`).
            passed: names of further variables of the trainer's environment that the program gets.
        """
        self.command = [command[0], *(_absolute(word) for word in command[1:])]
        if os.sep in command[0]:
            self.command[0] = str(Path(command[0]).absolute())
        self.name, self.env, self.passed = Path(command[0]).name, dict(env), tuple(passed)
        self._cleanup_pool = EnvironmentPool(max_concurrent)

    async def run(self, assignment: Assignment) -> ProgramResult | None:
        """See `AgentRunner`."""
        folder, output, process = Path(mkdtemp(prefix="mtrl-agent-")), None, None
        try:
            output = await Output.open()
            result, environment = folder / "result.json", self._environment(assignment, folder)
            (folder / "work").mkdir()
            (folder / "row.json").write_text(json.dumps(assignment.row, ensure_ascii=False), encoding="utf-8")
            process = SupervisedProcess(self.command, environment, output.writer, self.name, folder / "work")
            output.close_writer()
            code = await process.wait()
            await output.complete(SECONDS_FOR_OUTPUT)
            if code:
                secrets = [*secrets_of(environment), *(os.environ[name] for name in self.passed)]
                text = redacted(output.text, secrets)
                raise AgentError(f"{self.name} {process.end()}: {error_line(text)}\nThe end of its output:\n{text}")
            return as_outcome(_read(result), f"{self.name}, in MTRL_RESULT,")
        finally:
            if output is not None:
                output.close()
            await self._cleanup_pool.finish(
                partial(_clean_up, process, folder), timeout=SECONDS_TO_EXIT + 3 * KILL_TIMEOUT
            )

    async def close(self) -> None:
        self._cleanup_pool.close()

    def _environment(self, assignment: Assignment, folder: Path) -> dict[str, str]:
        host = urlsplit(assignment.base_url).hostname or ""
        return {
            **agent_environment(no_proxy_hosts=(host,)),
            "PATH": program_path(),
            **{name: os.environ[name] for name in self.passed},
            **self.env,
            "OPENAI_BASE_URL": assignment.base_url,
            "OPENAI_API_KEY": assignment.api_key,
            "ANTHROPIC_BASE_URL": assignment.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": assignment.api_key,
            "MTRL_MODEL": assignment.model,
            "MTRL_ROW": str(folder / "row.json"),
            "MTRL_RESULT": str(folder / "result.json"),
            "MTRL_FEEDBACK_URL": assignment.feedback_url,
        }


def _absolute(word: str) -> str:
    return str(Path(word).absolute()) if Path(word).is_file() else word


def _clean_up(process: SupervisedProcess | None, folder: Path) -> None:
    """End the processes and then remove their folder. It blocks, so it runs on a thread."""
    if process is not None:
        process.end(SECONDS_TO_EXIT)
    _make_writable(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _make_writable(folder: Path) -> None:
    """Make a folder and all folders in it writable: nothing can be removed from one that a program made read-only."""
    with suppress(OSError):
        folder.chmod(0o700)
    for parent, names, _ in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)


def _read(path: Path) -> Any:
    """Read the JSON value of a file that a program has written; None if the file does not exist.

    Raises:
        AgentError: the file is not a regular file, is too large, cannot be read, or holds no JSON.
    """
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, RESULT_FLAGS)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AgentError("MTRL_RESULT is not a regular file")
            content = file.read(MAX_RESULT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"MTRL_RESULT cannot be read ({error.strerror})") from None
    if len(content) > MAX_RESULT_BYTES:
        raise AgentError(f"MTRL_RESULT has more than {MAX_RESULT_BYTES} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentError(f"MTRL_RESULT holds no JSON ({str(error)[:200]})") from None
