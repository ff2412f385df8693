"""Classes of other frameworks are recognised as environments, and other classes are refused."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mtrl.environments.adapters import adapt, extra_hint
from mtrl.environments.adapters.base import EnvironmentAdapter, metrics_of, row_seed, with_text
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import get_family
from mtrl.errors import UserError
from mtrl.types import FinishReason, Trajectory, Turn
from tests import forked


class Gym:
    def reset(self): ...
    def step(self, action): ...


class SkyRL:
    def init(self, prompt): ...
    def step(self, action): ...


class Tinker:
    async def initial_observation(self): ...
    async def step(self, message): ...


class TRL:
    def reset(self, **row): ...
    def look(self) -> str:
        """Look."""


class OnlyReset:
    def reset(self): ...


class Forgetful:
    """An environment of mtrl without its base class."""

    def reset(self, row): ...
    def step(self, response, ground_truth): ...


class Ours(BaseEnvironment): ...


def makes_a_gym(size: int = 1) -> Gym: ...
def makes_something(size: int = 1): ...
def makes_a_riddle() -> "NoSuchName": ...  # noqa: F821


class Whole(Gym):
    """Defines parts of a family by static methods; `gold` is a plain method and no part of the family."""

    @staticmethod
    def score(trajectory, row):
        return 0.25

    @classmethod
    def load(cls, data, seed, **config):
        return cls.__name__

    def gold(self): ...


@pytest.mark.parametrize(
    ("value", "adapter"),
    [
        (Gym, "GymnasiumAdapter"),
        (SkyRL, "SkyRLGymAdapter"),
        (Tinker, "MessageEnvAdapter"),
        (TRL, "TRLAdapter"),
        (makes_a_gym, "GymnasiumAdapter"),
        (OnlyReset, None),
        (Forgetful, None),
        (Ours, None),
        (Turn, None),
        (makes_something, None),
        (makes_a_riddle, None),
        (7, None),
        (types, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_classes_and_functions_are_recognised(value, adapter):
    adapted = adapt(value)
    if adapter is None:
        assert adapted is None
        return
    assert [cls.__name__ for cls in adapted.__mro__][1] == adapter
    assert issubclass(adapted, EnvironmentAdapter) and adapted.__name__ == value.__name__ and adapted.foreign is value


def test_a_target_becomes_a_family_whose_success_is_a_reward_of_one():
    family = get_family("x", f"{__name__}.Gym")
    turn = Turn([], [], [], [], FinishReason.STOP, "", {}, reward=0.5)
    assert family.name == "Gym" and family.demonstrate is None
    assert [family.score(Trajectory("t", "g", 0, [turn] * n), {}) for n in (1, 2)] == [0.0, 1.0]


def test_static_methods_are_parts_of_the_family():
    family = get_family("x", f"{__name__}.Whole")
    assert family.score(None, {}) == 0.25 and family.load(None, 0) == "Whole" and family.gold is None


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("skyrl_gym", "skyrl-gym"),
        ("gymnasium.spaces", "gymnasium"),
        ("openenv.core", "openenv"),
        ("tinker_cookbook.rl", "tinker"),
        ("verifiers", "verifiers"),
    ],
)
def test_a_framework_that_is_missing_is_named_with_its_extra(module, extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    (tmp_path / "needs_it.py").write_text(f"import {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=rf"install it with: pip install 'mtrl-agents\[{extra}\]'"):
        get_family("x", "needs_it.Environment")


def test_other_import_errors_name_no_extra():
    assert extra_hint(ImportError("no", name="numpy")) == "" and extra_hint(ValueError("no")) == ""


def test_a_class_of_no_framework_is_refused():
    with pytest.raises(
        UserError, match="Forgetful is a type; it must be a Family or a BaseEnvironment class, or an en"
    ):
        get_family("x", f"{__name__}.Forgetful")


def test_adapt_imports_no_framework():
    frameworks = "gymnasium skyrl_gym nemo_gym openenv tinker_cookbook verifiers trl torch"
    code = (
        "import sys, mtrl.environments.family, mtrl.environments.adapters as a\n"
        "from mtrl.environments.adapters import base, gymnasium, nemo_gym, openenv, openenv_tools, skyrl_gym\n"
        "from mtrl.environments.adapters import tinker, trl, verifiers\n"
        "class Gym:\n    def reset(self): ...\n    def step(self, action): ...\n"
        f"assert a.adapt(Gym); print([m for m in '{frameworks}'.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_row_seeds_come_from_the_row_or_its_id():
    assert row_seed({"id": "a", "seed": 7}) == 7 and row_seed({"id": "a", "seed": 0}) == 0
    assert row_seed({"id": "a"}) == row_seed({"id": "a", "seed": None}) == 715526629
    assert 0 <= row_seed({"id": "b"}) < 2**31


def test_metrics_are_the_finite_numbers():
    info = {"a": 1, "b": True, "c": "x", "d": None, "e": float("inf"), "f": [1], 3: 0.5}
    assert metrics_of(info) == {"a": 1.0, "b": 1.0, "3": 0.5}
    assert metrics_of(None) == metrics_of([("a", 1)]) == {}


def test_with_text_appends_to_the_last_user_message():
    user = [{"role": "user", "content": "a"}]
    assert with_text(user, "b") == [{"role": "user", "content": "a\n\nb"}]
    assert user == [{"role": "user", "content": "a"}], "the row is unchanged"
    system = [{"role": "system", "content": "s"}]
    assert with_text(system, "b") == [*system, {"role": "user", "content": "b"}]


COIN = '''
from types import SimpleNamespace


class Coin:
    """A Gymnasium class without a base class; the right action is heads."""

    def reset(self, seed=None):
        return f"coin {seed % 7}", {}

    def step(self, action):
        return "", float(action == "heads"), True, False, {}

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: rng.choice(["heads", "tails"]))
'''


@pytest.mark.slow
def test_a_whole_run_on_a_foreign_class(tmp_path):
    (tmp_path / "coin.py").write_text(COIN)
    root = Path(__file__).parents[3]
    overrides = ["experiment=null", "environment.target=coin.Coin", "name=coin", "debug=fast", "run_dir=run",
                 "tracker.plots=false", "diagnosis.live=none"]  # fmt: skip
    done = forked.run(
        [sys.executable, "-m", "mtrl.main", *overrides],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (tmp_path / "run" / "trajectories" / "train_step_000001.jsonl").read_text().splitlines()
    for line in lines:
        group = json.loads(line)
        for trajectory in group.get("trajectories", [group]):
            (turn,) = trajectory["turns"]
            assert turn["reward"] == float(turn["text"] == "heads") and trajectory["error"] is None
            assert turn["observation"][0]["content"].startswith("coin ")
