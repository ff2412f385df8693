"""Scripts that tests run as programs, and functions that find their running processes. Not a test."""

import json
import os
import time
from pathlib import Path

from mtrl.agents.runner import Assignment

HEAD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
row = json.loads(Path(os.environ["MTRL_ROW"]).read_text())

def pay(value):
    Path(os.environ["MTRL_RESULT"]).write_text(json.dumps(value))

def ask(messages, **options):
    from urllib.request import Request, urlopen
    body = json.dumps({"model": os.environ["MTRL_MODEL"], "messages": messages, **options}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urlopen(request))["choices"][0]["message"]
"""
SPREAD = """
def note(pid):
    with open(row["pids"], "a") as file:
        file.write(f"{pid}\\n")

signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(os.getpid())
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
for settings in ({}, {"start_new_session": True}, {"start_new_session": True, "env": {}}):
    note(subprocess.Popen([sys.executable, "-S", "-c", deaf], **settings).pid)
if os.fork() == 0:  # a daemon: forked twice
    os.setsid()
    if os.fork() == 0:
        note(os.getpid())
        os.execv(sys.executable, [sys.executable, "-S", "-c", deaf])
    os._exit(0)
os.wait()
while len(open(row["pids"]).readlines()) < 5:
    time.sleep(0.01)
print("all are there", flush=True)
"""
"""Script of five processes that SIGTERM does not end, each in another way."""
COUNT = 5


def script(folder, body):
    """Write a program with these lines, and return its file."""
    path = Path(folder) / "agent.py"
    path.write_text(HEAD + body)
    return str(path)


def assignment(row, **changes):
    """Return an episode without a policy, for programs that send no request."""
    values = {
        "row": row,
        "base_url": "http://127.0.0.1:9/trajectories/secret-token/v1",
        "api_key": "secret-token",
        "model": "mtrl",
        "trajectory_id": "step0/0/0",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 8,
        "feedback_url": "http://127.0.0.1:9/trajectories/secret-token",
    }
    return Assignment(**{**values, **changes})


def pids(path, count=COUNT, seconds=20):
    """Wait until all processes have written their ids, and return the ids."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if Path(path).exists() and len(found := Path(path).read_text().split()) >= count:
            return [int(pid) for pid in found]
        time.sleep(0.01)
    raise TimeoutError(f"there are fewer than {count} processes")


def running(found):
    """Return the ids of the processes that still run."""
    return [pid for pid in found if is_running(pid)]


def is_running(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (ProcessLookupError, FileNotFoundError):
        return False


def has_ended(found, seconds=20):
    """Whether all processes end within a time limit."""
    end = time.monotonic() + seconds
    while running(found) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(found)


def read_json(path):
    return json.loads(Path(path).read_text())
