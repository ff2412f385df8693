"""A server as a process: its environment, its log, its end and what it says last."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from mtrl.engines.server.backend import Command
from mtrl.engines.server.process import ServerProcess, free_port

NO_PROXY = "127.0.0.1,localhost,::1"
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def start(tmp_path):
    """`start(code, **env)`: a `ServerProcess` of this Python code; ended after the test."""
    started = []

    def make(code, **env):
        command = Command([sys.executable, "-S", "-c", code], env)
        started.append(ServerProcess(command, tmp_path / "logs" / "log", "toy"))
        return started[-1]

    yield make
    for server in started:
        server.end(0)


def ended(server):
    return asyncio.run(asyncio.wait_for(server.wait(), 30))


def test_it_runs_until_it_ends(start):
    server = start("import sys; sys.stdin.read(); sys.exit(4)")
    assert ended(server) == 4  # there is nothing to read
    assert not server.running and server.returncode == 4 and server.end() == "ended with status 4"


def test_whoever_stops_waiting_leaves_the_others_waiting(start):
    server = start("import time; time.sleep(600)")

    async def three():
        first, second = asyncio.create_task(server.wait()), asyncio.create_task(server.wait())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.wait(), 0.05)
        first.cancel()
        os.kill(server.pid, signal.SIGKILL)
        return await asyncio.wait_for(second, 30)

    assert asyncio.run(three()) == -signal.SIGKILL


def test_a_loop_that_ends_while_it_waits_is_no_matter(start, caplog):
    server = start("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(server.wait(), 0.05))
    server.end(0)
    assert ended(server) < 0 and not caplog.records


def test_many_threads_may_end_it(start):
    server = start("import time; time.sleep(600)")
    assert server.pid
    told = []
    threads = [threading.Thread(target=lambda: told.append(server.end(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told == ["was killed by SIGTERM"] * 8


def test_what_cannot_be_started(tmp_path):
    server = ServerProcess(Command([str(tmp_path / "no-python"), "-m", "x"]), tmp_path / "log", "toy")
    assert ended(server) == 127
    assert server.last_words() == f"cannot start {tmp_path / 'no-python'}: No such file or directory"
    with pytest.raises(ProcessLookupError, match="toy"):
        _ = server.pid


def test_the_log_is_appended_and_its_owners_alone(start, tmp_path):
    log = tmp_path / "logs" / "log"
    log.parent.mkdir()
    log.write_text("OutOfMemoryError: of the one before\n")
    log.chmod(0o644)
    server = start("import sys; print('one', flush=True); print('two', file=sys.stderr)")
    ended(server)
    assert log.read_text() == "OutOfMemoryError: of the one before\none\ntwo\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert server.last_words() == "two"


def test_last_words_come_from_the_end_of_a_long_log(start):
    server = start("print('y' * 10**6, flush=True); raise ValueError('the rope is too short')")
    ended(server)
    assert server.last_words() == "ValueError: the rope is too short"


def test_silence_has_no_last_words(start):
    server = start("")
    ended(server)
    assert server.last_words() == ""


def test_secrets_are_not_told(start, monkeypatch):
    """Neither its own nor the one of the trainer's that it gets as well."""
    monkeypatch.setenv("HF_TOKEN", "hf_0815")
    for name in ("TOY_TOKEN", "HF_TOKEN"):
        server = start(f"import os; raise ValueError(os.environ['{name}'])", TOY_TOKEN="4711-0815")
        ended(server)
        assert server.last_words() == "ValueError: ***"


def test_a_port_that_another_has_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start(f"import socket; socket.create_server(('127.0.0.1', {port}))")
        assert ended(server) == 1
        assert server.lost_port and "Address already in use" in server.last_words()
    server = start(f"import socket; socket.create_server(('127.0.0.1', {free_port()}))")
    assert ended(server) == 0 and not server.lost_port


def environment(server, log):
    assert ended(server) == 0, server.last_words()
    return json.loads(log.read_text().splitlines()[-1])


def test_the_environment_is_scrubbed(start, tmp_path, monkeypatch):
    dropped = {
        "LD_PRELOAD": "", "PYTHONPATH": "x", "PYTHONHASHSEED": "3", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7", "PYTORCH_CUDA_ALLOC_CONF": "x", "VIRTUAL_ENV": "x",
        "OPENAI_API_KEY": "s", "WANDB_API_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s", "AWS_PROFILE": "x", "GH_TOKEN": "s",
        "MLFLOW_TRACKING_PASSWORD": "s", "MTRL_ENGINE_KEY": "s", "VLLM_API_KEY": "s", "LD_LIBRARY_PATH": "by a library",
    }  # fmt: skip
    kept = {"HF_TOKEN": "h", "HF_HOME": "x", "NCCL_DEBUG": "INFO", "VLLM_LOGGING_LEVEL": "x"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name, value in (dropped | kept).items():
        monkeypatch.setenv(name, value)
    found = environment(start(SHOW, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="0"), tmp_path / "logs" / "log")
    assert found["OMP_NUM_THREADS"] == "1" and found["CUDA_VISIBLE_DEVICES"] == "0"
    assert not set(found) & (set(dropped) - {"OMP_NUM_THREADS"})
    assert kept.items() <= found.items()
    assert found["PATH"].split(":")[0] == os.path.dirname(sys.executable)
    assert found["HOME"] == os.environ["HOME"]


@pytest.mark.parametrize(("given", "wanted"), [(None, NO_PROXY), ("a.b", f"a.b,{NO_PROXY}")])
def test_a_proxy_is_not_for_this_machine(start, tmp_path, monkeypatch, given, wanted):
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    if given:
        monkeypatch.setenv("NO_PROXY", given)
    found = environment(start(SHOW), tmp_path / "logs" / "log")
    assert found["no_proxy"] == found["NO_PROXY"] == wanted


def test_the_library_path_of_the_user_stays(tmp_path):
    program = (
        "import os, sys; from pathlib import Path\n"
        "from mtrl.engines.server.environment import server_environment\n"
        "from mtrl.engines.server.backend import Command\n"
        "os.environ['LD_LIBRARY_PATH'] = 'of a library'\n"
        "print(server_environment(Command(['python'])).get('LD_LIBRARY_PATH'))"
    )
    for given in (None, "/of/the/user"):
        before = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        env = before | ({"LD_LIBRARY_PATH": given} if given else {})
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(given)


def test_no_other_file_of_the_trainer_is_inherited(start, tmp_path):
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        held_by_it = "sorted(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1])"
        server = start(f"import os; print({held_by_it})")
        ended(server)
    log = tmp_path / "logs" / "log"
    assert log.read_text() == f"{sorted(['/dev/null', str(log), str(log)])}\n"


def test_ports_differ_and_are_free():
    with socket.create_server(("127.0.0.1", free_port())) as one:
        assert one.getsockname()[1] != free_port()
