"""`environment.prompt`: its automatic value, and the loaders that get it."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import compose, merge
from mtrl.command.stored import of_run
from mtrl.config.derived import prompt_of
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.factory import load_task, loader_settings, writes_prompts
from mtrl.environments.family import Family, get_family
from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir

HF = ("model=hf", "model.path=owner/name")


def config_of(*overrides):
    return OmegaConf.to_object(compose(["experiment=gsm8k", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "prompt"),
    [
        ((), "short"),
        (HF, "full"),
        (("environment.prompt=full",), "full"),
        ((*HF, "environment.prompt=short"), "short"),
    ],
)
def test_the_automatic_prompt_is_full_unless_the_policy_is_tiny(overrides, prompt):
    config = config_of("data.synthetic_train_rows=2", "data.synthetic_test_rows=1", *overrides)
    assert prompt_of(config) == prompt
    roles = [message["role"] for message in load_task(config).splits.train[0]["prompt"]]
    assert roles == (["system", "user"] if prompt == "full" else ["user"])


def test_an_unknown_prompt_is_refused():
    with pytest.raises(UserError, match="environment.prompt=long"):
        config_of("environment.prompt=long")


def test_the_former_setting_of_the_task_names_the_key():
    with pytest.raises(UserError, match="full_prompt is not a key of gsm8k; write environment.prompt=full"):
        config_of("environment.config.full_prompt=true")


class WithoutPrompts(BaseEnvironment):
    """An environment whose rows have prompts of their own."""

    @staticmethod
    def load(data, seed, **config):
        return Splits([], [])


def test_a_prompt_without_effect_gives_a_warning():
    target = ["environment.name=x", f"environment.target={__name__}.WithoutPrompts"]
    warning = "environment.prompt=full changes nothing: the loader of WithoutPrompts has no parameter prompt"
    assert warning in check(merge([*target, "environment.prompt=full"]))
    assert not any("environment.prompt" in text for text in check(merge(target)))


def test_only_a_loader_with_the_parameter_gets_the_prompt():
    def load(data, seed, **config):
        return Splits([], [])

    family = Family("own", BaseEnvironment, load=load, score=lambda trajectory, row: 0.0)
    own = replace(family, load=lambda data, seed, prompt="short", **config: Splits([], []))
    config = config_of("environment.config.calculator=true")
    assert (writes_prompts(family), loader_settings(config, family)) == (False, {"calculator": True})
    assert (writes_prompts(own), loader_settings(config, own)) == (True, {"calculator": True, "prompt": "short"})
    assert all(writes_prompts(get_family(name)) for name in ("gsm8k", "sop", "mini_swe"))


@pytest.mark.parametrize(("setting", "prompt"), [("\n    full_prompt: true", "full"), (" {}", "short")])
def test_a_stored_run_from_before_the_key_keeps_its_prompts(setting, prompt, tmp_path):
    """An own setting of the task, `full_prompt`, chose the prompts of such a run, also for models that are not tiny."""
    text = f"name: old\nmodel:\n  name: hf\n  path: owner/name\nenvironment:\n  name: games\n  config:{setting}\n"
    RunDir(tmp_path).config.write_text(text)
    cfg = of_run(tmp_path, [])
    assert (cfg.environment.prompt, "full_prompt" in cfg.environment.config) == (prompt, False)
