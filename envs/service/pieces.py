"""Pieces of JSON that are the same in every call and result; each of them is one token of the tiny policy."""

from __future__ import annotations

import json

from envs.service.store import SHOWN, Store
from mtrl.environments.tool_calls import format_call
from mtrl.environments.tools import toolbox

_HOLE = "\0"


def tokens() -> tuple[str, ...]:
    """Return the pieces of the calls of every tool, and of their results."""
    texts = [format_call("end_conversation", {})]
    for name, tool in toolbox(Store({})).items():
        texts.append(format_call(name, dict.fromkeys(tool.schema["function"]["parameters"]["properties"], _HOLE)))
    texts += [json.dumps({"reference": _HOLE}), json.dumps({"recorded": "yes"}), json.dumps({"identity": "wrong"})]
    texts.append(json.dumps({"identity": _HOLE, **dict.fromkeys(SHOWN, _HOLE)}))
    pieces = (piece for text in texts for piece in text.split(r"\u0000"))
    return tuple(dict.fromkeys(pieces))
