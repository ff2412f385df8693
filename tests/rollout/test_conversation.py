"""The token ids of an episode."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.models.renderer import make_renderer
from mtrl.rollout.conversation import Codec, Conversation, SingleMessageConversation, classify_break
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import FinishReason, Generation, Trajectory

QUESTION = [{"role": "user", "content": "Q?"}]
HEARD = [{"role": "user", "content": "obs1"}]


@pytest.fixture(scope="module", params=["default", "qwen3"])
def codec(request, chatml_tokenizer):
    """The ChatML tokenizer with its template, and with the Qwen3 renderer of the `renderers` package."""
    return Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, request.param))


@pytest.fixture(scope="module")
def template_codec(chatml_tokenizer):
    return Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, "default"))


@pytest.fixture(scope="module")
def ids(chatml_tokenizer):
    return lambda text: chatml_tokenizer.encode(text, add_special_tokens=False)


def samples(conversation):
    trajectory = Trajectory("t", "g", 0, conversation.turns)
    return trajectory_samples(trajectory, [1.0] * len(conversation.turns))


def layout(tokenizer, sample):
    """Return the pieces `(text, trained)` of a sample."""
    runs = []
    for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True):
        if runs and runs[-1][1] == trained:
            runs[-1][0].append(token)
        else:
            runs.append(([token], trained))
    return [(tokenizer.decode(tokens), trained) for tokens, trained in runs]


# -- one message per turn ---------------------------------------------------------------------------------------------


def test_multi_turn_layout(codec, ids, generation):
    conversation = Conversation(codec, QUESTION)
    conversation.add_action(generation(ids("R1<|im_end|>")))
    conversation.add_observation(HEARD)
    conversation.add_action(generation(ids("R2<|im_end|>")))
    (sample,) = samples(conversation)
    assert layout(codec.tokenizer, sample) == [
        ("<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n", False),
        ("R1<|im_end|>", True),
        ("\n<|im_start|>user\nobs1<|im_end|>\n<|im_start|>assistant\n", False),
        ("R2<|im_end|>", True),
    ]
    assert [turn.break_reason for turn in conversation.turns] == [None, None]
    assert [turn.text for turn in conversation.turns] == ["R1", "R2"]
    assert [turn.message for turn in conversation.turns] == [
        {"role": "assistant", "content": "R1"},
        {"role": "assistant", "content": "R2"},
    ]
    assert [turn.observation for turn in conversation.turns] == [QUESTION, HEARD]


def test_logprobs_and_versions_stay_at_their_tokens(codec, ids, generation):
    conversation = Conversation(codec, QUESTION)
    first, second = ids("R1<|im_end|>"), ids("R2<|im_end|>")
    conversation.add_action(generation(first, version=3))
    conversation.add_observation(HEARD)
    conversation.add_action(generation(second, version=4))
    (sample,) = samples(conversation)
    trained = [i for i, mask in enumerate(sample.loss_mask) if mask]
    assert [sample.token_ids[i] for i in trained] == first + second
    assert [sample.logprobs[i] for i in trained] == generation(first).logprobs + generation(second).logprobs
    assert [sample.versions[i] for i in trained] == [3] * len(first) + [4] * len(second)
    assert [sample.turns[i] for i in trained] == [0] * len(first) + [1] * len(second)


def test_a_cut_turn_gets_its_closing_token_as_context(codec, ids, generation):
    conversation = Conversation(codec, QUESTION)
    conversation.add_action(generation(ids("R1 trunc"), cut=True))
    conversation.add_observation(HEARD)
    conversation.add_action(generation(ids("R2<|im_end|>")))
    (sample,) = samples(conversation)
    assert layout(codec.tokenizer, sample)[1:3] == [
        ("R1 trunc", True),
        ("<|im_end|>\n<|im_start|>user\nobs1<|im_end|>\n<|im_start|>assistant\n", False),
    ]


def test_an_empty_observation_adds_a_generation_prompt(template_codec, ids, generation):
    conversation = Conversation(template_codec, QUESTION)
    conversation.add_action(generation(ids("R1<|im_end|>")))
    conversation.add_observation([])
    turn = conversation.add_action(generation(ids("R2")))
    assert template_codec.tokenizer.decode(turn.observation_ids) == "\n<|im_start|>assistant\n"


def test_sampled_ids_are_never_encoded_again(codec, ids, generation):
    tokenizer = codec.tokenizer
    odd = [tokenizer.convert_tokens_to_ids(letter) for letter in "hello"] + ids("<|im_end|>")
    assert tokenizer.decode(odd) == "hello<|im_end|>" and ids("hello<|im_end|>") != odd, (
        "they would come back otherwise"
    )
    for layout_class in (Conversation, SingleMessageConversation):
        conversation = layout_class(codec, QUESTION)
        conversation.add_action(generation(odd))
        conversation.add_observation(HEARD)
        start = len(conversation.turns[0].observation_ids)
        assert conversation.prompt_ids[start : start + 5] == odd[:5]
        assert conversation.turns[0].action_ids[:5] == odd[:5]
        conversation.add_action(generation(ids("x")))
        assert conversation.turns[1].break_reason is None


def test_thinking_stays_in_the_context(codec, ids, generation):
    conversation = Conversation(codec, QUESTION)
    sampled = ids("<think>\nhm\n</think>\n\nR1<|im_end|>")
    turn = conversation.add_action(generation(sampled))
    conversation.add_observation(HEARD)
    assert conversation.prompt_ids[len(turn.observation_ids) :][: len(sampled)] == sampled
    assert turn.text == "<think>\nhm\n</think>\n\nR1", "the environment reads what was said"
    assert "hm" in turn.message["reasoning_content"] and "hm" not in turn.message["content"]


def test_a_tool_call_is_parsed(chatml_tokenizer, ids, generation):
    codec = Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, "qwen3"))
    conversation = Conversation(codec, QUESTION)
    reply = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>'
    turn = conversation.add_action(generation(ids(reply)))
    (call,) = turn.message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": {"at": "x"}}
    conversation.add_observation([{"role": "tool", "content": "46"}])
    received = chatml_tokenizer.decode(conversation.prompt_ids[len(turn.observation_ids) + len(turn.action_ids) :])
    assert received == "\n<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


sampled_turns = st.lists(
    st.tuples(
        st.lists(st.integers(3, 299), min_size=1, max_size=5),
        st.sampled_from(["stop", "length", "stop string"]),
        st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=9),
    ),
    min_size=1,
    max_size=4,
)


@given(sampled_turns, st.sampled_from([Conversation, SingleMessageConversation]))
def test_turns_concatenate_to_the_next_prompt(template_codec, turns, layout_class):
    """For any sampled ids, the tokens of the turns in order are exactly the next prompt of the engine."""
    conversation = layout_class(template_codec, QUESTION)
    end = template_codec.tokenizer.eos_token_id
    for action, ending, received in turns:
        ids = [*action, end] if ending == "stop" else action
        reason = FinishReason.LENGTH if ending == "length" else FinishReason.STOP
        conversation.add_action(Generation(ids, [0.0] * len(ids), reason, [(0, len(ids))]))
        conversation.add_observation([{"role": "user", "content": received}])
        held = [i for turn in conversation.turns for i in turn.observation_ids + turn.action_ids]
        assert conversation.prompt_ids[: len(held)] == held
        new = conversation.prompt_ids[len(held) :]
        assert not new or conversation.turns[-1].break_reason is None
        if layout_class is SingleMessageConversation:
            assert new == template_codec.tokenizer.encode(received, add_special_tokens=False)
        assert all(len(t.action_ids) == len(t.action_logprobs) == len(t.versions) for t in conversation.turns)
    assert len(samples(conversation)) == 1


# -- all turns inside one message -------------------------------------------------------------------------------------


def test_single_message_layout(codec, ids, generation):
    conversation = SingleMessageConversation(codec, QUESTION)
    conversation.add_action(generation(ids("R1<|im_end|>")))
    conversation.add_observation(HEARD)
    conversation.add_action(generation(ids("R2<|im_end|>")))
    (sample,) = samples(conversation)
    assert layout(codec.tokenizer, sample) == [
        ("<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n", False),
        ("R1", True),
        ("obs1", False),
        ("R2<|im_end|>", True),
    ]
    first = conversation.turns[0]
    assert first.action_ids == ids("R1") and first.action_logprobs == generation(ids("R1")).logprobs
    assert first.version_spans == [(0, len(ids("R1")))] and first.metrics == {"dropped_stop_tokens": 1.0}


def test_no_end_token_is_added(codec, ids, generation):
    conversation = SingleMessageConversation(codec, QUESTION)
    conversation.add_action(generation(ids("R1"), cut=True))
    conversation.add_observation(HEARD)
    conversation.add_action(generation(ids("R2"), cut=True))
    (sample,) = samples(conversation)
    assert layout(codec.tokenizer, sample)[1:] == [("R1", True), ("obs1", False), ("R2", True)]
    assert conversation.turns[0].metrics == {}


def test_a_turn_of_only_the_end_token_becomes_empty(codec, ids, generation):
    conversation = SingleMessageConversation(codec, QUESTION)
    turn = conversation.add_action(generation(ids("<|im_end|>")))
    conversation.add_observation(HEARD)
    assert (turn.action_ids, turn.action_logprobs, turn.version_spans, turn.text) == ([], [], [], "")
    assert conversation.prompt_ids == turn.observation_ids + ids("obs1")


# -- breaks -----------------------------------------------------------------------------------------------------------


class Stub:
    """A renderer with the results of the test: `bridge(previous ids)` and `again()` return ids or None."""

    def __init__(self, bridge=lambda previous: None, again=lambda: None):
        self.bridge, self.again, self.rendered = bridge, again, 0

    def render_ids(self, messages, **_):
        self.rendered += 1
        return [10, 11] if self.rendered == 1 else self.again()

    def bridge_to_next_turn(self, prompt, completion, messages, **_):
        return self.bridge(prompt + completion)

    def parse_response(self, ids, **_):
        return SimpleNamespace(content="said", reasoning_content=None, tool_calls=[])

    def get_stop_token_ids(self):
        return [1]


class Letters:
    """id 10 + n is the n-th letter, and so is id 110 + n."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(97 + (i - 10) % 100) for i in ids)


PREVIOUS = [10, 11, 12, 13]
"""The prompt of `Stub`, and the tokens that are sampled after it."""


@pytest.mark.parametrize(
    ("stub", "context", "reason"),
    [
        (Stub(bridge=lambda p: [*p, 20]), [*PREVIOUS, 20], None),
        (Stub(again=lambda: [*PREVIOUS, 20]), [*PREVIOUS, 20], None),
        (Stub(again=lambda: [10, 11, 13, 20]), [10, 11, 13, 20], "template"),
        (Stub(bridge=lambda p: [10, 11, 112, 13, 20]), [10, 11, 112, 13, 20], "retoken"),
        (Stub(bridge=lambda p: [10, 11, 19, 13, 20]), [10, 11, 19, 13, 20], "edited"),
        (Stub(bridge=lambda p: [10, 11, 20]), [10, 11, 20], "other"),
    ],
)
def test_breaks_are_classified_and_begin_a_new_sample(stub, context, reason, generation):
    stub.rendered = 0
    conversation = Conversation(Codec(Letters(), stub), QUESTION)
    conversation.add_action(generation([12, 13]))
    conversation.add_observation(HEARD)
    assert conversation.prompt_ids == context
    second = conversation.add_action(generation([14]))
    assert second.break_reason == reason
    made = samples(conversation)
    if reason is None:
        assert [s.token_ids for s in made] == [[*context, 14]]
    else:
        assert second.observation_ids == context
        assert [s.token_ids for s in made] == [PREVIOUS, [*context, 14]]
        assert [s.loss_mask for s in made] == [[False, False, True, True], [False] * len(context) + [True]]


def test_after_a_break_turns_extend_again(generation):
    stub = Stub(bridge=lambda p: [20, 21] if len(p) == 4 else [*p, 30])
    conversation = Conversation(Codec(Letters(), stub), QUESTION)
    for ids in ([12, 13], [14], [15]):
        conversation.add_action(generation(ids))
        conversation.add_observation(HEARD)
    assert [t.break_reason for t in conversation.turns] == [None, "other", None]
    assert [s.token_ids for s in samples(conversation)] == [PREVIOUS, [20, 21, 14, 30, 15]]


def test_classify_break_reads_special_tokens_too(template_codec, ids):
    before = ids("<|im_start|>user\nx<|im_end|>")
    assert classify_break(before, ids("<|im_start|>user\nx<|endoftext|>y"), template_codec) == "edited"
