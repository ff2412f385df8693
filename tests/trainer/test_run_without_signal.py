"""A run whose rollouts of a prompt all have the same reward ends with an error."""

import json

import pytest

from mtrl.utils.files import replace_text
from tests.sweep.sweeps import PAYOFF, QUICK, program


@pytest.mark.slow
def test_steps_without_an_advantage_end_the_run(tmp_path):
    replace_text(tmp_path / "payoff.py", PAYOFF)
    limits = ("trainer.max_steps_without_signal=2", "trainer.max_steps=5")
    done = program(tmp_path, *QUICK, *limits, "environment.config.payoff=0.5", "run_dir=run")
    assert done.returncode == 2, done.stderr
    message = "no group had an advantage for trainer.max_steps_without_signal=2 steps in a row"
    assert message in done.stderr and "the mean reward is 0.500" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][-1] == 2
