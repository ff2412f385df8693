import gc
import os
import weakref

import pytest

from mtrl.utils.process import settled, usable_cores


class Node:
    def __init__(self):
        self.me = self


def test_only_later_objects_are_collected():
    before = gc.get_threshold()
    old = Node()
    stored = weakref.ref(old)
    with settled():
        del old
        new = Node()
        collected = weakref.ref(new)
        del new
        gc.collect()
        assert collected() is None
        assert stored() is not None
        assert gc.get_freeze_count() > 0
    gc.collect()
    assert stored() is None
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_settings_are_restored_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), settled():
        1 / 0  # noqa: B018
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_only_cores_of_the_affinity_count(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 6, 7})
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 128
