"""A Hub that does not answer gets one request per process."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mtrl
from mtrl.utils import hub

ROOT = Path(mtrl.__file__).parent.parent
FAST = ("debug=fast", "model.warm_start.demonstrations=8", "preflight.at_start=none", "run_dir=run")
COMMANDS = {
    "main": ["-m", "mtrl.main", "experiment=gsm8k_multi_turn", "model=hf", "model.path=owner/name",
             "data.path=null", "run_dir=run"],
    "evaluate": ["-m", "mtrl.evaluate", "experiment=gsm8k_multi_turn", "evaluation.model=owner/name"],
    "sft": ["-m", "mtrl.sft", "--data", "chat.jsonl", "--model", "owner/name", "--out", "out"],
    "data": ["-m", "mtrl.main", "data.path=owner/name", "run_dir=run"],
    "reference": ["-m", "mtrl.main", *FAST, "algorithm.kl_loss_coef=0.1", "algorithm.kl_reference=owner/name"],
    "critic": ["-m", "mtrl.main", *FAST, "algorithm=turn_gae", "algorithm.critic.path=owner/name"],
}  # fmt: skip
ONE_AFTER_ANOTHER = """
import json, os, socket, sys
from pathlib import Path
from tests import forked

address, commands = json.loads(sys.stdin.read())
results = {}
for name, words in commands.items():
    folder = Path(name)
    folder.mkdir()
    (folder / "chat.jsonl").write_text(json.dumps(
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    ))
    with socket.create_connection(address) as marker:
        marker.sendall(name.encode())
        marker.recv(1)  # until the server has read it
    environment = os.environ | {"MTRL_CACHE": str(folder.resolve() / "cache")}
    done = forked.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    results[name] = done.returncode, done.stdout + done.stderr
print(json.dumps(results))
"""
"""Runs the commands, each in a process forked from one that has imported all modules with this HF_ENDPOINT. Sends the
name of each command to the Hub before it."""


@pytest.fixture
def silent_hub():
    """The address of a Hub that reads requests and does not answer, and the list of their first lines."""
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    requests.append(connection.recv(4096).split(b"\r\n")[0].decode())

        threading.Thread(target=refuse, daemon=True).start()
        yield server.getsockname(), requests
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.ci
def test_an_unreachable_hub_gets_one_request(silent_hub, tmp_path):
    address, requests = silent_hub
    environment = {"HF_ENDPOINT": "http://{}:{}".format(*address), "HF_HOME": str(tmp_path / "home"),
                   "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER], cwd=tmp_path, env=environment, check=True, capture_output=True,
        text=True, input=json.dumps([address, COMMANDS]),
    )  # fmt: skip
    ours = [line for line in requests if line in COMMANDS or line.startswith("HEAD") or "owner" in line]
    assert ours == [line for name in COMMANDS for line in (name, "HEAD / HTTP/1.1")]
    for name, (code, output) in json.loads(done.stdout).items():
        assert code == 2, (name, output)
        last = output.strip().splitlines()[-1]
        assert "owner/name" in last and "Hub" in last, (name, last)


def test_a_local_folder_sends_no_request(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "hub_answers", lambda: pytest.fail("the Hub was asked"))
    assert not hub.is_out_of_reach(str(tmp_path))
