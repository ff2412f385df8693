"""MLflow, the real one: a SQLite file, and a server that is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest
from follow_runs import HOSTILE, add_step, add_trajectories, make_run, tool_episode, tracker, with_trackers

from mtrl.record.metrics import MetricsLog
from mtrl.trackers import followers, mlflow_url, start_followers
from mtrl.trackers.mlflow_names import LONGEST_TEXT, safe_name
from mtrl.trackers.start import follower_of
from tests.packages import need

need("mlflow")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mlflow")]

ANSWER = "the answer is 12"
LONG = "x" * (LONGEST_TEXT + 1000)

# -- a SQLite file -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A run with odd content that was sent, its follower, and MLflow's own client to read it back."""
    from mlflow.tracking import MlflowClient

    home = tmp_path_factory.mktemp("runs")
    run = make_run(home / "run", steps=3)
    failed = tool_episode("task-x", HOSTILE, reward=1.0, score=0.0)
    failed.turns[0].message["tool_calls"].append("no call at all")
    failed.turns[0].observation = [{"role": "user", "content": LONG}]
    add_trajectories(run, 2, [failed], kind="disagree")
    MetricsLog(run.metrics).log(3, {"acc@1": 0.5, "bad": float("inf")})
    run.write_summary({"steps": 3})
    follower = follower_of("mlflow", run, tracker("mlflow"))
    follower.advance(final=True, is_over=True)
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    yield run, follower, client
    follower.release()


@pytest.fixture(scope="module")
def traces(sent):
    _, follower, client = sent
    experiment = follower.receipts.remote["experiment_id"]
    found = client.search_traces(locations=[experiment], run_id=follower.receipts.remote["run_id"])
    return {(t.info.tags["mtrl.kind"], t.info.tags["mtrl.step"], t.info.tags["mtrl.task"]): t for t in found}


def test_metrics_arrive_under_their_names(sent):
    run, follower, client = sent
    assert follower.left() == {} and follower.receipts.refused == {}
    history = client.get_metric_history(follower.receipts.remote["run_id"], "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    stored = client.get_run(follower.receipts.remote["run_id"])
    assert stored.data.metrics[safe_name("acc@1")] == 0.5 and "bad" not in stored.data.metrics
    assert stored.data.params["trainer.optimizer.lr"] == "0.5"
    assert stored.data.tags["mtrl.seed"] == "3" and stored.info.status == "FINISHED"
    files = {file.path for file in client.list_artifacts(stored.info.run_id)}
    assert files == {"config.yaml", "summary.json"}
    assert not (Path.cwd() / "mlruns").exists() and (run.path.parent / "mlflow_artifacts").is_dir()


def test_every_turn_is_in_a_trace_with_reward_and_score(traces):
    assert len(traces) == 7
    trace = traces["train", "2", "task-1"]
    root, first, tool, second = trace.data.spans
    assert [root.name, first.name, tool.name, second.name] == ["episode", "turn 0", "turn 0 tool 0 add", "turn 1"]
    assert first.parent_id == second.parent_id == root.span_id and tool.parent_id == first.span_id
    assert root.inputs == {"messages": [{"role": "user", "content": "what is 5 + 7?"}]}
    assert root.outputs == second.outputs == {"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}
    assert second.attributes["text"] == ANSWER
    attributes = root.attributes
    assert (attributes["reward"], attributes["score"], attributes["stop_reason"], attributes["tokens"]) == (
        1.0,
        1.0,
        "done",
        5,
    )
    assert (attributes["step"], attributes["kind"], attributes["verdict"]) == (2, "train", "agree")
    assert [turn.attributes["reward"] for turn in (first, second)] == [0.25, 0.75]
    assert first.attributes["components"] == {"format": 0.25}
    assert first.attributes["logprob_mean"] == -0.375 and first.attributes["advantage_mean"] == 0.5
    assert second.attributes["mlflow.chat.tokenUsage"] == {"input_tokens": 6, "output_tokens": 3, "total_tokens": 9}
    assert tool.inputs == {"a": 5, "b": 7} and tool.outputs == "12"
    feedback = {assessment.name: assessment.feedback.value for assessment in trace.info.assessments}
    assert feedback == {"reward": 1.0, "score": 1.0, "verdict": "agree"}


def test_spans_have_the_durations_of_the_turns(traces):
    root, first, tool, second = traces["train", "2", "task-1"].data.spans
    seconds = [(span.end_time_ns - span.start_time_ns) / 1e9 for span in (root, first, tool, second)]
    assert seconds == [pytest.approx(s) for s in (4.0, 3.0, 1.0, 1.0)]
    assert first.start_time_ns == root.start_time_ns and second.end_time_ns == root.end_time_ns
    assert tool.end_time_ns == first.end_time_ns


def test_hostile_and_huge_texts_arrive_harmless(traces):
    trace = traces["disagree", "2", "task-x"]
    assert trace.info.tags["mtrl.verdict"] == "lenient"
    root, turn, *_ = trace.data.spans
    assert (
        "left out; the whole is in trajectories/disagree_step_000002.jsonl line 1"
        in turn.inputs["messages"][0]["content"]
    )
    content = root.outputs["choices"][0]["message"]["content"]
    assert "\\ud800" in content and "<script>" in content
    assert "\x1b" not in trace.info.response_preview


def test_repeated_sending_changes_nothing(sent, traces):
    """Without the journal the run is found by its id, and sent pieces are recognised."""
    run, follower, client = sent
    known = dict(follower.receipts.remote)
    follower.release()
    follower.receipts.path.unlink()
    again = follower_of("mlflow", run, tracker("mlflow"))
    assert again.advance(final=True, is_over=True) > 10
    again.release()
    assert again.receipts.remote == known
    history = client.get_metric_history(known["run_id"], "train/loss")
    assert len(history) == 3
    found = client.search_traces(locations=[known["experiment_id"]])
    assert {t.info.trace_id for t in found} == {t.info.trace_id for t in traces.values()}
    spans = {t.info.trace_id: len(t.data.spans) for t in traces.values()}
    assert {t.info.trace_id: len(t.data.spans) for t in found} == spans
    assert all(len(t.info.assessments) == 3 for t in found)


def test_a_row_in_two_batches_arrives_whole_after_a_failure(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    from mtrl.trackers import to_mlflow

    monkeypatch.setattr(to_mlflow, "METRICS_AT_ONCE", 2)
    log_batch, calls = MlflowClient.log_batch, []

    def failing(self, *place, metrics=(), **words):
        calls.extend(metrics and ["metrics"])
        if len(calls) == 2:
            calls.append("the next one succeeds")
            raise ConnectionError("gone")
        return log_batch(self, *place, metrics=metrics, **words)

    monkeypatch.setattr(MlflowClient, "log_batch", failing)
    run = make_run(tmp_path / "run", steps=1)
    follower = follower_of("mlflow", run, tracker("mlflow"))
    with pytest.raises(ConnectionError, match="gone"):
        follower.advance()
    follower.advance()
    follower.release()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (row,) = map(json.loads, run.metrics.read_text().splitlines())
    arrived = client.get_run(follower.receipts.remote["run_id"]).data.metrics
    assert len(row) > 3 and {safe_name(name) for name in row} - {"step"} <= arrived.keys()


def test_a_resumed_run_continues_the_same_mlflow_run(sent):
    run, follower, client = sent
    known = dict(follower.receipts.remote)
    run.config.write_text(run.config.read_text().replace("seed: 3", "seed: 3\nresume: latest").replace("0.5", "0.25"))
    add_step(run, 4)
    resumed = follower_of("mlflow", run, tracker("mlflow"))
    resumed.advance()
    stored = client.get_run(known["run_id"])
    assert stored.info.status == "RUNNING" and resumed.receipts.remote == known
    assert stored.data.metrics["rollout/reward/mean"] == 0.4
    assert stored.data.params["trainer.optimizer.lr"] == "0.5"  # MLflow stores the first value
    assert stored.data.tags["changed.trainer.optimizer.lr"] == "0.25"
    assert len(client.search_runs([known["experiment_id"]])) == 1
    resumed.release()


def test_a_password_in_the_variable_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    run = make_run(tmp_path / "run", steps=1)
    follower = follower_of("mlflow", run, tracker("mlflow"))
    assert follower.backend.uri == "http://me:hunter2@127.0.0.1:9"
    shown = [follower.backend.destination, follower.backend.url({}), follower.backend.hint({})]
    follower.release()
    assert not any("hunter2" in text for text in shown)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any("me:***@127" in file.read_text(errors="replace") for file in written)
    assert not any("hunter2" in file.read_text(errors="replace") for file in written)


def test_the_url_names_the_run(sent):
    run, follower, _ = sent
    remote = follower.receipts.remote
    url = f"http://127.0.0.1:5000/#/experiments/{remote['experiment_id']}/runs/{remote['run_id']}"
    assert mlflow_url(with_trackers("mlflow"), run) == url
    server = with_trackers("mlflow", uri="http://tracking.example:80/")
    assert mlflow_url(server, run) == "http://tracking.example:80"  # nothing was sent there
    assert follower.hint() == f"mlflow server --backend-store-uri sqlite:///{run.path.parent / 'mlflow.db'}"


# -- a server ----------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def serve(home, port):
    """A tracking server in a process group of its own, since it has workers."""
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{home / 'server.db'}", "--artifacts-destination", str(home / "files")]
    command = [sys.executable, "-m", "mlflow", "server", *words, *store]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (home / "server.log").open("ab") as log:
        server = subprocess.Popen(
            command, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return server
        except OSError:
            assert server.poll() is None, (home / "server.log").read_text()
            time.sleep(0.2)
    raise AssertionError((home / "server.log").read_text())


def kill(server):
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.ci
def test_a_killed_server_loses_and_duplicates_nothing(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(followers, "FIRST_DELAY", 0.1)
    monkeypatch.setattr(followers, "LONGEST_DELAY", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = free_port()
    uri, warnings = f"http://127.0.0.1:{port}", []
    run = make_run(tmp_path / "run")
    server = serve(tmp_path, port)
    try:
        group = start_followers(with_trackers("mlflow", uri=uri), run, warnings.append)
        journal = run.path / "trackers"
        for step in range(3):
            add_step(run, step)
        while not any("metrics.jsonl" in path.read_text() for path in journal.glob("mlflow-*")):
            group.poke()
            time.sleep(0.05)
        kill(server)  # it may be doing any step
        for step in range(3, 8):
            add_step(run, step)
        while not warnings:
            group.poke()
            time.sleep(0.05)
        server = serve(tmp_path, port)
        run.write_summary({"steps": 8})
        group.close()
        assert len(warnings) == 2 and "answers again" in warnings[1], warnings
        client = MlflowClient(uri)
        (stored,) = client.search_runs([client.get_experiment_by_name("mtrl").experiment_id])
        history = client.get_metric_history(stored.info.run_id, "train/loss")
        assert [metric.step for metric in history] == list(range(8))
        found = client.search_traces(locations=[stored.info.experiment_id], run_id=stored.info.run_id)
        assert len(found) == 12
        assert all(len(trace.data.spans) == 4 for trace in found)
        assert all(len(trace.info.assessments) == 3 for trace in found)
        assert {file.path for file in client.list_artifacts(stored.info.run_id)} == {"config.yaml", "summary.json"}
        assert stored.info.status == "FINISHED"
        assert mlflow_url(with_trackers("mlflow", uri=uri), run).startswith(f"{uri}/#/experiments/")
    finally:
        kill(server)


def test_a_silent_server_does_not_delay_a_run(tmp_path):
    """The server accepts connections and never answers. The run continues, and its process ends."""
    run = make_run(tmp_path / "run")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        code = f"""
            import sys
            sys.path[:0] = [{str(Path(__file__).parent)!r}]
            from follow_runs import add_step, with_trackers
            from mtrl.trackers import followers, start_followers
            from mtrl.record.run_dir import RunDir
            followers.SILENT_SECONDS = 2.0
            run = RunDir({str(run.path)!r})
            uri = "http://127.0.0.1:{sock.getsockname()[1]}"
            group = start_followers(with_trackers("mlflow", uri=uri), run, print)
            for step in range(5):
                add_step(run, step)
                group.poke()
            group.close()
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        environment = {**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "300"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "left: 5 rows, 9 trajectories, 2 files" in done.stdout
    assert f"mtrl track {run.path}" in done.stdout
