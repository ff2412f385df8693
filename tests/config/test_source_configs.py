"""The configuration of each source of a mixture, and the errors of wrong ones."""

import pytest

from mtrl.config.mixture import described_tasks, source_configs, weights_of
from mtrl.config.schema import Config, DataConfig, EnvironmentConfig, RewardConfig
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
    assert source_configs(mixture()) == {} and weights_of(mixture(words=WORDS, sql=SQL)) == {"words": 1.0, "sql": 3.0}
    assert described_tasks(mixture(words=WORDS, sql=SQL)) == (
        "25% words: gsm8k, synthetic rows; 75% sql: text_to_sql, synthetic rows"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weight": -1, **WORDS}, "environments.a.weight=-1 must be a number of at least 0"),
        ({"weight": "x", **WORDS}, "environments.a.weight=x must be a number of at least 0"),
        ({"weight": 0, **WORDS}, "the weights of environments a sum to 0"),
        ({"weight": 2}, "environments.a sets neither environment nor data"),
        ({"enviroment": {}, **WORDS}, "environments.a.enviroment is not a key of a source; did you mean"),
        ({"environment": {"nam": "x"}}, "did you mean environments.a.environment.name?"),
        ({"environment": {"retries": 2}}, "cannot differ between the sources of a run; set environment.retries"),
        ({"data": {"max_train_rows": "many"}}, "environments.a.data.max_train_rows=many must be an integer or null"),
        ({"data": 3}, "environments.a.data=3 must be a section"),
        (3, "environments.a=3 must be a section with weight, environment, data, reward"),
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
