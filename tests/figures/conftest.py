"""Generated runs in their folders."""

import json

import pytest
from omegaconf import OmegaConf

from mtrl.figures.axis import Study
from mtrl.figures.groups import group_runs
from mtrl.record.run import Run
from mtrl.types import to_json
from tests.figures.made import SETTINGS, training_rows
from tests.record.conftest import rows

__all__ = ["make_run", "rows", "study"]


@pytest.fixture
def make_run(tmp_path):
    """Write a run, and return its folder."""

    def make(name="run", rows=None, seed=0, trajectories=None, spans=None, settings=None):
        folder = tmp_path / name
        (folder / "trajectories").mkdir(parents=True)
        config = OmegaConf.create()
        for key, value in {**SETTINGS, "seed": seed, "run_dir": str(folder), **(settings or {})}.items():
            OmegaConf.update(config, key, value, force_add=True)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
        lines = training_rows() if rows is None else rows
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for file, items in (trajectories or {}).items():
            text = "".join(to_json(item) + "\n" for item in items)
            (folder / "trajectories" / f"{file}.jsonl").write_text(text)
        if spans is not None:
            (folder / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
        return folder

    return make


@pytest.fixture
def study(make_run):
    """A study of runs given as the keywords of `make_run`."""

    def make(*runs, **keywords):
        folders = [make_run(f"run{number}", **run) for number, run in enumerate(runs)]
        return Study(group_runs([Run(folder) for folder in folders]), **keywords)

    return make
