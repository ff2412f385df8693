"""A folder of config groups of the user's own."""

import pytest

from mtrl.config.compose import compose
from mtrl.errors import UserError
from mtrl.main import prepare

GUIDE = """
trainer:
  max_steps: 7
generator:
  max_turns: 5
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    return tmp_path


def refusal(folder) -> str:
    with pytest.raises(UserError) as caught:
        compose(["experiment=guide"], str(folder))
    return str(caught.value)


def test_an_experiment_that_says_where_its_keys_belong(folder):
    (folder / "experiment" / "guide.yaml").write_text(f"\n# @package _global_\n# Mine.\n{GUIDE}")
    cfg = compose(["experiment=guide"], str(folder))
    assert cfg.trainer.max_steps == 7 and cfg.generator.max_turns == 5


@pytest.mark.parametrize("text", [GUIDE, f"# Mine.\n# @package _global_{GUIDE}"])
def test_one_that_does_not_is_told_its_first_line(folder, text):
    (folder / "experiment" / "guide.yaml").write_text(text)
    said = refusal(folder)
    assert "guide.yaml" in said and "write '# @package _global_' as its first line" in said


def test_a_primary_configuration_is_refused_and_not_ignored(folder):
    (folder / "config.yaml").write_text(GUIDE)
    assert "config.yaml is not read" in refusal(folder) and "experiment=mine" in refusal(folder)


@pytest.mark.parametrize("more", [[], ["--cfg", "job"], ["--help"]])
def test_another_primary_configuration_is_refused_by_every_command(folder, more):
    (folder / "mine.yaml").write_text(GUIDE)
    with pytest.raises(UserError, match="--config-name mine is not known.*experiment=mine"):
        prepare(["--config-dir", str(folder), "--config-name", "mine", *more])


def test_a_folder_that_is_not_there(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none")
