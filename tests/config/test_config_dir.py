"""A folder with config groups of a user."""

import pytest

from mtrl.command.compose import compose
from mtrl.config.config_dir import GLOBAL_GROUPS
from mtrl.errors import UserError
from mtrl.main import prepare
from tests.config.test_plain_yaml import bomb

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


def refusal(folder, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(words or ["experiment=guide"], str(folder))
    return str(caught.value)


def write(file, text=f"# @package _global_{GUIDE}"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_an_experiment_that_says_where_its_keys_belong(folder):
    (folder / "experiment" / "guide.yaml").write_text(f"\n# @package _global_\n# Mine.\n{GUIDE}")
    cfg = compose(["experiment=guide"], str(folder))
    assert cfg.trainer.max_steps == 7 and cfg.generator.max_turns == 5


@pytest.mark.parametrize("text", [GUIDE, f"# Mine.\n# @package _global_{GUIDE}"])
def test_a_missing_header_is_named_in_the_message(folder, text):
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


@pytest.mark.parametrize("group", GLOBAL_GROUPS)
def test_the_header_is_required_in_subfolders_of_a_group(folder, group):
    write(folder / group / "sub" / "g.yaml", GUIDE)
    said = refusal(folder, f"{group}=sub/g")
    assert "sub/g.yaml sets keys of other sections" in said and "as its first line" in said
    write(folder / group / "sub" / "g.yaml")
    assert compose([f"{group}=sub/g"], str(folder)).trainer.max_steps == 7


@pytest.mark.parametrize(
    ("there", "fix"),
    [
        ("experiment/guide.yml", "rename it to {}/experiment/guide.yaml"),
        ("guide.yaml", "rename it to {}/experiment/guide.yaml"),
        ("experiment/mine/guide.yaml", "write experiment=mine/guide"),
    ],
)
def test_a_file_that_lies_elsewhere_is_named(folder, there, fix):
    write(folder / there)
    said = refusal(folder)
    assert said == f"experiment=guide does not exist, and {folder / there} is not it; {fix.format(folder)}"


def test_without_such_a_file_the_options_are_listed(folder):
    write(folder / "misguide.yaml")
    assert "experiment=guide does not exist; " in refusal(folder)


@pytest.mark.parametrize("more", [[], ["--cfg", "job"], ["--help"]])
@pytest.mark.parametrize("named", [["--config-dir", "{}"], ["hydra.searchpath=['file://{}']"]])
def test_a_bomb_at_any_depth_is_refused_by_every_command(folder, named, more):
    write(folder / "experiment" / "a" / "b" / "c" / "bomb.yaml", f"# @package _global_\n{bomb()}")
    words = [word.format(folder) for word in named]
    with pytest.raises(UserError, match=r"bomb.yaml is not read: it has more than .*; write less, or remove it"):
        prepare([*words, "experiment=a/b/c/bomb", *more])


def test_a_bomb_behind_a_link_is_found_and_a_link_in_a_circle_ends(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (folder / "experiment" / "up").symlink_to(folder)
    write(folder / "experiment" / "guide.yaml")
    assert compose(["experiment=guide"], str(folder)).trainer.max_steps == 7
    write(other / "bomb.yaml", f"# @package _global_\n{bomb()}")
    (folder / "experiment" / "linked").symlink_to(other)
    assert "bomb.yaml is not read" in refusal(folder)


def test_both_ways_to_name_folders_go_together(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write(other / "experiment" / "guide.yaml")
    assert compose(["experiment=guide", f"hydra.searchpath=['file://{other}']"], str(folder)).trainer.max_steps == 7


def test_a_search_path_that_is_no_list(folder):
    assert "is no list of folders; write --config-dir FOLDER" in refusal(folder, "hydra.searchpath=file:///x")


def test_another_path_of_the_primary_configuration_is_refused(folder):
    with pytest.raises(UserError, match=r"--config-path mine is not taken.*write --config-dir mine experiment=NAME"):
        prepare(["--config-path", "mine", "experiment=guide"])


@pytest.mark.parametrize("option", ["../mine", "a/../../mine", "[a,../mine]"])
def test_a_choice_outside_of_the_groups_is_refused(folder, option):
    write(folder / "mine.yaml")
    assert "is a file outside of the config groups; put it into FOLDER/experiment" in refusal(
        folder, f"experiment={option}"
    )
