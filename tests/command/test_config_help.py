"""The output of `--help`: every group of a run with its options, and every key."""

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import CONF, compose
from mtrl.command.help import config_groups, help_text
from mtrl.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """A folder with config groups of a user."""
    for file in (
        "experiment/mine.yaml",
        "mine/deeper/one.yaml",
        "hydra/sweeper/other.yaml",
        "notes/read.md",
        "top.yaml",
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# @package _global_\nseed: 3\n")
    return tmp_path


def test_groups_are_those_of_the_folders_and_no_others(folder):
    assert config_groups([folder]) == {"experiment": ["mine"], "mine/deeper": ["one"]}
    groups = config_groups([CONF, folder])
    assert groups["experiment"] == sorted(["mine", *(path.stem for path in (CONF / "experiment").glob("*.yaml"))])
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert {group.partition("/")[0] for group in groups} == folders - {"hydra", "sagemaker"} | {"mine"}


def test_groups_of_ones_own_and_the_keys_as_composed_are_shown(folder):
    shown = help_text(["experiment=mine"], str(folder))
    assert "\nexperiment: agent_" in shown and ", mine, " in shown and "\nmine/deeper: one\n" in shown
    keys = OmegaConf.create(shown.partition("Keys (section.key=value):")[2])
    assert keys.seed == 3 and keys.keys() == compose().keys()
    assert "$" not in shown.replace("${", "")


def test_help_resolves_interpolations_on_request():
    assert "run_dir: outputs/${name}/" in help_text(["name=x"], None)
    assert "run_dir: outputs/x/" in help_text(["name=x"], None, resolve=True)


def test_errors_are_one_sentence():
    with pytest.raises(UserError, match="must be an integer"):
        help_text(["seed=x"], None)
