"""Every file under conf/ composes, by every spelling, and each experiment contains the command that starts it."""

import shlex

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose, merge
from mtrl.command.secret_checks import check_secrets
from mtrl.config.keys import all_keys, plain
from mtrl.config.overrides import CONF, normalise
from mtrl.errors import UserError

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
DEFAULT = "experiment=gsm8k"
OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.name in all_keys()
}
COMBINATIONS = [
    {group: options[i % len(options)] for group, options in OPTIONS.items()}
    for i in range(max(len(options) for options in OPTIONS.values()))
]
"""Choices of one option of each group, so that each option is in one of them."""


def same(one, other) -> bool:
    """Assert that two compositions are the same run; only the second of its start may differ."""
    one, other = (OmegaConf.to_container(cfg) for cfg in (one, other))
    return one | {"run_dir": ""} == other | {"run_dir": ""}


def test_no_arguments_are_the_default_experiment():
    cfg = compose()
    assert same(cfg, compose([DEFAULT]))
    assert (cfg.environment.name, cfg.data.path, cfg.environment.config) == ("gsm8k", None, {"calculator": True})
    assert cfg.generator.max_turns > 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_by_both_spellings(name):
    assert compose([f"experiment={name}"]).name == name
    assert normalise([f"+experiment={name}"]) == normalise([f"experiment={name}"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_debug_fast_makes_every_experiment_two_small_steps(name):
    cfg = compose([f"experiment={name}", "debug=fast"])
    assert normalise([f"+experiment={name}", "+debug=fast"]) == normalise([f"experiment={name}", "debug=fast"])
    assert cfg.name == name
    assert cfg.trainer.max_steps == 2
    assert cfg.trainer.prompts_per_step * cfg.algorithm.group_size <= 4


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "8"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_first_lines_of_an_experiment_are_its_command(name):
    package, command = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()[:2]
    assert package == "# @package _global_"
    words = shlex.split(command.removeprefix("# "))
    started = ["mtrl", "train"] if words[0] == "mtrl" else [*TORCHRUN, "-m", "mtrl.main"]
    start = len(started)
    assert words[:start] == started
    # A command for several ranks may name more, which its machine needs.
    needed = words[start + 1 :] if words[0] == "torchrun" else []
    assert normalise(words[start:] or [DEFAULT]) == normalise([f"experiment={name}", *needed])
    if needed:
        compose(words[start:])


@pytest.mark.parametrize("choices", COMBINATIONS, ids=lambda choices: " ".join(choices.values()))
def test_every_option_of_every_group_has_only_keys_of_the_schema_and_no_secret(choices):
    cfg = merge(normalise([f"{group}={option}" for group, option in choices.items()]))
    for group, option in choices.items():
        known = {path.rpartition(".")[2] for path in all_keys() if path.startswith(f"{group}.")}
        assert set(cfg[group]) <= known, f"{group}={option}"
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, "x")
    check_secrets(plain(cfg))


def test_the_command_line_wins_over_the_experiment():
    cfg = compose(["experiment=gsm8k", "algorithm=rloo", "trainer.max_steps=3", "algorithm.group_size=4"])
    assert cfg.algorithm.advantage_method == "rloo"
    assert (cfg.trainer.max_steps, cfg.algorithm.group_size) == (3, 4)


def test_any_sign_before_a_known_key_is_fine():
    plain = compose(["trainer.max_steps=7"])
    assert same(plain, compose(["+trainer.max_steps=7"])) and same(plain, compose(["++trainer.max_steps=7"]))


def test_null_takes_an_experiment_away():
    cfg = compose(["experiment=null"])
    assert cfg.environment.config == {} and cfg.trainer.max_steps == all_keys()["trainer.max_steps"].default


def test_open_sections_take_keys_of_their_own():
    cfg = compose(
        [
            "environment.config.operations=3",
            "reward.components.format=0.5",
            "reward.components={correct: 2.0}",
        ]
    )
    assert cfg.environment.config == {"calculator": True, "operations": 3}
    assert cfg.reward.components == {"environment": 1.0, "format": 0.5, "correct": 2.0}


@pytest.mark.parametrize("sweep", ["temperature=0.7", "{temperature: 0.7}"])
def test_evaluation_sampling_is_greedy_and_else_as_in_training(sweep):
    key = "generator.eval_sampling_params" + (f"={sweep}" if sweep.startswith("{") else f".{sweep}")
    assert compose().generator.eval_sampling_params is None
    evaluated = compose([key, "generator.sampling_params.max_generate_length=33"]).generator.eval_sampling_params
    assert (evaluated.temperature, evaluated.max_generate_length) == (0.7, 33)


def test_a_project_of_the_users_own_adds_groups(tmp_path, monkeypatch):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/guess.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /environment: null\n"
        "name: guess\n"
        "environment: {name: guess, target: guessing_game.Guess, config: {low: 3}}\n"
        "data: {path: some/rows}\n"
    )
    (tmp_path / "conf/cluster").mkdir()
    (tmp_path / "conf/cluster/large.yaml").write_text("# @package _global_\nseed: 7\n")
    (tmp_path / "guessing_game.py").write_text(
        "from mtrl.environments.base import BaseEnvironment\nclass Guess(BaseEnvironment):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cfg = compose(["experiment=guess", "+cluster=large"], config_dir=str(tmp_path / "conf"))
    assert (cfg.name, cfg.seed, cfg.environment.config) == ("guess", 7, {"low": 3})


def test_a_config_dir_that_does_not_exist():
    with pytest.raises(UserError, match="--config-dir nowhere does not exist; name a folder with config groups"):
        compose(config_dir="nowhere")
