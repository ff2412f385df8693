"""The commands of docs/sweeps.md and docs/launching.md that tests/test_docs.py does not run compose."""

import re
import shlex

import pytest
from sweeps import ROOT

from mtrl.config.overrides import normalise
from mtrl.sweep.run import names_sweep, typed_out

LINES = [
    line
    for name in ("sweeps", "launching")
    for block in re.findall(r"^```console\n(.*?)^```$", (ROOT / f"docs/{name}.md").read_text(), re.M | re.S)
    for line in block.splitlines()
]
STARTS = [line for line in LINES if re.match(r"mtrl train |scripts/|sbatch |docker run ", line)]


def overrides_of(line):
    return [word for word in shlex.split(line) if re.fullmatch(r"[\w./]+=.*", word)]


def test_every_line_is_looked_at():
    others = set(LINES) - set(STARTS)
    others_begin = {line.split()[0] for line in others}
    assert others_begin == {"pip", "docker", "ray", "srun", "export", "head=$(scontrol"} and len(STARTS) > 10


@pytest.mark.parametrize("line", STARTS, ids=range(len(STARTS)))
def test_documented_commands_compose(line):
    if "joblib" in line or "submitit" in line or "slurm " in line or "optuna" in line:
        pytest.importorskip("optuna", reason="pip install -e '.[sweep]'")
    overrides = normalise(overrides_of(line))
    typed = typed_out(overrides, None)
    assert names_sweep(overrides) == ("sweep=" in line) == ("hydra.sweeper.params=null" in typed)
