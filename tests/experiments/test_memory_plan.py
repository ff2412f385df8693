"""The memory plan counts what a rank of a sharded model allocates, by PyTorch's own tracker."""

import json
import sys

from mtrl.config.overrides import CONF
from tests import forked


def test_the_plan_is_close_to_the_tracked_tensors_of_a_rank():
    """Half of six layers are recomputed."""
    command = [sys.executable, "experiments/memory_plan/tracked.py", "Qwen/Qwen2.5-0.5B-Instruct", "--tokens", "2048"]
    command += ["--recomputed", "3", "--layers", "6"]
    done = forked.run(command, cwd=CONF.parent, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["ranks"] == 8
    assert 1.0 < found["planned_over_tracked"] < 1.1
