"""Calls to all workers of a vLLM server whose errors are read from every worker.

vLLM 0.32 reads no answer after that of the first worker that fails. The answers of later workers then stay in their
queues, and each later call gets the answers to an earlier one. Here a worker's error is a value like any other answer,
so that all answers are read before the first error is raised.

This module runs inside the engine's environment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "add_lora",
    "remove_lora",
    "sleep",
    "wake_up",
)
"""Methods of workers that the trainer's requests call. In these no worker waits without a time limit for another one;
elsewhere a worker may wait for the failed one for ever, and its answer with it."""


@dataclass(frozen=True)
class WorkerFailure:
    """The answer of a worker that failed."""

    message: str


def answer(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method in a worker, and return its result or the `WorkerFailure`."""
    try:
        return getattr(worker, method)(*args, **kwargs)
    except Exception as error:
        log.exception("%s failed", method)
        return WorkerFailure(str(error) or type(error).__name__)


def results_of(answers: Sequence[Any]) -> Sequence[Any]:
    """Return the answers of all workers, by rank.

    Raises:
        RuntimeError: a worker failed; the message is that of the first one, with its rank.
    """
    for rank, found in enumerate(answers):
        if isinstance(found, WorkerFailure):
            raise RuntimeError(f"worker {rank} of {len(answers)} failed: {found.message}")
    return answers


def read_all_answers() -> None:
    """Patch the executor of servers with several workers so that it reads the answers of all workers to `METHODS`.
    Servers that do not receive weights from mtrl work as before."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call: Callable[..., Any] = MultiprocExecutor.collective_rpc
    if call.__module__ == __name__:
        return  # vLLM may load a plugin twice

    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        receives = self.vllm_config.weight_transfer_config
        if receives is None or receives.backend != "mtrl" or method not in METHODS or more:
            return call(self, method, timeout, args, kwargs, **more)
        return results_of(call(self, partial(answer, method=method, args=args, kwargs=kwargs or {}), timeout))

    MultiprocExecutor.collective_rpc = collective_rpc
