"""The configuration of each source of a mixture, and the errors of wrong ones."""

from dataclasses import replace

import pytest

from mtrl.config.mixture import described_tasks, group_sizes, source_configs, weights_of
from mtrl.config.schema import Config, DataConfig, EnvironmentConfig, RewardConfig
from mtrl.config.source_weights import Weight
from mtrl.errors import UserError

WORDS = {"environment": {"name": "gsm8k", "config": {"calculator": True}}}
SQL = {"weight": 3, "environment": {"name": "text_to_sql"}, "data": {"max_train_rows": 5}}


def mixture(**sources):
    """Return the configuration of a run on the sources, whose own task is a vault with a setting."""
    return Config(
        environment=EnvironmentConfig(target="vault.Vault", name="vault", config={"digits": 3}, prompt="full"),
        data=DataConfig(max_test_rows=7),
        reward=RewardConfig(components={"environment": 1.0, "format": 0.5}),
        environments=sources,
    )


def test_a_source_changes_only_the_keys_that_it_sets_and_another_task_starts_with_an_empty_config():
    own = source_configs(mixture(words=WORDS, more={"data": {"path": "rows"}, "reward": {"components": {"format": 0}}}))
    words, more = own["words"], own["more"]
    assert (words.environment.name, words.environment.target) == ("gsm8k", None)
    assert words.environment.config == {"calculator": True} and words.environment.prompt == "full"
    assert words.data == DataConfig(max_test_rows=7) and words.environments == {}
    assert more.environment == mixture().environment and more.data == DataConfig(path="rows", max_test_rows=7)
    assert more.reward.components == {"environment": 1.0, "format": 0}
    assert source_configs(mixture()) == {} and group_sizes(mixture()) == {}
    constant = {"words": Weight(((0, 1.0),)), "sql": Weight(((0, 3.0),))}
    assert weights_of(mixture(words=WORDS, sql=SQL)) == constant


def test_a_source_may_have_limits_and_a_group_size_of_its_own():
    short = {
        "generator": {"max_turns": 2, "sampling_params": {"max_generate_length": 9}},
        "algorithm": {"group_size": 4},
        "environment": {"step_timeout": 3, "retries": 0},
        "data": {"path": "rows"},
    }
    config = mixture(short=short, sql=SQL)
    own = source_configs(config)["short"]
    assert own.generator.max_turns == 2 and own.algorithm.group_size == 4
    assert own.generator.sampling_params == replace(config.generator.sampling_params, max_generate_length=9)
    assert replace(own.environment, step_timeout=30.0, retries=1) == config.environment
    assert (own.environment.step_timeout, own.environment.retries) == (3, 0)
    assert source_configs(config)["sql"].generator == config.generator
    assert group_sizes(config) == {"short": 4, "sql": 8}


def test_the_first_line_has_the_share_the_turns_and_the_group_size_of_each_source():
    assert described_tasks(mixture(words=WORDS, sql=SQL)) == (
        "25% words: gsm8k, synthetic rows, at most 5 turns; 75% sql: text_to_sql, synthetic rows, at most 5 turns"
    )
    words = WORDS | {"generator": {"max_turns": 1}, "algorithm": {"group_size": 4}, "weight": [[0, 1], [9, 0]]}
    assert described_tasks(mixture(words=words, sql=SQL)) == (
        "25% at first words: gsm8k, synthetic rows, at most 1 turns, groups of 4; 75% sql: text_to_sql, synthetic "
        "rows, at most 5 turns"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weight": -1, **WORDS}, "environments.a.weight=-1 must be a number of at least 0"),
        ({"weight": "x", **WORDS}, "environments.a.weight=x must be a number of at least 0"),
        ({"weight": 0, **WORDS}, "the weights of environments a sum to 0, so no row"),
        ({"weight": [[0, 1], [9, 0]], **WORDS}, "the weights of environments a sum to 0 after 9 rows"),
        (
            {"weight": [[9, 1], [3, 2]], **WORDS},
            "environments.a.weight=[[9,1],[3,2]] is no schedule: it must be a list",
        ),
        ({"weight": [[0, -1]], **WORDS}, "environments.a.weight=[[0,-1]] is no schedule"),
        ({"weight": [[-1, 1]], **WORDS}, "environments.a.weight=[[-1,1]] is no schedule"),
        ({"weight": [1, 2], **WORDS}, "environments.a.weight=[1,2] is no schedule"),
        ({"weight": [], **WORDS}, "environments.a.weight=[] is no schedule"),
        ({"weight": 2}, "environments.a sets neither environment nor data"),
        ({"enviroment": {}, **WORDS}, "environments.a.enviroment is not a key of a source; did you mean"),
        ({"environment": {"nam": "x"}}, "did you mean environments.a.environment.name?"),
        (
            {"environment": {"max_workers": 2}},
            "cannot differ between the sources of a run; set environment.max_workers",
        ),
        (
            {"data": {}, "generator": {"backend": "vllm"}, **WORDS},
            "generator.backend cannot differ between the sources",
        ),
        (
            {"generator": {"sampling_params": {"temperature": 2}}, **WORDS},
            "environments.a.generator.sampling_params.temperature cannot differ between the sources of a run",
        ),
        ({"algorithm": {"group_size": "x"}, **WORDS}, "environments.a.algorithm.group_size=x must be an integer"),
        ({"generator": {"max_turn": 2}, **WORDS}, "did you mean environments.a.generator.max_turns?"),
        ({"data": {"max_train_rows": "many"}}, "environments.a.data.max_train_rows=many must be an integer or null"),
        ({"data": 3}, "environments.a.data=3 must be a section"),
        (3, "environments.a=3 must be a section with weight, environment, data, reward, generator"),
    ],
)
def test_a_wrong_source_is_refused_with_its_key(source, message):
    with pytest.raises(UserError) as error:
        config = mixture(a=source)
        weights_of(config), source_configs(config)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["success", "a/b", "1st", "a.b"])
def test_a_name_that_metrics_cannot_have_is_refused(name):
    with pytest.raises(UserError, match="cannot be the name of a source"):
        source_configs(mixture(**{name: WORDS}))
