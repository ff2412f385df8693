"""An agent with the client of OpenAI, as a function and as a program, gives the tokens of the native loop."""

import json
import sys
from pathlib import Path

from examples.agents import openai_tools
from examples.agents.word_problems import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.agents.program import ProgramRunner
from mtrl.types import StopReason
from tests.examples.agent_episodes import by_agent, by_environment, calculator_call, tokens

PROGRAM = Path(openai_tools.__file__)


def called(row, responses, codec, **limits):
    return by_agent(CallableRunner(openai_tools.run, 2), row, responses, codec, **limits)


def test_the_agent_trains_the_tokens_of_the_native_loop(row, tiny_codec):
    answer = f"#### {row['ground_truth']['answer']}"
    for responses in (
        FAMILY.gold(row),
        ["#### 1"],
        [calculator_call("1+2"), calculator_call("1/0"), answer],
        [calculator_call("2") * 2, answer],
    ):
        agent = called(row, responses, tiny_codec)
        native = by_environment(FAMILY, row, responses, tiny_codec, max_turns=3)
        assert agent.reward == native.reward == float(answer in responses)
        assert FAMILY.score(agent, row) == FAMILY.score(native, row) == agent.reward
        assert [turn.message for turn in agent.turns] == [turn.message for turn in native.turns]
        errors = any("Error" in message["content"] for message in agent.messages)
        assert errors or tokens(agent) == tokens(native)
        assert all(turn.break_reason is None for turn in agent.turns)


def test_a_malformed_call_is_an_error_observation(row, tiny_codec):
    trajectory = called(row, ["<tool_call>{oops</tool_call>", "#### 1"], tiny_codec)
    assert trajectory.turns[1].observation[0]["content"].startswith("Error: ")
    assert [turn.break_reason for turn in trajectory.turns] == [None, None]


def test_the_agent_stops_after_its_own_limit(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec)
    assert (len(trajectory.turns), trajectory.reward) == (openai_tools.MOST_CALLS, 0.0)
    assert trajectory.stop_reason == StopReason.DONE


def test_the_run_stops_the_agent_after_max_turns(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec, calls=2)
    assert (len(trajectory.turns), trajectory.stop_reason) == (2, StopReason.MAX_TURNS)


def test_the_agent_runs_as_a_program(row, tiny_codec):
    """The program runs in its own folder, and cannot import mtrl."""
    runner = ProgramRunner([sys.executable, str(PROGRAM)], {}, 1)
    trajectory = by_agent(runner, row, FAMILY.gold(row), tiny_codec)
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason, len(trajectory.turns)) == (1.0, StopReason.DONE, 2)
    assert tokens(trajectory) == tokens(called(row, FAMILY.gold(row), tiny_codec))


def test_the_agent_imports_nothing_of_mtrl():
    source = PROGRAM.read_text(encoding="utf-8")
    assert "import mtrl" not in source and "from mtrl" not in source and "from envs" not in source
    assert json.dumps(openai_tools.CALCULATE)
