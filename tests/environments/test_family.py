"""Task families are found by their name or by the path of a class."""

import re
from dataclasses import fields

import pytest

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import BUILT_IN, Family, family_of_class, get_family, register, reward_is_success
from mtrl.errors import UserError
from mtrl.types import FinishReason, Trajectory, Turn


class Own(BaseEnvironment):
    pass


MINE = Family("mine", Own, load=lambda data, seed: None, score=lambda trajectory, row: 1.0)


@pytest.mark.parametrize("name", ["load", "score", "gold", "measure"])
def test_a_function_of_a_family_that_takes_self_is_refused(name):
    cls = type("Mistaken", (BaseEnvironment,), {name: lambda self, *rest: None})
    with pytest.raises(UserError, match=f"Mistaken.{name} takes self, .*write @staticmethod above it"):
        family_of_class(cls)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_families_keep_their_name(name):
    assert get_family(name).name == name


def test_a_registered_family_is_found(monkeypatch):
    monkeypatch.setattr("mtrl.environments.family.REGISTERED", {})
    assert register(MINE) is MINE and get_family("mine") is MINE


def test_a_target_is_imported():
    assert get_family("whatever", f"{__name__}.MINE") is MINE


def test_a_bare_class_becomes_a_family():
    family = get_family("whatever", f"{__name__}.Own")
    assert (family.name, family.environment, family.demonstrate) == ("Own", Own, None)

    def score(reward):
        turn = Turn([], [], [], [], FinishReason.STOP, "", {}, reward=reward)
        return family.score(Trajectory("t", "g", 0, [turn, turn]), {})

    assert (score(0.5), score(0.4)) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["score", "gold", "demonstrate"])
def test_an_async_function_of_a_family_is_refused(name):
    """The pre-flight and `mtrl play` would await an async scorer, a run would not."""

    async def waits(*args):
        return 1.0

    with pytest.raises(UserError, match=f"^{name} of Waiting is async; write `def {name}`"):
        family_of_class(type("Waiting", (Own,), {name: staticmethod(waits)}))


OPTIONAL = (
    *("demonstrate", "gold", "decoys", "answered", "worked_example", "explain", "measure"),
    *("waits_for_processes", "offline", "shows_images"),
)


@pytest.mark.parametrize("turns", [1, 3, 6, 10, 49, 150])
def test_without_a_scorer_a_sum_of_one_succeeds_whatever_its_rounding(turns):
    def of(reward):
        turn = Turn([], [], [], [], FinishReason.STOP, "", {"role": "assistant", "content": ""}, reward=reward)
        return Trajectory("t", "g", 0, [turn] * turns)

    assert reward_is_success(of(1 / turns), {}) == 1.0 and reward_is_success(of(0.999 / turns), {}) == 0.0


def test_attributes_of_a_bare_class_become_fields_of_the_family():
    whole = type("Whole", (Own,), {name: object() for name in ("load", "score", *OPTIONAL)})
    family = family_of_class(whole)
    assert all(getattr(family, name) is getattr(whole, name) for name in ("load", "score", *OPTIONAL))
    named = {field.name for field in fields(Family)} - {"name", "environment", "load", "score"}
    assert named == {*OPTIONAL, "config_keys", "tokens"}, "a new field is read from a class too"


@pytest.mark.parametrize(
    ("name", "target", "sentence"),
    [
        (
            "chess",
            None,
            f"environment.name=chess is not known; choose one of {', '.join(sorted(BUILT_IN))}, or set environment.",
        ),
        ("x", "no.such.Thing", "environment.target=no.such.Thing cannot be imported"),
        ("x", "mtrl.types.Nothing", "environment.target=mtrl.types.Nothing cannot be imported"),
        ("x", "word", "environment.target=word names no class; write module.Class, such as vault.Vault"),
        ("x", "mtrl.types.Turn", "environment.target=mtrl.types.Turn is a type; it must be a Family or"),
    ],
)
def test_a_name_or_target_that_is_no_family_is_a_user_error(name, target, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        get_family(name, target)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("x = 1\nretrun 0.0\n", "(invalid syntax (broken.py, line 2)); fix the module"),
        ("x = 1\n\nx.y = undefined\n", "(NameError in broken.py, line 3: name 'undefined' is not defined); fix the"),
    ],
)
def test_a_module_that_cannot_be_imported_names_the_line(tmp_path, monkeypatch, code, sentence):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=re.escape(f"environment.target=broken.Env cannot be imported {sentence}")):
        get_family("x", "broken.Env")


def test_an_environment_without_step_raises_not_implemented():
    with pytest.raises(NotImplementedError, match=r"Own does not define step\(response, ground_truth\)"):
        Own().step("x", {})
