"""Episodes with tools: inputs of the environment and the model, and that every sampled id is trained."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.models.renderer import TINY_TEMPLATE, make_renderer
from mtrl.rollout.conversation import Codec, Conversation, SingleMessageConversation
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import FinishReason, Generation, StopReason, Trajectory, to_json

QUESTION = [{"role": "user", "content": "Q?"}]
CALL = '<tool_call>\n{"name": "double", "arguments": {"n": 21}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "double", "arguments": {"n": \n</tool_call>'


class Doubling(ToolEnvironment):
    """Environment with one tool, whose result is the right answer."""

    @tool
    def double(self, n: int) -> int:
        """Twice the number."""
        return 2 * n

    def answer(self, response, ground_truth):
        return float("42" in response), None, True


WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", params=["tiny", "qwen3", "default", "default with tools"])
def codec(request, chatml_tokenizer, make_chatml_tokenizer, tiny_codec):
    """The tiny policy's renderer, a typed one of `renderers`, and chat templates without and with tools."""
    if request.param == "tiny":
        return tiny_codec
    tokenizer = make_chatml_tokenizer(WITH_TOOLS) if request.param == "default with tools" else chatml_tokenizer
    return Codec(tokenizer, make_renderer(tokenizer, request.param.split()[0]))


@pytest.fixture
def run_tools(make_loop, codec, run_episode, sampling, row):
    """Function `run_tools(responses, environment)` that returns the trajectory of one episode."""

    def sample_turns(responses, environment=Doubling, layout=Conversation, **limits):
        loop = make_loop(environment, engine=_engine(codec, responses), **{"max_context_length": 9000, **limits})
        loop.make_conversation = lambda messages, tools=None: layout(codec, messages, tools)
        sampled = type(sampling)(max_generate_length=400, stop_token_ids=codec.stop_token_ids)
        return run_episode(loop, sampling=sampled)

    return sample_turns


def _engine(codec, responses):
    return ScriptedEngine(lambda trajectory_id, turn: responses[turn], codec.tokenizer)


def context(codec, trajectory):
    ids = [i for turn in trajectory.turns for i in turn.observation_ids + turn.action_ids]
    return codec.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_call_its_result_and_the_answer(run_tools, codec):
    trajectory = run_tools([CALL, "it is 42"])
    assert trajectory.error is None and trajectory.stop_reason == StopReason.DONE and trajectory.reward == 1.0
    first, second = trajectory.turns
    (call,) = first.message["tool_calls"]
    assert call["function"] == {"name": "double", "arguments": {"n": 21}} and "malformed" not in call
    assert second.observation == [{"role": "tool", "tool_call_id": call["id"], "name": "double", "content": "42"}]
    assert "tool_calls" not in second.message and second.break_reason is None
    assert first.metrics == {"tool_calls": 1.0, "tool_errors": 0.0, "tool/double/calls": 1.0}
    assert second.metrics == {"tool_calls": 0.0, "tool_errors": 0.0, "tool/double/calls": 0.0}
    json.loads(to_json(trajectory).encode())


def test_the_model_sees_the_tools(run_tools, codec):
    """Only the tiny policy does not see them, since its family writes its prompts."""
    text = context(codec, run_tools([CALL, "it is 42"]))
    assert ("Twice the number." in text) == (codec.tokenizer.chat_template != TINY_TEMPLATE)
    assert text.count("42") >= 2


@pytest.mark.parametrize(
    ("reply", "received"),
    [
        (BROKEN, "Error: the tool call is not valid JSON"),
        ('<tool_call>\n{"name": "double", "arguments": {"n": 21}}', "Error: the tool call is not closed"),
        ('<tool_call>\n{"arguments": {"n": 21}}\n</tool_call>', "Error: the tool call names no tool"),
        (CALL.replace("21", "[]"), "Error: wrong arguments for double: n: Input should be a valid integer"),
        (CALL.replace("double", "doble"), "Error: there is no tool doble; did you mean double?"),
        (CALL.replace("21", "9" * 5000), "Error: the tool call is not valid JSON"),
        (CALL.replace("21", "[" * 3000), "Error: the tool call is not valid JSON"),
        (CALL.replace("21", "NaN"), "Error: the tool call is not valid JSON"),
        (CALL.replace("21", '"\\ud800"'), "Error: wrong arguments for double: n: "),
    ],
)
def test_malformed_calls_are_reported_to_the_model(make_loop, codec, row, reply, received):
    loop = make_loop(Doubling, engine=_engine(codec, [reply, "it is 42"]), max_context_length=20000)
    loop.make_conversation = lambda messages, tools=None: Conversation(codec, messages, tools)
    sampled = _sampling(codec, 12000)
    trajectory = asyncio.run(asyncio.wait_for(loop.run(row, "g", 0, sampled), 60))
    assert trajectory.error is None and trajectory.stop_reason == StopReason.DONE and len(trajectory.turns) == 2
    (report,) = trajectory.turns[1].observation
    assert report["content"].startswith(received) and report["role"] == "tool" and len(report["content"]) < 320
    assert trajectory.turns[0].metrics["tool_errors"] == 1.0 == trajectory.turns[0].metrics["tool_calls"]
    to_json(trajectory).encode()


def _sampling(codec, length):
    from mtrl.engines.base import SamplingParams

    return SamplingParams(max_generate_length=length, stop_token_ids=codec.stop_token_ids)


def test_a_truncated_call_is_reported(make_loop, codec, row):
    loop = make_loop(Doubling, engine=_engine(codec, [CALL, CALL, CALL]), max_context_length=9000)
    loop.make_conversation = lambda messages, tools=None: Conversation(codec, messages, tools)
    whole = len(codec.tokenizer.encode(CALL, add_special_tokens=False))
    trajectory = asyncio.run(loop.run(row, "g", 0, _sampling(codec, whole - 1)))
    assert trajectory.turns[0].finish == FinishReason.LENGTH
    assert trajectory.turns[1].observation[0]["content"] == "Error: the tool call is not closed"


def test_an_environment_cannot_change_the_message(run_tools):
    class Meddling(Doubling):
        async def respond(self, message, response, ground_truth):
            result = await super().respond(message, response, ground_truth)
            message.clear()
            return result

    assert run_tools([CALL, "42"], Meddling).turns[0].message["tool_calls"]


def test_tools_may_depend_on_the_row(run_tools, codec):
    class PerRow(Doubling):
        def reset(self, row=None):
            super().reset(row)
            del self.toolbox["double"]

    trajectory = run_tools([CALL, "42"], PerRow)
    assert trajectory.error is None and "Twice" not in context(codec, trajectory)


# -- environments without tools ---------------------------------------------------------------------------------------


def test_text_environments_receive_text(run_tools):
    received = []

    class Plain(BaseEnvironment):
        def step(self, response, ground_truth):
            received.append(response)
            return StepResult(0.5, "more", len(received) == 2)

    trajectory = run_tools([CALL, "42"], Plain)
    assert trajectory.error is None and received == [CALL, "42"] and trajectory.rewards == [0.5, 0.5]
    assert trajectory.turns[1].observation == [{"role": "user", "content": "more"}]


def test_environments_need_no_base_class(run_tools):
    class Duck:
        def reset(self, row):
            return None

        def step(self, response, ground_truth):
            return 1.0, None, True

        def close(self):
            pass

    assert run_tools(["x"], Duck).reward == 1.0


# -- token truth ------------------------------------------------------------------------------------------------------

piece = st.sampled_from(
    [CALL, BROKEN, "<tool_call>", "</tool_call>", '{"name": "double", ', "so: ", "42", "é", "\n", '"arguments": {}}']
)
turns = st.lists(st.tuples(st.lists(piece, max_size=4), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=40)
@given(turns, st.sampled_from([Conversation, SingleMessageConversation]))
def test_every_sampled_id_is_trained_once(codec, turns, layout):
    """Any turns with calls, broken or whole, closed or cut, are one sample with mask True exactly on sampled ids."""
    environment = Doubling(max_turns=99)
    conversation = layout(codec, QUESTION, environment.tools)
    sampled, prompts = [], []
    for pieces, closed in turns:
        ids = codec.tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids = [*ids, codec.stop_token_ids[0]] if closed or not ids else ids
        finish = FinishReason.STOP if closed else FinishReason.LENGTH
        prompts.append(list(conversation.prompt_ids))
        turn = conversation.add_action(Generation(ids, [-0.5] * len(ids), finish, [(0, len(ids))]))
        result = asyncio.run(environment.respond(turn.message, turn.text, {}))
        sampled.append(turn)
        conversation.add_observation(list(result.observation or [{"role": "user", "content": "more"}]))
    environment.close()
    assert [turn.break_reason for turn in sampled] == [None] * len(sampled)
    (sample,) = trajectory_samples(Trajectory("t", "g", 0, conversation.turns), [1.0] * len(sampled)) or [None]
    if sample is None:
        return
    trained = [i for i, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert trained == [i for turn in sampled for i in turn.action_ids]
    for turn, prompt in zip(sampled, prompts, strict=True):
        start = len(prompt)
        assert (prompt + turn.action_ids) == sample.token_ids[: start + len(turn.action_ids)]


@given(st.lists(piece, max_size=5))
def test_calls_of_the_tiny_policy_render_as_sampled(tiny_codec, pieces):
    text = "".join(pieces)
    ids = tiny_codec.tokenizer.encode(text, add_special_tokens=False)
    conversation = Conversation(tiny_codec, QUESTION, Doubling().tools)
    turn = conversation.add_action(Generation(ids, [0.0] * len(ids), FinishReason.LENGTH, [(0, len(ids))]))
    assert turn.message["content"] == text == turn.text
    again = tiny_codec.renderer.render_ids([*QUESTION, turn.message])
    assert tiny_codec.tokenizer.decode(again, skip_special_tokens=False).endswith(f"<|assistant|>{text}<|end|>")


def test_calls_of_a_prompt_are_rendered(codec):
    """Few-shot examples of a data set, in OpenAI's form."""
    call = {"type": "function", "id": "1", "function": {"name": "double", "arguments": {"n": 1}}}
    shown = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "double", "content": "2"},
    ]
    text = codec.tokenizer.decode(codec.renderer.render_ids(shown, tools=Doubling().tools), skip_special_tokens=False)
    assert text.replace(" ", "").replace("\n", "").count('"double","arguments":{"n":1}') == 1


def test_without_tools_nothing_is_parsed(tiny_codec, chatml_tokenizer):
    for codec in (tiny_codec, Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, "default"))):
        conversation = Conversation(codec, QUESTION)
        ids = codec.tokenizer.encode(CALL, add_special_tokens=False)
        turn = conversation.add_action(Generation(ids, [0.0] * len(ids), FinishReason.LENGTH, [(0, len(ids))]))
        assert turn.message == {"role": "assistant", "content": CALL}
