"""Rewards and completion over HTTP, as SageMaker's SDK reports them."""

import json
import math

import pytest
from live_gateway import HELLO, Live

from mtrl.gateway import app

SIGNED = "sagemaker-api-key-QWN0aW9uPUNhbGxXaXRoQmVhcmVyVG9rZW4"
"""Bearer token of the SDK: a request that is signed for AWS."""


@pytest.fixture(scope="module")
def live(tiny_codec):
    with Live(tiny_codec) as live:
        yield live


@pytest.fixture
def session(live, request):
    session = live.open(f"step1/{request.node.name}/0")
    yield session
    live.close(session)


def report(live, session, path, body, by_url=True):
    """Send a report as the SDK does, and return the status and the body."""
    if by_url:
        status, _, answer = live.ask("POST", f"/trajectories/{session.token}{path}", body, SIGNED)
    else:
        status, _, answer = live.ask("POST", path, body, session.token)
    return status, answer


def rewarded(live, session):
    return [turn.reward for turn in live.turns(session)]


@pytest.mark.parametrize("by_url", [True, False])
@pytest.mark.parametrize(
    ("name", "status", "rewards"),
    [
        ("TrajectoryId", "Status", "Rewards"),
        ("trajectoryId", "status", "rewards"),
        ("rolloutId", "status", "reward"),
        ("trajectory_id", "status", "rewards"),
    ],
)
def test_reports_are_accepted_in_any_spelling(live, session, by_url, name, status, rewards):
    live.chat(session)
    about = {"JobArn": "arn:aws:sagemaker:us-west-2:1:job/x", name: session.name}
    assert report(live, session, "/complete-rollout", {**about, status: "ready"}, by_url) == (
        200, {"TrajectoryId": session.name, "Status": "ready"},
    )  # fmt: skip
    assert report(live, session, "/update-reward", {**about, rewards: [0.75]}, by_url)[0] == 200
    assert session.finished.is_set()
    assert rewarded(live, session) == [0.75]


def test_one_reward_is_for_the_trajectory_and_several_for_its_turns(live, session):
    for _ in range(3):
        live.chat(session)
    for sent, paid in (([1], [0, 0, 1]), (0.5, [0, 0, 0.5]), ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]), ([2.0], [0, 0, 2])):
        assert report(live, session, "/update-reward", {"Rewards": sent})[0] == 200
        assert rewarded(live, session) == paid


def test_the_number_of_rewards_must_match_the_turns(live, session):
    for _ in range(3):
        live.chat(session)
    status, body = report(live, session, "/update-reward", {"Rewards": [1, 2]})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert session.rewards is None


@pytest.mark.parametrize(
    "rewards",
    [None, [], "1", ["1"], [None], True, [True], {}, [[1]], 10**400, [1, math.inf], [math.nan]],
    ids=repr,
)
def test_invalid_rewards_are_refused(live, session, rewards):
    live.chat(session)
    status, _ = report(live, session, "/update-reward", json.dumps({"Rewards": rewards}).encode())
    assert status == 400
    assert session.rewards is None


@pytest.mark.parametrize("body", [{}, {"Status": None}, {"JobArn": "arn", "ClientToken": "once"}], ids=repr)
def test_a_missing_status_means_ready(live, session, body):
    answer = report(live, session, "/complete-rollout", body)
    assert answer == (200, {"TrajectoryId": session.name, "Status": "ready"})
    assert (session.status, session.finished.is_set()) == ("ready", True)


@pytest.mark.parametrize("status", ["", "done", 1, ["ready"], "readyy"])
def test_invalid_statuses_are_refused(live, session, status):
    assert report(live, session, "/complete-rollout", {"Status": status})[0] == 400
    assert not session.finished.is_set()


@pytest.mark.parametrize("path", ["/update-reward", "/complete-rollout"])
def test_reports_about_another_trajectory_are_refused(live, session, path):
    body = {"Status": "ready", "Rewards": [1.0], "TrajectoryId": "step1/other/0"}
    status, answer = report(live, session, path, body)
    assert (status, answer["error"]["code"]) == (403, "trajectory_mismatch")
    assert session.rewards is None and not session.finished.is_set()


def test_reports_may_be_repeated(live, session):
    live.chat(session)
    for _ in range(3):
        assert report(live, session, "/complete-rollout", {"Status": "ready"})[0] == 200
        assert report(live, session, "/update-reward", {"Rewards": [0.25]})[0] == 200
    assert rewarded(live, session) == [0.25]


def test_a_trajectory_ends_once(live, session):
    assert report(live, session, "/complete-rollout", {"Status": "failed", "Error": "it broke"})[0] == 200
    status, body = report(live, session, "/complete-rollout", {"Status": "ready"})
    assert status == 409
    assert "Cannot transition trajectory" in body["error"]["message"]
    assert report(live, session, "/complete-rollout", {"Status": "failed"})[0] == 200
    assert "it broke" in session.error


def test_late_reports_get_a_status_that_the_sdk_ignores(live, tiny_codec):
    """The SDK logs errors that contain "404" and continues; it raises other errors."""
    session = live.open("late")
    live.chat(session)
    live.close(session)
    for path in ("/update-reward", "/complete-rollout"):
        for by_url in (True, False):
            status, body = report(live, session, path, {"Rewards": [1.0], "Status": "ready"}, by_url)
            assert status == 404
            assert "not in valid status" in body["error"]["message"]
    assert rewarded(live, session) == [0.0]


def test_an_id_that_is_the_token_is_sufficient(live, session):
    """Such agents know only the gateway's address, by RFT_RUNTIME_ENDPOINT."""
    live.chat(session)
    about = {"TrajectoryId": session.token}
    assert live.ask("POST", "/update-reward", {**about, "Rewards": [0.5]}, SIGNED)[0] == 200
    assert live.ask("POST", "/complete-rollout", {**about, "Status": "failed"}, None)[0] == 200
    assert (rewarded(live, session), session.status) == ([0.5], "failed")


def test_the_size_of_a_report_is_limited(live, session, monkeypatch):
    monkeypatch.setattr(app, "MAX_REPORT_BYTES", 1000)
    for token in (None, session.token):
        status, _, body = live.ask("POST", "/update-reward", {"Rewards": [1.0] * 1000}, token)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert live.ask("POST", "/update-reward", {"Rewards": [1.0]}, session.token)[0] == 200


@pytest.mark.parametrize("name", [7, ["a"], {}, True, "\ud800"], ids=repr)
def test_an_unknown_id_is_refused(live, session, name):
    body = json.dumps({"TrajectoryId": name, "Rewards": [1.0]}).encode()
    assert live.ask("POST", "/update-reward", body, SIGNED)[0] == (401 if isinstance(name, str) else 400)
    assert live.ask("POST", "/update-reward", body, session.token)[0] == (403 if isinstance(name, str) else 400)
    assert session.rewards is None


def test_a_report_needs_a_token(live, session):
    for token in (None, SIGNED):
        assert live.ask("POST", "/update-reward", {"Rewards": [1.0], "TrajectoryId": session.name}, token)[0] == 401
    assert session.rewards is None


class TestTheRealSdk:
    @pytest.fixture
    def rft(self, monkeypatch):
        from sagemaker.train import rft

        monkeypatch.setattr(rft.feedback, "generate_token", lambda region: SIGNED)
        return rft

    def payload(self, live, session):
        endpoint = live.gateway.trajectory_url(session)
        metadata = {"job_arn": "arn", "trajectory_id": session.name, "endpoint": endpoint, "region": "us-west-2"}
        return {"instance": {"question": "hello"}, "metadata": metadata}

    def agent(self, live, session, result):
        from sagemaker.train.rft.adapters.langchain import create_http_client

        def run(payload):
            with create_http_client(trust_env=False) as client:
                url = f"{live.gateway.base_url(session)}/chat/completions"
                answer = client.post(url, json={"model": "m", "messages": HELLO})
            answer.raise_for_status()
            if isinstance(result, Exception):
                raise result
            return result

        return run

    @pytest.mark.parametrize("reward", [0.5, [0.5], 1])
    def test_the_sdk_reports_a_success(self, live, session, rft, reward):
        handler = rft.sagemaker_rft_handler(self.agent(live, session, {"reward": reward}))
        handler(self.payload(live, session))
        assert session.finished.is_set()
        assert rewarded(live, session) == [reward[0] if isinstance(reward, list) else reward]

    @pytest.mark.parametrize("result", [RuntimeError("broke"), {"status": "error", "error": "broke"}])
    def test_the_sdk_reports_a_failure(self, live, session, rft, result):
        handler = rft.sagemaker_rft_handler(self.agent(live, session, result))
        if isinstance(result, Exception):
            with pytest.raises(RuntimeError, match="broke"):
                handler(self.payload(live, session))
        else:
            handler(self.payload(live, session))
        assert (session.status, session.finished.is_set()) == ("failed", True)

    def test_the_sdk_tolerates_a_late_report(self, live, rft):
        session = live.open("late by the sdk")
        live.close(session)
        client = rft.RolloutFeedbackClient(self.payload(live, session)["metadata"])
        client.report_complete(1.0)
        client.report_error("nothing")
