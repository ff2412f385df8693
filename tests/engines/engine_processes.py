"""Engines in separate processes, and the state of those processes."""

import asyncio
import time
from pathlib import Path

import torch
from toy_model import ToyLM

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.process import ProcessEngine

PROMPT = [3, 1, 4, 1, 5]
CONTEXT = 4000
ENDLESS = SamplingParams(max_generate_length=3900)
"""Seconds; such turns are released in the end."""
SHORT = SamplingParams(max_generate_length=4)


def run(coroutine, seconds=120):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def make_engine(model=None, **settings):
    settings = {"max_num_seqs": 8, "max_context_length": CONTEXT, "deterministic": False} | settings
    return ProcessEngine(model or ToyLM(), None, **settings)


def ask(engine, name, prompt=PROMPT, sampling=ENDLESS):
    return asyncio.ensure_future(engine.generate(name, prompt, sampling))


def has_ended(pid):
    """Whether this process has ended; it may still be a zombie."""
    try:
        return state(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def state(pid):
    """One letter, as proc(5) has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
