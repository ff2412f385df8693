"""Signals that ask a run to stop."""

import signal
import threading
from queue import Queue

import pytest

from mtrl.errors import EndedAtOnce, Interrupted
from mtrl.utils.signals import SIGNALS, Interrupt, Relay


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_requests_a_stop_and_the_second_ends(number):
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt() as interrupt:
        assert interrupt.requested is None
        signal.raise_signal(number)
        assert interrupt.requested == number.name
        with pytest.raises(EndedAtOnce) as ended:
            signal.raise_signal(signal.SIGTERM)
    assert ended.value.number == signal.SIGTERM
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_first_signal_is_reported(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = []
    with Interrupt(lambda: message.append(interrupt.requested)) as interrupt:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert message == ["SIGUSR1"]


def test_a_second_signal_waits_for_the_report():
    lines = []

    def report():
        lines.append("asked to")
        signal.raise_signal(signal.SIGTERM)
        lines[-1] += " stop"

    with Interrupt(report), pytest.raises(EndedAtOnce) as ended:
        signal.raise_signal(signal.SIGINT)
    assert lines == ["asked to stop"] and ended.value.number == signal.SIGTERM


def test_under_torchrun_only_the_first_signal_counts(monkeypatch):
    """torchrun and the scheduler both send signals, and a second signal must not prevent the checkpoint."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Interrupt() as interrupt:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
    assert interrupt.requested == "SIGUSR1"


def test_a_follower_forwards_only_the_first_signal():
    message, handlers = Queue(), [signal.getsignal(number) for number in SIGNALS]
    with Relay(message.put):
        signal.raise_signal(signal.SIGTERM)
        for number in SIGNALS:
            signal.raise_signal(number)
        assert message.get(timeout=10) == "SIGTERM"
    assert message.empty()
    with Relay(message.put):
        pass  # no signal came, and no code waits for one
    assert [signal.getsignal(number) for number in SIGNALS] == handlers and signal.set_wakeup_fd(-1) == -1


def test_a_follower_forwards_signals_while_its_main_thread_is_busy():
    """The main thread is inside of one long call, such as a collective."""
    lock, when = threading.Lock(), []
    lock.acquire()

    def report(name):
        when.append(name)
        lock.release()

    with Relay(report):
        threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR1]).start()  # is delivered to another thread
        assert lock.acquire(timeout=10) and when == ["SIGUSR1"]


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_the_exit_status_tells_schedulers_whether_to_restart(name, status):
    with pytest.raises(SystemExit) as caught:
        raise Interrupted(name)
    assert (caught.value.code, caught.value.signal) == (status, name)
