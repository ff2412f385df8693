"""A server as a process: its environment, its log, its end and its last error."""

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

from mtrl.engines.server.backend import ServerCommand
from mtrl.engines.server.process import ServerProcess, free_port

NO_PROXY = "127.0.0.1,localhost,::1"
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def start(tmp_path):
    """Function `start(code, **env)` that returns a `ServerProcess` of this Python code, which ends with the test."""
    started = []

    def make(code, **env):
        command = ServerCommand([sys.executable, "-S", "-c", code], env)
        started.append(ServerProcess(command, tmp_path / "logs" / "log", "toy"))
        return started[-1]

    yield make
    for server in started:
        server.end(0)


def ended(server):
    return asyncio.run(asyncio.wait_for(server.wait(), 30))


def test_a_process_runs_until_it_ends(start):
    server = start("import sys; sys.stdin.read(); sys.exit(4)")
    assert ended(server) == 4  # there is nothing to read
    assert not server.running and server.returncode == 4 and server.end() == "ended with status 4"


def test_a_cancelled_wait_does_not_cancel_others(start):
    server = start("import time; time.sleep(600)")

    async def three():
        first, second = asyncio.create_task(server.wait()), asyncio.create_task(server.wait())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.wait(), 0.05)
        first.cancel()
        os.kill(server.pid, signal.SIGKILL)
        return await asyncio.wait_for(second, 30)

    assert asyncio.run(three()) == -signal.SIGKILL


def test_an_event_loop_may_end_during_a_wait(start, caplog):
    server = start("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(server.wait(), 0.05))
    server.end(0)
    assert ended(server) < 0 and not caplog.records


def test_several_threads_may_end_a_process(start):
    server = start("import time; time.sleep(600)")
    assert server.pid
    message = []
    threads = [threading.Thread(target=lambda: message.append(server.end(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert message == ["was killed by SIGTERM"] * 8


def test_a_command_that_cannot_start_is_reported(tmp_path):
    server = ServerProcess(ServerCommand([str(tmp_path / "no-python"), "-m", "x"]), tmp_path / "log", "toy")
    assert ended(server) == 127
    assert server.error_line() == f"cannot start {tmp_path / 'no-python'}: No such file or directory"
    with pytest.raises(ProcessLookupError, match="toy"):
        _ = server.pid


def test_the_log_is_appended_and_private(start, tmp_path):
    log = tmp_path / "logs" / "log"
    log.parent.mkdir()
    log.write_text("OutOfMemoryError: of the one before\n")
    log.chmod(0o644)
    server = start("import sys; print('one', flush=True); print('two', file=sys.stderr)")
    ended(server)
    assert log.read_text() == "OutOfMemoryError: of the one before\none\ntwo\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert server.error_line() == "two"


def test_the_error_line_is_searched_at_the_end_of_a_long_log(start):
    server = start("print('y' * 10**6, flush=True); raise ValueError('the rope is too short')")
    ended(server)
    assert server.error_line() == "ValueError: the rope is too short"


def test_an_empty_log_has_no_error_line(start):
    server = start("")
    ended(server)
    assert server.error_line() == ""


def test_secrets_are_redacted(start, monkeypatch):
    """Neither the server's own secret nor that of the trainer, which the server also gets, is in the log."""
    monkeypatch.setenv("HF_TOKEN", "hf_0815")
    for name in ("TOY_TOKEN", "HF_TOKEN"):
        server = start(f"import os; raise ValueError(os.environ['{name}'])", TOY_TOKEN="4711-0815")
        ended(server)
        assert server.error_line() == "ValueError: ***"


def test_a_port_taken_by_another_process_is_recognised(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start(f"import socket; socket.create_server(('127.0.0.1', {port}))")
        assert ended(server) == 1
        assert server.lost_port and "Address already in use" in server.error_line()
    server = start(f"import socket; socket.create_server(('127.0.0.1', {free_port()}))")
    assert ended(server) == 0 and not server.lost_port


def environment(server, log):
    assert ended(server) == 0, server.error_line()
    return json.loads(log.read_text().splitlines()[-1])


def test_the_environment_is_scrubbed(start, tmp_path, monkeypatch):
    dropped = {
        "LD_PRELOAD": "", "PYTHONPATH": "x", "PYTHONHASHSEED": "3", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7", "PYTORCH_CUDA_ALLOC_CONF": "x", "VIRTUAL_ENV": "x",
        "OPENAI_API_KEY": "s", "WANDB_API_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s", "AWS_PROFILE": "x", "GH_TOKEN": "s",
        "MLFLOW_TRACKING_PASSWORD": "s", "MTRL_ENGINE_KEY": "s", "VLLM_API_KEY": "s", "LD_LIBRARY_PATH": "by a library",
    }  # fmt: skip
    stored = {"HF_TOKEN": "h", "HF_HOME": "x", "NCCL_DEBUG": "INFO", "VLLM_LOGGING_LEVEL": "x"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name, value in (dropped | stored).items():
        monkeypatch.setenv(name, value)
    found = environment(start(SHOW, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="0"), tmp_path / "logs" / "log")
    assert found["OMP_NUM_THREADS"] == "1" and found["CUDA_VISIBLE_DEVICES"] == "0"
    assert not set(found) & (set(dropped) - {"OMP_NUM_THREADS"})
    assert stored.items() <= found.items()
    assert found["PATH"].split(":")[0] == os.path.dirname(sys.executable)
    assert found["HOME"] == os.environ["HOME"]


@pytest.mark.parametrize(("given", "wanted"), [(None, NO_PROXY), ("a.b", f"a.b,{NO_PROXY}")])
def test_this_machine_is_exempt_from_proxies(start, tmp_path, monkeypatch, given, wanted):
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    if given:
        monkeypatch.setenv("NO_PROXY", given)
    found = environment(start(SHOW), tmp_path / "logs" / "log")
    assert found["no_proxy"] == found["NO_PROXY"] == wanted


def test_the_library_path_of_the_user_is_inherited(tmp_path):
    program = (
        "import os, sys; from pathlib import Path\n"
        "from mtrl.engines.server.environment import server_environment\n"
        "from mtrl.engines.server.backend import ServerCommand\n"
        "os.environ['LD_LIBRARY_PATH'] = 'of a library'\n"
        "print(server_environment(ServerCommand(['python'])).get('LD_LIBRARY_PATH'))"
    )
    for given in (None, "/of/the/user"):
        before = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        env = before | ({"LD_LIBRARY_PATH": given} if given else {})
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(given)


def test_no_file_descriptor_of_the_trainer_is_inherited(start, tmp_path):
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
