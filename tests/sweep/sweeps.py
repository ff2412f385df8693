"""Helpers of the sweep tests: an environment with a configured reward, a stand-in for training, and finished jobs."""

import json
import os
import sys
from pathlib import Path

import mtrl
from mtrl.sweep.outcome import JobResult
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent

PAYOFF = '''
from types import SimpleNamespace
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Splits

class Payoff(BaseEnvironment):
    """Pays `payoff`, whatever the policy does."""

    def __init__(self, max_turns=1, payoff=0.0, **config):
        super().__init__(max_turns)
        self.payoff = payoff

    def step(self, response, ground_truth):
        return self.payoff, None, True

    @staticmethod
    def load(data, seed, **config):
        said = [[{"role": "user", "content": f"go {n}"}] for n in range(8)]
        rows = [{"id": f"{n}", "prompt": prompt, "ground_truth": {"answer": "1"}} for n, prompt in enumerate(said)]
        return Splits(train=rows[:4], test=rows[4:])

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: "1")
'''
QUICK = (
    *("environment.target=payoff.Payoff", "name=payoff", "objective=reward_after", "debug=fast"),
    *("tracker.plots=false", "preflight.at_start=none", "diagnosis.live=none", "model.warm_start.check_every=1"),
)

STAND_IN = '''
"""Imported by every Python that is started here: training is a sum, and torch is not imported."""
import os, sys, time, types
from pathlib import Path

def train(cfg, hooks):
    run = Path(cfg.run_dir)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1}\\n')
    (run / "process").write_text(str(os.getpid()))
    deadline = time.monotonic() + 120
    while len({file.read_text() for file in run.parent.glob("*/process")} - {""}) < 2:  # the other worker has no job
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if cfg.seed == 13:
        raise RuntimeError("out of luck\\nand more")
    return {"success_after": cfg.seed / 10, "steps": 1}

sys.modules["mtrl.trainer.run"] = types.SimpleNamespace(train=train)
sys.modules["mtrl.doctor.at_start"] = types.SimpleNamespace(plan_at_start=None)
'''

PATIENT = '''
"""As above: a run that trains until it is asked to stop, and takes a second to save itself."""
import sys, threading, time, types
from pathlib import Path

def train(cfg, hooks):
    from mtrl.errors import Interrupted
    from mtrl.utils.signals import Interrupt

    asked = threading.Event()
    with Interrupt(asked.set) as interrupt:
        (Path(cfg.run_dir) / "training").touch()
        asked.wait(120)
        time.sleep(1)
    (Path(cfg.run_dir) / "saved").touch()
    raise Interrupted(interrupt.requested)

sys.modules["mtrl.trainer.run"] = types.SimpleNamespace(train=train)
sys.modules["mtrl.doctor.at_start"] = types.SimpleNamespace(plan_at_start=None)
'''


def program(folder, *words, module="mtrl.main", run=forked.run):
    """Run a module of this tree in `folder`, with the modules of `folder` in the path."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, words)]
    return run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def make_job(folder, number, overrides, value=None, status="finished", said="", **more):
    """Write the outcome of a finished job."""
    outcome = JobResult.begin(number, overrides, "success_after", more.pop("direction", "maximize"))
    outcome.end(status, said, value)
    outcome.started, outcome.ended = 100.0, 112.5
    outcome.write(folder / str(number))
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(3))
    (folder / str(number) / "metrics.jsonl").write_text(rows)
    (folder / str(number) / "config.yaml").write_text("trainer: {max_steps: 2}\n")
    return folder / str(number)
