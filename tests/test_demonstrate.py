"""`mtrl demonstrate`: the episodes of a demonstrator as conversations that `mtrl.sft` reads."""

import json
import os
from dataclasses import replace

import pytest

from mtrl.demonstrate import main
from mtrl.environments import family
from mtrl.errors import UserError
from mtrl.sft import read_conversations

FEW = ("data.synthetic_train_rows=12", "data.synthetic_test_rows=12")


@pytest.mark.parametrize("experiment", ["gsm8k", "text_to_sql", "search", "triviaqa", "sop", "games", "service"])
def test_every_task_writes_what_sft_reads(experiment, tmp_path, capsys):
    out = tmp_path / "demonstrations.jsonl"
    assert main([f"experiment={experiment}", *FEW, "--out", str(out), "--count", "9"]) == 0
    conversations = read_conversations(out)
    assert len(conversations) == 9 and all(chat.messages[-1]["role"] == "assistant" for chat in conversations)
    assert all(bool(chat.tools) == (experiment in ("sop", "service")) for chat in conversations)
    assert "9 episodes on 9 training rows" in capsys.readouterr().out


def test_demonstrations_contain_no_held_out_rows(tmp_path):
    from mtrl.command.compose import compose
    from mtrl.environments.factory import load_task

    out = tmp_path / "demonstrations.jsonl"
    main(["experiment=gsm8k", *FEW, "--out", str(out), "--count", "30"])
    prompts = {json.loads(line)["messages"][0]["content"] for line in out.read_text().splitlines()}
    splits = load_task(compose(["experiment=gsm8k", *FEW])).splits
    questions = {split: {row["prompt"][0]["content"] for row in getattr(splits, split)} for split in ("train", "test")}
    assert prompts == questions["train"] and not prompts & questions["test"]


def test_the_same_seed_writes_the_same_file(tmp_path):
    for name in ("a", "b"):
        main(["experiment=gsm8k", *FEW, "--out", str(tmp_path / name), "--count", "5"])
    main(["experiment=gsm8k", *FEW, "seed=1", "--out", str(tmp_path / "c"), "--count", "5"])
    one, two, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert one == two != other


def test_output_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="--count=0 must be 1 or more"):
        main(["experiment=gsm8k", "--count", "0", "--out", str(tmp_path / "out")])
    (tmp_path / "there").touch()
    with pytest.raises(UserError, match="exists; choose another file"):
        main(["experiment=gsm8k", "--out", str(tmp_path / "there")])


def test_an_environment_that_changes_the_working_directory_does_not_move_the_file(tmp_path, monkeypatch):
    """The file was written, and could not get its name."""
    from envs.gsm8k import FAMILY

    def demonstrate(row, rng):
        os.chdir(tmp_path / "elsewhere")
        return FAMILY.demonstrate(row, rng)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(family.REGISTERED, "moving", replace(FAMILY, name="moving", demonstrate=demonstrate))
    words = ["experiment=null", "environment.name=moving", "environment.config={}", "--count", "1"]
    assert main([*words, *FEW, "--out", "out.jsonl"]) == 0
    assert len(read_conversations(tmp_path / "out.jsonl")) == 1 and list((tmp_path / "elsewhere").iterdir()) == []
