"""The process that runs verifiers for `verifiers_agent.py`, in an interpreter of its own, as mtrl sees it.

verifiers takes seconds to import and needs other versions of packages than mtrl. One process therefore stays for all
episodes of this process; `verifiers_program/mtrl_verifiers.py` is what it runs.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from examples.agents.own_interpreter import own_interpreter
from mtrl.agents.runner import AgentError
from mtrl.config.derived import program_path
from mtrl.engines.server.environment import agent_environment
from mtrl.engines.server.supervised_process import SupervisedProcess

PYTHON = "MTRL_VERIFIERS_PYTHON"
"""Environment variable that names the interpreter."""
PROGRAM = Path(__file__).parent / "verifiers_program" / "mtrl_verifiers.py"
INSTALL = "python -m venv verifiers && verifiers/bin/pip install 'verifiers>=0.4,<0.5'"
MAX_SHOWN_LINES = 5


class VerifiersWorker:
    """A worker process. Requests may come from any thread; each answer is a future."""

    def __init__(self) -> None:
        """
        Raises:
            UserError: the variable names no interpreter.
        """
        python = own_interpreter(PYTHON, "verifiers", INSTALL)
        requests, stdin = os.pipe()
        answers, stdout = os.pipe()
        printed, stderr = os.pipe()
        variables = {
            **agent_environment(no_proxy_hosts=()),
            "PATH": f"{python.parent}{os.pathsep}{program_path()}",
        }
        try:
            self.process = SupervisedProcess(
                [str(python), str(PROGRAM)], variables, stdout, "verifiers", stdin=requests, errors=stderr
            )
        finally:
            for descriptor in (requests, stdout, stderr):
                os.close(descriptor)
        self.pid, self._ids, self._lock = os.getpid(), count(1), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {0: _uncancelled()}
        self.ready, self._alive = self._waiting[0], True
        self._requests: SimpleQueue[str | None] = SimpleQueue()
        self._last: deque[str] = deque(maxlen=MAX_SHOWN_LINES)
        # A pipe that is full blocks its writer, so threads write and read, and not the event loop.
        self._printing = self._start(self._keep_printed, printed, "rb")
        self._start(self._read, answers, "rb")
        self._start(self._write, stdin, "wb")

    @property
    def alive(self) -> bool:
        return self._alive and self.pid == os.getpid()  # a fork has no threads of its parent

    def request(self, do: str, **fields: Any) -> tuple[int, Future[Any]]:
        """Send a request, and return its number and the future of its answer, which raises `AgentError`."""
        with self._lock:
            number, answer = next(self._ids), _uncancelled()
            if self._alive:
                self._waiting[number] = answer
            else:
                answer.set_exception(self._lost())
        self._requests.put(json.dumps({"id": number, "do": do, **fields}))
        return number, answer

    def cancel(self, number: int) -> None:
        """End a request whose answer is not awaited any more."""
        with self._lock:
            self._waiting.pop(number, None)
        self._requests.put(json.dumps({"id": number, "do": "cancel"}))

    def end(self) -> None:
        """End the process and all that it has started; this blocks for some seconds at most."""
        self._requests.put(None)
        self.process.end()

    def _start(self, function: Any, descriptor: int, mode: str) -> threading.Thread:
        file = os.fdopen(descriptor, mode)
        thread = threading.Thread(target=function, args=(file,), name=f"verifiers{function.__name__}", daemon=True)
        thread.start()
        return thread

    def _write(self, file: IO[bytes]) -> None:
        try:
            with file:
                while (line := self._requests.get()) is not None:
                    file.write(f"{line}\n".encode())
                    file.flush()
        except BrokenPipeError:  # the reader of the answers reports it
            pass

    def _read(self, file: IO[bytes]) -> None:
        with file:
            for line in file:
                try:
                    answer = json.loads(line)
                    number = answer["id"]
                except (ValueError, LookupError, TypeError):  # another program than the worker's
                    self._last.append(line[:500].decode(errors="replace").rstrip())
                    break
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None:
                    continue
                if "error" in answer:
                    future.set_exception(AgentError(answer["error"]))
                else:
                    future.set_result(answer["value"])
        self.process.end(0)  # a process that does not speak the protocol still runs
        self._printing.join(1)
        with self._lock:
            self._alive, waiting, self._waiting = False, [*self._waiting.values()], {}
        self._requests.put(None)
        for future in waiting:
            future.set_exception(self._lost())

    def _keep_printed(self, file: IO[bytes]) -> None:
        with file:
            for line in file:
                self._last.append(line[:500].decode(errors="replace").rstrip())

    def _lost(self) -> AgentError:
        return AgentError(f"the process of verifiers {self.process.end(0)}; its last output: {' | '.join(self._last)}")


def _uncancelled() -> Future[Any]:
    """Return a future that its waiters cannot cancel, so that setting its result cannot fail."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
