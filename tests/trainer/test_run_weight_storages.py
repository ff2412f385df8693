"""A run whose engine frees its copy of the weights during updates: the results are those of a run that keeps it."""

import pytest
from runs import finish, rows_of, start, weights_of

pytestmark = pytest.mark.slow

COUNT = """
    from pathlib import Path
    from mtrl.engines.local.weight_storages import WeightStorages
    free = WeightStorages.free
    def counted(memory):
        with Path({file!r}).open("a") as file:
            file.write(f"{{memory.bytes}}\\n")
        if {frees}:
            free(memory)
    WeightStorages.free = counted
"""


def test_freed_weights_change_no_result(tmp_path):
    words = ["trainer.fsdp.param_dtype=bfloat16", "trainer.max_steps=4"]
    for name, frees in ("frees", True), ("keeps", False):
        code = COUNT.format(file=str(tmp_path / f"{name}.txt"), frees=frees)
        finish(start(tmp_path / name, *words, code=code))
        freed = [int(line) for line in (tmp_path / f"{name}.txt").read_text().splitlines()]
        assert len(freed) == 4 and min(freed) > 0, "once for each step"
    assert rows_of(tmp_path / "frees") == rows_of(tmp_path / "keeps")
    assert weights_of(tmp_path / "frees") == weights_of(tmp_path / "keeps")
