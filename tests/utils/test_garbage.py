import gc
import weakref

import pytest

from mtrl.utils.garbage import settled


class Node:
    def __init__(self):
        self.me = self


def test_what_exists_stays_and_what_comes_later_is_collected():
    before = gc.get_threshold()
    old = Node()
    kept = weakref.ref(old)
    with settled():
        del old
        new = Node()
        gone = weakref.ref(new)
        del new
        gc.collect()
        assert gone() is None
        assert kept() is not None
        assert gc.get_freeze_count() > 0
    gc.collect()
    assert kept() is None
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_an_error_leaves_nothing_behind():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), settled():
        1 / 0  # noqa: B018
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
