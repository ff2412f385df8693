"""The supervisor of containers, with programs in place of an engine that are late, fail or never answer."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mtrl.sandbox import container_supervisor
from mtrl.sandbox.container_supervisor import has_clients, remove_all

LABEL = f"mtrl.owner=test-{os.getpid()}"
ENGINE = """#!/bin/bash
cd "$(dirname "$0")"
case $1 in
    run) sleep 1.5; echo "${@: -1}" > container ;;
    ps) if [ -e container ]; then echo name; fi ;;
    rm) rm container; echo removed > removed ;;
esac
"""
STARTING = """
import subprocess, sys
from mtrl.sandbox.container_supervisor import owner_label

client = subprocess.Popen([sys.argv[1], "run", "--label", owner_label(sys.argv[1]), "image"])
print("client", flush=True)
client.wait()
"""


def test_a_container_that_is_created_after_the_kill_is_removed(tmp_path):
    """A program in place of podman creates its container more than a second after the process was killed."""
    engine = tmp_path / "engine"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-c", STARTING, engine], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"client\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "container").exists()
    deadline = time.monotonic() + 30
    while not (tmp_path / "removed").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "removed").exists() and not (tmp_path / "container").exists()


SILENT = """#!/bin/bash
cd "$(dirname "$0")"
echo "$1" >> calls
if (($(wc -l < calls) <= FAILURES)); then echo no daemon >&2; exit 1; fi
case $1 in
    ps) if [ -e container ]; then echo name; fi ;;
    rm) rm container ;;
esac
"""


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """Makes a program in place of an engine that has one container and fails in its first calls."""
    monkeypatch.setattr(container_supervisor, "FAILURE_PAUSE", 0.01)
    monkeypatch.setattr(container_supervisor, "EMPTY_PAUSE", 0.01)
    monkeypatch.setattr(container_supervisor, "LONGEST_SILENCE", 0.2)

    def make(failures):
        (tmp_path / "container").touch()
        engine = tmp_path / "engine"
        engine.write_text(SILENT.replace("FAILURES", str(failures)))
        engine.chmod(0o755)
        return str(engine)

    return make


def test_an_engine_that_does_not_answer_is_given_up(silent, tmp_path):
    """The container remains, and ends by itself."""
    assert not remove_all(silent(10**6), LABEL)
    assert len((tmp_path / "calls").read_text().splitlines()) > 1 and (tmp_path / "container").exists()
    assert not remove_all(str(tmp_path / "gone"), LABEL), "its program was removed"


def test_an_engine_that_restarts_is_waited_for(silent, tmp_path, monkeypatch):
    monkeypatch.setattr(container_supervisor, "LONGEST_SILENCE", 60.0)
    assert remove_all(silent(3), LABEL)
    assert (tmp_path / "calls").read_text().split() == ["ps", "ps", "ps", "ps", "rm", "ps", "ps", "ps"]
    assert not (tmp_path / "container").exists()


def test_a_client_that_may_create_a_container_is_waited_for_in_silence(silent, tmp_path, monkeypatch):
    """Without the client, which ends when the engine answers, the engine would be given up at its second failure."""
    monkeypatch.setattr(container_supervisor, "LONGEST_SILENCE", 0.0)
    until_it_answers = "until [ -e calls ] && (($(wc -l < calls) > 5)); do sleep 0.05; done"
    with subprocess.Popen(["bash", "-c", until_it_answers, LABEL], cwd=tmp_path) as client:
        try:
            while not has_clients(LABEL):  # the kernel shows the arguments a moment after the program has started
                time.sleep(0.001)
            assert remove_all(silent(5), LABEL)
        finally:
            client.kill()
    assert not (tmp_path / "container").exists()


LATE = """#!/bin/bash
cd "$(dirname "$0")"
echo "$1" >> calls
if [ "$1" = ps ] && [ "$(grep -c ps calls)" = 3 ]; then echo name; fi
"""


def test_a_container_that_appears_after_an_empty_look_is_removed(tmp_path, monkeypatch):
    """The daemon creates the container of a client that was killed while no client is left."""
    monkeypatch.setattr(container_supervisor, "EMPTY_PAUSE", 0.01)
    engine = tmp_path / "engine"
    engine.write_text(LATE)
    engine.chmod(0o755)
    assert remove_all(str(engine), LABEL)
    assert (tmp_path / "calls").read_text().split() == ["ps", "ps", "ps", "rm", "ps", "ps", "ps"]
