"""A server that scores prompts: the required answer, and one sentence for every other answer."""

import asyncio
import json

import pytest

from mtrl.config.endpoint_schema import BudgetConfig, EndpointConfig, PriceConfig
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.chat_client import GarbledAnswerError
from mtrl.engines.endpoints.prompt_logprobs import PromptScorer, parse, parse_top
from mtrl.errors import RunEndedError, UserError
from tests.engines.chat_server import ChatServer, Reply, refusal


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("mtrl.engines.endpoints.chat_client.FIRST_PAUSE", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def scorer_at(url, top_k=0, **limits):
    budget = Budget("distillation.teacher.endpoint", PriceConfig(), BudgetConfig(**limits))
    return PromptScorer.at(url, "m", EndpointConfig(api_key_env="", timeout=5.0, retries=1), budget, top_k)


def scored(tokens, texts=None):
    texts = texts or [str(token) for token in tokens]
    return Reply(body={"choices": [{"logprobs": {"tokens": texts, "token_logprobs": [None, *tokens[1:]]}}]})


def test_the_log_probs_of_the_prompt_are_the_first_of_the_answer():
    answer = {"tokens": ["a", "b", "c"], "token_logprobs": [None, -0.5, -9.0]}
    body = json.dumps({"choices": [{"logprobs": answer}]}).encode()
    assert parse(body, 2).logprobs == [0.0, -0.5] and parse(body, 3).texts == ["a", "b", "c"]
    assert parse(body.replace(b"-0.5", b"-Infinity"), 2).logprobs == [0.0, float("-inf")]


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b'{"choices": []}',
        b'{"choices": [{"logprobs": null}]}',
        b'{"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [null]}}]}',  # a server that ignores echo
        b'{"choices": [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [null, null]}}]}',
        b'{"choices": [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [null, NaN]}}]}',
        b'{"choices": [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [null, 1.5]}}]}',
        b'{"choices": [{"logprobs": {"tokens": ["a", 7], "token_logprobs": [null, -1]}}]}',
    ],
)
def test_other_answers_are_garbled(body):
    with pytest.raises(GarbledAnswerError):
        parse(body, 2)


def places(*dicts):
    """Return an answer with these log-probs by id, as vLLM writes it."""
    entries = [
        {str(id): {"logprob": value, "rank": 1, "decoded_token": f"<{id}>"} for id, value in d.items()} for d in dicts
    ]
    return json.dumps({"choices": [{"prompt_logprobs": [None, *entries]}]}).encode()


def test_the_most_probable_tokens_are_read_by_id_and_sorted():
    """The second token of the prompt is among the two most probable ones, and the third is not."""
    found = parse_top(places({7: -0.5, 8: -0.1}, {5: -9.0, 7: -0.2, 9: -1.0}), [3, 7, 5], 2)
    assert found.logprobs == [0.0, -0.5, -9.0] and found.texts == [None, "<7>", "<5>"]
    assert found.top.ids[1:].tolist() == [[8, 7], [7, 9]]
    assert found.top.logprobs[1:].tolist() == [[-0.1, -0.5], [-0.2, -1.0]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"choices": [{"logprobs": null}]}', "lacks the prompt_logprobs of a token, or some of the 2"),
        (b'{"choices": [{"prompt_logprobs": [null, null, {}]}]}', "lacks the prompt_logprobs"),
        (places({7: -1, 8: -1}), "lacks the prompt_logprobs"),
        (places({7: -1, 8: -1}, {5: -1}), "lacks the prompt_logprobs"),
        (places({7: -1, 8: -1}, {6: -1, 8: -1}), "lacks the prompt_logprobs"),
        (places({7: -1, 8: -1}, {5: -1, -8: -1}), "a negative id"),
        (places({7: -1, 8: -1}, {5: 1.5, 8: -1}), "a log-prob that is not a number up to 0"),
    ],
)
def test_answers_without_some_of_the_most_probable_tokens_are_garbled(body, said):
    with pytest.raises(GarbledAnswerError, match=said):
        parse_top(body, [3, 7, 5], 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refusal(503, "starting"), "failed 2 times, the last time with HTTP 503 starting; see that it runs"),
        (
            Reply(body={"choices": []}),
            "Error: the answer has no log-probs of the prompt; see that it runs",
        ),
        (refusal(404, "no model m"), "answered HTTP 404 no model m; correct distillation.teacher.url"),
        (refusal(400, "maximum context length is 2"), "it cannot hold the 3 tokens of a conversation: lower generator"),
    ],
    ids=["down", "without echo", "unknown model", "too long"],
)
def test_a_server_that_does_not_answer_ends_the_run_by_one_sentence(answer, said):
    with ChatServer(lambda body, number: answer, "/v1/completions") as server, pytest.raises(RunEndedError) as caught:
        asyncio.run(scorer_at(server.url).score_all([[1, 2, 3]] * 4))
    message = str(caught.value)
    assert message.startswith(f"the teacher at distillation.teacher.url={server.url} ") and said in message
    assert "\n" not in message


def test_a_server_that_gives_fewer_log_probs_is_named_with_the_fix():
    answer = refusal(400, "Requested prompt logprobs of 50, which is greater than max allowed: 20")
    with ChatServer(lambda body, number: answer, "/v1/completions") as server, pytest.raises(RunEndedError) as caught:
        asyncio.run(scorer_at(server.url, top_k=50).score_all([[1, 2, 3]]))
    assert "max allowed: 20; start it with --max-logprobs 50 or more, or lower distillation.top_k=50" in str(
        caught.value
    )


def test_the_budget_limits_the_requests():
    with ChatServer(lambda body, number: scored([0, -1.0, -2.0]), "/v1/completions") as server:
        scorer = scorer_at(server.url, requests=2)
        found = asyncio.run(scorer.score_all([[1, 2, 3]] * 2))
        assert [scored.logprobs for scored in found] == [[0.0, -1.0, -2.0]] * 2
        with pytest.raises(RunEndedError, match=r"distillation\.teacher\.endpoint\.budget\.requests=2 is too small"):
            asyncio.run(scorer.score_all([[1, 2, 3]]))


def test_another_tokenizer_is_refused(tiny_tokenizer):
    def answer(shift):
        def reply(body, number):
            texts = [tiny_tokenizer.decode([(token + shift) % len(tiny_tokenizer)]) for token in body["prompt"]]
            return scored([-1.0] * len(texts), texts)

        return reply

    with ChatServer(answer(0), "/v1/completions") as server:
        asyncio.run(scorer_at(server.url).check(tiny_tokenizer))
    said = r"has another tokenizer than the policy \(token \d+ is '.*' there and '.*' here\)"
    with ChatServer(answer(1), "/v1/completions") as server, pytest.raises(UserError, match=said):
        asyncio.run(scorer_at(server.url).check(tiny_tokenizer))
