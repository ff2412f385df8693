"""Clients of agents, each with a live gateway: OpenAI's own, LiteLLM and LangChain."""

import asyncio
import json
from dataclasses import replace

import httpx
import openai
import pytest
from live_gateway import HELLO, LIMITS, SECONDS, HeldEngine, Live

MOST_CALLS = 10
MOST_BYTES = 200_000
CALL = 'let me look <tool_call>{"name": "look", "arguments": {"at": "the box"}}</tool_call>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look at something",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
ASK = [{"role": "system", "content": "you count apples."}, {"role": "user", "content": "how many?"}]
LONG = [{"role": "user", "content": "how many apples " * 3000}]
LARGE = [{"role": "user", "content": "apples " * MOST_BYTES}]


def respond(name, turn):
    """The name of a trajectory is its first answer; later answers are the number of the call."""
    first = {"tools": CALL, "stops": "one two STOP three", "unicode": "né 漢 🍎", "broken": '<tool_call>{"name": "lo'}
    key = name.partition("#")[0].partition(":")[0]
    return first.get(key, f"{name} {turn}") if turn == 0 or key == "stops" else f"{key} {turn}"


@pytest.fixture(scope="module")
def live(tiny_codec):
    with Live(tiny_codec, respond, replace(LIMITS, max_calls=MOST_CALLS), max_body=MOST_BYTES) as live:
        yield live


@pytest.fixture
def requested(live, monkeypatch):
    """A list with one entry for every request of a trajectory."""
    requests, find = [], live.gateway.registry.find
    monkeypatch.setattr(live.gateway.registry, "find", lambda seen: requests.append(seen) or find(seen))
    return requests


@pytest.fixture
def open_session(live, request):
    """Function `open_session(kind)` that opens a session whose first answer is of this kind."""
    opened = []

    def open_session(kind="plain"):
        opened.append(live.open(f"{kind}:{request.node.name}"))
        return opened[-1]

    yield open_session
    for session in opened:
        live.close(session)


@pytest.fixture
def client_of(live):
    """Function `client_of(session)` that returns OpenAI's client, without retries."""
    clients = []

    def client_of(session, **options):
        settings = {"base_url": live.gateway.base_url(session), "api_key": session.token, "max_retries": 0, **options}
        clients.append(openai.OpenAI(**settings))
        return clients[-1]

    yield client_of
    for client in clients:
        client.close()


def calls_of(choice):
    return [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def extends(turns):
    return [turn.break_reason for turn in turns] == [None] * len(turns)


class TestOpenAI:
    def test_a_conversation_extends_its_tokens(self, live, open_session, client_of):
        session = open_session()
        client, messages = client_of(session), list(ASK)
        for turn in range(3):
            completion = client.chat.completions.create(model="any-name", messages=messages)
            message = completion.choices[0].message
            assert (completion.model, completion.object) == ("any-name", "chat.completion")
            assert completion.choices[0].finish_reason == "stop"
            assert message.content == (f"{session.name} 0" if turn == 0 else f"plain {turn}")
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "and now?"}]
        turns = live.turns(session)
        assert len(turns) == 3 and extends(turns)

    def test_usage_counts_the_tokens_of_the_turn(self, live, open_session, client_of):
        session = open_session()
        usage = client_of(session).chat.completions.create(model="m", messages=ASK).usage
        (turn,) = live.turns(session)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(turn.observation_ids), len(turn.action_ids))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    @pytest.mark.parametrize("kind", ["plain", "unicode", "tools", "stops", "broken"])
    def test_a_stream_equals_the_plain_answer(self, live, open_session, client_of, kind):
        options = {"tools": [LOOK]} if kind in ("tools", "broken") else {"stop": "STOP"} if kind == "stops" else {}
        whole = open_session(kind)
        completion = client_of(whole).chat.completions.create(model="m", messages=ASK, **options)
        live.close(whole)
        client = client_of(live.open(whole.name))
        with client.chat.completions.stream(
            model="m", messages=ASK, stream_options={"include_usage": True}, **options
        ) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion()
        expected, found = completion.choices[0], streamed.choices[0]
        assert (found.message.content or "") == (expected.message.content or "")
        assert found.finish_reason == expected.finish_reason
        assert calls_of(found) == calls_of(expected)
        assert streamed.usage.total_tokens == completion.usage.total_tokens

    def test_tool_calls_and_results_are_exchanged(self, live, open_session, client_of):
        session = open_session("tools")
        client = client_of(session)
        choice = client.chat.completions.create(model="m", messages=ASK, tools=[LOOK]).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "the box"})
        assert "tool_call" not in (choice.message.content or "")
        messages = [
            *ASK,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "46 apples"},
        ]
        second = client.chat.completions.create(model="m", messages=messages, tools=[LOOK])
        assert second.choices[0].finish_reason == "stop"
        turns = live.turns(session)
        assert turns[0].text == CALL
        assert extends(turns)
        assert [message["role"] for message in turns[1].observation] == ["tool"]

    def test_a_malformed_call_is_passed_on(self, open_session, client_of):
        choice = client_of(open_session("broken")).chat.completions.create(model="m", messages=ASK, tools=[LOOK])
        (call,) = choice.choices[0].message.tool_calls
        with pytest.raises(ValueError):
            json.loads(call.function.arguments)

    @pytest.mark.parametrize("stop", ["STOP", ["nowhere", "STOP"]])
    def test_stop_strings_are_removed(self, live, open_session, client_of, stop):
        session = open_session("stops")
        choice = client_of(session).chat.completions.create(model="m", messages=ASK, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one two ", "stop")

    def test_max_tokens_limits_the_answer(self, open_session, client_of):
        completion = client_of(open_session()).chat.completions.create(model="m", messages=ASK, max_tokens=3)
        assert (completion.choices[0].finish_reason, completion.usage.completion_tokens) == ("length", 3)

    def test_logprobs_are_those_of_the_sampled_tokens(self, live, open_session, client_of):
        session = open_session("unicode")
        choice = client_of(session).chat.completions.create(model="m", messages=ASK, logprobs=True).choices[0]
        (turn,) = live.turns(session)
        tokens = choice.logprobs.content
        assert [token.logprob for token in tokens] == turn.action_logprobs[: len(tokens)]
        assert len(tokens) == len(turn.action_ids) - 1
        assert all(bytes(token.bytes).decode() == token.token for token in tokens if token.bytes is not None)

    def test_n_answers_are_returned(self, live, open_session, client_of):
        session = open_session()
        completion = client_of(session).chat.completions.create(model="m", messages=ASK, n=3)
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        turns = live.turns(session)
        assert sorted(turn.text for turn in turns) == sorted(c.message.content for c in completion.choices)
        assert [turn.break_reason for turn in turns] == [None, "branch", "branch"]
        assert completion.usage.prompt_tokens == len(turns[0].observation_ids)

    def test_a_stream_of_several_answers_with_their_logprobs(self, live, open_session, client_of):
        session = open_session()
        chunks = client_of(session).chat.completions.create(model="m", messages=ASK, n=2, logprobs=True, stream=True)
        reply, logprobs = ["", ""], [[], []]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            reply[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        turns = live.turns(session)
        assert sorted(reply) == sorted(turn.text for turn in turns)
        for text, tokens in zip(reply, logprobs, strict=True):
            turn = next(turn for turn in turns if turn.text == text)
            assert [token.logprob for token in tokens] == turn.action_logprobs[:-1]

    def test_completions_are_answered(self, live, open_session, client_of):
        session = open_session()
        client = client_of(session)
        first = client.completions.create(model="m", prompt="how many apples", max_tokens=5).choices[0]
        assert session.name.startswith(first.text) and first.finish_reason == "length"
        stream = client.completions.create(model="m", prompt=f"how many apples{first.text} and", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "plain 1"
        assert extends(live.turns(session))

    def test_the_model_is_listed(self, open_session, client_of):
        client = client_of(open_session())
        assert [model.id for model in client.models.list()] == ["mtrl"]
        assert client.models.retrieve("mtrl").owned_by == "mtrl"

    def test_errors_have_the_classes_of_openai(self, live, open_session, client_of):
        session, other = open_session(), open_session("other")
        ask = {"model": "m", "messages": ASK}

        def chat(client, **options):
            return client.chat.completions.create(**{**ask, **options})

        root = f"{live.gateway.url}/v1"
        with pytest.raises(openai.AuthenticationError, match="belongs to no trajectory"):
            chat(client_of(session, base_url=root, api_key="wrong"))
        with pytest.raises(openai.PermissionDeniedError):
            chat(client_of(session, default_headers={"X-Mtrl-Trajectory-Id": other.name}))
        with pytest.raises(openai.NotFoundError):
            client_of(session).models.retrieve("gpt-4o")
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client_of(session), response_format={"type": "json_object"})
        assert caught.value.param == "response_format"
        with pytest.raises(openai.NotFoundError):
            client_of(session).embeddings.create(model="m", input="how many?")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                chat(client_of(session), messages=LONG, stream=stream)
            assert caught.value.code == "context_length_exceeded"

    def test_final_errors_are_not_retried(self, live, open_session, client_of, requested):
        session = open_session()
        client = client_of(session, max_retries=5)
        for _ in range(MOST_CALLS):
            client.chat.completions.create(model="m", messages=ASK)
        for messages, status, code in ((LARGE, 413, "request_too_large"), (ASK, 429, "max_calls")):
            del requested[:]
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(model="m", messages=messages)
            assert (caught.value.status_code, caught.value.code, len(requested)) == (status, code, 1)
        live.close(session)
        del requested[:]
        with pytest.raises(openai.APIStatusError, match="not in valid status") as caught:
            client.chat.completions.create(model="m", messages=ASK)
        assert (caught.value.status_code, len(requested)) == (410, 1)

    def test_the_async_client_sends_concurrent_requests(self, live, open_session):
        sessions = [open_session(f"async{n}") for n in range(8)]

        async def converse(session):
            async with openai.AsyncOpenAI(base_url=live.gateway.base_url(session), api_key="x") as client:
                messages = list(ASK)
                for _ in range(3):
                    stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
                    reply = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
                    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and now?"}]

        async def all_of_them():
            await asyncio.gather(*map(converse, sessions))

        asyncio.run(asyncio.wait_for(all_of_them(), 30))
        for session in sessions:
            kind = session.name.partition(":")[0]
            turns = live.turns(session)
            assert [turn.text for turn in turns] == [f"{session.name} 0", f"{kind} 1", f"{kind} 2"]
            assert extends(turns)


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the internet for a list of prices
        import litellm
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


def to_litellm(live, session, **options):
    """Return the arguments of a completion of LiteLLM."""
    settings = {"model": "openai/m", "messages": ASK, "num_retries": 0, "max_retries": 0}
    return {**settings, "api_base": live.gateway.base_url(session), "api_key": session.token, **options}


class TestLiteLLM:
    @pytest.fixture
    def ask(self, live, litellm):
        """Function `ask(session, **options)` that returns a completion."""
        return lambda session, **options: litellm.completion(**to_litellm(live, session, **options))

    def test_plain_streamed_and_multiple_answers(self, live, open_session, ask):
        session = open_session()
        completion = ask(session)
        assert completion.choices[0].message.content == f"{session.name} 0"
        (turn,) = live.turns(session)
        assert completion.usage.completion_tokens == len(turn.action_ids)
        stream = ask(session, messages=[*ASK, completion.choices[0].message, *HELLO], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "plain 1"
        assert extends(live.turns(session))
        assert len(ask(session, n=2).choices) == 2

    def test_tools_stop_and_logprobs(self, live, open_session, ask):
        session = open_session("tools")
        choice = ask(session, tools=[LOOK], logprobs=True).choices[0]
        message = choice.message
        logprobs = [token["logprob"] for token in choice.logprobs["content"]]
        assert logprobs == live.turns(session)[0].action_logprobs[:-1]
        assert json.loads(message.tool_calls[0].function.arguments) == {"at": "the box"}
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "46"}
        assert ask(session, messages=[*ASK, message, answer], tools=[LOOK]).choices[0].finish_reason == "stop"
        assert extends(live.turns(session))
        assert ask(open_session("stops"), stop=["STOP"]).choices[0].message.content == "one two "

    def test_streamed_tools(self, litellm, open_session, ask):
        chunks = list(ask(open_session("tools"), tools=[LOOK], stream=True))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "the box"})

    def test_concurrent_async_requests(self, live, litellm, open_session):
        sessions = [open_session(f"async{n}") for n in range(4)]

        async def converse(session):
            messages = list(ASK)
            for _ in range(2):
                stream = await litellm.acompletion(**to_litellm(live, session, messages=messages, stream=True))
                reply = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                messages += [{"role": "assistant", "content": reply}, *HELLO]

        async def all_of_them():
            await asyncio.gather(*map(converse, sessions))

        asyncio.run(asyncio.wait_for(all_of_them(), 30))
        for session in sessions:
            turns = live.turns(session)
            assert [turn.text for turn in turns] == [f"{session.name} 0", f"{session.name.partition(':')[0]} 1"]
            assert extends(turns)

    def test_errors_have_the_classes_of_litellm(self, live, litellm, open_session, ask, requested):
        session = open_session()
        with pytest.raises(litellm.AuthenticationError):
            ask(session, api_base=f"{live.gateway.url}/v1", api_key="wrong")
        with pytest.raises(litellm.ContextWindowExceededError):
            ask(session, messages=LONG)
        with pytest.raises(litellm.BadRequestError):
            ask(session, messages=[])
        for _ in range(MOST_CALLS):
            ask(session)
        for messages, status in ((LARGE, 413), (ASK, 429)):
            del requested[:]
            with pytest.raises((openai.APIStatusError, litellm.APIError)) as caught:  # 1.110: 413
                ask(session, messages=messages, max_retries=5)
            assert (caught.value.status_code, len(requested)) == (status, 1)


def in_langchain(live, session, **options):
    from langchain_openai import ChatOpenAI

    settings = {"max_retries": 0, **options}
    return ChatOpenAI(model="m", base_url=live.gateway.base_url(session), api_key=session.token, **settings)


class TestLangChain:
    @pytest.fixture
    def model_of(self, live):
        """Function `model_of(session, **options)` that returns the chat model of LangChain."""
        return lambda session, **options: in_langchain(live, session, **options)

    def test_conversations_and_streams(self, live, open_session, model_of):
        from langchain_core.messages import HumanMessage, SystemMessage

        session = open_session()
        model = model_of(session)
        messages = [SystemMessage("you count apples."), HumanMessage("how many?")]
        first = model.invoke(messages)
        assert first.content == f"{session.name} 0"
        assert first.usage_metadata["output_tokens"] == len(live.turns(session)[0].action_ids)
        streamed = "".join(part.content for part in model.stream([*messages, first, HumanMessage("and now?")]))
        assert streamed == "plain 1"
        assert extends(live.turns(session))

    def test_tool_calls_and_results(self, live, open_session, model_of):
        from langchain_core.messages import HumanMessage, ToolMessage

        session = open_session("tools")
        model = model_of(session).bind_tools([LOOK])
        first = model.invoke([HumanMessage("how many?")])
        assert [(call["name"], call["args"]) for call in first.tool_calls] == [("look", {"at": "the box"})]
        result = ToolMessage("46 apples", tool_call_id=first.tool_calls[0]["id"])
        assert model.invoke([HumanMessage("how many?"), first, result]).content == "tools 1"
        assert extends(live.turns(session))

    def test_async_streamed_tools(self, live, open_session, model_of):
        session = open_session("tools")

        async def ask():
            model = model_of(session).bind_tools([LOOK])
            parts = [part async for part in model.astream("how many?")]
            whole = sum(parts[1:], parts[0])
            return whole, await model.ainvoke(["how many?", whole, ("user", "46 apples?")])

        first, second = asyncio.run(asyncio.wait_for(ask(), 30))
        assert [(call["name"], call["args"]) for call in first.tool_calls] == [("look", {"at": "the box"})]
        assert second.content == "tools 1"
        assert extends(live.turns(session))

    def test_stop_logprobs_n_and_errors(self, live, open_session, model_of, requested):
        from langchain_core.messages import HumanMessage

        session = open_session("stops")
        assert model_of(session).invoke("how many?", stop=["STOP"]).content == "one two "
        answer = model_of(session, logprobs=True).invoke("how many?")
        assert len(answer.response_metadata["logprobs"]["content"]) > 1
        assert len(model_of(open_session(), n=2).generate([[HumanMessage("how many?")]]).generations[0]) == 2
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            model_of(session).invoke(LONG)
        for _ in range(MOST_CALLS - 2):
            model_of(session).invoke("how many?")
        for messages, status in ((LARGE, 413), (ASK, 429)):
            del requested[:]
            with pytest.raises(openai.APIStatusError) as caught:
                model_of(session, max_retries=5).invoke(messages)
            assert (caught.value.status_code, len(requested)) == (status, 1)


class TestTimeouts:
    """A client that times out discards its call: it becomes no turn, and the next call is the first."""

    @pytest.fixture
    def held(self, tiny_codec):
        engine = HeldEngine(lambda name, turn: f"{name} {turn}", tiny_codec.tokenizer)
        with Live(tiny_codec, engine=engine) as held:
            yield held

    @pytest.fixture(params=["openai", "litellm", "langchain"])
    def ask(self, request, held):
        """Function `ask(session, timeout)` that returns the text of the answer."""

        def by_openai(session, timeout):
            with openai.OpenAI(base_url=held.gateway.base_url(session), api_key="x", max_retries=0) as client:
                completion = client.chat.completions.create(model="m", messages=ASK, timeout=timeout)
            return completion.choices[0].message.content

        def by_litellm(session, timeout):
            completion = request.getfixturevalue("litellm").completion(**to_litellm(held, session, timeout=timeout))
            return completion.choices[0].message.content

        def by_langchain(session, timeout):
            return in_langchain(held, session, timeout=timeout).invoke(ASK).content

        return {"openai": by_openai, "litellm": by_litellm, "langchain": by_langchain}[request.param]

    def test_a_client_timeout_discards_the_call(self, held, ask):
        session = held.open("slow")
        with pytest.raises(openai.APITimeoutError):
            ask(session, httpx.Timeout(SECONDS, read=1))
        assert held.engine.someone_left.wait(SECONDS)
        assert held.turns(session) == []
        held.call(held.engine.gate.set)
        assert ask(session, httpx.Timeout(SECONDS)) == "slow 0"
        (turn,) = held.turns(session)
        assert turn.break_reason is None
