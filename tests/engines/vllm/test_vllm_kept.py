"""The weights that a vLLM worker keeps accept changes from their own version only."""

import pytest
import torch

from mtrl.engines.server.changes import find_changes, message_of
from mtrl.engines.vllm.kept import KeptWeights

OLD = {"a": torch.zeros(500, 3, dtype=torch.bfloat16), "b": torch.ones(4)}
NEW = {"a": OLD["a"].index_fill(0, torch.tensor([7]), -0.0), "b": OLD["b"]}


def send(kept, new, old, base, version):
    """Send new weights as one update, and return the tensors that the worker loads."""
    found = [find_changes(name, value, None if old is None else old[name]) for name, value in new.items()]
    message = message_of([piece for _, pieces in found for piece in pieces], "cpu")
    kept.begin()
    loaded = kept.apply([layout for layout, _ in found], message, base, version)
    kept.finish()
    return loaded


def is_same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)) for name, value in expected.items()
    )


def test_changes_are_applied_to_the_last_weights():
    kept = KeptWeights()
    assert is_same(send(kept, OLD, None, None, 1), OLD)
    kept.check(1)
    assert is_same(send(kept, NEW, OLD, 1, 2), NEW)
    assert is_same(send(kept, NEW, NEW, 2, 3), NEW)
    kept.check(3)


def test_changes_from_another_version_are_refused():
    kept = KeptWeights()
    with pytest.raises(ValueError, match="keeps no weights, and the changes are from version 1"):
        kept.check(1)
    send(kept, OLD, None, None, 4)
    with pytest.raises(ValueError, match="keeps the weights of version 4, and the changes are from version 3"):
        kept.check(3)
    with pytest.raises(ValueError, match="version 4, and the changes are from version 3"):
        send(kept, NEW, OLD, 3, 5)
    with pytest.raises(ValueError, match="keeps no weights"):  # the update has failed
        kept.check(4)


def test_an_update_without_changes_leaves_no_weights():
    """Such as one by files, after which the kept tensors are no longer those that the server samples with."""
    kept = KeptWeights()
    send(kept, OLD, None, None, 1)
    kept.begin()
    kept.finish()
    with pytest.raises(ValueError, match="keeps no weights"):
        kept.check(1)


def test_changes_of_unknown_tensors_are_refused():
    kept = KeptWeights()
    send(kept, {"b": OLD["b"]}, None, None, 1)
    with pytest.raises(ValueError, match=r"keeps no a of bfloat16 \(500, 3\)"):
        send(kept, NEW, OLD, 1, 2)
    with pytest.raises(ValueError, match="has no changes of 16 bytes"):
        kept.apply([find_changes("b", OLD["b"], None)[0]], torch.zeros(15, dtype=torch.uint8), None, 2)
