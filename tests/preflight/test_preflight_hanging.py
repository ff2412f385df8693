"""A lazy value whose computation hangs does not block other instances."""

import threading
from dataclasses import dataclass

from mtrl.preflight.context import CheckContext, lazy


@dataclass
class Slow:
    gate: threading.Event
    made: int = 0

    @lazy
    def value(self) -> int:
        """Return a number after the gate has opened."""
        self.made += 1
        self.gate.wait(60)
        return self.made


def test_it_is_made_once_and_at_its_first_use():
    open_ = threading.Event()
    open_.set()
    thing = Slow(open_)
    assert thing.made == 0
    assert thing.value == thing.value == thing.made == 1


def test_one_that_hangs_does_not_stop_another_instance():
    closed, open_ = threading.Event(), threading.Event()
    open_.set()
    hanging = Slow(closed)
    thread = threading.Thread(target=lambda: hanging.value, daemon=True)
    thread.start()
    try:
        while not hanging.made:
            pass
        got = []
        other = threading.Thread(target=lambda: got.append(Slow(open_).value), daemon=True)
        other.start()
        other.join(30)
        assert got == [1]
    finally:
        closed.set()
        thread.join()


def test_shared_values_of_the_context_are_lazy():
    """Values that call code of a task may hang."""
    for name in ("gold", "gold_responses", "solved", "demonstrated", "fuzz", "wrong", "repeats"):
        assert isinstance(vars(CheckContext)[name], lazy), name
