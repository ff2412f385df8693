"""No program accepts an address such as s3://… as a folder for its output."""

import importlib

import pytest

from mtrl.config.outputs import check_file, is_address
from mtrl.errors import UserError
from mtrl.retrieval.__main__ import parse, run

PROGRAMS = [
    ("mtrl.main.prepare", ["hydra.sweep.dir={}"]),
    ("mtrl.main.prepare", ["-m", "seed=0,1", "hydra.sweep.dir='{}'"]),
    ("mtrl.main.prepare", ["hydra.run.dir={}"]),
    ("mtrl.main.prepare", ["-m", "seed=0,1", "run_dir={}"]),
    ("mtrl.preflight.__main__.main", ["preflight.json={}"]),
    ("mtrl.gateway.__main__.main", ["gateway.out={}"]),
    ("mtrl.demonstrate.main", ["--out", "{}"]),
    ("mtrl.sft.main", ["--data", "rows.jsonl", "--out", "{}"]),
    ("mtrl.figures.__main__.main", ["RUN", "--out", "{}"]),
    ("mtrl.play.__main__.main", ["out={}"]),
    ("mtrl.rescore.__main__.main", ["RUN", "out={}"]),
    ("mtrl.diagnose.__main__.main", ["RUN", "--html", "{}"]),
    ("mtrl.diagnose.__main__.main", ["RUN", "--json", "{}"]),
    ("mtrl.evaluation.command.main", ["evaluation.output={}"]),
    ("examples.turn_level_rewards.gsm8k_multi_turn_dataset.main", ["--output_dir", "{}"]),
]


@pytest.mark.parametrize(("program", "words"), PROGRAMS, ids=str)
def test_every_program_refuses_an_address(program, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, _, name = program.rpartition(".")
    with pytest.raises(UserError, match=r"s3:/.*bucket/x.* is an address, and results are written to folders of this"):
        getattr(importlib.import_module(module), name)([word.format("s3://bucket/x") for word in words])
    assert not list(tmp_path.iterdir())


def test_so_does_the_retriever():
    command = parse(["--corpus", "c.jsonl", "--retriever", "dense", "--index", "s3://bucket/x"])
    with pytest.raises(UserError, match="--index s3://bucket/x is an address"):
        run(command)


@pytest.mark.parametrize("path", ["runs/a", "/tmp/x", "C:/x", "a:b", "s3", "there/s3:/x", "", None])
def test_folders_are_no_addresses(path):
    assert not is_address(path)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match="--html .* is a folder; name a file in it"):
        check_file(f"--html {tmp_path}", tmp_path)
    with pytest.raises(UserError, match="is no folder; make it, or name another file"):
        check_file("--html none/x.html", tmp_path / "none" / "x.html")
    check_file("--html x.html", tmp_path / "x.html")
