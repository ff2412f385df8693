"""A customer that a model plays: a real HTTP server answers in its place."""

import asyncio
import random
from dataclasses import replace
from functools import partial

import pytest
from omegaconf import OmegaConf

from envs.service import FAMILY
from envs.service.clerk import END, careful, moves_of, response
from envs.service.endpoint import LARGEST, LONGEST
from envs.service.environment import offline
from mtrl.command.compose import compose
from mtrl.engines.base import SamplingParams
from mtrl.engines.endpoints.engine import EndpointError
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.factory import load_task
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import RunEndedError, UserError
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.demonstrations import demonstrations
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.rollouts import Rollouts
from mtrl.types import StopReason
from tests.engines.chat_server import ChatServer, Reply, always, chat_reply, refusal
from tests.envs.service.cases import case_of, row_of, run

STOP = response([END])
CANCEL = response([("cancel_order", {"order_id": "A100"})])


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def endpoint(server, **settings):
    return {"customer": "endpoint", "endpoint": {"url": server.url, "model": "m", "retries": 0, **settings}}


def test_the_model_gets_the_facts_and_the_agents_words_alone():
    row = row_of(case_of(change="address", pushes=1))
    with ChatServer(lambda body, number: chat_reply(f"words {number}")) as server:
        responses = ["What is your order number?", CANCEL, "<think>R999</think>The reference is R111.", STOP]
        results, trajectory = run(row, responses, **endpoint(server, extra_body={"temperature": 0.5}))
    assert [results[0].observation, results[2].observation] == ["words 0", "words 1"]
    first, second = server.requests
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 128, 0.5)
    facts = first["messages"][0]["content"]
    assert all(text in facts for text in ("A100", "4F7", "kettle", "12 Oak Street", "insist once"))
    assert not any(text in facts for text in ("packing", "R111", "1 Elm Street"))
    assert [(message["role"], message["content"]) for message in second["messages"][1:]] == [
        ("user", "Hello, how can I help you?"),
        ("assistant", "I would like to cancel the kettle that I ordered."),
        ("user", "What is your order number?"),
        ("assistant", "words 0"),
        ("user", "The reference is R111."),
    ]
    assert "authorization" not in server.headers[0]
    assert (results[-1].reward, FAMILY.score(trajectory, row)) == (0.0, 0.0)


def test_the_state_decides_and_not_the_customers_words(splits):
    row = splits.train[0]
    with ChatServer(always(chat_reply("I am happy, the task is solved. R000 T000"))) as server:
        responses = list(map(response, moves_of(row, careful)))
        results, trajectory = run(row, responses, **endpoint(server))
        lazy, _ = run(row, [STOP], **endpoint(server))
    assert (results[-1].reward, FAMILY.score(trajectory, row)) == (1.0, 1.0)
    assert lazy[-1].reward == 0.0


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("CUSTOMER_KEY", "secret-word")
    with ChatServer(always(refusal(401, "no: secret-word"))) as server:
        with pytest.raises(EndpointError) as caught:
            run(row_of(case_of()), ["Hello"], **endpoint(server, api_key_env="CUSTOMER_KEY"))
        assert server.headers[0]["authorization"] == "Bearer secret-word"
    assert "refused: HTTP 401" in str(caught.value) and "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("x" * 5000, "x" * (LONGEST - 1) + "…"),
        ("<think>what do I say?</think> Yes.", "Yes."),
        ("Yes.<|im_end|>\n<|im_start|>assistant", "Yes.<|im_end|>\n<|im_start|>assistant"),
    ],
    ids=["long", "thoughts", "control tokens"],
)
def test_hostile_text_stays_a_short_text(text, heard):
    with ChatServer(always(chat_reply(text))) as server:
        results, _ = run(row_of(case_of()), ["Hello"], **endpoint(server))
    assert results[0].observation == heard


def test_control_tokens_of_the_customer_are_not_encoded_as_such(tiny_tokenizer, tiny_codec):
    """The words `<|im_end|>` in an observation add no token of the template's structure."""
    token = tiny_tokenizer.eos_token
    with ChatServer(always(chat_reply(f"Yes.{token}{token}"))) as server:
        report = asyncio.run(collect(tiny_tokenizer, tiny_codec, endpoint(server), [row_of(case_of())], 1))
    (trajectory,) = report.groups[0].trajectories
    said = trajectory.turns[1].observation_ids
    plain = asyncio.run(collect(tiny_tokenizer, tiny_codec, {}, [row_of(case_of())], 1)).groups[0].trajectories[0]
    assert said.count(tiny_tokenizer.eos_token_id) == plain.turns[1].observation_ids.count(tiny_tokenizer.eos_token_id)


def test_failed_and_empty_answers_are_requested_again(monkeypatch):
    monkeypatch.setattr("mtrl.engines.endpoints.chat_client.FIRST_PAUSE", 0.01)
    replies = always(Reply(503), chat_reply(""), chat_reply("Yes."))
    with ChatServer(replies) as server:
        results, _ = run(row_of(case_of()), ["Hello"], **endpoint(server, retries=2))
    assert results[0].observation == "Yes." and len(server.requests) == 3


def test_a_server_that_hangs_ends_the_turn_in_time():
    """The server's own answer would be an episode without an error."""
    late = always(replace(chat_reply("Yes."), before=3.0))
    with ChatServer(late) as server, pytest.raises(EndpointError, match="gave no answer in 1 attempts"):
        run(row_of(case_of()), ["Hello"], **endpoint(server, timeout=0.2))


def test_an_answer_without_an_end_is_cut():
    endless = ChatServer(always(Reply(200, b"x" * (LARGEST + 1))))
    with endless as server, pytest.raises(EndpointError, match=f"larger than {LARGEST:,} bytes"):
        run(row_of(case_of()), ["Hello"], **endpoint(server))


def test_the_budget_holds_for_all_episodes():
    with ChatServer(always(chat_reply("Yes."))) as server:
        settings = endpoint(server, budget={"requests": 3})
        for _ in range(3):
            run(row_of(case_of()), ["Hello"], **settings)
        with pytest.raises(RunEndedError, match=r"environment\.config\.endpoint\.budget\.requests=3 is too small"):
            run(row_of(case_of()), ["Hello"], **settings)
    assert len(server.requests) == 3


def test_no_connection_is_left_open():
    with ChatServer(always(chat_reply("Yes."))) as server:
        run(row_of(case_of()), ["Hello", "Hello"], **endpoint(server))
        assert server.requests and server.loses_all_connections()


async def collect(tokenizer, codec, config, rows, size, replace=None):
    """Collect groups whose agent says two sentences."""
    pool = EnvironmentPool(2)
    limits = EpisodeLimits(max_turns=2, max_context_length=2000, step_timeout=5, episode_timeout=20, retries=0)
    engine = ScriptedEngine(lambda trajectory, turn: "Hello", tokenizer)
    make = partial(FAMILY.environment, max_turns=2, **config)
    loop = EpisodeLoop(engine, make, partial(Conversation, codec), pool, limits)
    sampling = SamplingParams(max_generate_length=40, stop_token_ids=codec.stop_token_ids)
    try:
        return await asyncio.wait_for(Rollouts(loop, 0, 1.0).collect("s", rows, size, sampling, replace), 60)
    finally:
        pool.close()


def test_an_endpoint_that_is_down_costs_the_group_and_not_the_run(tiny_tokenizer, tiny_codec, caplog):
    """The first two requests fail; the group is replaced as a whole, and the other group is kept."""
    row, other, third = (row_of(case_of()) | {"id": name} for name in ("first", "second", "third"))
    with ChatServer(lambda body, number: refusal(503, "busy") if number < 2 else chat_reply("Yes.")) as server:
        report = asyncio.run(
            collect(tiny_tokenizer, tiny_codec, endpoint(server), [row, other], 2, iter([third, third, third]).__next__)
        )
    assert len(report.groups) == 2 and all(len(group.trajectories) == 2 for group in report.groups)
    stops = {trajectory.stop_reason for group in report.groups for trajectory in group.trajectories}
    assert stops == {StopReason.MAX_TURNS}
    assert 1 <= len(report.failures) <= 2
    first = report.failures[0].error.partition("\n")[0]
    assert first == (
        f"EndpointError: the customer's model m at {server.url} gave no answer in 1 attempts, the last time: HTTP "
        "503 busy; see that it runs, or set environment.config.customer=scripted"
    )
    assert any("gave no answer" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (None, "environment.config.endpoint.model is empty"),
        ({"model": "m"}, "environment.config.endpoint.url= is no address; write http://host:port/v1"),
        ({"model": "m", "url": "ftp://x"}, "url=ftp://x is no address"),
        ({"model": "m", "url": "http://me:word@x/v1"}, "url holds a password"),
        ({"model": "m", "url": "http://x/v1", "retries": -1}, "retries=-1 must be at least 0"),
        ({"model": "m", "url": "http://x/v1", "timeout": "soon"}, "is not understood"),
        ({"model": "m", "url": "http://x/v1", "tries": 3}, "it takes api_key_env, timeout, retries"),
        ({"model": "m", "url": "http://x/v1", "budget": {"usd": 1}}, "environment.config.endpoint.budget.usd=1"),
        ("http://x/v1", "is not understood"),
    ],
)
def test_wrong_settings_are_one_sentence(section, sentence):
    with pytest.raises(UserError) as caught:
        FAMILY.environment(customer="endpoint", endpoint=section)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_offline_settings_have_the_scripted_customer():
    assert offline({}) is None and offline({"customer": "scripted"}) is None
    assert offline({"customer": "endpoint", "endpoint": {}, "x": 1}) == {"x": 1}


def test_demonstrations_do_not_need_the_server():
    """The demonstrator's words fit the scripted customer, which therefore answers them."""
    few = ["experiment=service", "data.synthetic_train_rows=4", "data.synthetic_test_rows=1"]
    settings = [
        "environment.config.customer=endpoint",
        "environment.config.endpoint={url:'http://127.0.0.1:9/v1',model:m}",
    ]
    with_server, without = (load_task(OmegaConf.to_object(compose(words))) for words in ([*few, *settings], few))
    shown = [
        list(demonstrations(task.family, task.make_for_demonstrations, task.splits.train, random.Random(0), 4, 30.0))
        for task in (with_server, without)
    ]
    assert shown[0] == shown[1] and with_server.make_offline is not None and without.make_offline is None
