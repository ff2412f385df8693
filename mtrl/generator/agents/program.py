"""Agents that are programs: one process tree for each episode, in an empty folder, which ends with it.

The program is told by its environment: `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `MTRL_MODEL`, `MTRL_ROW` (file of the row,
JSON), `MTRL_RESULT` (where it may write `{"reward": …}`, or whatever `as_outcome` takes, as JSON) and
`MTRL_FEEDBACK_URL` (where it may report instead). It has played when it ends with status 0.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

from mtrl.config.agent_checks import program_path
from mtrl.environments.pool import EnvironmentPool
from mtrl.generator.agents.output import Output
from mtrl.generator.agents.runner import AgentError, Assignment, Outcome, as_outcome
from mtrl.generator.engines.server.environment import agent_environment, secrets_of
from mtrl.generator.engines.server.kept_process import KILLING, KeptProcess
from mtrl.generator.engines.server.words import last_words

GRACE = 2.0
"""Seconds that a program has to end by itself once it is told to (SIGTERM)."""
LARGEST_RESULT = 2**20
"""Bytes of what a program may write to `MTRL_RESULT`."""
LAST_READING = 5.0
"""Seconds in which the last words of a program that has ended are read."""


class ProgramRunner:
    """Starts a command for every episode, under a keeper (`mtrl/generator/engines/server/keeper.py`): all that it has
    started ends with the episode, and with the trainer, whatever becomes of it."""

    plays_on = False

    def __init__(self, command: Sequence[str], env: Mapping[str, str], max_concurrent: int, passed: Sequence[str] = ()):
        """
        Args:
            command: program and arguments. What names a file here is made an absolute path, for the program starts in
                a folder of its own.
            env: on top of what it gets of the trainer's environment (`PASSED_ON`).
            passed: names of further variables of it.
        """
        self.command = [command[0], *(_absolute(word) for word in command[1:])]
        if os.sep in command[0]:
            self.command[0] = str(Path(command[0]).absolute())
        self.name, self.env, self.passed = Path(command[0]).name, dict(env), tuple(passed)
        self._ending = EnvironmentPool(max_concurrent)

    async def run(self, assignment: Assignment) -> Outcome | None:
        """See `Runner`."""
        folder, output, process = Path(mkdtemp(prefix="mtrl-agent-")), None, None
        try:
            output = await Output.open()
            result, environment = folder / "result.json", self._environment(assignment, folder)
            (folder / "work").mkdir()
            (folder / "row.json").write_text(json.dumps(assignment.row, ensure_ascii=False), encoding="utf-8")
            process = KeptProcess(self.command, environment, output.writer, self.name, folder / "work")
            output.close_writer()
            code = await process.wait()
            await output.complete(LAST_READING)
            if code:
                said = _redacted(
                    output.text, [*secrets_of(environment), *filter(None, map(os.environ.get, self.passed))]
                )
                raise AgentError(f"{self.name} {process.end()}: {last_words(said)}\nIts last words:\n{said}")
            return as_outcome(_read(result), f"{self.name}, in MTRL_RESULT,")
        finally:
            if output is not None:
                output.close()
            await self._ending.finish(partial(_clean_up, process, folder), timeout=GRACE + 3 * KILLING)

    async def close(self) -> None:
        self._ending.close()

    def _environment(self, assignment: Assignment, folder: Path) -> dict[str, str]:
        host = urlsplit(assignment.base_url).hostname or ""
        return {
            **agent_environment(straight=(host,)),
            "PATH": program_path(),
            **{name: os.environ[name] for name in self.passed},
            **self.env,
            "OPENAI_BASE_URL": assignment.base_url,
            "OPENAI_API_KEY": assignment.api_key,
            "MTRL_MODEL": assignment.model,
            "MTRL_ROW": str(folder / "row.json"),
            "MTRL_RESULT": str(folder / "result.json"),
            "MTRL_FEEDBACK_URL": assignment.feedback_url,
        }


def _absolute(word: str) -> str:
    return str(Path(word).absolute()) if Path(word).is_file() else word


def _redacted(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _clean_up(process: KeptProcess | None, folder: Path) -> None:
    """On a thread: the processes end first, and then their folder goes."""
    if process is not None:
        process.end(GRACE)
    shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> Any:
    """The JSON value of a file that a program has written; None if there is none.

    Raises:
        AgentError: it is something else.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"MTRL_RESULT cannot be read ({error.strerror})") from None
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise AgentError("MTRL_RESULT is no plain file")
        content = file.read(LARGEST_RESULT + 1)
    if len(content) > LARGEST_RESULT:
        raise AgentError(f"MTRL_RESULT has more than {LARGEST_RESULT} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentError(f"MTRL_RESULT holds no JSON ({str(error)[:200]})") from None
