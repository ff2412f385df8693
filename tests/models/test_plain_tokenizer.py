"""`PlainTokenizer` gives the same ids and texts as the tokenizer of Hugging Face that it wraps."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import OffsetTokenizer, Tokenizer, _get_offset_tokenizer

from mtrl.models.plain_tokenizer import SHORT, PlainTokenizer, plain
from mtrl.models.renderer import TinyRenderer, make_renderer
from mtrl.rollout.conversation import Codec

words = st.lists(
    st.one_of(st.text(max_size=2 * SHORT), st.sampled_from(["<|im_end|>", "<|im_start|>", "assistant\n", "\n", "é"])),
    max_size=4,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer(chatml_tokenizer):
    return copy.deepcopy(chatml_tokenizer)  # some tests enable padding


@given(words, st.booleans(), st.booleans())
def test_ids_and_texts_equal_those_of_the_tokenizer(tokenizer, text, special, skip):
    one = plain(tokenizer)
    assert type(one) is PlainTokenizer
    for _ in range(2):  # the second result may be cached
        ids = one.encode(text, add_special_tokens=special)
        assert ids == tokenizer.encode(text, add_special_tokens=special)
    assert one.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    ids.append(0)  # a change of the result must not reach the cache
    assert one.encode(text, add_special_tokens=special) == ids[:-1]


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_conversations_equal_those_of_the_tokenizer(tokenizer, name):
    codecs = [Codec(each, make_renderer(each, name)) for each in (tokenizer, plain(tokenizer))]
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 30?"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    response = tokenizer.encode("Let me see.\n", add_special_tokens=False)
    observation = [{"role": "tool", "content": "42", "name": "add", "tool_call_id": "call_0_0"}]
    found = []
    for codec in codecs:
        prompt = codec.render(opening, tools)
        action = [*response, codec.stop_token_ids[0]]
        parsed = codec.parse(action, prompt, tools, 0)
        found.append((prompt, parsed, codec.decode(action), codec.extend(prompt, action, observation, tools)))
    assert found[0] == found[1] and found[0][3] is not None


def test_renderers_compute_no_offsets(tokenizer):
    one = plain(tokenizer)
    assert isinstance(one, Tokenizer) and not isinstance(one, OffsetTokenizer)
    assert _get_offset_tokenizer(tokenizer) is not None and _get_offset_tokenizer(one) is None


def test_other_attributes_are_those_of_the_tokenizer(tokenizer, tiny_tokenizer):
    one = plain(tokenizer)
    assert one.eos_token_id == tokenizer.eos_token_id and one.chat_template == tokenizer.chat_template
    assert one.decode(5) == tokenizer.decode(5) and len(one) == len(tokenizer)
    assert one.encode("a b", add_special_tokens=False, truncation=True, max_length=1) == tokenizer.encode("a b")[:1]
    assert type(make_renderer(plain(tiny_tokenizer))) is TinyRenderer


def test_a_backend_with_padding_or_truncation_is_not_used_directly(tokenizer):
    one, text = plain(tokenizer), "one two three " * SHORT
    expected = tokenizer.encode(text, add_special_tokens=False)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert one.encode(text, add_special_tokens=False) == expected
    tokenizer.backend_tokenizer.enable_padding(length=10_000)
    assert one.encode(text, add_special_tokens=False) == expected


def test_tokenizers_that_differ_from_their_backend_are_not_wrapped(tokenizer):
    class Own(type(tokenizer)):
        def _decode(self, *args, **options):
            return "something else"

    class Letters:
        """A class that is no tokenizer of Hugging Face."""

    own, cleaned, split = (copy.deepcopy(tokenizer) for _ in range(3))
    own.__class__ = Own
    cleaned.clean_up_tokenization_spaces = True
    split.split_special_tokens = True
    for each in (own, cleaned, split, Letters()):
        assert plain(each) is each


def test_a_missing_attribute_is_an_attribute_error(tokenizer):
    with pytest.raises(AttributeError):
        plain(tokenizer).no_such_thing  # noqa: B018
