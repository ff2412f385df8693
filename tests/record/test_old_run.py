"""A run of an earlier version: `old_run` was written on 2026-11-26 by commit 7e43614 of 2026-11-23, without its export.

    mtrl train debug=fast trainer.max_steps=1 seed=5 tracker.plots=false trainer.save_trajectories_every=1 \\
        evaluation.rows=2 evaluation.sampled_rows=2 run_dir=old_run
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtrl.diagnose.diagnosis import diagnose
from mtrl.record.library import Library
from mtrl.record.run import Run
from mtrl.utils.files import to_strict_json
from mtrl.view.export import wait_for_indexes
from mtrl.view.http_api import Api
from mtrl.view.query import Query
from tests import forked

OLD = Path(__file__).parent / "old_run"


@pytest.fixture
def old_run(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "old_run"))


def test_an_old_run_opens_in_the_viewer_and_in_the_diagnosis(old_run):
    api = Api(Library([old_run]))
    (run,) = api.library.runs
    wait_for_indexes(run)
    files = api.files(run, Query([]))["files"]
    assert {file["file"]: file["count"] for file in files} == {
        **{f"eval_{kind}_step_00000{step}": 2 for kind in ("greedy", "sampled") for step in (0, 1)},
        "train_step_000001": 4,
    }
    for file in files:
        for number in range(file["count"]):
            shown = json.loads(to_strict_json(api.trajectory(run, file["file"], str(number), Query([]))))
            assert shown["turns"] and not shown.get("problem")
    assert api.metrics(run, Query([]))["last_step"] == 1
    assert api.config(run, Query([]))
    assert diagnose(old_run).record


def test_an_old_run_is_resumed_when_its_files_are_trusted(old_run):
    """Checkpoints had no checksums then. The message says how to trust them, and nothing of the run is lost."""
    before = {path: path.read_bytes() for path in (old_run / "trajectories").glob("*.jsonl")}
    command = [sys.executable, "-m", "mtrl.main", "resume=latest", "run_dir=old_run", "trainer.max_steps=2"]
    changes = ["debug=fast", "seed=5", "tracker.plots=false", "evaluation.rows=2", "evaluation.sampled_rows=2"]

    def resume():
        return forked.run([*command, *changes], cwd=old_run.parent, capture_output=True, text=True)

    refused = resume()
    assert refused.returncode == 2
    (fix,) = re.findall("run `(.*)` in it", refused.stderr)
    subprocess.run(fix, shell=True, cwd=old_run / "checkpoints" / "step_000001", check=True)
    done = resume()
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in Run(old_run).rows] == [0, 1, 2]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (old_run / "checkpoints" / "step_000002").is_dir() and (old_run / "export" / "config.json").exists()
