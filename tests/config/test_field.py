"""Fields with allowed values are ordinary fields, and their values are checked."""

from dataclasses import dataclass, fields
from math import inf, nan

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from mtrl.config.field import Bound, function, number, one_of, setting


@dataclass
class Section:
    share: float = number(0.5, above=0, below=1, why="it is a share")
    rows: int | None = number(None, at_least=1)
    mode: str = one_of("wait", "drop")
    credit: str | None = one_of(None, "turn", "trajectory", refused={"token": "needs a critic; set turn"})
    loss: str = function("ppo", "gspo", aliases={"regular": "ppo"})
    cap: float = number(2.0, above=0, read_with={"loss": ("gspo",)})
    paths: list[str] = setting(factory=list, program="mtrl evaluate")
    threads: int | None = setting(None, affects_policy=False)


@pytest.mark.parametrize(
    ("bound", "within", "broken"),
    [
        (Bound(at_least=1), (1, 1.0), {0: "at least 1", 0.99: "at least 1", nan: "at least 1", inf: "a finite number"}),
        (Bound(above=0), (1e-9, 5), {0: "above 0", -1: "above 0", nan: "above 0"}),
        (Bound(at_most=1), (-5, 1), {1.01: "at most 1", nan: "at most 1", -inf: "a finite number"}),
        (Bound(at_least=0, at_most=1), (0, 0.5, 1), {-0.1: "at least 0", 2: "at most 1"}),
        (Bound(above=0, at_most=1), (0.1, 1), {0: "above 0", 2: "at most 1"}),
        (Bound(above=0, below=1), (0.01, 0.99), {0: "above 0", 1: "below 1", nan: "above 0"}),
        (Bound(), (-1e300, 0), {-inf: "a finite number", nan: "a finite number"}),
        (Bound(above=0, may_be_infinite=True), (1, inf), {0: "above 0", -inf: "above 0", nan: "above 0"}),
    ],
    ids=str,
)
def test_the_bound_that_is_broken_is_named(bound, within, broken):
    assert [bound.broken_by(value) for value in within] == [None] * len(within)
    assert {value: bound.broken_by(value) for value in broken} == broken


def test_declared_bounds_and_words_are_in_the_metadata():
    stated = {entry.name: dict(entry.metadata) for entry in fields(Section)}
    assert stated == {
        "share": {"bound": Bound(above=0, below=1, why="it is a share")},
        "rows": {"bound": Bound(at_least=1)},
        "mode": {"choices": ("wait", "drop"), "refused": {}},
        "credit": {"choices": ("turn", "trajectory"), "refused": {"token": "needs a critic; set turn"}},
        "loss": {"functions": ("ppo", "gspo", "regular"), "aliases": {"regular": "ppo"}},
        "cap": {"bound": Bound(above=0), "read_with": {"loss": ("gspo",)}},
        "paths": {"program": "mtrl evaluate", "affects_policy": False},
        "threads": {"affects_policy": False},
    }


def test_defaults_and_types_are_those_of_plain_fields():
    assert Section() == Section(0.5, None, "wait", None, "ppo", 2.0, [], None)
    cfg = OmegaConf.structured(Section)
    checked = {"share": 0.5, "rows": None, "mode": "wait", "credit": None}
    assert cfg == {**checked, "loss": "ppo", "cap": 2.0, "paths": [], "threads": None}
    cfg.rows, cfg.share = 3, 1
    assert OmegaConf.to_object(cfg) == Section(share=1.0, rows=3)
    with pytest.raises(ValidationError):
        cfg.rows = "many"
    with pytest.raises(ValidationError):
        cfg.mode = None
