"""Containers of Podman and Docker, for real where this machine can run them."""

import os
import signal
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mtrl.errors import UserError
from mtrl.sandbox import disk_watch, engine_container
from mtrl.sandbox.container import CommandResult, ContainerError, ContainerLimits, copy_out
from mtrl.sandbox.container_files import may_measure
from mtrl.sandbox.engine_container import EngineContainer, reason_of
from tests.container_root import ENGINES, IMAGE, WRITE_ON, need_engine
from tests.sandbox.container_kills import kill_once
from tests.sandbox.swerex_servers import until

LIMITS = ContainerLimits(memory="64m", cpus=1.0, processes=32)


def remaining(container):
    """What the engine prints of a container that may be gone."""
    command = [container.engine, "ps", "-aq", "--filter", f"name={container.name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", params=ENGINES)
def container(request, tmp_path_factory):
    """A running container of each engine."""
    need_engine(request.param, tmp_path_factory.mktemp(request.param))
    started = EngineContainer(request.param, IMAGE, LIMITS, cwd="/app")
    started.start()
    yield started
    started.remove()
    assert remaining(started) == ""


def test_commands_keep_files_and_get_variables(container):
    first = container.run('echo "$A" > a.txt; echo out; echo err >&2; exit 3', 20, {"A": "it's $HOME"})
    assert (first.output, first.exit_code, first.stopped) == ("out\nerr\n", 3, "")
    assert copy_out(container, "/app/a.txt") == "it's $HOME\n"
    assert copy_out(container, "/app") is None and copy_out(container, "/nothing") is None
    assert container.run("echo $HOSTNAME", 20).output == "container\n", "it must not differ between episodes"


def test_both_outputs_are_in_the_order_of_their_lines(container):
    """Engines transport two streams, whose order Docker 28 lost in the first of two lines."""
    lines = container.run("for i in {1..40}; do echo $i; echo $i >&2; done", 20).output.splitlines()
    assert lines == [str(number) for number in range(1, 41) for _ in range(2)]
    assert container.run("echo )", 20).output.startswith("bash: -c: line 1: syntax error")


def test_a_folder_is_copied_in(container, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.txt").write_text("b")
    container.copy_in(tmp_path, "/tmp")
    assert copy_out(container, "/tmp/below/b.txt") == "b"


def test_limits_hold(container):
    late = container.run("echo begun; sleep 100", 4)
    assert (late.output, late.exit_code) == ("begun\n", -1) and "more than 4 s" in late.stopped
    memory = container.run("x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo unlimited", 20)
    assert "unlimited" not in memory.output and not Path("oom").exists()
    forks = container.run("for i in {1..60}; do sleep 1 & done; wait; echo end", 30)
    assert "Resource temporarily unavailable" in forks.output
    network = container.run("cat /proc/net/dev", 10).output.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in network] == ["lo"]


@pytest.mark.parametrize("measured_by", ["host", "engine"])
def test_a_container_that_fills_its_disk_is_removed(container, monkeypatch, measured_by):
    """One file ends at the limit of the kernel, and many files end the container: no host is filled."""
    if measured_by == "engine":
        monkeypatch.setattr(engine_container, "container_files", lambda process, container: None)
    elif not may_measure():
        pytest.skip("only root may read the folders of all containers")
    else:
        monkeypatch.setattr(disk_watch, "engine_sizes", None)
    small = EngineContainer(container.engine, IMAGE, replace(LIMITS, disk_mb=16), cwd="/app")
    reason = "the files of the container exceeded 16 MiB, and the container was removed"
    try:
        small.start()
        assert f"{16 * 2**20}\n" in small.run("cat /dev/zero > one; wc -c < one; rm one", 20).output
        full = small.run(WRITE_ON, 60)
        assert (full.exit_code, full.stopped) == (-1, reason)
        assert small.run("ls", 20) == CommandResult("", -1, reason)
    finally:
        small.remove()
    assert remaining(small) == "" and container.run("echo other", 20).output == "other\n"


KILL_SLEEPS = 'for p in /proc/[0-9]*; do if [ "$(cat $p/comm)" = sleep ]; then kill -9 ${p#/proc/}; fi; done'


LEAVE = "for i in {1..20}; do (sleep 0.1 &) done; sleep 0.3; echo end"


def test_processes_that_a_command_leaves_count_until_they_end(container):
    """The limit is 32 processes, and each command leaves 20, which end soon."""
    for _ in range(3):
        assert container.run(LEAVE, 20).output == "end\n"


def test_a_command_cannot_end_the_main_process(container):
    """A main process that starts another one would end at the limit on processes."""
    container.run(f"for s in {{1..64}}; do kill -$s 1; done; {KILL_SLEEPS}", 20)
    assert "sleep" not in container.run("sleep 0.3 & wait; cat /proc/[0-9]*/comm", 20).output.split()
    for _ in range(3):
        assert container.run(LEAVE, 20).output == "end\n"


def test_a_command_that_fills_the_memory_ends_before_the_container(container):
    """The files of /dev/shm are memory that no killed process frees, so the kernel kills one process after another."""
    command, main = container.run("cat /proc/$$/oom_score_adj /proc/1/oom_score_adj", 20).output.split()
    assert command == "1000" and int(main) < 1000
    full = EngineContainer(container.engine, IMAGE, LIMITS)
    full.start()
    try:
        done = full.run("cat /dev/zero > /dev/shm/file; sleep 0.1; echo end", 20)
        assert full.is_running() and done.exit_code != 0
    finally:
        full.remove()


def test_a_container_ends_by_itself(container):
    short = EngineContainer(container.engine, IMAGE, replace(LIMITS, seconds=0.5))
    short.start()
    with pytest.raises(ContainerError, match="cannot run a command in .*: (Error|the container has ended)"):
        while short.run("sleep 10", 20).output == "":
            continue
    short.remove()


@pytest.mark.parametrize("code", [1, 125, 255])
def test_a_command_cannot_pretend_that_the_engine_failed(container, code):
    done = container.run(f"echo 'Error: no such container' >&2; exit {code}", 20)
    assert (done.output, done.exit_code) == ("Error: no such container\n", code)


LOST = """#!/bin/bash
case $1 in
    exec) echo "$PRINTED"; exit $CODE ;;
    container) echo "Cannot connect to the Docker daemon" >&2; exit 1 ;;
esac
"""


CANNOT = "Cannot connect to the Docker daemon at unix:///x"


@pytest.mark.parametrize(
    ("printed", "code", "reason"),
    [
        ("begun", 255, "the container has ended, or docker is lost"),
        ("begun", 137, "the container has ended, or docker is lost"),
        (CANNOT, 1, CANNOT),
    ],
)
def test_a_daemon_that_is_lost_fails_the_episode(tmp_path, monkeypatch, printed, code, reason):
    """A program in place of docker prints what Docker 20.10 printed when its daemon was killed during a command, was
    stopped during one, which kills the containers, and was killed before one."""
    engine = tmp_path / "docker"
    engine.write_text(LOST)
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PRINTED", printed)
    monkeypatch.setenv("CODE", str(code))
    with pytest.raises(ContainerError, match=f"docker cannot run a command in {IMAGE}: {reason}"):
        EngineContainer("docker", IMAGE, LIMITS).run("echo begun; sleep 5", 20)


@pytest.mark.parametrize(
    ("command", "reason"),
    [("a\0b", "a NUL character"), ("\ud800", "a lone surrogate"), ("é" * 2**16, "131072 bytes")],
    ids=["NUL", "surrogate", "long"],
)
def test_a_command_that_no_program_can_be_given_is_a_failed_command(tmp_path, monkeypatch, command, reason):
    """A model cannot void its episode by it. The program in place of docker would raise ContainerError."""
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/bash\nexit 255\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    container = EngineContainer("docker", IMAGE, LIMITS)
    done = container.run(command, 20)
    assert done.exit_code == 126 and f"bash: the command has {reason}" in done.output and not done.stopped
    with pytest.raises(ContainerError):
        container.run("x" * (2**17 - 1), 20)


def test_the_file_of_bash_env_is_read_once(tmp_path):
    """Images set this variable, for example to activate an environment of Python."""
    (tmp_path / "env").write_text("echo read; f() { echo function; }")
    command = [*engine_container.RUN_WORDS, "bash", "-c", "f; echo $POSIXLY_CORRECT; echo error >&2"]
    done = subprocess.run(
        command, env={**os.environ, "BASH_ENV": str(tmp_path / "env")}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("read\nfunction\n\nerror\n", "")


def test_the_longest_command_runs(container):
    assert container.run(f"echo one # {'x' * (2**17 - 1 - 11)}", 20).output == "one\n"


def test_the_reason_of_a_failed_start():
    hint = "\nRun 'docker run --help' for more information\n"
    assert reason_of(f"Unable to find image\ndocker: no such image\n{hint}") == "docker: no such image"
    assert reason_of("Trying to pull\nError: no registry\n") == "Error: no registry"
    assert reason_of("first\nlast\n") == "last" and reason_of(" \n") == "the program printed nothing"


def test_a_missing_image_and_a_removed_container_are_one_sentence(container):
    missing = EngineContainer(container.engine, "localhost/mtrl-no-such-image:1", LIMITS)
    with pytest.raises(
        ContainerError, match=f"{container.engine} cannot start a container of {missing.image}: (docker:|Error)"
    ):
        missing.start()
    missing.remove()
    with pytest.raises(ContainerError, match=f"{container.engine} cannot run a command in {missing.image}: Error"):
        missing.run("ls", 20)


def test_a_killed_process_leaves_no_container(container):
    """The first kill falls into the start of the containers, and the second into their commands."""
    assert kill_once(container.engine, 0.3)[1] == 0
    before, left = kill_once(container.engine, 0.5, started=2)
    assert before > 0 and left == 0


def test_an_engine_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="backend=podman needs the program podman, which is not on PATH; install"):
        EngineContainer("podman", IMAGE, LIMITS)


def test_a_forked_process_has_slots_of_its_own(tmp_path):
    calls = engine_container.CALLS_AT_ONCE
    waiting = "echo >> begun; until [ -e end ]; do sleep 0.05; done"
    with ThreadPoolExecutor(calls) as pool:
        held = [
            pool.submit(engine_container.call_engine, ["sh", "-c", waiting], 60, "", tmp_path) for _ in range(calls)
        ]
        until(lambda: (tmp_path / "begun").exists() and len((tmp_path / "begun").read_text()) == calls)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of Python warn of threads
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                engine_container.call_engine(["true"], 10, "")
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        (tmp_path / "end").touch()
        assert [call.result() for call in held] == [""] * calls
    assert status == 0
