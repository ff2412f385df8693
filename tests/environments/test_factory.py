"""Configurations become tasks; errors name keys that do not fit the environment."""

import os
import random
import threading
import time

import pytest
from omegaconf import OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import compose, merge
from mtrl.config.overrides import normalise
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.factory import environment_factory, load_task, try_out
from mtrl.environments.family import Family
from mtrl.errors import UserError

ROWS = [{"id": str(n), "prompt": [], "ground_truth": {}} for n in range(4)]


class Strict(BaseEnvironment):
    """Accepts only the arguments that it names."""

    closed = 0

    def __init__(self, max_turns=5, hard=False):
        super().__init__(max_turns)
        self.hard = hard

    async def close(self):
        Strict.closed += 1

    @staticmethod
    def load(data, seed, hard=False):
        return Splits(ROWS[:2], ROWS[2:])


class Calculates(Strict):
    """Accepts the key of gsm8k."""

    def __init__(self, max_turns=5, calculator=False):
        super().__init__(max_turns)

    @staticmethod
    def load(data, seed, **config):
        return Splits(ROWS[:2], ROWS[2:])


class Open(BaseEnvironment):
    """Accepts any key, like the environment of the README."""

    load = Calculates.load


def anything(name="x", **more):
    """Accepts any keyword, like gymnasium.make."""


FOREIGN = Family(
    "foreign", type("Foreign", (Open,), {"foreign": staticmethod(anything)}), Open.load, lambda t, row: 0.0
)


def composed(*overrides):
    """Return the configuration and its warnings."""
    cfg = merge(normalise([f"environment.target={__name__}.{overrides[0]}", *overrides[1:]]))
    return cfg, check(cfg)


def config_of(*overrides):
    return OmegaConf.to_object(compose(overrides))


def test_the_task_of_the_default_experiment():
    config = config_of("data.synthetic_train_rows=8", "data.synthetic_test_rows=4")
    task = load_task(config)
    assert (task.family.name, len(task.splits.train), len(task.splits.test)) == ("gsm8k", 8, 4)
    first, second = task.make_environment(), task.make_environment()
    assert first is not second and (first.max_turns, first.calculator is not None) == (4, True)
    assert environment_factory(config, task.family, 9)().max_turns == 9


def test_environments_with_several_reward_schemes_get_the_configured_one():
    config = config_of("reward=guide")
    assert load_task(config).make_environment.keywords["reward"] == "guide"
    cfg, _ = composed("Open")
    assert "reward" not in load_task(OmegaConf.to_object(cfg)).make_environment.keywords


def test_the_limits_of_rows_hold_for_loaders_that_ignore_them(monkeypatch):
    monkeypatch.setattr(Open, "load", lambda *_, **config: Splits(ROWS[:2], ROWS[2:], ROWS[:1]))
    cfg, _ = composed("Open", "data.max_train_rows=1", "data.max_test_rows=1")
    splits = load_task(OmegaConf.to_object(cfg)).splits
    assert (splits.train, splits.test, splits.validation) == (ROWS[:1], ROWS[2:3], ROWS[:1])


def test_loading_a_task_does_not_use_the_global_random_state():
    before = random.getstate()
    load_task(config_of())
    assert random.getstate() == before


def test_load_task_makes_and_closes_one_environment():
    cfg, _ = composed("Strict")
    closed = Strict.closed
    load_task(OmegaConf.to_object(cfg))
    assert Strict.closed == closed + 1


class Sleeps(BaseEnvironment):
    def __init__(self, max_turns=5):
        super().__init__(max_turns)
        time.sleep(60)


class SleepsAtTheEnd(BaseEnvironment):
    def close(self):
        time.sleep(60)


class SleepsAtTheEndAsync(BaseEnvironment):
    async def close(self):
        time.sleep(60)


class Breaks(BaseEnvironment):
    def close(self):
        raise OSError("the lock is missing")


class Leaves(BaseEnvironment):
    def __init__(self, max_turns=5):
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Sleeps, "making an environment of .* took longer than environment.step_timeout=0.2 s; fix the environment"),
        (SleepsAtTheEnd, "closing an environment of .* took longer than environment.step_timeout=0.2 s"),
        (SleepsAtTheEndAsync, "closing an environment of .* took longer than environment.step_timeout=0.2 s"),
        (Breaks, "closing an environment of .* failed: OSError in test_factory.py, line .*: the lock is missing"),
        (Leaves, "making an environment of .* failed: SystemExit"),
    ],
)
def test_an_environment_that_hangs_or_fails_at_the_start_is_a_user_error(environment, message):
    config = config_of("environment.step_timeout=0.2")
    family = Family("own", environment, None, None)
    begun = time.monotonic()
    with pytest.raises(UserError, match=message):
        try_out(environment, config, family)
    assert time.monotonic() - begun < 10


def exits(*_, **config):
    os._exit(0)


def leaves(*_, **config):
    raise SystemExit(0)


def hangs(*_, **config):
    threading.Event().wait(60)


def breaks(*_, **config):
    return {}["rows"]


def mistypes(*_, **config):
    return len(5)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (exits, "failed: SystemExit in test_factory.py, line .*: os._exit.0. in an environment; fix the loader or"),
        (leaves, "failed: SystemExit in test_factory.py, line .*: 0; fix the loader or its data"),
        (hangs, "took longer than environment.episode_timeout=0.2 s; fix the loader or its data, or raise it"),
        (breaks, "failed: KeyError in test_factory.py, line .*: 'rows'; fix the loader or its data"),
        (mistypes, "failed: TypeError in test_factory.py, line .*; fix the loader or its data"),
    ],
)
def test_a_loader_that_hangs_or_fails_is_a_user_error(load, message, monkeypatch):
    monkeypatch.setattr(Open, "load", load)
    config = config_of("environment.name=x", f"environment.target={__name__}.Open", "environment.config={}")
    config.environment.episode_timeout = 0.2 if load is hangs else 60.0
    with pytest.raises(UserError, match=f"loading the rows of Open {message}"):
        load_task(config)


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("Strict", "hrd", "does not fit what loads the rows of Strict (got an unexpected keyword argument 'hrd')"),
        ("Calculates", "hrd", "environment.config.hrd is not a key of Calculates; it takes max_turns, calculator"),
    ],
)
def test_an_unknown_environment_key_is_refused(name, key, message):
    cfg, _ = composed(name, f"environment.config.{key}=1")
    with pytest.raises(UserError) as caught:
        load_task(OmegaConf.to_object(cfg))
    assert message in str(caught.value)


def test_an_environment_that_does_not_take_max_turns_gets_the_fix():
    """The message was that of a key of `environment.config`, which the user had not set."""

    class Fixed(Open):
        def __init__(self):
            super().__init__(3)

    config = config_of()
    config.environment.config = {}
    with pytest.raises(UserError, match="^Fixed does not take max_turns, .*; give its __init__ the arguments"):
        environment_factory(config, Family("x", Fixed, Fixed.load, lambda *of: 0.0))


def test_environment_keys_of_the_replaced_task_are_dropped_with_a_warning():
    cfg, warnings = composed("Strict", "environment.config.hard=true")
    assert cfg.environment.config == {"hard": True}
    target = f"{__name__}.Strict"
    assert warnings == [
        f"environment.config.calculator is left out: {target} does not take what environment.name=gsm8k does"
    ]
    assert check(cfg) == [], "the warning is given once"
    assert load_task(OmegaConf.to_object(cfg)).make_environment().hard is True


def test_environment_keys_that_the_target_accepts_stay():
    for name, more in (("Calculates", ()), ("Open", ()), ("Calculates", ("environment.config.hrd=1",))):
        cfg, warnings = composed(name, *more)
        assert cfg.environment.config.calculator is True and warnings == []


def test_a_foreign_function_with_arbitrary_keywords_gets_no_keys_of_the_replaced_task():
    cfg, warnings = composed("FOREIGN", "environment.config.id=lake")
    assert cfg.environment.config == {"id": "lake"} and len(warnings) == 1


def test_environment_keys_of_another_experiment_are_dropped_too():
    cfg, warnings = composed("Strict", "experiment=games_hf", "model=tiny", "model.path=null")
    assert cfg.environment.config == {} and "environment.name=games" in warnings[0]


def test_unknown_environment_keys_without_a_target_are_refused():
    with pytest.raises(UserError, match="environment.config.calculator is not a key of text_to_sql"):
        compose(["environment=text_to_sql"])


def test_what_the_loader_returns_is_checked(monkeypatch):
    monkeypatch.setattr(Open, "load", lambda *_, **config: ROWS)
    cfg, _ = composed("Open")
    with pytest.raises(UserError, match="load of Open returned a list; return Splits"):
        load_task(OmegaConf.to_object(cfg))
