"""One session: its limits, end, rewards and slots of the engine; and its equality with the episode loop."""

import asyncio
import json
from dataclasses import asdict, replace
from functools import partial

import pytest
from session_helpers import (
    USER,
    WatchedEngine,
    chat,
    replies,
    run,
    session_of,
    text,
    trajectory_of,
    until_all_wait,
    wire,
)

from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import ChatRequest
from mtrl.gateway.session import Session, SessionLimits
from mtrl.models.plain_tokenizer import PlainTokenizer, plain
from mtrl.models.renderer import make_renderer
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import FinishReason, StopReason, Trajectory

MORE = {"role": "user", "content": "more"}


async def refused(requested):
    with pytest.raises(RequestError) as caught:
        await requested
    return caught.value


def run_session(scenario, codec, answer=None, **limits):
    """Run `play(session, engine)` to its end, and return the session and its engine."""
    engine = WatchedEngine(answer or replies(codec, "one", "two", "three"))

    async def scene():
        session = session_of(engine, codec, **limits)
        await scenario(session, engine)
        return session

    return run(scene()), engine


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_sampling_parameters_of_the_run_take_precedence(tiny_codec):
    async def scenario(session, engine):
        await session.chat(chat(USER, temperature=0, top_p=1, max_tokens=7, stop=["X", "Y"], nonsense=1))
        await session.chat(chat(MORE, max_tokens=700))

    session, engine = run_session(scenario, tiny_codec, temperature=1.0, seed=5, stop=("Y", "Z"))
    first, second = (sampling for _, _, sampling, _ in engine.seen.values())
    assert first == replace(session.sampling, seed=5, max_generate_length=7, stop=("Y", "Z", "X"))
    assert second == replace(session.sampling, seed=6, max_generate_length=50)
    assert session.metrics == {"gateway/overridden": 1, "gateway/unknown_fields": 1}


def test_the_client_gets_text_without_the_stop_string(tiny_codec):
    async def scenario(session, engine):
        (call,) = await session.chat(chat(USER, stop=["apples"]))
        assert call.message["content"] == call.text == "how many " and call.finish_reason == "stop"
        await session.chat(chat(USER, wire(call), MORE))

    session, _ = run_session(scenario, tiny_codec, replies(tiny_codec, "how many apples"))
    first, second = session.turns()
    assert first.text == first.message["content"] == "how many apples" and second.break_reason is None
    assert first.action_ids == replies(tiny_codec, "how many apples")(0) and first.versions == [3] * len(
        first.action_ids
    )


def test_finish_reasons_are_reported(tiny_codec):
    called = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look"}}]
    answers = [
        replies(tiny_codec, called)(0),
        (tiny_codec.encode("cut"), FinishReason.LENGTH),
        replies(tiny_codec, "")(0),
    ]

    async def scenario(session, engine):
        calls = [(await session.chat(chat(USER, tools=tools)))[0] for _ in answers]
        assert [call.finish_reason for call in calls] == ["tool_calls", "length", "stop"]
        assert calls[0].message["tool_calls"][0]["id"] == "call_0_0" and calls[0].message["content"] == ""

    run_session(scenario, tiny_codec, lambda number: answers[number])


def test_concurrent_calls_are_limited(tiny_codec):
    async def scenario(session, engine):
        engine.gate.clear()
        task = asyncio.ensure_future(session.chat(chat(USER, n=5)))
        await until_all_wait()
        assert sorted(engine.asking) == ["g/0", "g/0#1"]
        engine.gate.set()
        assert [call.index for call in await task] == [0, 1, 2, 3, 4]

    session, engine = run_session(scenario, tiny_codec, at_once=2)
    assert len(session.turns()) == 5 and len(engine.open_ids) == 1


def test_one_engine_trajectory_stays_open_between_calls(tiny_codec):
    async def scenario(session, engine):
        assert engine.open_ids == ["g/0"]
        await session.chat(chat(USER))
        assert engine.open_ids == ["g/0"] and not engine.released
        engine.gate.clear()
        beside = [asyncio.ensure_future(session.chat(chat(USER))) for _ in range(2)]
        await until_all_wait()
        assert engine.open_ids == ["g/0", "g/0#1"]
        engine.gate.set()
        await asyncio.gather(*beside)
        assert engine.open_ids == ["g/0#1"] and engine.released == ["g/0"]
        await session.chat(chat(USER))
        assert engine.open_ids == ["g/0#1"]
        session.close()
        session.close()
        assert engine.open_ids == []

    run_session(scenario, tiny_codec)


# -- limits and failures ----------------------------------------------------------------------------------------------


def test_the_call_limit_is_enforced(tiny_codec):
    async def scenario(session, engine):
        await session.chat(chat(USER))
        error = await refused(session.chat(chat(USER, n=2)))
        assert (error.status, error.code) == (429, "max_calls") and session.stop_reason == StopReason.MAX_TURNS
        await session.chat(chat(USER))
        assert session.stop_reason is None, "it went on"
        assert (await refused(session.complete(text("x")))).code == "max_calls"

    session, _ = run_session(scenario, tiny_codec, calls=2)
    assert session.stop_reason == StopReason.MAX_TURNS and len(session.turns()) == 2


@pytest.mark.parametrize("characters", [300, 10_000_000])
def test_a_full_context_is_refused(tiny_codec, characters):
    async def scenario(session, engine):
        long = {"role": "user", "content": "ab" * (characters // 2)}
        for requested in (session.chat(chat(long)), session.complete(text(long["content"]))):
            error = await refused(requested)
            assert (error.status, error.code) == (400, "context_length_exceeded")
            assert "maximum context length is 100 tokens" in error.message
        assert session.stop_reason == StopReason.CONTEXT_LIMIT and engine.seen == {}
        await session.chat(chat(USER))

    session, _ = run_session(scenario, tiny_codec, context=100)
    assert session.stop_reason is None and len(session.turns()) == 1


def test_a_count_of_tokens_is_no_call(tiny_codec):
    """A refused call stays the stop reason, and a refused count becomes none."""

    async def scenario(session, engine):
        long = chat({"role": "user", "content": "ab" * 10_000})
        for reason in (None, StopReason.CONTEXT_LIMIT):
            with pytest.raises(RequestError) as error:
                session.count_tokens(long)
            assert error.value.code == "context_length_exceeded" and session.stop_reason == reason
            assert session.count_tokens(chat(USER)) > 0 and session.stop_reason == reason
            await refused(session.chat(long))

    run_session(scenario, tiny_codec, context=100)


DEEP = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": ["ab"] * 3000})}}
SHORT = {"role": "user", "content": ""}


@pytest.mark.parametrize(
    "body",
    [
        chat(*[SHORT] * 101),
        chat(SHORT, {"role": "assistant", "content": "", "tool_calls": [DEEP]}),
        chat(SHORT, {"role": "assistant", "content": "", "reasoning_content": "ab" * 2000}),
        chat({**SHORT, "name": "ab" * 2000}),
        chat(SHORT, tools=[{"type": "function", "function": {"name": "f", "description": "ab" * 2000}}]),
        text([5] * 101),
        text("ab" * 2000),
    ],
    ids=["messages", "arguments", "reasoning", "name", "tools", "ids", "text"],
)
def test_oversize_requests_are_refused_before_encoding(tiny_codec, monkeypatch, body):
    """Encoding a large request would delay the others."""

    async def scenario(session, engine):
        for method in ("render", "extend", "encode"):
            monkeypatch.setattr(Codec, method, lambda *_: pytest.fail("the request was encoded"))
        error = await refused(session.chat(body) if isinstance(body, ChatRequest) else session.complete(body))
        assert error.code == "context_length_exceeded" and session.stop_reason == StopReason.CONTEXT_LIMIT

    run_session(scenario, tiny_codec, context=100)


def test_concurrent_calls_are_counted(tiny_codec):
    async def scenario(session, engine):
        await session.chat(chat(USER, n=3))
        engine.gate.clear()
        tasks = [asyncio.ensure_future(session.chat(chat(USER, n=n))) for n in (1, 2)]
        await until_all_wait()
        engine.gate.set()
        await asyncio.gather(*tasks)
        await session.chat(chat(USER))

    session, _ = run_session(scenario, tiny_codec)
    assert session.metrics["gateway/beside"] == 2, "the answers to one request have their order"


def test_a_cancelled_call_is_discarded(tiny_codec):
    async def scenario(session, engine):
        (first,) = await session.chat(chat(USER))
        engine.gate.clear()
        cancelled = asyncio.ensure_future(session.chat(chat(USER, wire(first), MORE)))
        await until_all_wait()
        again = asyncio.ensure_future(
            session.chat(chat(USER, wire(first), MORE))
        )  # before the first is known to be gone
        await until_all_wait()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        engine.gate.set()
        await again

    session, engine = run_session(scenario, tiny_codec)
    assert [turn.break_reason for turn in session.turns()] == [None, None]
    assert session.metrics["gateway/gone"] == 1 and engine.released == ["g/0"] and engine.open_ids == ["g/0#1"]
    assert sorted(engine.seen) == [0, 1, 2], "each call has a random stream of its own"


def test_a_failed_answer_fails_its_request(tiny_codec):
    async def scenario(session, engine):
        error = await refused(session.chat(chat(USER, n=3)))
        assert error.status == 500 and isinstance(session.failure, RuntimeError) and not session.finished.is_set()
        assert len(engine.open_ids) < 2 and not engine.asking and session.turns() == []
        await session.chat(chat(USER))

    ok = replies(tiny_codec, "ok")
    session, _ = run_session(scenario, tiny_codec, lambda number: RuntimeError("broken") if number == 1 else ok(number))
    assert [turn.break_reason for turn in session.turns()] == [None]


def test_a_lost_engine_ends_the_session(tiny_codec):
    async def scenario(session, engine):
        assert (await refused(session.chat(chat(USER)))).status == 503
        assert session.finished.is_set() and session.status is None

    session, _ = run_session(scenario, tiny_codec, lambda _: EngineLostError("gone"))
    assert isinstance(session.failure, EngineLostError)


def test_an_aborted_turn_is_discarded(tiny_codec):
    async def scenario(session, engine):
        assert (await refused(session.chat(chat(USER)))).status == 503

    session, _ = run_session(scenario, tiny_codec, lambda _: ([5], FinishReason.ABORT))
    assert session.stop_reason == StopReason.ABORTED and session.turns() == []


def test_unparsable_tokens_fail_the_call(tiny_codec, monkeypatch):
    def parse(*_, **__):
        raise ValueError("no")

    async def scenario(session, engine):
        with monkeypatch.context() as patch:
            patch.setattr(tiny_codec.renderer, "parse_response", parse)
            assert (await refused(session.chat(chat(USER)))).status == 500

    session, _ = run_session(scenario, tiny_codec)
    assert session.stop_reason == StopReason.PARSE_ERROR and session.turns() == []


def test_messages_refused_by_the_template(make_chatml_tokenizer):
    template = "{% for m in messages %}{% if m['content'] == 'x' %}{{ raise_exception('no x') }}{% endif %}{% endfor %}"
    tokenizer = make_chatml_tokenizer(template + "<|im_end|>x")
    codec = Codec(tokenizer, make_renderer(tokenizer, "default"))

    async def scenario(session, engine):
        error = await refused(session.chat(chat({"role": "user", "content": "x"})))
        assert error.status == 400 and error.param == "messages" and "no x" in error.message

    run_session(scenario, codec)


def test_a_closed_session_refuses_requests(tiny_codec):
    async def scenario(session, engine):
        await session.chat(chat(USER))
        engine.gate.clear()
        late = asyncio.ensure_future(session.chat(chat(USER)))
        await until_all_wait()
        session.close()
        engine.gate.set()
        for requested in (late, session.chat(chat(USER)), session.complete(text("x"))):
            error = await refused(requested)
            assert error.status == 410 and "not in valid status" in error.message
        with pytest.raises(RequestError):
            session.set_rewards(1.0)

    session, engine = run_session(scenario, tiny_codec)
    assert len(session.turns()) == 1 and engine.open_ids == [], "what it had is kept"


@pytest.mark.parametrize("of_a_run", [False, True], ids=["Hugging Face's", "a run's"])
def test_token_ids_beyond_the_vocabulary_are_refused(tiny_codec, of_a_run):
    async def scenario(session, engine):
        error = await refused(session.complete(text([5, 10**9])))
        assert (error.status, error.param) == (400, "prompt") and session.stop_reason is None
        (call,) = await session.complete(text([5, 7]))
        assert call.prompt_ids == [5, 7]

    tokenizer = plain(tiny_codec.tokenizer) if of_a_run else tiny_codec.tokenizer
    assert isinstance(tokenizer, PlainTokenizer) is of_a_run
    run_session(scenario, Codec(tokenizer, tiny_codec.renderer))


# -- rewards and the end ----------------------------------------------------------------------------------------------


def test_rewards_are_set(tiny_codec):
    async def scenario(session, engine):
        session.set_rewards(7)
        assert session.turns() == [], "there is nothing to pay, and nothing to complain of"
        for _ in range(3):
            await session.chat(chat(USER))
        session.set_rewards([1, 2, 3])
        assert trajectory_of(session).rewards == [1.0, 2.0, 3.0]
        await session.chat(chat(USER))
        assert trajectory_of(session).rewards == [1.0, 2.0, 3.0, 0.0], "each stays where it was"
        session.set_rewards([0.5])
        session.set_rewards(0.25)
        assert trajectory_of(session).rewards == [0.0, 0.0, 0.0, 0.25], "the latest counts"
        for wrong in ([1.0, 2.0], [], float("nan"), 1e308, -1e12, [0.0, 0.0, 0.0, float("inf")]):
            with pytest.raises(RequestError) as caught:
                session.set_rewards(wrong)
            assert caught.value.status == 400 and session.rewards == [0.25]

    run_session(scenario, tiny_codec)


def test_only_the_first_end_counts(tiny_codec):
    async def scenario(session, engine):
        session.finish("failed", "why")
        session.finish("ready")
        assert (session.status, session.error) == ("failed", "why") and session.finished.is_set()

    run_session(scenario, tiny_codec)


# -- equality with the episode loop -----------------------------------------------------------------------------------


class Echo(BaseEnvironment):
    """An environment that echoes the response."""

    def step(self, response, ground_truth):
        return 0.5, f"heard {response.count('a')} and {len(response)}", False

    def close(self):
        """Do nothing: the environment has no resources."""


TURNS = 3


def natively(model, codec, rows, sampling):
    async def scenario():
        engine = LocalEngine(model, codec.tokenizer, 8, 200)
        limits = EpisodeLimits(TURNS, 200, 20, 60, 0)
        pool = EnvironmentPool(4)
        loop = EpisodeLoop(engine, partial(Echo, TURNS), partial(Conversation, codec), pool, limits)
        try:
            seeded = [(row, replace(sampling, seed=100 * i)) for i, row in enumerate(rows)]
            return await asyncio.gather(*(loop.run(row, "g", i, s) for i, (row, s) in enumerate(seeded)))
        finally:
            pool.close()
            await engine.close()

    return run(scenario())


def by_a_program(model, codec, rows, sampling):
    async def program(session, row):
        messages, environment = list(row["prompt"]), Echo(TURNS)
        for _ in range(TURNS):
            (call,) = await session.chat(chat(*messages))
            received = environment.step(call.text, None)[1]
            messages += [wire(call), {"role": "user", "content": received}]
        session.set_rewards([0.5] * TURNS)
        session.close()
        return session.turns()

    async def scenario():
        engine = LocalEngine(model, codec.tokenizer, 8, 200)
        limits = SessionLimits(TURNS, 8, 200)
        sessions = [
            Session(f"g/{i}", engine, codec, replace(sampling, seed=100 * i), limits, "t") for i in range(len(rows))
        ]
        try:
            return await asyncio.gather(*map(program, sessions, rows))
        finally:
            await engine.close()

    return run(scenario())


def test_a_program_gets_the_same_turns_as_the_episode_loop(tiny_model, tiny_codec):
    words = ("how many apples", "answer", "the question is how many pears there are", "stop")
    rows = [
        {"id": str(i), "prompt": [{"role": "user", "content": reply}], "ground_truth": {}}
        for i, reply in enumerate(words)
    ]
    sampling = SamplingParams(max_generate_length=12, temperature=0.9, stop_token_ids=tiny_codec.stop_token_ids)
    native = natively(tiny_model, tiny_codec, rows, sampling)
    programs = by_a_program(tiny_model, tiny_codec, rows, sampling)
    assert len({tuple(t.turns[0].action_ids) for t in native}) == len(rows), "they say different things"
    for trajectory, turns in zip(native, programs, strict=True):
        timeless = {"seconds_generate": 0.0, "seconds_environment": 0.0}
        assert [asdict(replace(t, **timeless)) for t in turns] == [
            asdict(replace(t, **timeless)) for t in trajectory.turns
        ]
        advantages = [1.0, 2.0, 3.0]
        ours = trajectory_samples(Trajectory("t", "g", trajectory.index, turns), advantages)
        assert ours == trajectory_samples(trajectory, advantages) and len(ours) == 1


@pytest.mark.parametrize("name", ["default", "qwen3"])
def test_a_program_has_the_contexts_of_a_conversation(chatml_tokenizer, name):
    codec = Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, name))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    reply = [
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "argum\n</tool_call> what',
        "done",
    ]
    received = [{"role": "tool", "tool_call_id": "call_0_0", "content": "46"}, {"role": "user", "content": "no"}]
    engine = WatchedEngine(replies(codec, *reply))

    async def scenario():
        session, messages = session_of(engine, codec), [USER]
        for observation in [*received, None]:
            (call,) = await session.chat(chat(*messages, tools=tools))
            messages += [wire(call), observation]
        return session.turns()

    turns = run(scenario())
    conversation = Conversation(codec, [USER], tools)
    for (_, prompt, _, generation), observation in zip(engine.seen.values(), [*received, None], strict=True):
        assert prompt == conversation.prompt
        conversation.add_action(generation)
        if observation:
            conversation.add_observation([observation])
    for ours, theirs in zip(turns, conversation.turns, strict=True):
        assert replace(ours, seconds_generate=0.0, seconds_environment=0.0) == theirs
    assert [turn.break_reason for turn in turns] == [None] * 3
