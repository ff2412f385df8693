"""Rows of the sop family: generated cases of the procedures, and a user's SOP-Bench folder for evaluation."""

from __future__ import annotations

import json
import logging
import random
from functools import cache
from hashlib import sha256
from itertools import product, zip_longest
from typing import Any

from envs.sop.domain import Domain, carry_out
from envs.sop.domains import DOMAINS
from envs.sop.output import CLOSE, OPEN
from envs.sop.prompts import case_text, full_prompt, short_prompt
from envs.sop.sop_bench import LICENCE, load_sop_bench
from envs.sop.spec import check_tools
from mtrl.datasets import Splits, cap
from mtrl.environments.base import Resources
from mtrl.environments.tool_calls import format_call
from mtrl.environments.tools import toolbox
from mtrl.environments.worked_example import Line, calling
from mtrl.errors import UserError
from mtrl.types import Message, Row

log = logging.getLogger(__name__)

HELD_OUT = 8
"""Number of cases of which one is held out, on average."""
CASES = tuple(f"{letter}{number:03}" for letter, number in product("ABCDEFGHJK", range(1000)))
"""Ids of all cases that a domain can have."""
EXAMPLE_CASE = "Z100"
"""Id of the case of the worked examples, which is none of `CASES`."""


def load(
    data: Any,
    seed: int,
    domain: str = "all",
    prompt: str = "short",
    format_coef: float = 0.1,
    tools_spec: str | None = None,
    sop_bench: str | None = None,
) -> Splits:
    """Return generated cases; with `sop_bench`, the rows of that folder are held out instead of generated cases.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated cases.
        domain: one of `DOMAINS`, or all, which alternates between them.
        prompt: full, with procedure, form and a worked example for a language model, or short.
        format_coef: used only by the environment.
        tools_spec: a JSON file with the production tools, which the tools of `domain` must equal.
        sop_bench: a folder of one SOP-Bench domain, for evaluation.

    Raises:
        UserError: the domain is unknown, `data.path` is set, the tools differ, or the folder cannot be read.
    """
    if data.path is not None:
        raise UserError(
            f"data.path={data.path} would be trained on; sop trains on generated cases only, and {LICENCE}: "
            "set data.path=null, and environment.config.sop_bench to a folder to evaluate on"
        )
    if domain not in (*DOMAINS, "all"):
        raise UserError(f"environment.config.domain={domain} is not known; choose one of {', '.join(DOMAINS)}, all")
    chosen = [DOMAINS[domain]] if domain != "all" else list(DOMAINS.values())
    if tools_spec is not None:
        _check_spec(tools_spec, chosen)
    full = prompt == "full"
    train = _rows(chosen, seed, "train", data.synthetic_train_rows, full)
    if sop_bench is not None:
        return cap(Splits(train, load_sop_bench(sop_bench)), data)
    return cap(Splits(train, _rows(chosen, seed, "test", data.synthetic_test_rows, full)), data)


def gold(row: Row) -> list[str]:
    """Return the responses of a player that follows the procedure exactly.

    The procedure of a SOP-Bench folder cannot be executed here. Its rows get one recorded call and then the labels,
    which verifies that prompt, labels and scorer are consistent.
    """
    if row["domain"] in DOMAINS:
        turns, answer = carry_out(DOMAINS[row["domain"]], row["case"], row["fixture"])
    else:
        turns, answer = [[(line["tool"], line["arguments"])] for line in row["fixture"][:1]], row["ground_truth"]
    return [*("".join(format_call(*call) for call in calls) for calls in turns), final_output(answer)]


def worked_example(row: Row) -> Row | None:
    """Return the row that the worked example of the row's full prompt solves; None for the rows of a SOP-Bench folder,
    whose prompts have no example."""
    return example_row(row["domain"]) if row["domain"] in DOMAINS else None


def example_row(domain: str) -> Row:
    """Return the row of a domain that its worked example solves."""
    return _row(DOMAINS[domain], 0, EXAMPLE_CASE, "example", full=False)


@cache
def example_lines(domain: str) -> tuple[Line, ...]:
    """Return the worked example of a domain: its procedure, carried out on the example's case."""
    row = example_row(domain)
    turns, answer = carry_out(DOMAINS[domain], EXAMPLE_CASE, row["fixture"])
    lines: list[Line] = [("User", case_text({DOMAINS[domain].case: EXAMPLE_CASE}))]
    with Resources() as resources:
        tools = toolbox(DOMAINS[domain].open(row["fixture"], resources))
        for calls in turns:
            results = [tools[name].function(**arguments).model_dump(mode="json") for name, arguments in calls]
            lines += [calling(*call) for call in calls]
            lines += [("Tool", json.dumps(result, ensure_ascii=False)) for result in results]
    return (*lines, ("Assistant", final_output(answer)))


def decoys(row: Row) -> list[str]:
    """Return well-formed answers that are wrong in one field, which holds the value of another field or "n/a"."""
    truth = row["ground_truth"]
    wrong = [{**truth, name: other} for name in truth for other in (*truth.values(), "n/a") if other != truth[name]]
    return [final_output(fields) for fields in wrong]


def final_output(fields: dict[str, str]) -> str:
    """Return an answer in the form that reward and scorer read."""
    return f"{OPEN}{json.dumps(fields, ensure_ascii=False)}{CLOSE}"


def is_held_out(domain: str, case: str) -> bool:
    """Whether the case belongs to the test split. This depends only on its id, not on the seed."""
    return sha256(f"{domain}/{case}".encode()).digest()[0] % HELD_OUT == 0


def _check_spec(path: str, chosen: list[Domain]) -> None:
    if len(chosen) != 1:
        raise UserError(
            f"environment.config.tools_spec={path} is of one domain; set environment.config.domain to one of "
            f"{', '.join(DOMAINS)}"
        )
    check_tools(chosen[0], path)


def _rows(domains: list[Domain], seed: int, split: str, count: int, full: bool) -> list[Row]:
    share = -(-count // len(domains))
    by_domain = [_domain_rows(domain, seed, split, share, full) for domain in domains]
    rows = [row for turn in zip_longest(*by_domain) for row in turn if row is not None][:count]
    if len(rows) < count:
        log.warning("sop: %d different %s cases instead of %d: there are no more", len(rows), split, count)
    return rows


def _domain_rows(domain: Domain, seed: int, split: str, count: int, full: bool) -> list[Row]:
    """Return up to `count` distinct cases of a split. The record of a case depends only on the seed and its id."""
    cases = [case for case in CASES if is_held_out(domain.name, case) == (split == "test")]
    random.Random(f"sop/{seed}/{domain.name}/{split}").shuffle(cases)
    return [_row(domain, seed, case, split, full) for case in cases[:count]]


def _row(domain: Domain, seed: int, case: str, split: str, full: bool) -> Row:
    record = domain.draw(random.Random(f"sop/{seed}/{domain.name}/{case}"), case)
    return {
        "id": f"{domain.name}-{case}",
        "prompt": _full_prompt(domain, case) if full else short_prompt(domain, case),
        "ground_truth": domain.decide(record),
        "split": split,
        "domain": domain.name,
        "case": case,
        "fixture": domain.fixture(record),
    }


def _full_prompt(domain: Domain, case: str) -> list[Message]:
    return full_prompt(domain.procedure, {domain.case: case}, domain.fields, example_lines(domain.name))
