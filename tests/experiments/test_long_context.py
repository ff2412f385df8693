"""The study of one long trajectory, at three thousand tokens."""

import json

import pytest
from safetensors.torch import load_file

from experiments.long_context import one_trajectory
from experiments.long_context.one_trajectory import (
    RECOMPUTED,
    TOLERANCE,
    UNSPLIT,
    Way,
    by_mtrl,
    error_of,
    make_model,
    unsplit,
)

TOKENS = 3072


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "model"
    make_model(folder, TOKENS)
    return folder


@pytest.mark.parametrize(
    "way",
    [
        Way(overrides=(RECOMPUTED, "trainer.recomputed_layers=2")),
        Way(overrides=(RECOMPUTED, "trainer.max_logits_per_chunk=65536")),
        Way(is_broken=True),
    ],
    ids=["half of the layers", "chunks", "with a break"],
)
def test_gradients_of_a_long_trajectory_are_those_of_the_unsplit_run(folder, way, monkeypatch):
    monkeypatch.setattr("mtrl.models.attention.MASKED", 2**18)
    loss, expected, whole = unsplit(folder, TOKENS, way.is_broken)
    found, gradients, positions = by_mtrl(folder, TOKENS, way)
    assert found == pytest.approx(loss, rel=1e-5)
    assert positions == TOKENS == whole - 1024 * way.is_broken, "a shared turn counts once"
    assert error_of(gradients, expected) < TOLERANCE
    name = max(expected, key=lambda name: expected[name].norm())
    wrong = expected | {name: 1.01 * expected[name]}
    assert error_of(wrong, expected) > TOLERANCE, "the tolerance notices a wrong gradient"


def test_a_way_writes_its_figures_and_gradients(folder):
    one_trajectory.run_way(UNSPLIT, folder.parent, 1024)
    figures = json.loads((folder.parent / "unsplit.leader.json").read_text())
    assert figures["peak_mib"] >= 0 and figures["seconds"] > 0
    loss, gradients, positions = unsplit(folder, 1024)
    assert figures["loss"] == loss and figures["positions"] == positions == 1024
    assert error_of(load_file(folder.parent / "unsplit.safetensors"), gradients) == 0
