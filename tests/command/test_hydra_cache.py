"""A composition from the cache of tests/hydra_cache.py is the one that Hydra makes."""

from unittest import mock

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

from mtrl.command.compose import merge_with_hydra, without_hydra
from mtrl.config.overrides import normalise
from mtrl.errors import UserError
from tests.hydra_cache import CREATE, DEFAULTS, LOAD, LOADED, MERGE, MERGED

WORDS = [
    [],
    ["experiment=text_to_sql", "trainer.max_steps=3"],
    ["trainer.max_steps=4", "algorithm=rloo", "model={path: folder}", "~environment.config.calculator"],
    ["+environment.config={operations: 3}", "debug=fast", "hydra.job.name=other", "experiment=null"],
]


def by_hydra(words, folder):
    """Compose without the cache."""
    with (
        mock.patch.object(ConfigRepository, "load_config", LOAD),
        mock.patch.object(config_loader_impl, "create_defaults_list", CREATE),
        mock.patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", MERGE),
    ):
        return merge_with_hydra(words, folder)


@pytest.mark.parametrize("words", WORDS)
def test_a_composition_from_the_cache_is_that_of_hydra(words):
    words = [*normalise(words), "run_dir=same"]
    expected = by_hydra(words, None)
    merge_with_hydra([*words, "trainer.max_steps=99", "+environment.config.other=1"], None)
    known = len(DEFAULTS), len(MERGED), len(LOADED)
    found = merge_with_hydra(words, None)
    assert (len(DEFAULTS), len(MERGED), len(LOADED)) == known
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    assert OmegaConf.to_object(without_hydra(found)) == OmegaConf.to_object(without_hydra(expected))


def test_folders_of_the_users_own_are_read_each_time(tmp_path):
    """The second composition has the merge of the files under conf/ from the cache."""
    (tmp_path / "experiment").mkdir()
    words = ["experiment=own", "run_dir=same"]
    known = None
    for steps in (5, 6):
        text = f"# @package _global_\ndefaults: [override /algorithm: rloo]\ntrainer: {{max_steps: {steps}}}\n"
        (tmp_path / "experiment/own.yaml").write_text(text)
        found = merge_with_hydra(words, str(tmp_path))
        assert found.trainer.max_steps == steps and found.algorithm.advantage_method == "rloo"
        assert known in (None, (len(MERGED), len(LOADED)))
        known = len(MERGED), len(LOADED)
    expected = by_hydra(words, str(tmp_path))
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    assert OmegaConf.to_object(without_hydra(found)) == OmegaConf.to_object(without_hydra(expected))
    (tmp_path / "experiment/own.yaml").write_text("# @package _global_\ntrainer: {max_steps: many}\n")
    sentences = set()
    for compose in (merge_with_hydra, by_hydra):
        with pytest.raises(UserError) as wrong:
            compose(words, str(tmp_path))
        sentences.add(str(wrong.value))
    assert len(sentences) == 1
