"""Whole runs as programs: start, wait, and read."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import mtrl
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent
QUIET = ["tracker.plots=false", "preflight.at_start=none", "diagnosis.live=none"]
"""Overrides that turn off work which does not change a run and would take as long as its training."""
SMALL = [
    "model.tiny.hidden_size=64",
    "model.tiny.intermediate_size=128",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.warm_start.demonstrations=256",
    "model.warm_start.success_band=[0,1]",
    "model.warm_start.min_steps=0",
    "model.warm_start.check_every=40",
    "model.warm_start.batch_size=8",
    "model.warm_start.lr=5e-3",
    "model.warm_start.muon_lr=null",
    "model.warm_start.episodes=8",
    "reward=guide",
    "data.synthetic_train_rows=256",
    "data.synthetic_test_rows=16",
    "evaluation.rows=8",
    "evaluation.sampled_rows=4",
    "evaluation.every_steps=3",
    "algorithm.group_size=4",
    "trainer.prompts_per_step=4",
    "trainer.max_steps=8",
    "trainer.checkpoint.every_steps=2",
    "trainer.optimizer.lr=1e-3",
    "generator.max_turns=3",
    "generator.sampling_params.max_generate_length=16",
    *QUIET,
]
"""Settings of a run of a few seconds that learns, evaluates and saves. The format is rewarded too, so that every step
has a signal."""

NO_EVALUATION = [
    "evaluation.before_train=false",
    "evaluation.every_steps=0",
    "evaluation.rows=2",
    "evaluation.sampled_rows=0",
]
"""Settings of a run that only plays two rows at its end."""


def start(run_dir, *words, code=None):
    """Start the command line in a process, after `code` if it is given."""
    command = [sys.executable, "-m", "mtrl.main"]
    if code:
        command = [sys.executable, "-c", textwrap.dedent(code) + "\nfrom mtrl.main import cli; cli()"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{run_dir.parent}", "OMP_NUM_THREADS": "1"}
    arguments = [*command, *SMALL, *words, f"run_dir={run_dir}"]
    return forked.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, expected=0):
    output, _ = process.communicate(timeout=900)
    assert process.returncode == expected, output
    return output


def rows_of(run_dir):
    """Return the metrics without those that depend on time."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def weights_of(run_dir):
    return (run_dir / "export" / "model.safetensors").read_bytes()
