"""Engines in separate processes, and the state of those processes."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from toy_model import ToyLM

from mtrl.engines.base import SamplingParams
from mtrl.engines.local import worker
from mtrl.engines.local.channel import Channel
from mtrl.engines.local.child import Child
from mtrl.engines.local.memory import EngineMemory
from mtrl.engines.local.process import ProcessEngine
from tests import forked

PROMPT = [3, 1, 4, 1, 5]
CONTEXT = 4000
ENDLESS = SamplingParams(max_generate_length=3900)
"""Sampling of a turn of many seconds, which the test releases before its end."""
SHORT = SamplingParams(max_generate_length=4)


def run(coroutine, seconds=120):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def make_engine(model=None, **settings):
    settings = {"max_num_seqs": 8, "max_context_length": CONTEXT, "deterministic": False} | settings
    return ProcessEngine(EngineMemory(model or ToyLM(), None, **settings))


def ask(engine, name, prompt=PROMPT, sampling=ENDLESS):
    return asyncio.ensure_future(engine.generate(name, prompt, sampling))


def has_ended(pid):
    """Whether this process has ended; it may still be a zombie."""
    try:
        return state(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def state(pid):
    """Return the state of a process as a letter of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class ForkedChild(Child):
    """`Child` that is forked from the server of `tests.forked`, so that the imports of its worker take no time."""

    def __init__(self, threads, gpu=None):
        ours, theirs = socket.socketpair()
        our_files, their_files = socket.socketpair()
        with theirs, their_files:
            inherited = [forked.Descriptor(theirs.fileno()), forked.Descriptor(their_files.fileno())]
            self._process = Forked(inherited, threads)
        self.channel = Channel(ours, our_files)


class Forked:
    """The part of `subprocess.Popen` that `Child` uses."""

    def __init__(self, files, threads):
        words = (files, os.getpid(), threads, sys.path)
        self._process = forked.CONTEXT.Process(name="MainProcess", target=_work, args=words)
        forked.begin()
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return self._process.exitcode


def _work(files, parent, threads, path):
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    sys.path[:] = path
    sys.argv = [worker.__name__, *map(str, files), str(parent)]
    worker.main()
