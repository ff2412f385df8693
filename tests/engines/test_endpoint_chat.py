"""Episodes as messages: the same loop, environments and rewards as with token ids."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.schema import EndpointConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.endpoints.engine import Address, EndpointEngine
from mtrl.engines.endpoints.wire import calls_from_wire, to_wire
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.rollout.chat import ChatConversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.types import StopReason, to_json, trajectory_from_dict
from tests.engines.chat_server import ChatServer, always, chat_reply, refusal

LIMITS = EpisodeLimits(max_turns=4, max_context_length=10_000, step_timeout=5, episode_timeout=20, retries=0)


@pytest.fixture
def run_chat(row, monkeypatch):
    """Function `run_chat(environment, answer)` that returns the trajectory, and the server that sampled it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pool = EnvironmentPool(2)

    def run(environment, answer, limits=LIMITS, **config):
        async def run_episode_at(url):
            engine = EndpointEngine(Address("m", url), EndpointConfig(**{"timeout": 5.0, "retries": 0, **config}))
            loop = EpisodeLoop(engine, environment, ChatConversation, pool, limits)
            trajectory = await loop.run(row, "g", 0, SamplingParams(max_generate_length=9, temperature=0.0))
            await engine.close()
            return trajectory

        with ChatServer(answer) as server:
            return asyncio.run(run_episode_at(server.url)), server

    yield run
    pool.close()


class Shop(ToolEnvironment):
    """An environment with a tool for prices; a response without a call is the answer."""

    @tool
    def price(self, of: str) -> str:
        """Return the price."""
        return {"tea": "3", "cake": "5"}[of]

    def answer(self, response, ground_truth):
        return float(response == "8"), None, True


def call(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_episode_with_messages(run_chat, counting):
    trajectory, server = run_chat(counting, always(chat_reply("a"), chat_reply("b"), chat_reply("c"), chat_reply("d")))
    assert [turn.text for turn in trajectory.turns] == counting.made[0].received == ["a", "b", "c", "d"]
    assert trajectory.stop_reason == StopReason.MAX_TURNS and trajectory.rewards == [0.5] * 4
    assert server.requests[2]["messages"] == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "heard a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "heard b"},
    ]
    assert all(not turn.action_ids and not turn.observation_ids and not turn.version_spans for turn in trajectory.turns)
    assert trajectory.turns[1].metrics["completion_tokens"] == 5
    assert trajectory_from_dict(json.loads(to_json(trajectory))) == trajectory


def test_rewards_are_the_same_as_with_token_ids(run_chat, counting, make_loop, run_episode):
    """The reward depends on the text, so that a lost or changed word is detected."""

    def step(self, response, truth):
        return len(response) + 0.25, f"you said {response}", response == "ccc"

    environment = type("Env", (counting,), {"step": step})
    words = ["a", "bb", "ccc"]
    local = run_episode(make_loop(environment, words))
    remote, _ = run_chat(environment, always(*map(chat_reply, words)))
    assert remote.rewards == local.rewards == [1.25, 2.25, 3.25]
    assert remote.messages == local.messages and remote.stop_reason == local.stop_reason == StopReason.DONE


def test_native_tool_calls(run_chat):
    both = [call("price", '{"of": "tea"}'), call("price", '{"of": "cake"}', "c2")]
    trajectory, server = run_chat(Shop, always(chat_reply("", calls=both, finish="tool_calls"), chat_reply("8")))
    assert trajectory.reward == 1.0 and trajectory.stop_reason == StopReason.DONE
    assert [t["function"]["name"] for t in server.requests[0]["tools"]] == ["price"]
    sent = server.requests[1]["messages"]
    assert sent[1] == {"role": "assistant", "content": "", "tool_calls": both}
    results = [
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "5", "tool_call_id": "c2"},
    ]
    assert sent[2:] == results
    assert trajectory.turns[0].message["tool_calls"][0]["function"] == {"name": "price", "arguments": {"of": "tea"}}
    assert '{"name": "price", "arguments": {"of": "tea"}}' in trajectory.turns[0].text


def test_calls_in_the_text_form_are_parsed(run_chat):
    text = 'well <tool_call>{"name": "price", "arguments": {"of": "tea"}}</tool_call>'
    trajectory, server = run_chat(Shop, always(chat_reply(text), chat_reply("8")))
    assert trajectory.reward == 1.0 and trajectory.turns[0].text == text
    sent = server.requests[1]["messages"]
    assert sent[1] == {"role": "assistant", "content": text} and sent[2] == {"role": "user", "content": "3"}


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        ([call("price", "{oops")], "not valid JSON"),
        ([call("price", "[1]")], "does not have the expected form"),
        ([call("", "{}")], "names no tool"),
        ([{"id": 5, "function": None}], "does not have the expected form"),
        ([call("nothing", "{}")], "nothing"),
    ],
)
def test_malformed_calls_are_reported_to_the_model_and_can_be_sent_back(run_chat, calls, problem):
    trajectory, server = run_chat(Shop, always(chat_reply("", calls=calls), chat_reply("8")))
    assert problem in str(trajectory.turns[1].observation) and trajectory.reward == 1.0
    sent = server.requests[1]["messages"]
    function = sent[1]["tool_calls"][0]["function"]
    assert function["name"] and isinstance(function["arguments"], str)
    assert sent[2]["role"] == "tool" and sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]


def test_reasoning_is_stored_and_not_sent_back(run_chat, counting):
    trajectory, server = run_chat(counting, always(chat_reply("a", reasoning_content="hm")))
    assert trajectory.turns[0].message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "a"}


def test_a_full_context_of_the_model_ends_the_episode(run_chat, counting):
    full = refusal(400, "maximum context length", "context_length_exceeded")
    trajectory, _ = run_chat(counting, always(chat_reply("a"), full))
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and [t.text for t in trajectory.turns] == ["a", ""]
    assert trajectory.error is None


def test_the_configured_context_limit_ends_the_episode(run_chat, counting):
    limits = EpisodeLimits(4, 16, 5, 20, 0)
    trajectory, server = run_chat(counting, always(chat_reply("a", prompt=11, completion=5)), limits)
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and len(server.requests) == 1


def test_a_failing_server_fails_the_episode(run_chat, counting):
    trajectory, _ = run_chat(counting, always(chat_reply("a"), refusal(500, "the disk is full")), retries=1)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and "HTTP 500 the disk is full" in trajectory.error
    assert counting.made[0].closed == 1


CONTENT = st.none() | st.text(max_size=8) | st.sampled_from(["<tool_call>x</tool_call>", "<tool_call>"])
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["1", "2", None]) | st.integers(),
            "function": st.none()
            | st.fixed_dictionaries({"name": st.none() | st.text(max_size=3), "arguments": st.text(max_size=4)}),
        }
    ),
    max_size=3,
)


@given(
    st.lists(st.tuples(CONTENT, CALLS, st.lists(st.sampled_from(["1", "2", "call_0_0", None]), max_size=2)), max_size=4)
)
def test_any_answers_can_be_sent(answers):
    """Messages have no unknown key, every result names an earlier call, and every call has a name and text."""
    from mtrl.environments.tool_calls import message_calls

    messages = [{"role": "user", "content": "Q"}]
    for turn, (content, calls, results) in enumerate(answers):
        message = {"role": "assistant", "content": content, "extra": 1}
        if calls:
            message["tool_calls"] = message_calls(calls_from_wire(calls), turn)
        messages += [message, *({"role": "tool", "content": "r", "tool_call_id": i, "name": "n"} for i in results)]
    called = set()
    for message in json.loads(json.dumps(to_wire(messages))):
        assert set(message) <= {"role", "content", "tool_calls", "tool_call_id"} and message["content"] is not None
        for made in message.get("tool_calls", ()):
            assert made["function"]["name"] and isinstance(made["function"]["arguments"], str)
            called.add(made["id"])
        assert message["role"] != "tool" or message["tool_call_id"] in called


def test_images_are_sent_in_the_form_of_the_api():
    text = {"type": "text", "text": "see"}
    messages = [{"role": "user", "content": [text, {"type": "image", "image": "data:image/png;base64,AA=="}]}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert to_wire(messages) == [{"role": "user", "content": [text, image]}]


def test_calls_without_ids_are_sent_as_text():
    """An API refuses a call without an id, and data may have none."""
    calls = [{"type": "function", "function": {"name": "price", "arguments": {"of": "tea"}}}]
    messages = [{"role": "assistant", "content": "so: ", "tool_calls": calls}, {"role": "tool", "content": "3"}]
    text = 'so: <tool_call>{"name": "price", "arguments": {"of": "tea"}}</tool_call>'
    assert to_wire(messages) == [{"role": "assistant", "content": text}, {"role": "user", "content": "3"}]
