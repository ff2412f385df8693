"""Cases, rows and episodes for the tests of the service desk."""

import asyncio

from envs.service import FAMILY
from envs.service.case import Case, Customer, Wish
from mtrl.rollout.stepper import text_message
from mtrl.types import FinishReason, StopReason, Trajectory, Turn


def case_of(kind="cancel", status="packing", returns="open", known=True, change=None, pushes=0, voice="polite"):
    """Return a case with one order and these properties; a change is the kind of the request that replaces the first
    one."""
    order = {
        "item": "kettle",
        "postcode": "4F7",
        "status": status,
        "returns": returns,
        "parcel": "none" if status == "packing" else "T552",
        "references": {"cancel_order": "R111", "change_address": "R222", "refund_order": "R333"},
        "address": "1 Elm Street",
        "cancelled": False,
        "refunded": False,
        "refused": [],
    }
    wishes = tuple(Wish(each, "12 Oak Street" if each == "address" else "") for each in (kind, change) if each)
    postcode = "4F7" if known else "9W9"
    return Case("A100", {"A100": order}, Customer("A100", postcode, "kettle", wishes, pushes, voice))


def row_of(case):
    return {"id": "service-A100", "prompt": [], "ground_truth": case.truth(), "split": "train", **case.row()}


def run(row, responses, **settings):
    """Play responses until the episode ends. Return the step results and the trajectory with parsed messages."""
    return asyncio.run(run_async(row, responses, **settings))


async def run_async(row, responses, **settings):
    environment = FAMILY.environment(**settings)
    results, turns = [], []
    try:
        environment.reset(row)
        for number, text in enumerate(responses):
            message = text_message(text, environment.tools, number)
            results.append(await environment.respond(message, text, row["ground_truth"]))
            turns.append(Turn([], [1], [0.0], [(0, 1)], FinishReason.STOP, text, message))
            if results[-1].done:
                break
    finally:
        environment.close()
    return results, Trajectory("row", "group", 0, turns, StopReason.DONE)


def outcome(row, responses, **settings):
    """Return the reward of the episode and its score."""
    results, trajectory = run(row, responses, **settings)
    return sum(result.reward for result in results), FAMILY.score(trajectory, row)
