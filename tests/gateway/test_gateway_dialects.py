"""The same conversation through every API: equal tokens, and each API's own form, read by its maker's client."""

import json

import openai
import pytest
from live_gateway import LIMITS, SECONDS, Live

from mtrl.gateway.dialects.response_items import input_messages
from mtrl.gateway.dialects.responses import read_tools

CALL = '<tool_call>{"name": "look", "arguments": {"at": "the box"}}</tool_call>'
TWO_CALLS = f'{CALL}<tool_call>{{"name": "look", "arguments": {{"at": "né 漢"}}}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
DESCRIBED = {"name": "look", "description": "look at something"}
ANSWERS = {
    "tools": [f"let me look {CALL}", "it is empty", "yes"],
    "parallel": [TWO_CALLS, "both are empty", "yes"],
    "broken": ['<tool_call>{"name": "look", "arguments": "oops"}</tool_call>', "sorry", "yes"],
    "input": ['<tool_call>{"name": "look", "arguments": {"input": "the box"}}</tool_call>', "done"],
    "namespace": ['<tool_call>{"name": "eyes.look", "arguments": {}}</tool_call>', "done"],
    "unicode": ["né 漢 🍎", "as before", "yes"],
    "stops": ["one two STOP three", "one", "yes"],
}
LONG = "how many apples " * 3000


def respond(name, turn):
    return ANSWERS[name.partition(":")[0]][turn]


@pytest.fixture(scope="module")
def live(tiny_codec):
    with Live(tiny_codec, respond, LIMITS) as live:
        yield live


@pytest.fixture
def opened(live, request):
    """Function `opened(kind, client)` that opens a session with the answers of this kind."""
    sessions = []

    def opened(kind, client=""):
        sessions.append(live.open(f"{kind}:{client}:{request.node.name}"))
        return sessions[-1]

    yield opened
    for session in sessions:
        live.close(session)


class Chat:
    """OpenAI's chat completions."""

    def __init__(self, live, session, stream=False):
        self.client = openai.OpenAI(
            base_url=live.gateway.base_url(session), api_key=session.token, max_retries=0, timeout=SECONDS
        )
        self.stream = stream
        tool = {"type": "function", "function": {**DESCRIBED, "parameters": PARAMETERS}}
        self.options = {"model": "m", "tools": [tool]}
        self.messages = [{"role": "system", "content": "you look."}]

    def say(self, text, **options):
        self.messages.append({"role": "user", "content": text})
        return self.ask(**options)

    def results(self, *texts):
        calls = self.messages[-1]["tool_calls"]
        for call, text in zip(calls, texts, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return self.ask()

    def ask(self, **options):
        completion = self.client.chat.completions.create(messages=self.messages, **self.options, **options)
        message = completion.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
        return message.content or "", calls, completion.choices[0].finish_reason


class Messages:
    """Anthropic's client."""

    def __init__(self, live, session, stream=False):
        import anthropic

        self.client = anthropic.Anthropic(
            base_url=live.gateway.base_url(session).removesuffix("/v1"),
            api_key=session.token, max_retries=0, timeout=SECONDS,
        )  # fmt: skip
        self.stream, self.messages = stream, []
        self.tools = [{**DESCRIBED, "input_schema": PARAMETERS}]

    def say(self, text, **options):
        self.messages.append({"role": "user", "content": text})
        return self.ask(**options)

    def results(self, *texts):
        calls = [block for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": text}]}
            for call, text in zip(calls, texts, strict=True)
        ]
        self.messages.append({"role": "user", "content": results})
        return self.ask()

    def fields(self, options):
        system = [{"type": "text", "text": "you look.", "cache_control": {"type": "ephemeral"}}]
        return {"model": "m", "system": system, "messages": self.messages, "tools": self.tools, **options}

    def count(self, text):
        messages = [*self.messages, {"role": "user", "content": text}]
        return self.client.messages.count_tokens(**{**self.fields({}), "messages": messages}).input_tokens

    def ask(self, **options):
        options = self.fields({"max_tokens": 200, **options})
        if self.stream:
            with self.client.messages.stream(**options) as stream:
                self.answer = stream.get_final_message()
        else:
            self.answer = self.client.messages.create(**options)
        self.messages.append({"role": "assistant", "content": [b.model_dump() for b in self.answer.content]})
        text = "".join(block.text for block in self.answer.content if block.type == "text")
        calls = [(block.name, block.input) for block in self.answer.content if block.type == "tool_use"]
        return text, calls, self.answer.stop_reason


class Responses:
    """OpenAI's responses, whose items the client sends back."""

    output, named = "function_call_output", False

    def __init__(self, live, session, stream=False):
        self.client = openai.OpenAI(
            base_url=live.gateway.base_url(session), api_key=session.token, max_retries=0, timeout=SECONDS
        )
        self.stream, self.items, self.answer = stream, [], None
        self.tools = [{"type": "function", **DESCRIBED, "parameters": PARAMETERS, "strict": False}]

    def say(self, text, **options):
        self.items.append({"role": "user", "content": [{"type": "input_text", "text": text}]})
        return self.ask(**options)

    def results(self, *texts):
        calls = [item for item in self.answer.output if item.type.endswith("_call")]
        for call, text in zip(calls, texts, strict=True):
            self.items.append({"type": self.output, "call_id": call.call_id, "output": text})
        return self.ask()

    def fields(self, options):
        earlier = {"previous_response_id": self.answer.id} if self.named and self.answer else {}
        fields = {"model": "m", "instructions": "you look.", "input": self.items, "tools": self.tools}
        return {**fields, **earlier, **options}

    def count(self, text):
        item = {"role": "user", "content": text}
        return self.client.responses.input_tokens.count(
            **{**self.fields({}), "input": [*self.items, item]}
        ).input_tokens

    def ask(self, **options):
        options = self.fields(options)
        if self.stream:
            with self.client.responses.stream(**options) as stream:
                numbers = [event.sequence_number for event in stream]
                self.answer = stream.get_final_response()
            assert numbers == list(range(len(numbers)))
        else:
            self.answer = self.client.responses.create(**options)
        sent = [item.model_dump(exclude_none=True) for item in self.answer.output]
        self.items = [] if self.named else [*self.items, *sent]
        calls = [(c.name, json.loads(c.arguments)) for c in self.answer.output if c.type == "function_call"]
        return self.answer.output_text, calls, self.answer.status


class StoredResponses(Responses):
    """OpenAI's responses, continued by the name of the last one."""

    named = True


CLIENTS = [
    pytest.param(Messages, False, id="messages"), pytest.param(Messages, True, id="messages-stream"),
    pytest.param(Responses, False, id="responses"), pytest.param(Responses, True, id="responses-stream"),
    pytest.param(StoredResponses, False, id="stored"), pytest.param(StoredResponses, True, id="stored-stream"),
]  # fmt: skip
RESULTS = {"tools": ["a box"], "parallel": ["a box", "a 漢"], "broken": ["what?"]}


def converse(client, kind):
    """Hold a conversation of three calls, and return the texts and the calls of each answer."""
    found = [client.say("look at the box")[:2]]
    found.append(client.results(*RESULTS[kind])[:2] if kind in RESULTS else client.say("again")[:2])
    return [*found, client.say("sure?")[:2]]


@pytest.mark.parametrize("kind", ["tools", "parallel", "broken", "unicode"])
@pytest.mark.parametrize(("dialect", "stream"), CLIENTS)
def test_a_conversation_has_the_tokens_of_chat_completions(live, opened, dialect, stream, kind):
    session, reference = opened(kind, "own"), opened(kind, "chat")
    expected = converse(Chat(live, reference), kind)
    found = converse(dialect(live, session, stream), kind)
    turns, wanted = live.turns(session), live.turns(reference)
    assert [turn.break_reason for turn in turns] == [None] * 3
    for turn, want in zip(turns, wanted, strict=True):
        assert (turn.observation_ids, turn.action_ids) == (want.observation_ids, want.action_ids)
    if kind == "broken" and dialect is Messages:
        assert found[0] == ("", [("", {"unparsed_arguments": '{"name": "look", "arguments": "oops"}'})])
    elif kind != "broken":
        assert found == expected


@pytest.mark.parametrize(("dialect", "stream"), CLIENTS)
def test_an_answer_has_all_fields_of_the_clients_types(live, opened, dialect, stream):
    """The clients check no answer, but a program that reads a missing field fails."""
    for kind in ("tools", "unicode"):
        client = dialect(live, opened(kind), stream)
        client.say("look")
        type(client.answer).model_validate(client.answer.to_dict())


def test_why_an_answer_ended(live, opened):
    reasons = {Messages: ["tool_use", "end_turn", "max_tokens"], Responses: ["completed", "incomplete"]}
    for dialect, names in reasons.items():
        client = dialect(live, opened("tools", dialect.__name__))
        limit = "max_tokens" if dialect is Messages else "max_output_tokens"
        ends = [client.say("look")[2], client.results("a box")[2], client.say("sure?", **{limit: 1})[2]]
        assert list(dict.fromkeys(ends)) == names
        if dialect is Responses:
            assert client.answer.incomplete_details.reason == "max_output_tokens"
    client = Messages(live, opened("stops"))
    assert client.say("count", stop_sequences=["never", "STOP"]) == ("one two ", [], "stop_sequence")
    assert client.answer.stop_sequence == "STOP"


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_one_text(live, opened, stream):
    for kind, expected in (("tools", '{"at": "the box"}'), ("input", "the box")):
        session = opened(kind)
        client = Responses(live, session, stream)
        client.tools = [{"type": "custom", **DESCRIBED}, {"type": "web_search"}]
        client.output = "custom_tool_call_output"
        client.say("look")
        (call,) = [item for item in client.answer.output if item.type == "custom_tool_call"]
        assert (call.name, call.input) == ("look", expected)
        client.results("a box")
        assert [turn.break_reason for turn in live.turns(session)] == [None, None]
        assert session.metrics["gateway/unknown_fields"] == 2, "the hosted tool, once in each request"


def test_token_counts_are_those_of_the_next_call(live, opened):
    for dialect in (Messages, Responses, StoredResponses):
        session = opened("unicode", dialect.__name__)
        client = dialect(live, session)
        client.say("what?")
        counted = client.count("again")
        assert len(live.turns(session)) == 1, "a count is no call"
        client.say("again")
        usage = client.answer.usage
        (first, second) = live.turns(session)
        context = len(first.observation_ids) + len(first.action_ids) + len(second.observation_ids)
        assert counted == usage.input_tokens == context and usage.output_tokens == len(second.action_ids)


def test_log_probs_of_a_response(live, opened):
    session = opened("unicode")
    client = Responses(live, session)
    client.say("what?", include=["message.output_text.logprobs"])
    logprobs = [token.logprob for token in client.answer.output[0].content[0].logprobs]
    (turn,) = live.turns(session)
    assert logprobs == turn.action_logprobs[: len(logprobs)] and len(logprobs) >= len(turn.action_logprobs) - 1


def test_instructions_do_not_carry_over(live, opened):
    session = opened("unicode")
    client = StoredResponses(live, session)
    client.say("what?")
    client.say("again", instructions="you only look.")
    assert [turn.break_reason for turn in live.turns(session)] == [None, "edited"]
    assert "you only look." in live.codec.decode(live.turns(session)[1].observation_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_each_apis_own_form(live, opened, stream):
    import anthropic

    client = Messages(live, opened("tools"), stream)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.say(LONG)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: ")
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.type is 'any'"):
        client.say("look", tool_choice={"type": "any"})
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com"}}
    with pytest.raises(anthropic.BadRequestError, match=r"content\[1\] is a part of the type 'image'; the model reads"):
        client.say([{"type": "text", "text": "look"}, image])
    client.client.api_key = "sk-other"
    client.client.base_url = client.client.base_url.copy_with(path="/")
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.say("look")
    assert caught.value.body["error"]["type"] == "authentication_error"
    responses = Responses(live, opened("tools", "responses"), stream)
    with pytest.raises(openai.BadRequestError) as caught:
        responses.say(LONG)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        responses.say("look", previous_response_id="resp_unknown")
    assert caught.value.param == "previous_response_id"
    responses.items = [{"role": "system", "content": ""}]
    with pytest.raises(openai.BadRequestError, match="input has only system messages without text"):
        responses.ask(instructions="")


def test_the_key_and_the_models_of_anthropics_client(live, opened):
    import anthropic

    session = opened("tools")
    root = live.gateway.url
    client = anthropic.Anthropic(base_url=root, api_key=session.token, max_retries=0, timeout=SECONDS)
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model
    type(model).model_validate(model.to_dict())
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


def test_many_calls_of_one_answer_become_one_message():
    """Each call is an item. Copies of the calls before it took minutes for the items of a body of 8 MiB."""
    count = 20_000
    items = [{"type": "function_call", "call_id": f"c{i}", "name": "look", "arguments": "{}"} for i in range(count)]
    first = {"type": "message", "role": "assistant", "content": "let me look"}
    question, answer, asked = input_messages([{"role": "user", "content": "q"}, first, *items, {"role": "user"}])
    assert (question["content"], answer["content"], asked["content"]) == ("q", "let me look", "")
    assert [call["id"] for call in answer["tool_calls"]] == [f"c{i}" for i in range(count)]


def test_tools_of_a_namespace_have_its_name(live, opened):
    session = opened("namespace")
    client = Responses(live, session)
    client.tools = [{"type": "namespace", "name": "eyes", "description": "", "tools": client.tools}]
    client.say("look")
    (call,) = client.answer.output
    assert (call.name, call.to_dict()["namespace"]) == ("look", "eyes")
    client.results("a box")
    assert [turn.break_reason for turn in live.turns(session)] == [None, None]
    assert [tool["function"]["name"] for tool in read_tools({"tools": client.tools}).offered] == ["eyes.look"]
