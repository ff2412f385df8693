"""Bodies of requests: accepted fields and their forms, and errors that name a refused field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.gateway.dialects.chat import read_chat
from mtrl.gateway.dialects.completions import read_completion
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import ChatRequest

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**body):
    return read_chat({"model": "m", "messages": HELLO, **body})


def messages(*given):
    return chat(messages=list(given)).messages


def refused(make, **body):
    with pytest.raises(RequestError) as caught:
        make(**body)
    assert caught.value.status == 400
    return caught.value


def test_a_request_with_only_messages():
    request = chat()
    assert request == ChatRequest(messages=HELLO, model="m")
    assert (request.n, request.max_tokens, request.stop, request.temperature) == (1, None, (), None)


def test_all_supported_fields():
    request = chat(
        n=2, max_tokens=5, stop="x", temperature=0, top_p=0.5, logprobs=True, stream=True, tools=[TOOL],
        stream_options={"include_usage": True}, tool_choice="auto",
    )  # fmt: skip
    assert (request.n, request.max_tokens, request.stop) == (2, 5, ("x",))
    assert (request.temperature, request.top_p) == (0.0, 0.5)
    assert request.logprobs and request.stream and request.include_usage and request.tools == [TOOL]


def test_max_completion_tokens_overrides_max_tokens():
    assert chat(max_completion_tokens=7).max_tokens == chat(max_completion_tokens=7, max_tokens=3).max_tokens == 7


def test_tool_choice_none_removes_the_tools():
    assert chat(tools=[TOOL], tool_choice="none").tools is None and chat(tools=[]).tools is None


def test_harmless_fields_are_ignored_and_unknown_ones_recorded():
    request = chat(user="u", seed=1, parallel_tool_calls=True, metadata={}, store=False, top_k=4, wild=None)
    assert request.unknown == ("top_k", "wild")


def test_null_equals_a_missing_field():
    fields = ("n", "max_tokens", "stop", "temperature", "top_p", "logprobs", "stream", "stream_options", "tools")
    assert chat(**dict.fromkeys((*fields, "tool_choice", "response_format", "logit_bias"))) == chat()


@pytest.mark.parametrize(
    "body",
    [
        {"n": 0}, {"n": True}, {"n": 1.0}, {"n": 129}, {"max_tokens": 0}, {"max_tokens": "5"}, {"stop": [""]},
        {"stop": 5}, {"stop": ["x"] * 17}, {"temperature": 2.1}, {"temperature": float("nan")}, {"top_p": -1},
        {"temperature": 10**400}, {"top_p": True}, {"logprobs": 1}, {"stream": "yes"}, {"stream_options": []},
        {"messages": []}, {"messages": "hi"}, {"model": 5}, {"tools": {}}, {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}}, {"response_format": {"type": "json_object"}}, {"top_logprobs": 1},
        {"logit_bias": {"5": 1}}, {"frequency_penalty": 0.1}, {"presence_penalty": -1}, {"functions": [{}]},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"guided_json": {}}, {"max_completion_tokens": 0},
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(body):
    (name,) = body
    error = refused(chat, **body)
    assert error.param == name and name in error.message and len(error.message) < 200
    assert error.body()["error"] == {
        "message": error.message, "type": "invalid_request_error", "param": name, "code": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0]"),
        ({"role": "god", "content": "hi"}, "messages[0]"),
        ({"role": ["user"], "content": "hi"}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": [], "text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_the_error_names_the_invalid_message(message, where):
    assert refused(chat, messages=[message]).param == where


@pytest.mark.parametrize("tool", [5, {}, {"type": "function"}, {"type": "function", "function": {"name": ""}}])
def test_the_error_names_the_invalid_tool(tool):
    assert refused(chat, tools=[TOOL, tool]).param == "tools[1]"


def test_messages_are_normalised():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    found = messages(
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "good"}]},
        {"role": "user", "content": "q", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "46"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}]},
    )
    assert found == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "q", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}],
        },
        {"role": "tool", "content": "46", "tool_call_id": "c"},
        {"role": "assistant", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("[" * 200 + "]" * 200, "[" * 200 + "]" * 200),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("{oops", "{oops"),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ("[1]", "[1]"),
    ],
)
def test_arguments_without_an_object_stay_text(given, taken):
    (message,) = messages({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]})
    assert message["tool_calls"][0]["function"]["arguments"] == taken


def test_unpaired_surrogates_become_question_marks():
    assert messages({"role": "user", "content": "a\ud800b"}) == [{"role": "user", "content": "a?b"}]
    assert chat(stop="\udfff").stop == ("?",)


@pytest.mark.parametrize(("prompt", "taken"), [("x", "x"), ([1, 2], [1, 2]), (["x"], "x"), ([[3]], [3])])
def test_valid_prompts(prompt, taken):
    assert read_completion({"prompt": prompt}).prompt == taken


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [-1], [True], {}, 5])
def test_invalid_prompts_are_refused(prompt):
    assert refused(read_completion, body={"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(("logprobs", "requested"), [(None, False), (False, False), (0, True)])
def test_logprobs_of_completions_are_a_number(logprobs, requested):
    assert read_completion({"prompt": "x", "logprobs": logprobs}).logprobs is requested


@pytest.mark.parametrize("field", [{"logprobs": 2}, {"echo": True}, {"suffix": "x"}, {"best_of": 2}])
def test_completions_refuse_unsupported_fields(field):
    assert refused(read_completion, body={"prompt": "x", **field}).param == next(iter(field))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "id"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
FIELDS = ["messages", "tools", "n", "stop", "logprobs", "stream_options", "model", "prompt", "temperature", "x"]


@given(st.one_of(anything, st.dictionaries(st.sampled_from(FIELDS), anything)), st.lists(anything, max_size=3))
def test_any_body_is_accepted_or_refused(body, reply):
    """An accepted body can be written to a file."""
    for make, taken in ((read_chat, "messages"), (read_completion, "prompt")):
        for sent in (
            body,
            {
                "messages": [{"role": "assistant", "content": reply, "tool_calls": reply}],
                "prompt": reply,
            },
        ):
            try:
                request = make(sent)
            except RequestError as error:
                assert error.status == 400 and json.dumps(error.body())
            else:
                json.dumps(getattr(request, taken), ensure_ascii=False, allow_nan=False).encode()


def test_a_body_nested_too_deep_is_refused():
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert refused(chat, stop=deep).param == "stop"
    assert refused(chat, tools=[{**TOOL, "x": deep}]).param == "tools"


def test_accepted_bodies_can_be_copied_and_written():
    deep = {}
    for _ in range(200):
        deep = {"x": deep}
    assert refused(chat, tools=[{**TOOL, "x": deep}]).param == "tools"
    call = {"function": {"name": "f", "arguments": deep}}
    error = refused(chat, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert error.param == "messages[0].tool_calls[0].arguments" and "nested too deep" in error.message
