"""Rows of the service family: generated cases, with a held-out split."""

from __future__ import annotations

import json
import logging
import random
from functools import cache
from hashlib import sha256
from itertools import product
from typing import Any

from envs.service.case import Case, Customer, Wish, draw, draw_order
from envs.service.clerk import END, careful, moves_of, response
from envs.service.customer import ScriptedCustomer, opening
from envs.service.prompts import full_prompt, short_prompt
from envs.service.store import REASONS, Store
from mtrl.datasets import Splits, cap
from mtrl.environments.tools import toolbox
from mtrl.environments.worked_example import Line, calling
from mtrl.errors import UserError
from mtrl.types import Row

log = logging.getLogger(__name__)

HELD_OUT = 8
"""Number of cases of which one is held out, on average."""
CASES = tuple(f"{letter}{number:03}" for letter, number in product("ABCDEFGHJK", range(1000)))
"""Numbers of all orders that a case can be about."""


def load(data: Any, seed: int, prompt: str = "short", customer: str = "scripted", endpoint: Any = None) -> Splits:
    """Return generated cases.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated cases.
        prompt: full, with the procedure and a worked example for a language model, or short.
        customer: used only by the environment.
        endpoint: used only by the environment.

    Raises:
        UserError: `data.path` is set.
    """
    if data.path is not None:
        raise UserError(f"data.path={data.path} has no effect: the rows of service are generated; set data.path=null")
    full = prompt == "full"
    counts = {"train": data.synthetic_train_rows, "test": data.synthetic_test_rows}
    train, test = (_rows(seed, split, count, full) for split, count in counts.items())
    return cap(Splits(train, test), data)


def gold(row: Row) -> list[str]:
    """Return the responses of an agent that follows the procedure exactly."""
    return [response(move) for move in moves_of(row, careful)]


def decoys(row: Row) -> list[str]:
    """Return last responses that end the conversation after one more change, which is wrong."""
    order, last = {"order_id": row["customer"]["order_id"]}, moves_of(row, careful)[-1]
    wrong = [("cancel_order", order), ("refund_order", order)]
    wrong += [("refuse_request", {**order, "reason": reason}) for reason in REASONS]
    right = row["ground_truth"]["orders"][order["order_id"]]
    done = {"cancel_order": right["cancelled"], "refund_order": right["refunded"]}
    return [
        response([call, *last])
        for call in wrong
        if not done.get(call[0], False) and call[1].get("reason") not in right["refused"]
    ]


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of the full prompts solves."""
    return example_row()


def example_row() -> Row:
    """Return the row of the worked example, which is none of the generated ones: its number and its street are in no
    case."""
    rng = random.Random("service/example")
    known = {"item": "bicycle", "status": "packing", "returns": "open", "parcel": "none"}
    orders = {"Z100": {**draw_order(rng), **known}}
    wishes = (Wish("address", "100 Station Street"), Wish("cancel"))
    customer = Customer("Z100", orders["Z100"]["postcode"], "bicycle", wishes, pushes=0, voice="polite")
    return _row(Case("Z100", orders, customer), "example", full=False)


@cache
def example_lines() -> tuple[Line, ...]:
    """Return the worked example: the procedure, followed on the row of the example."""
    row = example_row()
    facts = Customer.of(row)
    customer, tools = ScriptedCustomer(facts), toolbox(Store(row["orders"]))
    lines: list[Line] = [("User", opening(facts))]
    for move in moves_of(row, careful):
        if isinstance(move, str):
            lines += [("Assistant", move), ("User", customer.answer(move))]
        else:
            lines += [calling(*call) for call in move]
            results = [tools[name].function(**arguments) for name, arguments in move if (name, arguments) != END]
            lines += [("Tool", json.dumps(result, ensure_ascii=False)) for result in results]
    return tuple(lines)


def is_held_out(order_id: str) -> bool:
    """Whether the case of an order belongs to the test split. This depends only on its number, not on the seed."""
    return sha256(f"service/{order_id}".encode()).digest()[0] % HELD_OUT == 0


def _rows(seed: int, split: str, count: int, full: bool) -> list[Row]:
    """Return up to `count` distinct cases of a split. A case depends only on the seed and its number."""
    cases = [case for case in CASES if is_held_out(case) == (split == "test")]
    random.Random(f"service/{seed}/{split}").shuffle(cases)
    if count > len(cases):
        log.warning("service: %d different %s cases instead of %d: there are no more", len(cases), split, count)
    return [_row(draw(random.Random(f"service/{seed}/{case}"), case), split, full) for case in cases[:count]]


def _row(case: Case, split: str, full: bool) -> Row:
    words = opening(case.customer)
    return {
        "id": f"service-{case.order_id}",
        "prompt": full_prompt(words, example_lines()) if full else short_prompt(words),
        "ground_truth": case.truth(),
        "split": split,
        **case.row(),
    }
