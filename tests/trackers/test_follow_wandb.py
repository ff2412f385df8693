"""W&B offline, whose files `wandb sync` sends later; the tests need no network."""

import json
import struct
import time

import pytest
from follow_runs import HOSTILE, add_step, add_trajectories, make_run, tool_episode, tracker

from mtrl.errors import UserError
from mtrl.trackers.start import follower_of
from tests.packages import need

need("wandb")

BLOCK, FULL, LAST = 32768, 1, 4


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """Hide the W&B account of the person who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))


def offline():
    config = tracker("wandb")
    config.wandb.mode = "offline"
    return config


def records(run):
    """Return the content of the newest offline copy of the run. The file is a LevelDB log of protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (run.path / "wandb" / "latest-run").resolve().glob("*.wandb")
    data, place, parts, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # no header begins in the last bytes of a block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def history(run):
    """Wait until W&B's own process has written the copy, and return its rows."""
    while not any(record.WhichOneof("record_type") == "exit" for record in records(run)):
        time.sleep(0.05)
    rows = []
    for record in records(run):
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


def send(run):
    follower = follower_of("wandb", run, offline())
    follower.advance(final=True, is_over=True)
    follower.close()
    assert follower.left() == {} and follower.receipts.refused == {}
    follower.release()
    return follower


@pytest.mark.ci
def test_a_run_without_a_network_and_its_resumption(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    lenient = tool_episode("task-x", HOSTILE, reward=2.0, score=0.0)
    add_trajectories(run, 2, [lenient], kind="eval_greedy")
    run.write_summary({"steps": 3})
    follower = send(run)
    assert [row["_step"] for row in history(run)] == [0, 1, 2]
    assert [row["train/loss"] for row in history(run)][:2] == [1.0, 0.5]
    assert "trajectories/eval_greedy_step_000002" in json.dumps(history(run)[2])
    folder = (run.path / "wandb" / "latest-run").resolve()
    (table,) = folder.glob("files/media/table/trajectories/eval_greedy*.json")
    content = json.loads(table.read_text())
    found = dict(zip(content["columns"], content["data"][0], strict=True))
    assert (found["reward"], found["score"], found["verdict"], found["turns"]) == (2.0, 0.0, "lenient", 2)
    assert "[assistant, turn 0, reward +0.25]" in found["text"] and "\\ud800" in found["text"]
    assert (folder / "files" / "summary.json").is_file() and not (folder / "files" / "summary.json").is_symlink()
    assert follower.hint() == f"wandb sync {run.path / 'wandb' / 'latest-run'}"

    add_step(run, 3)  # the run continues; the newest copy has all of it
    send(run)
    assert [row["_step"] for row in history(run)] == [0, 1, 2, 3]
    (ids,) = {record.run.run_id for record in records(run) if record.WhichOneof("record_type") == "run"}
    assert ids == json.loads((run.path / "trackers" / "run.json").read_text())["id"]

    follower = follower_of("wandb", run, offline())  # a kill before W&B had everything on disk
    assert follower.advance(final=True) == 0
    follower.receipts.remember(held="yes")
    follower.release()
    send(run)
    assert [row["_step"] for row in history(run)] == [0, 1, 2, 3]


def test_a_missing_key_is_reported_without_a_prompt(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    follower = follower_of("wandb", run, tracker("wandb"))
    with pytest.raises(UserError, match=r"no API key; run `wandb login`, or set tracker.wandb.mode=offline"):
        follower.advance()
    assert follower.left() == {"rows": 1, "trajectories": 3, "files": 2}
