"""The drill with many containers counts lost episodes, and its first turns wait for all starts."""

import asyncio
from dataclasses import replace

import pytest

from experiments.containers.machine import Watch
from experiments.containers.side_by_side import SideBySide, report
from experiments.containers.tasks import write_tasks
from tests.container_root import ENGINES, need_engine


@pytest.mark.parametrize("engine", ENGINES)
def test_lost_episodes_are_counted(engine, tmp_path):
    """One of three episodes has no task folder; the two others are open at once."""
    need_engine(engine, tmp_path / "image")
    tasks = write_tasks(tmp_path / "tasks", 3, engine)
    lost = {**tasks[1].row, "ground_truth": {"task": "gone", "folder": str(tmp_path / "gone")}}
    tasks[1] = replace(tasks[1], row=lost)

    async def run():
        return await SideBySide(at_once=3, think=0.1, engine=engine).run(tasks)

    with Watch(lambda: 2) as watch:
        outcomes = asyncio.run(run())
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 1.0]
    assert [bool(outcome.error) for outcome in outcomes] == [False, True, False]
    shown = report(outcomes, watch, wall=1.0, left=0)
    assert "3 episodes, 1 lost, 2 solved" in shown and "lost 1 times: UserError: task gone has no task.toml" in shown
