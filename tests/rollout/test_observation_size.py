"""How large an observation may be."""

import time

import pytest

from mtrl.environments.observation_size import LARGEST
from mtrl.environments.results import as_messages
from mtrl.types import StopReason


def test_an_oversize_text_is_truncated_with_a_note():
    messages = as_messages("x" * (LARGEST + 5000))
    [message] = messages
    assert LARGEST - 100 < len(message["content"]) < LARGEST + 100
    assert message["content"].endswith(" more characters were cut]")


def test_the_limit_applies_to_all_messages_together():
    messages = as_messages([{"role": "user", "content": "x" * 400_000} for _ in range(5)])
    assert len(messages) == 3 and sum(len(m["content"]) for m in messages) < LARGEST + 1000
    assert messages[0]["content"] == "x" * 400_000 and messages[2]["content"].endswith("[2 more messages were cut]")


def test_a_cut_after_an_image_is_noted():
    image = {"type": "image", "image": "data:image/png;base64," + "A" * 600_000}
    messages = as_messages([{"role": "user", "content": [image]} for _ in range(2)])
    assert messages == [{"role": "user", "content": [image, {"type": "text", "text": "\n[1 more messages were cut]"}]}]


def test_excess_messages_are_dropped_without_a_failure():
    """One turn of a policy may hold tens of thousands of calls, each answered by a message."""
    calls = [{"role": "tool", "content": "no such tool", "tool_call_id": f"call_{n}"} for n in range(30_000)]
    messages = as_messages(calls)
    assert messages[:-1] == calls[: len(messages) - 1] and 1_000 < len(messages) < 30_000
    assert messages[-1]["content"] == f"no such tool\n[{30_000 - len(messages)} more messages were cut]"


def endless():
    own = []
    own.append(own)
    return own


@pytest.mark.parametrize(
    "content",
    [[{"type": "text", "text": "x" * (LARGEST + 1)}], [[]] * LARGEST, {"k" * LARGEST: 1}, endless()],
    ids=["a part", "a million lists", "a key", "a list in itself"],
)
def test_oversize_content_without_text_is_refused(content):
    with pytest.raises(TypeError, match="the observation is larger than 1,000,000 characters in what is no text"):
        as_messages({"role": "user", "content": content})


def test_ordinary_observations_are_unchanged():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "y" * 10_000, "tool_call_id": "1"},
    ]
    assert as_messages(messages) == messages


@pytest.mark.parametrize("done", [False, True])
def test_100_mb_are_processed_within_the_episode_timeout(make_loop, run_episode, counting, done):
    def step(self, response, truth):
        return 0.0, "x" * 100_000_000, done

    loop = make_loop(type("Env", (counting,), {"step": step}), max_context_length=4096)
    begun = time.monotonic()
    trajectory = run_episode(loop)
    assert time.monotonic() - begun < 20
    assert trajectory.stop_reason == (StopReason.DONE if done else StopReason.CONTEXT_LIMIT)
    assert len(str(trajectory.messages)) < LARGEST + 10_000


def test_the_message_of_an_error_is_truncated(make_loop, run_episode, counting):
    def step(self, response, truth):
        raise ValueError("x" * 10_000_000)

    trajectory = run_episode(make_loop(type("Env", (counting,), {"step": step})))
    assert trajectory.error.startswith("ValueError: xxx") and len(trajectory.error) < 30_000
