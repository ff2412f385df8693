"""A run whose engine frees its copy of the weights during updates: the results are those of a run that keeps it."""

import pytest
from runs import NO_EVALUATION, finish, rows_of, start, weights_of

pytestmark = pytest.mark.slow

MEASURED = """
    from pathlib import Path
    from mtrl.engines.local.engine import LocalEngine
    from mtrl.engines.local.weight_storages import WeightStorages
    if not {frees}:
        WeightStorages.free = lambda storages: None
    sleep = LocalEngine.sleep
    async def measured(engine):
        await sleep(engine)
        held = sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters())
        with Path({file!r}).open("a") as file:
            file.write(f"{{held}}\\n")
    LocalEngine.sleep = measured
"""


def held_during_updates(run_dir, *words, frees=True):
    """Make a run, and return the bytes of the engine's weights during each of its updates."""
    file = run_dir.with_suffix(".txt")
    finish(start(run_dir, *words, code=MEASURED.format(file=str(file), frees=frees)))
    return [int(line) for line in file.read_text().splitlines()]


@pytest.mark.ci
def test_freed_weights_change_no_result(tmp_path):
    words = ["trainer.fsdp.param_dtype=bfloat16", "trainer.max_steps=4"]
    assert held_during_updates(tmp_path / "frees", *words) == [0] * 4
    assert min(held_during_updates(tmp_path / "keeps", *words, frees=False)) > 0
    assert rows_of(tmp_path / "frees") == rows_of(tmp_path / "keeps")
    assert weights_of(tmp_path / "frees") == weights_of(tmp_path / "keeps")


def test_weights_that_are_not_cast_are_freed_too(tmp_path):
    """They are mapped from their file, and a mapped storage cannot be resized."""
    words = [*NO_EVALUATION, "trainer.fsdp.param_dtype=float32", "trainer.max_steps=2"]
    assert held_during_updates(tmp_path / "run", *words) == [0] * 2
