"""Containers that wait for episodes, with real engines where this machine can run them."""

import subprocess
import threading
from dataclasses import replace

import pytest

from mtrl.sandbox import warm_containers
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.container_supervisor import owner_label
from mtrl.sandbox.engine_container import engine_path
from mtrl.sandbox.warm_containers import ContainerKind, WarmContainer, WarmContainers
from tests.container_root import ENGINES, IMAGE, need_engine

LIMITS = ContainerLimits(memory="64m", processes=32)


@pytest.fixture(scope="module", params=ENGINES)
def kind(request, tmp_path_factory):
    need_engine(request.param, tmp_path_factory.mktemp(request.param))
    return ContainerKind(request.param, IMAGE, LIMITS, "/app")


def running(kind):
    """The names of the running containers of this process."""
    label = f"label={owner_label(engine_path(kind.engine))}"
    command = [kind.engine, "ps", "--format", "{{.Names}}", "--filter", label]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def settle():
    """Wait for the containers that are being started in the background."""
    for thread in threading.enumerate():
        if thread.name == "warm-container":
            thread.join()


@pytest.fixture
def others(kind):
    """A pool with at most one waiting container. The containers that the test has left are removed."""
    yield WarmContainers(1)
    settle()
    for name in running(kind):
        subprocess.run([kind.engine, "rm", "-f", name], capture_output=True, check=False)


PROGRAM = """#!/bin/bash
cd "$(dirname "$0")"
case $1 in
    run) echo >> runs; sleep 0.2 ;;
    container) echo true ;;
esac
"""


@pytest.fixture
def scripted(tmp_path):
    """A kind of containers of a program in place of an engine."""
    (tmp_path / "runs").touch()
    program = tmp_path / "engine"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return ContainerKind(str(program), "image", LIMITS)


def test_no_more_containers_are_started_than_may_wait(scripted, tmp_path):
    """Episodes of twenty kinds begin at once."""
    others, kinds = WarmContainers(2), [replace(scripted, cwd=f"/{i}") for i in range(20)]
    for one in kinds:
        others.refill(one)
    settle()
    assert (tmp_path / "runs").read_text() == "\n" * 2
    others.refill(kinds[-1])
    settle()
    assert [others.take(kinds[-1]) is None for _ in range(3)] == [False, False, True], "the newest kind waits"


def test_containers_are_started_again_after_any_error(scripted, tmp_path, caplog):
    others, program = WarmContainers(1), tmp_path / "engine"
    program.rename(tmp_path / "away")
    others.refill(scripted)
    settle()
    assert "no container waits for the next episode: environment.config.backend=" in caplog.text
    (tmp_path / "away").rename(program)
    others.refill(scripted)
    settle()
    assert others.take(scripted) is not None


def test_an_episode_takes_a_container_that_was_started_before(kind, others, tmp_path):
    first, second = WarmContainer(kind, others), WarmContainer(kind, others)
    first.remove()  # an episode may end before its container starts
    first.start()
    assert first.run("echo first > own; cat own", 20).output == "first\n"
    settle()
    assert len(before := running(kind)) == 2
    second.start()
    (tmp_path / "given").write_text("copied")
    second.copy_in(tmp_path, "/app")
    assert second.run("ls", 20).output == "given\n"
    settle()
    first.remove()
    second.remove()
    (waiting,) = running(kind)
    assert waiting not in before, "the container that waited was not taken"


def test_a_container_that_has_ended_or_waited_too_long_is_not_taken(kind, others, monkeypatch):
    others.refill(kind)
    settle()
    (ended,) = running(kind)
    subprocess.run([kind.engine, "rm", "-f", ended], capture_output=True, check=True)
    assert others.take(kind) is None
    others.refill(kind)
    settle()
    assert len(running(kind)) == 1
    monkeypatch.setattr(warm_containers, "LONGEST_WAIT", 0.0)
    assert others.take(kind) is None
    settle()
    assert running(kind) == set()


def test_containers_of_another_kind_take_the_place_of_the_old_ones(kind, others):
    for one in (kind, replace(kind, cwd="/tmp")):
        others.refill(one)
        settle()
        assert len(running(kind)) == 1
    assert others.take(kind) is None and others.take(replace(kind, cwd="/tmp")).run("pwd", 20).output == "/tmp\n"


def test_a_container_that_does_not_start_is_a_warning(kind, others, caplog):
    missing = replace(kind, image="localhost/mtrl-missing:1")
    for _ in range(2):
        caplog.clear()
        others.refill(missing)
        settle()
        assert f"no container waits for the next episode: {kind.engine} cannot start a container of" in caplog.text
    assert others.take(missing) is None
