"""config.yaml may be malicious: the viewer continues, and reports what it left out."""

import os

import pytest

from mtrl.record.config import read_config
from mtrl.record.library import Library

DEEP = ("more than 50 levels", "while increasing flow level")
"""Messages about deep nesting, of the check or of the parser in C, which has a limit since PyYAML 6.0.4."""
WIDE = "[" + ", ".join(["*a"] * 9) + "]"


def bomb():
    """Return nine lines of YAML with nine to the power of nine values."""
    lines = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(["k0: &k0 x", *lines])


def read(folder, text):
    (folder / "config.yaml").write_text(text)
    found = read_config(folder)
    return found.flat, found.problems


@pytest.mark.parametrize("text", ["a: [", "3", "", "\x00", "a: &x 1", "!!python/object:os.system {}", "a: .nan"])
def test_any_config_is_read(tmp_path, text):
    flat, problems = read(tmp_path, text)
    assert isinstance(flat, dict) and isinstance(problems, list)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 500_000, DEEP),  # the parser in C would end the process
        ("{a: " * 100_000, DEEP),
        ("a: &a {x: 1}\n" + "".join(f"b{n}: &a {{<<: {WIDE}}}\n" for n in range(20)), "*a holds itself"),
        ("a: &a [x]\n" + "".join(f"b{n}: &a {WIDE}\n" for n in range(20)), "*a holds itself"),
        (bomb(), "more than 4,194,304 characters, with its aliases written out"),
        (f"a: &a {'y' * 500_000}\nb: [{'*a, ' * 100_000}]\n", "its aliases written out"),
        ("a: &a [*a]", "*a holds itself"),
        ("a: " + ":".join(["1"] * 400_000), "a number of 799999 digits"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (f"a: {'x' * 2**20}", "config.yaml is larger than 1 MiB"),
    ],
)
def test_a_config_that_would_exhaust_the_viewer_is_refused(tmp_path, text, sentence):
    flat, (problem,) = read(tmp_path, text)
    assert flat == {} and any(words in problem for words in ([sentence] if isinstance(sentence, str) else sentence))


def test_a_config_of_many_keys_is_cut(tmp_path):
    flat, problems = read(tmp_path, "".join(f"k{n}: {n}\n" for n in range(6000)))
    assert len(flat) == 5000 and "more than 5000 keys" in problems[0]


def test_numbers_that_the_page_would_round_are_text(tmp_path):
    flat, problems = read(tmp_path, f"a: {2**53}\nb: {2**63 + 1}\nc: 0x{'f' * 900}\nd: 2001-01-01\ne: true\n")
    assert problems == []
    assert (flat["a"], flat["b"], flat["d"], flat["e"]) == (2**53, "9223372036854775809", "2001-01-01", True)
    assert flat["c"].startswith("0xfff") and len(flat["c"]) == 200


def test_links_out_of_the_run_and_pipes_are_not_read(tmp_path):
    """Otherwise the sender of a run could have files of the reader shown and exported."""
    run, secret = tmp_path / "run", tmp_path / "secret.json"
    (run / "tokenizer").mkdir(parents=True)
    (run / "trajectories").mkdir()
    secret.write_text('{"step": 1, "name": "secret"}\n')
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "tokenizer/tokenizer.json"):
        (run / name).symlink_to(secret)
    os.mkfifo(run / "timeline.jsonl")
    (run / "alarms.jsonl").symlink_to("/dev/zero")
    (shown,) = Library([run]).runs
    assert (shown.flat_config, shown.summary, shown.metrics.refresh(), shown.tokenizer) == ({}, {}, [], None)
    assert shown.timeline.refresh() == shown.alarms.refresh() == []
    problems = " ".join(shown.problems())
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "tokenizer/tokenizer.json", "alarms.jsonl"):
        assert f"{name} leads out of the run" in problems
    assert "timeline.jsonl is no regular file" in problems
