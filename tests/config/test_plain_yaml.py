"""Untrusted YAML: a few lines of aliases can expand to gigabytes."""

import time

import pytest
import yaml
from omegaconf import OmegaConf

from mtrl.command.compose import merge
from mtrl.command.runs import settle
from mtrl.command.stored import of_run
from mtrl.config.plain_yaml import load_config
from mtrl.config.schema import Config
from mtrl.diagnose.record import Record
from mtrl.errors import UserError
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir


def bomb():
    """Return ten lines of YAML with nine to the power of nine values."""
    lines = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(["k0: &k0 x", *lines])


@pytest.fixture
def received(tmp_path):
    """The folder of a run that was received from another user."""
    (tmp_path / "config.yaml").write_text(bomb())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        lambda run: load_config(run / "config.yaml"),
        lambda run: of_run(run, []),
        lambda run: Record.load(run),
        lambda run: Run(run).settings,
    ],
    ids=["load_config", "of_run", "diagnose", "figures"],
)
def test_a_received_run_cannot_block_a_reader(received, read):
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"config.yaml is not read: it has more than 4,194,304 characters, with its"):
        read(received)
    assert time.monotonic() - begun < 5


TEXTS = ["${oc.env:API_KEY}", "a ${x} b", "\\${x}", "\\\\${x} \\y", "$${x}", "{x: ${y}}", "c:\\new ${A} and $B"]


@pytest.mark.parametrize("text", TEXTS)
def test_interpolations_in_a_stored_config_are_text(tmp_path, text, monkeypatch):
    """A received run must not read the environment of its reader."""
    monkeypatch.setenv("API_KEY", "a secret of the reader")
    tree = {"name": text, "plugins": [], "environment": {"name": "gsm8k", "config": {"note": {"deep": [text]}}}}
    tree["reward"] = {"components": {text: 1.0, "environment": 1.0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert Record.load(tmp_path).setting("name") == Run(tmp_path).settings["name"] == text
    assert load_config(tmp_path / "config.yaml").name == text
    cfg = of_run(tmp_path, [])
    assert OmegaConf.to_container(cfg, resolve=True)["environment"]["config"]["note"] == {"deep": [text]}
    assert cfg.name == text and set(cfg.reward.components) == {text, "environment"}


def test_interpolations_that_name_each_other_take_no_memory(tmp_path):
    lines = [f"k{n}: '{f'${{k{n - 1}}}' * 9}'" for n in range(1, 12)]
    (tmp_path / "config.yaml").write_text("\n".join(["k0: xxxxxxxxx", *lines]))
    begun = time.monotonic()
    assert OmegaConf.to_container(load_config(tmp_path / "config.yaml"), resolve=True)["k11"] == "${k10}" * 9
    assert time.monotonic() - begun < 5


def test_nor_does_a_tracker_read_it(received):
    assert Run(received).stored_config.tree == {}


def test_an_experiment_of_ones_own_that_is_too_large_is_named(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{bomb()}\n")
    with pytest.raises(UserError, match=r"mine.yaml is not read: it has more than"):
        merge(["experiment=mine"], str(tmp_path))


def test_aliases_that_stay_small_are_read(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nname: &name mine\nobjective: *name\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert merge(["experiment=mine"], str(tmp_path)).name == "mine"
    (tmp_path / "config.yaml").write_text("a: &a [1, 2]\nb: *a\nlr: 1e-3\n")
    assert load_config(tmp_path / "config.yaml") == {"a": [1, 2], "b": [1, 2], "lr": 0.001}


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00", "", "# nothing\n"])
def test_a_config_that_is_no_mapping_is_one_sentence(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="restore the file from a copy of its run, or name another run"):
        load_config(tmp_path / "config.yaml")


@pytest.fixture
def written(tmp_path):
    """The folder of a run with a config.yaml in the form that runs write."""
    RunDir(tmp_path).write_config(Config(run_dir=str(tmp_path)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    return tmp_path


def test_a_cut_config_is_reported_at_any_position(written):
    """A file that is cut between two values is valid YAML, and missing keys would silently have their defaults."""
    file = written / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    said = []
    for number in range(0, len(lines), 23):
        file.write_text("".join(lines[:number]))
        with pytest.raises(UserError, match=r"config.yaml (is cut|is no configuration|cannot be read as YAML)") as told:
            load_config(file)
        said.append(str(told.value).split(": ", 1)[-1])
    assert "".join(said).count("is missing, and so are keys such as") > len(said) / 2 < len(set(said))
    file.write_text("".join(lines))
    assert load_config(file).trainer.max_steps == Config().trainer.max_steps


@pytest.mark.parametrize(
    "read",
    [
        lambda run: of_run(run, []),
        lambda run: Record.load(run),
        lambda run: Run(run).settings,
        lambda run: settle(merge(["resume=latest", f"run_dir={run}"])),
    ],
    ids=["evaluate", "diagnose", "figures", "resume"],
)
def test_a_run_whose_configuration_was_cut_is_refused(written, read):
    file = written / "config.yaml"
    file.write_text(file.read_text().split("algorithm:\n")[0])
    with pytest.raises(UserError, match=r"config.yaml is cut: its last line, .*, is missing, and so are keys such"):
        read(written)
    assert Run(written).problems() == ["config.yaml is cut: its end is missing"]


def test_configs_of_older_versions_are_read(tmp_path):
    """Such a configuration has no end mark, and lacks newer keys."""
    (tmp_path / "config.yaml").write_text("name: mine\ntrainer:\n  max_steps: 3\n")
    assert load_config(tmp_path / "config.yaml").trainer.max_steps == 3
