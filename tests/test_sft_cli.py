"""`mtrl sft`: it trains on a JSONL file, and writes a folder for `model.path`."""

import json
import os
import subprocess
import sys

import pytest
from transformers import Qwen3VLConfig

from mtrl.environments.tool_calls import format_call, text_of
from mtrl.errors import UserError
from mtrl.sft import main, read_conversations
from mtrl.types import Demonstration
from tests import forked

pytestmark = pytest.mark.xdist_group("sft")  # one worker trains the model
CHATS = [
    {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"<say>{word}</say>"}]}
    for word in ("yes", "no", "perhaps", "42", "17")
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, CHATS)) + "\n\n")
    return path


@pytest.fixture(scope="module")
def folder(chats, tmp_path_factory):
    """The folder of the tiny model that the command trained from scratch, and the output of the command."""
    out = tmp_path_factory.mktemp("sft") / "warm"
    command = [
        sys.executable,
        "-m",
        "mtrl.sft",
        "--data",
        chats,
        "--out",
        out,
        "--steps",
        "60",
        "--tags",
        "<say>,</say>",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run([str(c) for c in command], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def answer(folder, question):
    """Return the greedy answer. `model.generate` would import more than both trainings need."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mtrl.models.renderer import make_renderer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = make_renderer(tokenizer).render_ids([{"role": "user", "content": question}], add_generation_prompt=True)
    ids = list(prompt)
    while len(ids) < len(prompt) + 12 and ids[-1] != tokenizer.eos_token_id:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)


def test_the_tiny_model_learns_from_scratch(folder):
    out, printed = folder
    assert answer(out, "say 42") == "<say>42</say><|end|>"
    assert "5 conversations" in printed and "60 updates of 5 conversations" in printed
    assert "loss per token:" in printed and f"model.path={out}" in printed


def test_the_model_of_a_folder_is_trained(folder, tmp_path):
    """The command trains the model of a folder, writes another folder, and does not change the first."""
    more = {"messages": [{"role": "user", "content": "say 17"}, {"role": "assistant", "content": "no"}]}
    (tmp_path / "more.jsonl").write_text(json.dumps(more))
    before = (folder[0] / "model.safetensors").read_bytes()
    arguments = ["--data", tmp_path / "more.jsonl", "--out", tmp_path / "out", "--model", folder[0]]
    losses = main([str(a) for a in [*arguments, "--epochs", 60, "--lr", 3e-3]])
    assert len(losses) == 60 and losses[-1] < 0.1 < losses[0]
    assert answer(tmp_path / "out", "say 17") == "no<|end|>"
    assert (folder[0] / "model.safetensors").read_bytes() == before


def test_the_same_seed_writes_the_same_bytes(chats, tmp_path):
    for name in ("a", "b"):
        main(["--data", str(chats), "--out", str(tmp_path / name), "--steps", "3", "--seed", "5"])
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert one == other


def test_calls_have_the_names_of_their_tools(tmp_path):
    """OpenAI's format has the arguments of calls as JSON text, and null as the content beside them."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    (chat,) = read_conversations(tmp_path / "chats.jsonl")
    assert text_of(chat.messages[1]) == format_call("look", {"at": "x"})


GOOD = json.dumps(CHATS[0])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 3: this is not JSON"),
        ("[]", "line 3: there are no messages"),
        ('{"messages": []}', "line 3: there are no messages"),
        ('{"prompt": "x"}', "line 3: there are no messages"),
        ('{"messages": ["x"]}', "line 3: message 1 has no role of system, user, assistant, tool"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "line 3: message 1 has no role of"),
        ('{"messages": [{"role": "user"}]}', "line 3: the content of message 1 is None; it must be text"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', r"the content of message 1 is \['x'\]; it must be text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 3: the assistant says nothing"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"tool": "f"}]}]}',
            r"line 3 has a message with tool_calls=\[{'tool': 'f'}\]; write a list of",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
            "line 3: this is not JSON .*half of a surrogate",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x"}], "tools": ["f"]}',
            r"line 3: tools is \['f'\]; it must be a",
        ),
    ],
)
def test_an_invalid_line_is_a_user_error(tmp_path, line, sentence):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(UserError, match=sentence):
        main(["--data", str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_unicode_separator_does_not_end_a_line(tmp_path):
    from mtrl.sft import read_conversations

    chat = {"messages": [{"role": "assistant", "content": "a\u2028b\x85c\x0bd"}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(chat, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_conversations(tmp_path / "x.jsonl") == [Demonstration(chat["messages"])]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "none.jsonl"], "--data=.*none.jsonl cannot be read"),
        (["--data", "empty.jsonl"], "--data=.*empty.jsonl holds no conversation"),
        (["--data", "latin.jsonl"], "--data=.*latin.jsonl cannot be read .*; give a JSONL file in UTF-8"),
        (["--data", "good.jsonl", "--out", "good.jsonl"], "--out=.* exists; choose another folder"),
        (["--data", "good.jsonl", "--steps", "0"], "--steps=0 must be a number above 0"),
        (["--data", "good.jsonl", "--batch-size", "-1"], "--batch-size=-1 must be a number above 0"),
        (["--data", "good.jsonl", "--lr", "nan"], "--lr=nan must be a number above 0"),
        (["--data", "good.jsonl", "--seed", "-1"], "--seed=-1 must be at least 0"),
        (["--data", "good.jsonl", "--seed", str(2**63)], f"--seed={2**63} must be at most {2**63 - 1}"),
        (["--data", "good.jsonl", "--epochs", "inf"], "--epochs=inf must be a number above 0"),
        (["--data", "good.jsonl", "--dtype", "bfloat16"], "--dtype=bfloat16 has no effect with --model=tiny"),
        (
            ["--data", "good.jsonl", "--model", "no/such", "--tags", "<a>"],
            "--tags=<a> has no effect with --model=no/such",
        ),
        (["--data", "good.jsonl", "--device", "tpu"], "--device=tpu is not known; choose auto, cpu, cuda or cuda:N"),
        (["--data", "good.jsonl", "--renderer", "qwen3"], "^--renderer=qwen3 does not fit the tokenizer of the model"),
        (["--data", "good.jsonl", "--model", "no/such"], "--model=no/such cannot be loaded"),
        (["--data", "long.jsonl"], "conversation 2 of --data has .* tokens, more than the 1024 that the model holds"),
    ],
)
def test_wrong_arguments_are_user_errors(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    long = {"messages": [{"role": "assistant", "content": "1" * 2000}]}
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "latin.jsonl").write_bytes(GOOD.replace("yes", "\xfc").encode("latin-1"))
    (tmp_path / "long.jsonl").write_text(f"{GOOD}\n{json.dumps(long)}\n")
    with pytest.raises(UserError, match=sentence):
        main([*arguments, *([] if "--out" in arguments else ["--out", "out"])])
    assert not (tmp_path / "out").exists()


def test_a_model_that_reads_images_is_refused(chats, tmp_path):
    Qwen3VLConfig().save_pretrained(tmp_path / "sees")
    with pytest.raises(UserError, match=r"--model=\S+ reads images, and mtrl sft trains on text"):
        main(["--data", str(chats), "--out", str(tmp_path / "out"), "--model", str(tmp_path / "sees")])


def test_an_error_of_the_command_is_one_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{")
    command = [sys.executable, "-m", "mtrl.sft", "--data", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith(str(tmp_path / "bad.jsonl") + ", line 1: this is not JSON")
        and done.stderr.count("\n") == 1
    )


def test_help_and_wrong_data_need_no_torch():
    program = "import sys, mtrl.sft; mtrl.sft.parse(['--data', 'x', '--out', 'y']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
