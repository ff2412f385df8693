"""All texts of the environment, except the procedures and the tool results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from envs.sop.domain import Domain
from envs.sop.output import CLOSE, OPEN
from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message

ROLE = """You carry out a standard operating procedure on one case. Call the tools; do not guess their results. \
Use the case's own values as arguments.

The procedure:
"""
FORM = """When you are done, call no more tools, and end with one JSON object that has exactly these fields:
"""
FORM_COUNTS = "\nUse this form, even if the procedure shows another one."


def short_prompt(domain: Domain, case: str) -> list[Message]:
    """Return the prompt for the tiny policy, which knows the procedure from its warm start."""
    return [{"role": "user", "content": f"{domain.order}\n{case}"}]


def full_prompt(
    procedure: str, case: Mapping[str, str], fields: Mapping[str, str], example: Sequence[Line] = ()
) -> list[Message]:
    """Return the prompt for a language model: a system message with procedure, form and worked example, and a user
    message with the case. A SOP-Bench folder has no example."""
    form = f"{OPEN}{json.dumps(dict(fields), ensure_ascii=False)}{CLOSE}"
    system = f"{ROLE}\n{procedure}\n\n{FORM}{form}{FORM_COUNTS}"
    system = with_example(system, example) if example else system
    return [{"role": "system", "content": system}, {"role": "user", "content": case_text(case)}]


def case_text(case: Mapping[str, str]) -> str:
    """Return the user message of a case."""
    return "\n".join(f"{name}: {value}" for name, value in case.items())
