"""The trajectory of a request, and the answers of every route."""

import asyncio
import gc
import json
import weakref
from dataclasses import replace
from urllib.parse import quote

import httpx
import pytest
from live_gateway import HELLO, LIMITS, HeldEngine, Live, request_bytes

from mtrl.engines.base import EngineLostError
from mtrl.engines.scripted import ScriptedEngine
from mtrl.gateway import auth, stream
from mtrl.gateway.exchange import CancelOnDisconnect
from mtrl.rollout.rollouts import all_or_none

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": HELLO}


@pytest.fixture(scope="module")
def live(tiny_codec):
    with Live(tiny_codec) as live:
        yield live


@pytest.fixture
def other(live, request):
    session = live.open(f"{request.node.name} other")
    yield session
    live.close(session)


def message(body):
    return body["choices"][0]["message"]["content"]


class TestNaming:
    @pytest.mark.parametrize("prefix", ["", "/trajectories/{token}", "/trajectories/{name}"])
    @pytest.mark.parametrize("header", [None, "X-Mtrl-Trajectory-Id", "x-amzn-sagemaker-trajectory-id"])
    def test_a_token_is_accepted_with_any_name_of_its_trajectory(self, live, prefix, header):
        session = live.open("step1/0/3")
        path = prefix.format(token=session.token, name="step1%2F0%2F3") + CHAT
        headers = [(header, session.name)] if header else []
        status, _, body = live.ask("POST", path, BODY, session.token, headers)
        assert (status, message(body)) == (200, "step1/0/3 0")
        live.close(session)

    def test_the_url_is_sufficient(self, live, session):
        assert live.gateway.base_url(session) == f"{live.gateway.url}/trajectories/{session.token}/v1"
        assert live.chat(session)[0] == 200

    def test_a_key_of_another_service_is_ignored_with_the_url(self, live, session):
        path = f"/trajectories/{session.token}{CHAT}"
        status, _, body = live.ask("POST", path, BODY, "sk-proj-somebody-elses")
        assert (status, message(body)) == (200, f"{session.name} 0")

    def test_an_id_that_is_the_token_is_accepted(self, live, session):
        """The managed service sends such ids, signed for AWS, and boto3's client sends them without a bearer."""
        for bearer in ("sagemaker-api-key-QWN0aW9u", None):
            header = [("X-Amzn-SageMaker-Trajectory-Id", session.token)]
            assert live.ask("POST", CHAT, BODY, bearer, header)[0] == 200
        assert len(live.turns(session)) == 2

    @pytest.mark.parametrize("token", [None, "wrong", "", "sk-mtrl-", "é"])
    def test_a_missing_or_wrong_token_is_refused(self, live, session, token):
        status, _, body = live.ask("POST", CHAT, BODY, token)
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            401, "authentication_error", "invalid_api_key",
        )  # fmt: skip

    @pytest.mark.parametrize("header", ["X-Mtrl-Trajectory-Id", "X-Amzn-SageMaker-Trajectory-Id"])
    def test_a_name_without_a_token_is_refused(self, live, session, header):
        assert live.ask("POST", CHAT, BODY, None, [(header, session.name)])[0] == 401
        assert live.ask("POST", CHAT, BODY, session.name, [(header, session.name)])[0] == 401
        assert live.ask("POST", f"/trajectories/{session.name}{CHAT}".replace(" ", "%20"), BODY)[0] == 401

    @pytest.mark.parametrize("bearer", [None, "wrong"])
    @pytest.mark.parametrize(("method", "route"), [("POST", CHAT), ("POST", "/update-reward"), ("GET", "/v1/models")])
    def test_answers_without_a_key_reveal_no_names(self, live, session, bearer, method, route):
        def message(name):
            path, named = f"/trajectories/{quote(name, safe='')}{route}", [("X-Mtrl-Trajectory-Id", name)]
            answers = [live.ask(method, path, BODY, bearer), live.ask(method, route, BODY, bearer, named)]
            return [(status, body) for status, _, body in answers]

        assert message(session.name) == message("nobody")

    def test_an_unknown_url_is_refused(self, live):
        status, _, body = live.ask("POST", f"/trajectories/sk-mtrl-nobody{CHAT}", BODY)
        assert (status, body["error"]["code"]) == (404, "trajectory_not_found")

    def test_a_request_that_names_two_trajectories_is_refused(self, live, session, other):
        for prefix, headers in (
            (f"/trajectories/{other.token}", []),
            (f"/trajectories/{other.name}".replace(" ", "%20"), []),
            ("", [("X-Mtrl-Trajectory-Id", other.name)]),
            ("", [("X-Amzn-SageMaker-Trajectory-Id", other.token)]),
            ("", [("X-Mtrl-Trajectory-Id", session.name), ("X-Amzn-SageMaker-Trajectory-Id", other.name)]),
        ):
            status, _, body = live.ask("POST", prefix + CHAT, BODY, session.token, headers)
            assert (status, body["error"]["type"]) == (403, "permission_error"), (prefix, headers)
        path = f"/trajectories/{other.token}{CHAT}"
        assert live.ask("POST", path, BODY, None, [("X-Mtrl-Trajectory-Id", session.name)])[0] == 403
        assert live.turns(session) == live.turns(other) == []

    def test_a_finished_trajectory_is_refused(self, live):
        session = live.open("over")
        live.close(session)
        for path, token in ((f"/trajectories/{session.token}{CHAT}", None), (CHAT, session.token)):
            status, headers, body = live.ask("POST", path, BODY, token)
            assert (status, headers["x-should-retry"]) == (410, "false")
            assert "not in valid status" in body["error"]["message"]

    def test_names_can_be_reused_and_tokens_cannot(self, live):
        first = live.open("again")
        with pytest.raises(ValueError, match="open trajectory again"):
            live.open("again")
        live.close(first)
        second = live.open("again")
        assert live.chat(first)[0] == 410
        assert live.chat(second)[0] == 200
        live.close(second)

    def test_the_number_of_stored_tokens_is_limited(self, live, monkeypatch):
        monkeypatch.setattr(auth, "MAX_FINISHED", 2)
        sessions = [live.open(f"old {n}") for n in range(4)]
        for session in sessions:
            live.close(session)
        assert [live.chat(session)[0] for session in sessions] == [404, 404, 410, 410]


class TestRoutes:
    def test_health_needs_no_token(self, live):
        assert live.ask("GET", "/health")[::2] == (200, {"status": "healthy"})

    def test_models_are_listed(self, live, session):
        status, _, body = live.ask("GET", "/v1/models", None, session.token)
        assert (status, [model["id"] for model in body["data"]]) == (200, ["mtrl"])
        assert live.ask("GET", "/v1/models/mtrl", None, session.token)[2] == body["data"][0]
        assert live.ask("GET", "/v1/models/gpt-4o", None, session.token)[2]["error"]["code"] == "model_not_found"
        assert live.ask("GET", "/v1/models")[0] == 401

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", CHAT, 405), ("PUT", "/update-reward", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404),
            ("POST", "/trajectories", 404), ("GET", "/trajectories", 404), ("GET", "/trajectories/", 404),
            ("GET", "/v1/../health", 404), ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404), ("POST", "/health", 404),
        ],
    )  # fmt: skip
    def test_unknown_routes_are_refused(self, live, session, method, path, status):
        answer = live.ask(method, path, BODY, session.token)
        assert (answer[0], answer[1]["content-type"]) == (status, "application/json")
        assert answer[2]["error"]["message"]

    def test_paths_without_v1_or_with_a_final_slash_are_accepted(self, live, session):
        assert live.ask("POST", "/chat/completions", BODY, session.token)[0] == 200
        assert live.ask("POST", f"{CHAT}/", BODY, session.token)[0] == 200

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", "not JSON"), (b"{", "not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[" * 100_000, "not JSON"),
            (b"[]", "not a JSON object"), (b'{"messages": NaN}', "NaN is not a JSON number"), (b"9" * 5000, "not JSON"),
            (b'{"metadata": {"a": -1e999}}', "the number -1e999 is too large"),
            (b'{"messages": []}', "messages must be a list"), (b'{"messages": [7]}', "messages"),
        ],
    )  # fmt: skip
    def test_invalid_bodies_are_refused(self, live, session, body, words):
        status, headers, answer = live.ask("POST", CHAT, body, session.token)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert words in answer["error"]["message"]
        assert headers["x-should-retry"] == "false"

    def test_unpaired_surrogates_are_accepted(self, live, session):
        body = json.dumps({"messages": [{"role": "user", "content": "\ud800 x \udfff"}]}).encode()
        assert live.ask("POST", CHAT, body, session.token)[0] == 200

    def test_completions_accept_text_and_ids(self, live, session):
        for prompt in ("how many", live.codec.encode("how many")):
            path = "/v1/completions"
            status, _, body = live.ask("POST", path, {"model": "m", "prompt": prompt, "logprobs": 0}, session.token)
            choice = body["choices"][0]
            assert (status, body["object"], choice["finish_reason"]) == (200, "text_completion", "stop")
            assert choice["text"].startswith(session.name)
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])

    def test_the_request_rate_is_limited(self, tiny_codec, monkeypatch):
        monkeypatch.setattr(auth, "SECONDS_OF_BURST", 3000)
        with Live(tiny_codec, limits=replace(LIMITS, max_requests_per_second=0.001)) as live:
            session, other = live.open("in a loop"), live.open("other")
            found = [live.ask("GET", "/v1/models", None, session.token) for _ in range(3)]
            for route in (CHAT, "/update-reward", "/complete-rollout"):
                found.append(live.ask("POST", route, BODY, session.token))
            assert [status for status, _, _ in found] == [200, 200, 200, 429, 429, 429]
            assert "more than 0.001 requests per second" in found[-1][2]["error"]["message"]
            assert found[-1][1]["retry-after"] == "1"
            assert "x-should-retry" not in found[-1][1]
            assert live.chat(other)[0] == 200
            assert not session.finished.is_set()

    def test_a_rate_below_one_allows_one_request(self, tiny_codec):
        with Live(tiny_codec, limits=replace(LIMITS, max_requests_per_second=0.001)) as live:
            session = live.open()
            assert [live.chat(session)[0] for _ in range(2)] == [200, 429]


class TestStreams:
    def test_a_stream_starts_with_the_role_and_sends_comments(self, tiny_codec, monkeypatch):
        monkeypatch.setattr(stream, "SECONDS_BEFORE_STREAM", 0.01)
        monkeypatch.setattr(stream, "SECONDS_BETWEEN_COMMENTS", 0.02)
        engine = HeldEngine(lambda name, turn: "done", tiny_codec.tokenizer)
        with Live(tiny_codec, engine=engine) as live:
            url = f"{live.gateway.base_url(live.open())}/chat/completions"
            with httpx.stream("POST", url, json={**BODY, "stream": True, "n": 2}, timeout=20) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                lines = (line for line in response.iter_lines() if line)
                opening = [json.loads(next(lines).removeprefix("data: ")) for _ in range(2)]
                assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1]
                assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in opening)
                assert next(lines) == next(lines) == ": sampling"
                live.call(engine.gate.set)
                rest = [line for line in lines if not line.startswith(":")]
        assert rest[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in rest[:-1]]
        assert [chunk["delta"].get("content") for chunk in chunks if chunk["index"] == 1] == ["done", None]
        assert [chunk["finish_reason"] for chunk in chunks if chunk["index"] == 0] == [None, "stop"]

    @pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
    def test_no_character_of_an_answer_ends_a_line(self, tiny_codec, route):
        """`iter_lines` of httpx ends lines at these characters, and many clients read streams by it."""
        text = "a\x85b\u2028c\u2029d é"
        question = {"input": "q"} if route == "responses" else {"messages": HELLO}
        with Live(tiny_codec, lambda name, turn: text) as live:
            url = f"{live.gateway.base_url(live.open())}/{route}"
            with httpx.stream("POST", url, json={**question, "stream": True}, timeout=20) as response:
                lines = [line for line in response.iter_lines() if line and not line.startswith("event: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        assert json.dumps(text) in json.dumps(events)

    def test_an_immediate_refusal_has_its_status(self, live, session):
        long = [{"role": "user", "content": "how many apples " * 2000}]
        status, body = live.chat(session, long, stream=True)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    def test_a_later_error_is_an_event(self, tiny_codec, monkeypatch):
        monkeypatch.setattr(stream, "SECONDS_BEFORE_STREAM", 0.01)
        engine = HeldEngine(lambda name, turn: "done", tiny_codec.tokenizer)
        with Live(tiny_codec, engine=engine) as live:
            session = live.open()
            url = f"{live.gateway.base_url(session)}/chat/completions"
            with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=20) as response:
                lines = (line for line in response.iter_lines() if line)
                next(lines)
                live.close(session)
                rest = list(lines)
        assert json.loads(rest[0].removeprefix("data: "))["error"]["code"]
        assert rest[-1] == "data: [DONE]"


class Broken(ScriptedEngine):
    def __init__(self, error, tokenizer):
        super().__init__(lambda name, turn: "never", tokenizer)
        self.error = error

    async def generate(self, trajectory_id, prompt, sampling):
        raise self.error


class TestFailures:
    def test_an_error_is_freed_without_the_garbage_collector(self):
        """A reference cycle would need the garbage collector, which stops all clients."""

        class Refused(Exception):
            pass

        async def failed():
            async def fail():
                raise Refused

            async def receive():
                await asyncio.Event().wait()

            try:
                async with CancelOnDisconnect(receive, all_or_none([fail()])) as work:
                    await work.result()
            except Refused as error:
                return weakref.ref(error)

        gc.disable()
        try:
            assert asyncio.run(failed())() is None
        finally:
            gc.enable()

    def test_a_lost_engine_is_reported(self, tiny_codec):
        with Live(tiny_codec, engine=Broken(EngineLostError("gone"), tiny_codec.tokenizer)) as live:
            status, body = live.chat(live.open())
            assert (status, body["error"]["type"]) == (503, "server_error")

    def test_the_error_of_an_engine_is_not_revealed(self, tiny_codec, caplog):
        with Live(tiny_codec, engine=Broken(RuntimeError("the secret"), tiny_codec.tokenizer)) as live:
            status, body = live.chat(live.open())
            assert (status, body["error"]["type"]) == (500, "server_error")
            assert "secret" not in json.dumps(body)
            assert "the secret" in caplog.text
            status, _, streamed = live.ask(
                "POST", f"/trajectories/{live.open('b').token}{CHAT}", {**BODY, "stream": True}
            )
            assert status == 500 and "secret" not in json.dumps(streamed)

    def test_the_call_limit_forbids_retries(self, tiny_codec):
        with Live(tiny_codec, limits=replace(LIMITS, max_calls=1)) as live:
            session = live.open()
            assert live.chat(session)[0] == 200
            status, headers, body = live.ask("POST", CHAT, BODY, session.token)
            assert (status, body["error"]["code"], headers["x-should-retry"]) == (429, "max_calls", "false")

    @pytest.mark.parametrize("stream_it", [False, True])
    def test_a_disconnected_client_aborts_its_call(self, tiny_codec, stream_it):
        engine = HeldEngine(lambda name, turn: f"{name} {turn}", tiny_codec.tokenizer)
        with Live(tiny_codec, engine=engine) as live:
            session = live.open()
            with live.connect() as connection:
                connection.sendall(request_bytes(session, {**BODY, "stream": stream_it}))
                assert engine.someone_asks.wait(20)
            assert engine.someone_left.wait(20)
            live.call(engine.gate.set)
            assert live.chat(session)[0] == 200
            assert len(engine.aborted) == 1
            assert [turn.text for turn in live.turns(session)] == ["a 0"]
