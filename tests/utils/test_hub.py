"""A Hub that does not answer gets one request per process."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mtrl
from mtrl.utils import hub

ROOT = Path(mtrl.__file__).parent.parent
COMMANDS = {
    "main": ["-m", "mtrl.main", "experiment=gsm8k_multi_turn", "model=hf", "model.path=owner/name",
             "data.path=null", "run_dir=run"],
    "evaluate": ["-m", "mtrl.evaluate", "experiment=gsm8k_multi_turn", "evaluation.model=owner/name"],
    "sft": ["-m", "mtrl.sft", "--data", "chat.jsonl", "--model", "owner/name", "--out", "out"],
    "data": ["-m", "mtrl.main", "data.path=owner/name", "run_dir=run"],
    "reference": ["-m", "mtrl.main", "debug=fast", "algorithm.kl_loss_coef=0.1",
                  "algorithm.kl_reference=owner/name", "run_dir=run"],
    "critic": ["-m", "mtrl.main", "debug=fast", "algorithm=turn_gae",
               "algorithm.critic.path=owner/name", "run_dir=run"],
}  # fmt: skip


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
        yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unreachable_hub_gets_one_request(silent_hub, tmp_path, command):
    address, requests = silent_hub
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n'
    )
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin",
                   "MTRL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *COMMANDS[command]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert "owner/name" in last and ("Hub" in last)
    assert requests.count("HEAD / HTTP/1.1") == 1
    assert not [request for request in requests if "owner" in request]


def test_a_local_folder_sends_no_request(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "hub_answers", lambda: pytest.fail("the Hub was asked"))
    assert not hub.is_out_of_reach(str(tmp_path))
