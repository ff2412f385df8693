"""Agents behind HTTP: the managed service's protocol, over a real gateway."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer

import httpx
import pytest

from mtrl.agents import loop as loop_module
from mtrl.agents.loop import AgentLoop
from mtrl.agents.remote import RemoteRunner
from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.errors import UserError
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.rollout.episode import EpisodeLimits
from mtrl.types import StopReason

ROW = {"id": "r1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"answer": "b"}}


class Service:
    """The service of an agent. Its answer is `rollout(request, service)`: status and content."""

    def __init__(self, rollout, health=200):
        self.rollout, self.health = rollout, health
        self.payload, self.headers, self.threads = [], [], []

    def in_background(self, work):
        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()


@contextmanager
def serving(service):
    """Run the service, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_reply(service.health, {"status": "healthy"})

        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.payload.append(payload)
            service.headers.append(dict(self.headers))
            self.send_reply(*service.rollout(payload, service))

        def send_reply(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def raw(answer):
    """Yield the URL of a healthy service that answers a rollout with these bytes (None: no bytes) and disconnects."""
    over = threading.Event()

    class Handler(StreamRequestHandler):
        def handle(self):
            if self.rfile.readline().startswith(b"GET"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
            elif answer is None:
                over.wait(60)
            else:
                self.wfile.write(answer)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()


def post(url, content, **headers):
    return httpx.post(url, json=content, headers=headers, trust_env=False, timeout=20)


def ask(payload, calls=2):
    """Send requests as agents of the service do: with the endpoint and the trajectory of the metadata, and a foreign
    bearer token."""
    metadata, messages = payload["metadata"], list(payload["instance"]["prompt"])
    headers = {
        "Authorization": "Bearer sagemaker-api-key-abc",
        "X-Amzn-SageMaker-Job-Arn": metadata["job_arn"],
        "X-Amzn-SageMaker-Trajectory-Id": metadata["trajectory_id"],
    }
    for _ in range(calls):
        answer = post(f"{metadata['endpoint']}/v1/chat/completions", {"messages": messages}, **headers)
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "no"}]


def report(payload, path, **content):
    metadata = payload["metadata"]
    body = {"JobArn": metadata["job_arn"], "TrajectoryId": metadata["trajectory_id"], **content}
    return post(f"{metadata['endpoint']}/{path}", body, Authorization="Bearer sagemaker-api-key-abc")


@pytest.fixture
def run_agent(tiny_tokenizer, tiny_codec):
    """Function `run_agent(rollout, …)` that returns the trajectory of an episode, and the service that ran it."""

    def run(rollout, serve=serving, **limits):
        service = Service(rollout)
        engine = ScriptedEngine(lambda name, turn: "abcdef"[turn], tiny_tokenizer)
        standard = {"max_turns": 6, "max_context_length": 200, "step_timeout": 5, "episode_timeout": 20, "retries": 0}
        standard |= limits
        sampling = SamplingParams(max_generate_length=40, temperature=0.7, stop_token_ids=tiny_codec.stop_token_ids)

        async def one():
            with serve(service) as url:
                gateway = Gateway(engine, tiny_codec, SessionLimits(6, 4, 200))
                loop = AgentLoop(gateway, RemoteRunner(url, "MTRL_AGENT_KEY"), EpisodeLimits(**standard), 2)
                try:
                    return await loop.run(ROW, "step0/0", 1, sampling)
                finally:
                    await loop.close()

        trajectory = asyncio.run(asyncio.wait_for(one(), 120))
        for thread in service.threads:
            thread.join(60)
        return trajectory, service

    return run


def test_an_agent_that_answers_after_the_episode(run_agent, monkeypatch):
    monkeypatch.setenv("MTRL_AGENT_KEY", "the-agents-own")

    def rollout(payload, service):
        ask(payload)
        return 200, {"reward": [0.5, 1.0], "metrics": {"steps": 2}}

    trajectory, service = run_agent(rollout)
    assert trajectory.stop_reason == StopReason.DONE and trajectory.rewards == [0.5, 1.0]
    assert trajectory.metrics["steps"] == 2.0 and [turn.text for turn in trajectory.turns] == ["a", "b"]
    assert service.headers[0]["Authorization"] == "Bearer the-agents-own"
    (payload,) = service.payload
    assert payload["instance"] == ROW and payload["prompt"] == "Q" and payload["model_name"] == "mtrl"
    assert payload["inference_params"] == {"temperature": 0.7, "max_tokens": 40, "top_p": 1.0}
    assert payload["inferenceParams"] == {"temperature": 0.7, "maxTokens": 40, "topP": 1.0}
    metadata = payload["metadata"]
    assert metadata["trajectory_id"] == metadata["trajectoryId"] == metadata["rolloutId"]
    assert payload["model_endpoint"] == f"{metadata['endpoint']}/v1"


def test_an_agent_that_answers_first_and_reports_later(run_agent):
    """The agent first completes the episode and then reports the reward, as the SDK does."""

    def rollout(payload, service):
        def work():
            ask(payload)
            service.answers = [report(payload, "complete-rollout", Status="ready").status_code]
            service.answers.append(report(payload, "update-reward", Rewards=[0.75]).status_code)

        service.in_background(work)
        return 200, {"status": "accepted"}

    trajectory, service = run_agent(rollout)
    assert trajectory.stop_reason == StopReason.DONE and trajectory.rewards == [0.0, 0.75]
    assert service.answers == [200, 200]


def test_reports_during_the_rollout_request(run_agent):
    def rollout(payload, service):
        ask(payload)
        report(payload, "complete-rollout", Status="ready").raise_for_status()
        report(payload, "update-reward", Rewards=[0.1, 0.2]).raise_for_status()
        return 200, {"status": "accepted"}

    assert run_agent(rollout)[0].rewards == [0.1, 0.2]


def test_an_agent_that_reports_its_failure(run_agent):
    def rollout(payload, service):
        def work():
            ask(payload, 1)
            service.answers = [report(payload, "complete-rollout", Status="failed").status_code]
            service.answers.append(report(payload, "update-reward", Rewards=[0.0]).status_code)

        service.in_background(work)
        return 200, {"status": "accepted"}

    trajectory, service = run_agent(rollout)
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert trajectory.error.startswith("AgentError: the program reported that it failed")
    assert service.answers[0] == 200


def test_a_missing_reward_fails_the_episode(run_agent, monkeypatch):
    monkeypatch.setattr(loop_module, "SECONDS_FOR_REWARD", 0.2)

    def rollout(payload, service):
        ask(payload, 1)
        report(payload, "complete-rollout", Status="ready").raise_for_status()
        return 200, {"status": "accepted"}

    trajectory, _ = run_agent(rollout)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and "ended without a reward" in trajectory.error


def test_an_agent_that_never_reports_times_out(run_agent):
    trajectory, _ = run_agent(
        lambda payload, service: (ask(payload, 1), (200, {"status": "accepted"}))[1], episode_timeout=1
    )
    assert trajectory.stop_reason == StopReason.TIMEOUT and len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        ((500, {"error": "no GPU"}), "HTTP 500 no GPU"),
        ((422, {"detail": "no row"}), "HTTP 422 no row"),
        ((200, {"reward": "much"}), "returned 'much'"),
        ((200, {"status": "error", "error": "no disk"}), "no disk"),
    ],
)
def test_a_failing_agent_fails_the_episode(run_agent, answer, payload):
    def rollout(request, service):
        ask(request, 1)
        return answer

    trajectory, service = run_agent(rollout, retries=1)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and payload in trajectory.error.partition("\n")[0]
    assert len(service.payload) == 2 and trajectory.metrics["attempts"] == 2


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        (b"", "disconnected without sending a response"),
        (b"\0\xff what?\r\n\r\n", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{", "is broken JSON"),
    ],
    ids=["hangs up", "garbage", "breaks off", "broken JSON"],
)
def test_an_invalid_response_fails_the_episode(run_agent, answer, payload):
    trajectory, _ = run_agent(None, serve=lambda service: raw(answer))
    first_line = trajectory.error.partition("\n")[0]
    assert trajectory.stop_reason == StopReason.ENV_ERROR and payload in first_line and "POST http://127" in first_line


def test_an_agent_that_never_answers_times_out(run_agent):
    trajectory, _ = run_agent(None, serve=lambda service: raw(None), episode_timeout=1)
    assert trajectory.stop_reason == StopReason.TIMEOUT and not trajectory.turns


def test_late_requests_of_an_agent_are_refused(run_agent):
    def rollout(payload, service):
        ask(payload, 1)
        service.over = threading.Event()

        def work():
            service.over.wait(60)
            late = {"messages": ROW["prompt"]}
            service.answers = [
                post(f"{payload['metadata']['endpoint']}/v1/chat/completions", late),
                report(payload, "update-reward", Rewards=[1.0]),
            ]
            service.received.set()

        service.received = threading.Event()
        service.in_background(work)
        return 200, {"status": "accepted"}

    real = AgentLoop.close

    async def close(self):  # the gateway still answers other episodes
        service.over.set()
        await asyncio.to_thread(service.received.wait, 60)
        await real(self)

    service = None

    def remember(payload, it):
        nonlocal service
        service = it
        return rollout(payload, it)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentLoop, "close", close)
        trajectory, service = run_agent(remember, episode_timeout=1)
    assert trajectory.stop_reason == StopReason.TIMEOUT
    call, pay = service.answers
    assert call.status_code == 410 and "is not in valid status" in call.text
    assert pay.status_code in (200, 404) and trajectory.reward == 0.0


@pytest.mark.parametrize("health", [404, 503])
def test_an_unhealthy_agent_is_refused_at_the_start(health):
    with serving(Service(None, health)) as url, pytest.raises(UserError) as error:
        RemoteRunner(url, "MTRL_AGENT_KEY")
    assert f"generator.agent.url={url}: the agent does not answer GET /health (HTTP {health})" in str(error.value)


def test_an_unreachable_agent_is_refused_at_the_start():
    with pytest.raises(UserError, match=r"does not answer GET /health \(.*refused.*\); start it first"):
        RemoteRunner("http://127.0.0.1:9/", "MTRL_AGENT_KEY")
