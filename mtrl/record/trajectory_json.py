"""A trajectory as a line of JSON, byte for byte the same as `json.dumps` but three times as fast for long lists of
floats.

Most of a file of trajectories is log-probs, and Python takes half a microsecond to print each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import inf
from typing import Any

LONG = 16
"""Minimum length of a list for the fast printer, in numbers; shorter lists are not printed faster."""


def trajectory_line(data: Mapping[str, Any]) -> str:
    """Return `json.dumps(data, ensure_ascii=False)` of a trajectory (`mtrl.types.to_dict`)."""
    return _object({"turns": _turns}, data)


def floats(values: list[Any]) -> str:
    """Return `json.dumps(values)`."""
    if len(values) < LONG or set(map(type, values)) != {float}:
        return _plain(values)
    texts = _printer()(values)[1:-1].decode().split(",")
    # Both print the shortest digits that read back the same, but Python writes small and large numbers as 1e-05.
    for place in [place for place, size in enumerate(map(abs, values)) if size < 1e-4 or 1e16 <= size < inf]:
        texts[place] = repr(values[place])
    return f"[{', '.join(texts)}]"


@cache
def _printer() -> Callable[[list[float]], bytes]:
    """Return pydantic's printer, which is written in Rust. It is imported late, because readers of trajectories do not
    need it."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(list[float], config=ConfigDict(ser_json_inf_nan="constants")).dump_json


def _object(special: Mapping[str, Callable[[Any], str]], data: Mapping[str, Any]) -> str:
    members = (f"{json.dumps(key)}: {special.get(key, _plain)(value)}" for key, value in data.items())
    return f"{{{', '.join(members)}}}"


def _turns(turns: list[Mapping[str, Any]]) -> str:
    return f"[{', '.join(map(_turn, turns))}]"


_plain = partial(json.dumps, ensure_ascii=False)
_turn = partial(_object, dict.fromkeys(("action_logprobs", "trainer_logprobs", "advantages"), floats))
