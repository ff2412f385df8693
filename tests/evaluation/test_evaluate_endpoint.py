"""Evaluations of models behind an endpoint, with real servers that answer or fail."""

import json
from zlib import crc32

import pytest

from mtrl.command.compose import compose
from mtrl.engines.endpoints import chat_client
from mtrl.environments.factory import load_task
from mtrl.types import StopReason, read_trajectories
from tests.engines.chat_server import ChatServer, Reply, always, chat_reply, refusal
from tests.evaluation.conftest import TASK
from tests.evaluation.outputs import metrics_of, report_of

ROWS = ["evaluation.rows=6", "evaluation.sampled_rows=0", "evaluation.samples_per_row=1", "evaluation.output=out"]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE", 0.01)


@pytest.fixture(scope="module")
def task():
    from omegaconf import OmegaConf

    return load_task(OmegaConf.to_object(compose(TASK)))


@pytest.fixture
def gold(task):
    """Function `gold(wrong=())` that returns a policy that solves every row except those of the given indices."""
    known = {row["prompt"][-1]["content"]: (place, task.family.gold(row)) for place, row in enumerate(task.splits.test)}

    def make(wrong=()):
        def answer(body, n):
            place, responses = known[next(m["content"] for m in body["messages"] if m["role"] == "user")]
            turn = sum(message["role"] == "assistant" for message in body["messages"])
            return chat_reply("no idea" if place in wrong else responses[min(turn, len(responses) - 1)])

        return answer

    return make


def model(server, name="m"):
    return f"evaluation.model={name}@{server.url}"


def test_gold_behind_an_endpoint_beside_a_local_model(evaluate, run, gold, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    with ChatServer(gold(wrong={1, 4})) as server:
        words = [model(server, "big/gold"), "evaluation.compare=[base]", "evaluation.endpoint.api_key_env=SOME_KEY"]
        done = evaluate(run, *words, *ROWS)
    assert done.status == 0, done.err
    (row,) = metrics_of(tmp_path / "out")
    assert (row["val/success/mean"], row["val/episodes"]) == (pytest.approx(4 / 6), 6)
    remote = {key for key in row if key.startswith("val/")}
    local = {key.removeprefix("base/") for key in row if key.startswith("base/val/")}
    assert remote == local and remote, "the same keys, wherever the weights are"
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    requests = len(server.requests)
    usage = report_of(tmp_path / "out")["models"][0]["usage"]
    counted = {"prompt_tokens": 11.0, "completion_tokens": 5.0, "cached_tokens": 3.0, "requests": 1.0}
    assert usage == {n: c * requests for n, c in counted.items()} | {"retries": 0.0, "unconfirmed_requests": 0.0}
    assert {name: row[f"endpoint/{name}"] for name in usage} == usage and "endpoint/cost" not in row
    assert f"big_gold: {11 * requests} prompt tokens" in done.out
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert KEY.encode() not in written and KEY not in done.out + done.err


def test_equal_responses_get_equal_rewards_at_an_endpoint_and_locally(evaluate, task, gold, tmp_path):
    """The rescorer replays the episodes of the endpoint in a local loop with token ids, and none differs."""
    from mtrl.rescore.__main__ import main as rescore

    with ChatServer(gold(wrong={2})) as server:
        assert evaluate(*TASK, model(server), *ROWS).status == 0
    out = tmp_path / "again.json"
    assert rescore([str(tmp_path / "out"), f"out={out}"]) == 0
    found = json.loads(out.read_text())["all"]
    assert found["episodes"] == 6 and found["changed"] == 0 and found["success_after"] == pytest.approx(5 / 6)


def test_several_endpoints_run_concurrently(evaluate, gold, tmp_path):
    """Each endpoint waits for the other, so sequential requests would never end."""
    import threading

    meet = threading.Barrier(2, timeout=20)
    answer = gold()

    def first(body, n):
        if n == 0:
            meet.wait()
        return answer(body, n)

    with ChatServer(first) as one, ChatServer(first) as two:
        done = evaluate(*TASK, model(one), f"evaluation.compare=[m@{two.url}]", *ROWS)
    assert done.status == 0, done.out
    (row,) = metrics_of(tmp_path / "out")  # of one step, so that no reader mixes the two up
    assert row["val/episodes"] == row["m-2/val/episodes"] > 0


def test_failures_are_not_wrong_answers_and_are_retried(evaluate, gold, tmp_path):
    answer = gold(wrong={0})
    state = {"sick": True}

    def sometimes(body, n):
        reply = answer(body, n)
        is_wrong_row = "no idea" in json.dumps(reply.body)
        prompt = next(m["content"] for m in body["messages"] if m["role"] == "user")
        sick_row = state["sick"] and not is_wrong_row and crc32(prompt.encode()) % 2
        return refusal(500, "the disk is full") if sick_row else reply

    few = ["evaluation.endpoint.retries=0", "environment.retries=0", "environment.max_failed_share=1"]
    with ChatServer(sometimes) as server:
        done = evaluate(*TASK, model(server), *ROWS, *few)
        assert done.status == 0, done.err
        first = list(read_trajectories(tmp_path / "out" / "trajectories" / "m_greedy.jsonl"))
        failed = [t for t in first if t.stop_reason == StopReason.ENV_ERROR]
        assert failed and all(t.score is None and "HTTP 500 the disk is full" in t.error for t in failed)
        (row,) = metrics_of(tmp_path / "out")
        assert row["val/episodes"] == 6 - len(failed)
        assert row["val/success/mean"] == pytest.approx((5 - len(failed)) / (6 - len(failed)))
        assert f"m: {len(failed)} failed episodes are left out of the rates" in done.out
        assert report_of(tmp_path / "out")["models"][0]["greedy"]["failures"] == {"env_error": len(failed)}
        state["sick"] = False
        earlier = len(server.requests)
        done = evaluate(*TASK, model(server), *ROWS, *few)
    assert done.status == 0 and "going on with" in done.out
    (row,) = metrics_of(tmp_path / "out")
    assert row["val/episodes"] == 6 and row["val/success/mean"] == pytest.approx(5 / 6)
    prompts = {request["messages"][1]["content"] for request in server.requests[earlier:]}
    assert len(prompts) == len(failed), "only the failed episodes run again"


def test_a_model_behind_an_endpoint_gets_full_prompts(evaluate, gold):
    with ChatServer(gold()) as server:
        done = evaluate(*TASK, model(server), *ROWS)
    assert done.status == 0 and "full prompts" in done.out
    assert all(request["messages"][0]["role"] == "system" for request in server.requests)


def test_all_models_get_short_prompts_beside_a_tiny_policy(evaluate, run, gold):
    """A warning names the models that are no tiny policy; a prompt that the command names needs none."""
    warning = "environment.prompt=short: m gets the prompts of the tiny policy"
    with ChatServer(gold()) as server:
        done = evaluate(run, model(server), "evaluation.compare=[base]", *ROWS)
        assert done.status == 0 and warning in done.out and "short prompts" in done.out
        assert all(request["messages"][0]["role"] == "user" for request in server.requests)
        words = [f"evaluation.model={run / 'export'}", "environment.prompt=short", "evaluation.output=other"]
        done = evaluate(run, *words, f"evaluation.compare=[m@{server.url}]", *ROWS[:-1])
        assert done.status == 0 and warning not in done.out


def test_too_many_failures(evaluate, tmp_path):
    with ChatServer(always(refusal(500, "on fire"))) as server:
        done = evaluate(*TASK, model(server), *ROWS, "evaluation.endpoint.retries=0", "environment.retries=0")
    assert done.status == 1
    assert "4 of 4 episodes failed, and of 6 episodes environment.max_failed_share=0.5 may fail" in done.out
    assert "HTTP 500 on fire" in done.out and "go on with: the same command and evaluation.output=out" in done.out
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(
    ("reply", "words"),
    [(refusal(401, "bad key"), "api_key_env=OPENAI_API_KEY"), (refusal(404, "no such model"), "check the name")],
)
def test_a_refusal_ends_at_once(evaluate, reply, words):
    with ChatServer(always(reply)) as server:
        done = evaluate(*TASK, model(server), *ROWS, "evaluation.endpoint.max_concurrent=1")
    assert done.status == 2 and words in done.err and "\n" not in done.err
    assert len(server.requests) == 1


PRICES = [f"evaluation.endpoint.price.{name}={usd}" for name, usd in (("input", 2), ("cached", 1), ("output", 10))]


def test_an_evaluation_stops_at_its_budget_and_can_be_resumed(evaluate, gold, tmp_path):
    """Stored episodes are reused, earlier spending counts, and the result equals that of an uninterrupted one."""
    answer = gold(wrong={2})
    with ChatServer(answer) as server:
        whole = evaluate(*TASK, model(server), *ROWS[:-1], *PRICES, "evaluation.output=whole")
        needed = len(server.requests)
        assert whole.status == 0, whole.err
        limit = f"evaluation.endpoint.budget.requests={needed - 2}"
        few = [*TASK, model(server), *ROWS, *PRICES]
        done = evaluate(*few, limit)
        assert done.status == 1 and len(server.requests) == 2 * needed - 2, done.out
        message = f"evaluation.endpoint.budget.requests={needed - 2} is too small for another request"
        assert done.out.count(message) == 1 and f"{needed - 2} requests (0 repeated)" in done.out
        assert "go on with: the same command and evaluation.output=out" in done.out
        assert not (tmp_path / "out" / "report.json").exists()
        stored = list(read_trajectories(tmp_path / "out" / "trajectories" / "m_greedy.jsonl"))
        assert 0 < len(stored) < 6 and all(t.stop_reason == StopReason.DONE for t in stored)
        again = evaluate(*few, limit)
        assert again.status == 1 and len(server.requests) == 2 * needed - 2, "nothing more is sent"
        done = evaluate(*few, f"evaluation.endpoint.budget.requests={2 * needed}")
    assert done.status == 0, done.out
    found, expected = report_of(tmp_path / "out"), report_of(tmp_path / "whole")
    requests = len(server.requests) - needed
    usage = found["models"][0]["usage"]
    assert usage["requests"] == requests >= needed
    assert usage["cost"] == pytest.approx(requests * (8 * 2 + 3 * 1 + 5 * 10) / 1e6)
    assert found["models"][0]["greedy"] == expected["models"][0]["greedy"]
    (row,) = metrics_of(tmp_path / "out")
    assert row["endpoint/cost"] == usage["cost"] and row["endpoint/requests"] == requests
    cents = f"{usage['cost']:.3g} USD"
    assert f"{requests} requests (0 repeated), {cents}" in done.out
    pages = [(tmp_path / "out" / name).read_text() for name in ("report.md", "report.html")]
    assert all("Spending" in page and cents in page for page in pages)


def test_unusable_answers_are_charged(evaluate, gold, tmp_path):
    """Every other answer is unusable and reports a token count."""
    answer = gold()

    def sometimes(body, n):
        reply = answer(body, n)
        return Reply(200, {"choices": [], "usage": reply.body["usage"]}) if n % 2 == 0 else reply

    with ChatServer(sometimes) as server:
        one = ["evaluation.endpoint.max_concurrent=1", "evaluation.endpoint.retries=1"]
        done = evaluate(*TASK, model(server), *ROWS, *one)
    assert done.status == 0, done.err
    usage = report_of(tmp_path / "out")["models"][0]["usage"]
    assert usage["requests"] == len(server.requests) and usage["retries"] == len(server.requests) / 2
    assert usage["prompt_tokens"] == 11 * len(server.requests) and "cost" not in usage and "USD" not in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.endpoint.budget.usd=5"], "evaluation.endpoint.budget.usd=5.0 needs evaluation.endpoint.price.in"),
        (["evaluation.endpoint.price.input=5"], "evaluation.endpoint.price.output is not given"),
        (["evaluation.endpoint.budget.requests=0"], "evaluation.endpoint.budget.requests=0 must be at least 1"),
        (
            ["evaluation.endpoint.budget.tokens=9", "+evaluation.endpoint.extra_body.max_tokens=null"],
            "evaluation.endpoint.budget.tokens cannot be enforced",
        ),
    ],
)
def test_budgets_that_cannot_be_enforced(evaluate, gold, words, message):
    with ChatServer(gold()) as server:
        done = evaluate(*TASK, model(server), *ROWS, *words)
    assert done.status == 2 and message in done.err and "\n" not in done.err and not server.requests


def test_settings_that_endpoints_do_not_read(evaluate, gold):
    with ChatServer(gold()) as server:
        idle = ["generator.max_num_seqs=4", "generator.use_conversation_multi_turn=false"]
        done = evaluate(*TASK, model(server), *ROWS, *idle)
    assert done.status == 0, done.err
    assert "generator.max_num_seqs changes nothing, for every model is an endpoint" in done.out
    assert "use_conversation_multi_turn=False changes nothing for endpoints" in done.out
