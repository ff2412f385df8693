"""The training loop outside of its steps: the saved number of drawn rows, and its end."""

import asyncio
from types import SimpleNamespace

import pytest

from mtrl.config.schema import Config
from mtrl.errors import JobLost
from mtrl.record.metrics import MetricsLog
from mtrl.record.row_results import RowResults
from mtrl.record.timeline import Timeline
from mtrl.trainer.loop import Trainer
from mtrl.trainer.progress import RunProgress
from mtrl.trainer.work_thread import WorkThread


@pytest.fixture
def trainer(tmp_path):
    """A trainer with stand-ins for its parts, which record their calls in `calls`."""
    trainer = object.__new__(Trainer)
    trainer.calls = calls = []

    async def close(what):
        calls.append(what)

    def wait_saved():
        calls.append("saved")

    def save(folder, commit):
        commit()

    trainer.config = Config(run_dir=str(tmp_path))
    trainer.experience = SimpleNamespace(close=lambda: close("experience"), state=list)
    trainer.parts = SimpleNamespace(
        engine=SimpleNamespace(close=lambda: close("engine")), loop=SimpleNamespace(close=lambda: close("loop"))
    )
    trainer.timeline, trainer.row_results = Timeline(tmp_path / "timeline.jsonl"), RowResults(tmp_path / "rows.jsonl")
    trainer.work_thread = WorkThread(beside_rollouts=False)
    trainer.learners = SimpleNamespace(is_saving=False, wait_saved=wait_saved, save=save)
    trainer.progress, trainer.saved_step, trainer.rows = (
        RunProgress(step=3, rows_drawn=12),
        0,
        SimpleNamespace(drawn=17, state=dict),
    )
    trainer.checkpoints = SimpleNamespace(begin=lambda step: None, commit=lambda *saved: calls.append(saved[1]))
    return trainer


@pytest.mark.parametrize(("lag", "drawn"), [(0, 12), (1, 17)])
def test_rows_of_an_unfinished_step_are_drawn_again(trainer, lag, drawn):
    """With overlap these rows are stored as groups; without overlap they would be lost."""
    trainer.config.async_config.max_steps_off_policy = lag
    asyncio.run(trainer.save())
    (state,) = [call for call in trainer.calls if isinstance(call, dict)]
    assert state["rows_drawn"] == drawn


@pytest.mark.parametrize(("lag", "written"), [(0, []), (1, [{"step": 3, "results": [["a", 1.0]]}])])
def test_results_of_groups_that_a_checkpoint_stores_are_written_with_it(trainer, lag, written):
    """The resumed run scores them no more, and they were lost. Without overlap they are scored again."""
    trainer.config.async_config.max_steps_off_policy = lag
    trainer.row_results.note("a", 1.0)
    asyncio.run(trainer.save())
    assert MetricsLog(trainer.config.run_dir + "/rows.jsonl").read() == written


async def close(trainer, error=None):
    async with trainer.closing():
        if error:
            raise error


def test_the_last_checkpoint_is_waited_for_if_closing_fails(trainer):
    async def fails():
        raise OSError("the engine's process is lost")

    trainer.parts.engine.close = fails
    with pytest.raises(OSError, match="lost"):
        asyncio.run(close(trainer))
    assert trainer.calls == ["experience", "loop", "saved"]


def test_the_leaders_own_error_is_raised_instead_of_the_loss_of_other_ranks(trainer):
    def lost():
        raise JobLost(0, 2, "rank 0 failed")

    trainer.learners.wait_saved = lost
    with pytest.raises(ValueError, match="bug"):
        asyncio.run(close(trainer, ValueError("a bug")))
    with pytest.raises(JobLost):
        asyncio.run(close(trainer))
