"""What the rules read of a run's configuration."""

from pathlib import Path

import pytest
from made_up_runs import configured

from mtrl.diagnose.diagnosis import diagnose
from mtrl.diagnose.record import Record
from mtrl.errors import UserError


def test_values_that_are_no_finite_numbers_are_left_out():
    row = {"step": 1, "a": 10**400, "b": float("nan"), "c": True, "d": "1", "e": 2}
    record = Record(configured(), rows=[row])
    assert record.metrics() == ["e", "step"] and record.series("e").values.tolist() == [2.0]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, 16 * 8),
        ({"a": {}, "b": {"weight": 3}}, 16 * 8),
        ({"a": {"algorithm": {"group_size": 2}}, "b": {"weight": 3}}, 4 * 2 + 12 * 8),
        ({"a": {"weight": [[0, 1], [9, 0]], "algorithm": {"group_size": 4}}, "b": {"weight": 0}}, 16 * 4),
    ],
)
def test_episodes_of_a_step_by_worked_numbers(sources, expected):
    config = configured(trainer__prompts_per_step=16, algorithm__group_size=8, environments=sources)
    assert Record(config).episodes == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.max_steps", "many", "trainer.max_steps=many must be an integer; write for example"),
        ("diagnosis.window", None, "diagnosis.window=null must be an integer; write for example diagnosis.window="),
        ("evaluation.claim_threshold", [1], r"evaluation.claim_threshold=\[1\] must be a number or null"),
        ("trainer", "fast", "trainer=fast must be a section with keys of its own"),
        ("diagnosis.live", [], r"diagnosis.live=\[\] must be text"),
    ],
)
def test_a_setting_of_a_wrong_type_is_one_sentence(key, value, expected):
    record = Record(configured(**{key.replace(".", "__"): value}), Path("run"))
    with pytest.raises(UserError, match=f"^run/config.yaml: {expected}"):
        record.setting("trainer.max_steps" if key == "trainer" else key)


def test_a_run_with_a_setting_of_a_wrong_type_is_refused(tmp_path):
    """It was a traceback."""
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: many}\n")
    with pytest.raises(UserError, match="config.yaml: trainer.max_steps=many must be an integer"):
        diagnose(tmp_path)
