"""Hostile turns in `ToolEnvironment.step`: each is answered, none earns a reward, and the episode continues."""

import asyncio
import json
import time

import pytest
import tool_attacks
from attack_kit import MEGABYTE, measured

from mtrl.environments.base import StepResult
from mtrl.environments.replay import Recordings, ReplayTools
from mtrl.environments.results import as_messages
from mtrl.environments.tool_calls import CLOSE, OPEN, message_calls, parse_calls
from mtrl.environments.tools import ToolEnvironment, tool, toolbox

TURNS = tool_attacks.turns()
FAMILIES = sorted({attack.family for attack in TURNS})
TIMEOUT, MARGIN_SECONDS = 0.2, 60.0
LONGEST = 200_000
RECORDINGS = Recordings([{"tool": "look", "arguments": {"at": "x"}, "result": {"seen": 1}}])


class Shop(ToolEnvironment):
    """Tools whose arguments can make them slow, large or deep."""

    def __init__(self):
        super().__init__(max_turns=9, tool_timeout=TIMEOUT)
        self.toolbox |= toolbox(*ReplayTools(RECORDINGS).tools())

    @tool
    def price(self, item: str, count: int = 1) -> int:
        """The price."""
        return 250 * count

    @tool
    def wait(self, seconds: float) -> str:
        """Wait."""
        end = time.monotonic() + min(max(seconds, 0), 3)
        while time.monotonic() < end:
            time.sleep(0.01)
        return "waited"

    @tool
    def grow(self, size: int) -> str:
        """Much text."""
        return "x" * min(size, 10**8)

    @tool
    def power(self, digits: int) -> int:
        """A long number."""
        return 10 ** min(digits, 10**6)

    @tool
    def deep(self, levels: int) -> list:
        """Lists in lists."""
        value: list = []
        for _ in range(min(levels, 10**5)):
            value = [value]
        return value

    @tool
    def echo(self, text: str) -> str:
        """The same back."""
        return text

    @tool
    def end(self) -> StepResult:
        """Ends the episode."""
        return StepResult(0.0, "over", done=True)

    def answer(self, response, ground_truth):
        return float(response == "500"), None, True


def step(environment, text):
    return asyncio.run(asyncio.wait_for(environment.step(text, {}), 60))


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_turns_are_answered_and_earn_no_reward(family, outside):
    for attack in [attack for attack in TURNS if attack.family == family]:
        environment = Shop()
        try:
            with measured() as usage:
                result = step(environment, attack.text)
                observation = as_messages(result.observation)
                message_calls(parse_calls(attack.text)[1], 0)
            assert result.reward == 0.0 and not result.done, attack.text[:200]
            assert observation and {message["role"] for message in observation} == {"tool"}
            assert all(len(message["content"]) <= LONGEST for message in observation)
            assert {message["name"] for message in observation} <= {*environment.toolbox, "unknown"}
            json.dumps(observation, ensure_ascii=False).encode()
            beyond = int(result.metrics["tool_calls"]) - len(observation)
            assert not beyond or observation[-1]["content"].endswith(f"[{beyond} more messages were cut]")
            calls = sum(value for name, value in result.metrics.items() if name.endswith("/calls"))
            assert calls <= environment.max_tool_calls
            assert usage.seconds < 8 * TIMEOUT + MARGIN_SECONDS and usage.bytes < 256 * MEGABYTE
            again = step(environment, f"{OPEN}{tool_attacks.GOOD}{CLOSE}")
            assert [message["content"] for message in again.observation] == ["500"]
            last = step(environment, "500")
            assert last.done and last.reward == 1.0
        finally:
            environment.close()
    outside.check()


def test_errors_contain_no_markup_of_the_model():
    """Errors contain no markup or control tokens of the model."""
    for attack in TURNS:
        if attack.family not in ("names", "keys"):
            continue
        environment = Shop()
        for message in step(environment, attack.text).observation:
            assert not {"<", ">", "\0", "\n"} & set(message["content"]), attack.text[:200]
            assert len(message["content"]) < 320
        environment.close()


def test_calls_after_the_end_are_not_run(outside):
    over = '<tool_call>{"name": "end", "arguments": {}}</tool_call>'
    for attack in TURNS[::7]:
        environment = Shop()
        result = step(environment, over + attack.text)
        assert result.done and result.reward == 0.0
        observation = [message["content"] for message in result.observation]
        assert observation[0] == "over" and set(observation[1:]) <= {"Error: not run: the episode is over"}
        environment.close()
    outside.check()


def test_hostile_arguments_match_no_recording():
    """A hostile argument matches no recording, and the episode continues."""
    for value in tool_attacks.VALUES:
        environment = Shop()
        call = f'{{"name": "look", "arguments": {{"at": {value}}}}}'
        (message,) = step(environment, f"{OPEN}{call}{CLOSE}").observation
        assert message["content"].startswith("Error: ") and len(message["content"]) < 320
        (message,) = step(environment, f'{OPEN}{{"name": "look", "arguments": {{"at": "x"}}}}{CLOSE}').observation
        assert message["content"] == '{"seen": 1}'
        environment.close()


def test_nesting_near_the_recursion_limit_is_answered():
    """The recursion limit of Python depends on the depth of the caller; every call is answered."""
    for name in ("look", "echo", "price"):
        for depth in range(200, 1100, 50):
            environment = Shop()
            call = f'{{"name": "{name}", "arguments": {{"at": {"[" * depth}{"]" * depth}}}}}'
            (message,) = step(environment, f"{OPEN}{call}{CLOSE}").observation
            assert message["content"].startswith("Error: ") and "recursion" not in message["content"], depth
            environment.close()
