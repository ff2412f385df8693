"""Renderers: that of the tiny policy, and the one for any chat template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.models.renderer import END, TINY_TEMPLATE, TemplateRenderer, TinyRenderer, make_renderer
from mtrl.types import ROLES

contents = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["<sql>", "</sql>", "12", " 7", "\n", "<|end|>", "<|user|>", " ", "é"]), max_size=6).map(
        "".join
    ),
)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": contents}), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def renderer(tiny_tokenizer):
    return make_renderer(tiny_tokenizer)


def template_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


# -- the tiny policy --------------------------------------------------------------------------------------------------


def test_the_tiny_template_has_its_own_renderer(renderer):
    assert type(renderer) is TinyRenderer


@given(conversations, st.booleans())
def test_ids_of_the_tiny_renderer_equal_those_of_its_template(renderer, tiny_tokenizer, messages, prompt):
    expected = template_ids(tiny_tokenizer, messages, add_generation_prompt=prompt)
    assert renderer.render_ids(messages, add_generation_prompt=prompt) == expected
    assert renderer.render(messages, add_generation_prompt=prompt).token_ids == expected


@given(conversations, contents, conversations, st.booleans())
def test_the_bridge_of_the_tiny_renderer_equals_a_new_rendering(renderer, tiny_tokenizer, before, response, new, cut):
    prompt = renderer.render_ids(before, add_generation_prompt=True)
    completion = tiny_tokenizer.encode(response, add_special_tokens=False)
    if not cut:
        completion = [*completion, tiny_tokenizer.eos_token_id]
    elif completion[-1:] == [tiny_tokenizer.eos_token_id]:
        return  # the response is complete
    bridged = renderer.bridge_to_next_turn(prompt, completion, new)
    whole = [*before, {"role": "assistant", "content": response}, *new]
    assert bridged.token_ids == renderer.render_ids(whole, add_generation_prompt=True)


def test_the_mask_of_the_tiny_renderer_marks_sampled_tokens(renderer, tiny_tokenizer):
    messages = [
        {"role": "user", "content": "12?"},
        {"role": "assistant", "content": "34"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": ""},
    ]
    out = renderer.render(messages, add_generation_prompt=True)
    trained = [i for i, mask in zip(out.token_ids, out.sampled_mask, strict=True) if mask]
    assert tiny_tokenizer.decode(trained) == f"34{END}{END}"
    assert len(out.message_indices) == len(out.token_ids) and out.message_indices[-1] == -1
    # The template marks the same tokens.
    marked = tiny_tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert [bool(m) for m in marked["assistant_masks"]] == out.sampled_mask[:-1]


@given(contents.filter(lambda text: "<|" not in text))
def test_the_tiny_renderer_parses_responses(renderer, tiny_tokenizer, text):
    ids = tiny_tokenizer.encode(text, add_special_tokens=False)
    assert renderer.parse_response(ids).content == text
    assert renderer.parse_response([*ids, tiny_tokenizer.eos_token_id]).content == text


# -- any template -----------------------------------------------------------------------------------------------------

STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nhello<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template like that of Qwen3, which renders the last message of the assistant differently."""
NO_CLOSE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TRIMMED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

DIALOGUE = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "more"},
]


@pytest.mark.parametrize(
    "template", [None, STRICT, DEFAULT_SYSTEM, THINKING], ids=["chatml", "strict", "system", "thinking"]
)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_the_bridge_of_a_template_equals_a_new_rendering(make_chatml_tokenizer, template, cut, eos):
    tokenizer = make_chatml_tokenizer(**({"template": template} if template else {}), eos=eos)
    renderer = make_renderer(tokenizer, "default")
    prompt = renderer.render_ids(DIALOGUE[:1], add_generation_prompt=True)
    completion = tokenizer.encode("A" if cut else "A<|im_end|>", add_special_tokens=False)
    bridged = renderer.bridge_to_next_turn(prompt, completion, DIALOGUE[2:])
    assert bridged.token_ids == template_ids(tokenizer, DIALOGUE, add_generation_prompt=True)


def test_a_base_model_stops_where_its_template_does(make_chatml_tokenizer):
    """The `eos_token` of a base model ends documents; a turn ends with another token."""
    tokenizer = make_chatml_tokenizer(eos="<|endoftext|>")
    expected = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert make_renderer(tokenizer, "default").get_stop_token_ids() == expected


def test_a_template_without_a_closing_token_has_no_bridge(make_chatml_tokenizer):
    tokenizer = make_chatml_tokenizer(template=NO_CLOSE, eos="<|endoftext|>")
    assert make_renderer(tokenizer, "default").bridge_to_next_turn([5], [6], DIALOGUE[2:]) is None


def test_messages_that_the_template_refuses_have_no_bridge(make_chatml_tokenizer):
    renderer = make_renderer(make_chatml_tokenizer(template=STRICT), "default")
    assert renderer.bridge_to_next_turn([5], [6], [{"role": "assistant", "content": "again"}]) is None


def test_the_mask_of_a_template_marks_sampled_tokens(chatml_tokenizer):
    messages = [*DIALOGUE, {"role": "assistant", "content": "B"}]
    out = make_renderer(chatml_tokenizer, "default").render(messages)
    assert out.token_ids == template_ids(chatml_tokenizer, messages)
    trained = [i for i, mask in zip(out.token_ids, out.sampled_mask, strict=True) if mask]
    assert chatml_tokenizer.decode(trained) == "A<|im_end|>B<|im_end|>"


def test_a_template_that_rewrites_turns_cannot_be_trained_on(make_chatml_tokenizer):
    renderer = make_renderer(make_chatml_tokenizer(template=THINKING), "default")
    with pytest.raises(UserError, match="name a renderer that does"):
        renderer.render([*DIALOGUE, {"role": "assistant", "content": "B"}])


def test_results_of_tools_that_a_template_refuses_are_of_the_user(make_chatml_tokenizer):
    tokenizer = make_chatml_tokenizer(template=STRICT)
    renderer = make_renderer(tokenizer, "default")
    results = [{"role": "tool", "content": content} for content in ("1", "2")]
    ids = renderer.render_ids([*DIALOGUE[:2], *results, {"role": "user", "content": "more"}])
    assert tokenizer.decode(ids) == "<|im_start|>Q<|im_end|><|im_start|>A<|im_end|><|im_start|>1\n\n2\n\nmore<|im_end|>"
    prompt, completion = renderer.render_ids(DIALOGUE[:1], add_generation_prompt=True), tokenizer.encode("A<|im_end|>")
    bridged = renderer.bridge_to_next_turn(prompt, completion, results)
    assert tokenizer.decode(bridged.token_ids).endswith("A<|im_end|><|im_start|>1\n\n2<|im_end|><|im_start|>")


NAMED_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is none %}{{ m['tool_calls'] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
)


def test_calls_that_a_template_names_and_does_not_render_are_text(make_chatml_tokenizer):
    tokenizer = make_chatml_tokenizer(template=NAMED_ONLY)
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [DIALOGUE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.decode(make_renderer(tokenizer, "default").render_ids(messages))
    assert text.endswith('assistant\n<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call><|im_end|>')


# -- make_renderer ----------------------------------------------------------------------------------------------------


def test_an_unknown_model_gets_the_template(chatml_tokenizer):
    assert type(make_renderer(chatml_tokenizer)) is TemplateRenderer


def test_a_known_model_gets_its_own(make_chatml_tokenizer):
    tokenizer = make_chatml_tokenizer()
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    renderer = make_renderer(tokenizer)
    assert type(renderer).__name__ == "Qwen3Renderer" and renderer.effective_thinking_retention == "all"


def test_an_unknown_renderer_is_a_user_error(chatml_tokenizer):
    with pytest.raises(UserError, match="model.renderer=qwen99 is not known"):
        make_renderer(chatml_tokenizer, "qwen99")


@pytest.mark.parametrize("trimmed", [False, True])
def test_text_in_parts_is_rendered_like_text(make_chatml_tokenizer, trimmed):
    """Templates for text alone write the Python list of the parts, or refuse to join it to a text."""
    tokenizer = make_chatml_tokenizer(template=TRIMMED) if trimmed else make_chatml_tokenizer()
    renderer = make_renderer(tokenizer, "default")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    plain = [{**message, "content": "one two"} for message in messages]
    assert renderer.render_ids(messages) == template_ids(tokenizer, plain)
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    assert renderer.render_ids(messages, tools=tools) == renderer.render_ids(plain, tools=tools)


def test_parts_stay_parts_where_the_template_renders_them(make_chatml_tokenizer):
    tokenizer = make_chatml_tokenizer(template=IN_PARTS)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert make_renderer(tokenizer, "default").render_ids(messages) == template_ids(tokenizer, messages)


def test_a_renderer_for_other_tokenizers_is_a_user_error(tiny_tokenizer):
    with pytest.raises(
        UserError, match=r"^model\.renderer=qwen3 does not fit .* '<\|im_start\|>' not found.*; use auto$"
    ):
        make_renderer(tiny_tokenizer, "qwen3")


def test_a_missing_chat_template_is_a_user_error(make_chatml_tokenizer):
    with pytest.raises(UserError, match="has no chat template; use a chat model"):
        make_renderer(make_chatml_tokenizer(template=None))


def test_the_tiny_template_can_be_rendered_by_jinja(tiny_tokenizer):
    assert tiny_tokenizer.chat_template == TINY_TEMPLATE
    assert type(make_renderer(tiny_tokenizer, "default")) is TemplateRenderer
