"""Agents for tests, as Python functions. Not a test."""

import asyncio
import threading
import time


def guess(row, client):
    """Call the policy until it gives the answer; the reward is 1 for the answer."""
    messages, requested = list(row["prompt"]), 0
    while requested < row.get("calls", 3):
        message = client.chat(messages)
        requested += 1
        if message["content"] == row["ground_truth"]["answer"]:
            return {"reward": 1.0, "metrics": {"asked": requested}}
        messages += [message, {"role": "user", "content": "no"}]
    return 0.0


async def aguess(row, client):
    """`guess` as an async function."""
    messages = list(row["prompt"])
    for _ in range(row.get("calls", 3)):
        message = await client.achat(messages)
        if message["content"] == row["ground_truth"]["answer"]:
            return 1.0
        messages += [message, {"role": "user", "content": "no"}]
    return 0.0


def never_calls(row, client):
    return 1.0


def fails_at_once(row, client):
    raise LookupError("no such tool")


def fails(row, client):
    client.chat(row["prompt"])
    raise LookupError("no such tool")


def returns_no_reward(row, client):
    client.chat(row["prompt"])


def reports_failure(row, client):
    client.chat(row["prompt"])
    return {"status": "error", "error": "no disk"}


def rewards_per_turn(row, client):
    messages = list(row["prompt"])
    for _ in range(3):
        messages += [client.chat(messages), {"role": "user", "content": "go on"}]
    return row["rewards"]


def calls_forever(row, client):
    messages = list(row["prompt"])
    while True:
        messages += [client.chat(messages), {"role": "user", "content": "go on and on"}]


def hangs(row, client):
    client.chat(row["prompt"])
    time.sleep(600)


async def ahangs(row, client):
    await client.achat(row["prompt"])
    await asyncio.sleep(600)


async def blocks(row, client):
    return client.chat(row["prompt"])


class Together:
    """Counts concurrent episodes."""

    def __init__(self):
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def __call__(self, row, client):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        client.chat(row["prompt"])
        time.sleep(0.02)
        with self.lock:
            self.now -= 1
        return 1.0
