"""The benchmark of checkpoints, with small tensors: mtrl notices the faults of a disk, and DCP's safetensors do not."""

import sys

from mtrl.config.overrides import CONF
from tests import forked


def test_every_way_loads_what_it_saved_and_mtrl_notices_faults():
    command = [sys.executable, "benchmarks/checkpoints.py", "--layers", "2", "--width", "64", "--rounds", "1"]
    done = forked.run(command, cwd=CONF.parent, capture_output=True, text=True, check=True)
    rows = {line.split(" | ")[0].lstrip("| "): line.split(" | ")[-3:-1] for line in done.stdout.splitlines()[2:]}
    assert rows["mtrl"] == rows["mtrl, background"] == ["noticed", "noticed"]
    assert rows["DCP, safetensors"] == ["not noticed", "not noticed"]
