"""All texts of the environment, except the procedures and the tool results."""

from __future__ import annotations

import json
from collections.abc import Mapping

from envs.sop.domain import Domain
from envs.sop.output import CLOSE, OPEN
from mtrl.types import Message

ROLE = """You carry out a standard operating procedure on one case. Ask the tools; do not guess what they would say. \
Use the case's own values as arguments.

The procedure:
"""
FORM = """When you are done, call no more tools, and end with one JSON object that has exactly these fields:
"""
FORM_COUNTS = "\nThis form counts, also where the procedure shows another one."


def prompt(domain: Domain, case: str, full: bool) -> list[Message]:
    """Return the prompt of a generated row. The tiny policy knows the procedure from its warm start."""
    if not full:
        return [{"role": "user", "content": f"{domain.order}\n{case}"}]
    return procedure_prompt(domain.procedure, {domain.case: case}, domain.fields)


def procedure_prompt(procedure: str, case: Mapping[str, str], fields: Mapping[str, str]) -> list[Message]:
    """Return the prompt for a language model: a system message with procedure and form, and a user message with the
    case."""
    form = f"{OPEN}{json.dumps(dict(fields), ensure_ascii=False)}{CLOSE}"
    system = f"{ROLE}\n{procedure}\n\n{FORM}{form}{FORM_COUNTS}"
    said = "\n".join(f"{name}: {value}" for name, value in case.items())
    return [{"role": "system", "content": system}, {"role": "user", "content": said}]
