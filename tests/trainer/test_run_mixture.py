"""A run on a mixture as a program: metrics of each source, exact resume, and the programs that open the run."""

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from runs import QUIET, ROOT, finish, rows_of, weights_of

from mtrl.config.mixture import RESERVED
from mtrl.record.run import Run
from tests import forked

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]

NAMES = {"words", "sql"}
TINY = ("experiment=mixture", "debug=fast", "trainer.prompts_per_step=3", "environments.words.weight=2", *QUIET)


DOWN = """
    import json, pathlib, sys
    from envs.gsm8k.environment import Gsm8kEnv
    (metrics,) = (pathlib.Path(word[8:]) / "metrics.jsonl" for word in sys.argv if word.startswith("run_dir="))
    reset = Gsm8kEnv.reset
    def failing(self, row=None):
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if lines and 1 <= json.loads(lines[-1])["step"] <= 3:
            raise OSError("the service is down")
        return reset(self, row)
    Gsm8kEnv.reset = failing
    from mtrl.main import cli
    cli()
"""
"""A program whose word problems fail in the steps 2 to 4."""


def program(module, *words):
    return run([sys.executable, "-m", module, *map(str, words)])


def run(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return finish(forked.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


def test_a_mixture_has_metrics_of_each_source_resumes_exactly_and_can_be_opened(tmp_path):
    """The resumed run has a rollout worker, which applies the limits of the sources as well."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    own = (
        *("environments.words.weight=[[0,2],[90,1]]", "trainer.save_trajectories_every=1"),
        *("environments.sql.algorithm.group_size=3", "environments.sql.generator.max_turns=2"),
    )
    output = program("mtrl.main", *TINY, *own, f"run_dir={whole}")
    assert (
        "67% at first words: gsm8k" in output and "text_to_sql, synthetic rows, at most 2 turns, groups of 3" in output
    )
    first, *_, last = rows_of(whole)
    assert last["data/words/share"] == pytest.approx((2 - 6 / 90) / (3 - 6 / 90))
    for run_dir in (whole, again):
        if run_dir == again:
            resume = f"resume={whole / 'checkpoints' / 'step_000001'}"
            output = program("mtrl.main", *TINY, *own, resume, "rollouts.workers=1", f"run_dir={again}")
        found = [t for t in Run.open(run_dir).trajectories("train")]
        sizes = Counter((t.task_id.split("/")[0], t.group_id) for t in found)
        assert {(name, size) for (name, _), size in sizes.items()} == {("words", 2), ("sql", 3)}
        assert max(len(t.turns) for t in found if t.task_id.startswith("sql")) == 2
        assert max(len(t.turns) for t in found if t.task_id.startswith("words")) > 2
    assert (last["rollout/words/groups"], last["rollout/sql/groups"]) == (2.0, 1.0)
    assert {key for key in first if key.startswith("val/words/")} and first["val/sql/episodes"] == 2.0
    words = {key.split("/")[1] for key in {**first, **last} if key.startswith(("rollout/", "val/", "data/"))}
    assert words - NAMES <= {*RESERVED}

    of_workers = ("engine/workers", "engine/worker_restarts")
    resumed = {key: value for key, value in rows_of(again)[-1].items() if key not in of_workers}
    assert weights_of(again) == weights_of(whole) and resumed == last

    program("mtrl.rescore", whole, f"out={tmp_path / 'rescored.json'}")
    output = program("mtrl.evaluate", whole, "evaluation.sampled_rows=0", f"evaluation.output={tmp_path / 'all'}")
    assert "success, words" in output and "success, sql" in output
    (row,) = rows_of(tmp_path / "all")
    (model,) = json.loads((tmp_path / "all" / "report.json").read_text())["models"]
    assert model["greedy"]["episodes"] == 4 and {*model["by_source"]} == NAMES
    for name in NAMES:
        own = model["by_source"][name]["greedy"]
        assert own["episodes"] == 2 and own["success"]["value"] == row[f"val/{name}/success/mean"]
    assert "## Sources" in (tmp_path / "all" / "report.md").read_text()
    program("mtrl.evaluate", whole, "evaluation.source=sql", f"evaluation.output={tmp_path / 'evaluation'}")
    (row,) = rows_of(tmp_path / "evaluation")
    assert row["val/success/mean"] == row["val/sql/success/mean"] and "val/words/success/mean" not in row
    assert json.loads((tmp_path / "rescored.json").read_text())


def test_a_source_that_fails_alone_is_paused_and_tried_again(tmp_path):
    """The run has a critic, which is one for all sources."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    steps = ("trainer.max_steps=5", "evaluation.every_steps=2", "trainer.checkpoint.keep_last=3")
    words = (*TINY, *steps, "environment.retries=0", "algorithm=turn_gae")
    output = run([sys.executable, "-c", textwrap.dedent(DOWN), *words, f"run_dir={whole}"])
    assert "environments.words is paused: " in output and "OSError: the service is down" in output
    rows = {row["step"]: row for row in rows_of(whole)}
    drawn = [[rows[step][f"rollout/{name}/groups"] for name in ("words", "sql")] for step in range(1, 6)]
    assert drawn == [[2, 1], [0, 3], [0, 3], [0, 3], [2, 1]]
    assert [rows[step]["data/words/paused"] for step in range(1, 6)] == [0, 1, 1, 1, 0]
    assert rows[2]["rollout/words/failed_episodes"] > 0 and rows[3]["rollout/words/failed_episodes"] == 0

    program("mtrl.main", *words, f"resume={whole / 'checkpoints' / 'step_000003'}", f"run_dir={again}")
    assert weights_of(again) == weights_of(whole) and rows_of(again)[-1] == rows[5]
