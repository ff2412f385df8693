"""Parents and children: the changes, their effects, and changes that are not proposed again."""

import json

import numpy as np
import pytest
from made_up_runs import configured, learning, rows
from omegaconf import OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.diagnose.diagnosis import diagnose
from mtrl.diagnose.lineage import differences, lineage, tried_in_vain
from mtrl.diagnose.record import Record
from mtrl.errors import UserError


def write(folder, config, made):
    folder.mkdir()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def family(tmp_path, parent, child, **changes):
    """Write two runs with these chances of success."""
    steps = {"trainer__max_steps": len(parent)}
    first = write(tmp_path / "parent", configured(**steps), rows(0, parent))
    config = configured(**{**steps, **changes}, parent=str(first))
    return write(tmp_path / "child", config, rows(1, child))


def test_a_change_that_helped(tmp_path):
    child = family(tmp_path, np.full(60, 0.3), learning(0.3, 0.8, 60), trainer__optimizer={"lr": 1e-3})
    (link,) = lineage(Record.load(child))
    assert [(s.key, s.before, s.after) for s in link.settings] == [
        ("trainer.optimizer.lr", 4e-4, 1e-3),
    ]
    assert link.decisions == 1 and link.verdict == "better"
    effect = link.effects[0]
    assert effect.change.difference > 0.3 and 0 < effect.change.error < 0.1
    assert {e.metric for e in link.effects} == {"rollout/success/mean", "val/success/mean", "rollout/reward/mean"}
    assert tried_in_vain([link]) == []


def test_a_change_without_effect_is_not_proposed_again(tmp_path):
    agree = {"analysis/zero_adv_frac": 0.95}
    flat = np.full(60, 0.35)
    first = write(tmp_path / "first", configured(trainer__max_steps=60), rows(0, flat, **agree))
    smaller = {"algorithm__group_size": 4, "trainer__prompts_per_step": 32, "trainer__max_steps": 60}
    second = write(tmp_path / "second", configured(**smaller, parent=str(first)), rows(1, flat, **agree))
    back = {"trainer__max_steps": 60, "generator__max_turns": 5, "parent": str(second)}
    third = write(tmp_path / "third", configured(**back), rows(2, flat, **agree))
    report = diagnose(third)
    assert [link.verdict for link in report.links] == ["no clear difference"] * 2
    assert [link.decisions for link in report.links] == [1, 2]
    finding = next(f for f in report.diagnosis.findings if f.rule == "equal_groups")
    assert "algorithm.group_size=4 trainer.prompts_per_step=32" not in map(str, finding.proposals)
    alone = diagnose(first)
    finding = next(f for f in alone.diagnosis.findings if f.rule == "equal_groups")
    assert str(finding.change) == "algorithm.group_size=4 trainer.prompts_per_step=32"
    assert f"parent={first}" in alone.command


def test_several_changes_at_once_are_reported(tmp_path):
    child = family(
        tmp_path, np.full(40, 0.3), np.full(40, 0.3), generator__max_turns=6, algorithm__group_size=4, seed=3
    )
    report = diagnose(child)
    assert any("changed 3 settings" in remark and "generator.max_turns 4 → 6" in remark for remark in report.remarks)


def test_keys_that_belong_together_are_one_change():
    before = configured()
    after = configured(
        algorithm__loss_fn="cispo", algorithm__clip_low_threshold=0.0, algorithm__clip_high_threshold=5.0
    )
    assert [s.key for s in differences(before, after)] == [
        "algorithm.clip_high_threshold",
        "algorithm.clip_low_threshold",
        "algorithm.loss_fn",
    ]
    assert differences(before, configured(tracker={"plots": False}, run_dir="x", name="y")) == []
    assert differences({}, {"algorithm": {"group_size": 8}}) == []  # the schema's default


def test_runs_that_were_moved_together_are_found(tmp_path):
    child = family(tmp_path, np.full(30, 0.3), np.full(30, 0.3), generator__max_turns=6)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("parent", "child"):
        (tmp_path / name).rename(moved / name)
    assert len(lineage(Record.load(moved / child.name))) == 1


def test_a_missing_parent_is_a_remark(tmp_path):
    child = family(tmp_path, np.full(30, 0.3), np.full(30, 0.3))
    (tmp_path / "parent" / "config.yaml").unlink(), (tmp_path / "parent" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="parent=.* is no run"):
        lineage(Record.load(child))
    assert "is no run" in diagnose(child).remarks[0]


def test_runs_that_are_each_others_parents_end(tmp_path):
    one = write(tmp_path / "one", configured(parent=str(tmp_path / "two")), rows(0, np.full(30, 0.3)))
    write(tmp_path / "two", configured(parent=str(one)), rows(0, np.full(30, 0.3)))
    assert len(lineage(Record.load(one))) == 1


def test_parent_must_be_a_run(tmp_path):
    with pytest.raises(UserError, match="parent=.* is no run"):
        compose([f"parent={tmp_path}", f"run_dir={tmp_path / 'new'}"])
    run = write(tmp_path / "run", configured(), [])
    cfg = compose([f"parent={run}", f"run_dir={tmp_path / 'new'}"])
    assert cfg.parent == str(run) and check(cfg) == []
