"""A trivial task, and warm starts of a fraction of a second."""

import copy
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from mtrl.config.schema import Config
from mtrl.datasets import Splits
from mtrl.environments.factory import Task
from mtrl.trainer.setup.parts import prepared_start
from tests.echo import Echo, echo_family, rows

SIZES = {"hidden_size": 32, "intermediate_size": 64, "heads": 2, "vocabulary": 340, "context": 256, "init_std": 0.3}
FIXED = {"enabled": True, "success_band": [0, 1], "check_every": 4, "episodes": 4, "demonstrations": 24}
FAST = {"batch_size": 4, "lr": 2e-3, "muon_lr": 0.02}
"""Settings of a warm start of a fraction of a second: four updates, with any success rate."""


def config_of(model=None, **warm):
    chosen = {"name": "tiny", "tiny": SIZES, **(model or {}), "warm_start": {**FIXED, **FAST, **warm}}
    generator = {"max_turns": 3, "sampling_params": {"max_generate_length": 12}}
    rest = {"generator": generator, "environment": {"name": "echo"}, "run_dir": "unused"}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), {"model": chosen, **rest}))


def echo_task(environment=Echo, **changes):
    """Return a task of repeating digits, in three turns."""
    splits = Splits(rows("train", 12), rows("test", 6))
    return Task(replace(echo_family(), **changes), splits, partial(environment, max_turns=3))


def started(config, task, on_step=lambda step, success: None):
    """Make the warm start as a run does, with real parts."""
    path, result = prepared_start(config, task, on_step)
    return Path(path), result


class Script:
    """Stand-in for a measurement: returns these success rates one after another, and records the measured policies."""

    def __init__(self, *shares):
        self.shares, self.policies = list(shares), []

    def __call__(self, model, tokenizer=None):
        self.policies.append(copy.deepcopy(model.state_dict()))
        return self.shares[len(self.policies) - 1]


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
