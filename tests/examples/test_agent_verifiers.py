"""Environments of verifiers are played by the real package: their rewards, and the tokens of mtrl's own loop."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.agents import verifiers_agent
from mtrl.agents.callable import CallableRunner
from mtrl.config.schema import DataConfig
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.tool_calls import format_call
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.errors import UserError
from mtrl.types import StopReason
from tests.examples.agent_episodes import by_agent, by_environment, tokens

PYTHON = os.environ.get("MTRL_VERIFIERS_PYTHON")
real = pytest.mark.skipif(PYTHON is None, reason="MTRL_VERIFIERS_PYTHON names no Python with verifiers 0.4")
TASKS = Path(__file__).parent / "verifiers_tasks"
SENTENCE_OF_INSTALL = "made by: python -m venv verifiers && verifiers/bin/pip install 'verifiers>=0.4,<0.5'"


def program(path, command):
    """Write a shell script that becomes `command`, and return its path."""
    path.write_text(f'#!/bin/sh\n{command} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Verifiers' interpreter, which also finds the environments of the tests."""
    script = program(tmp_path_factory.mktemp("verifiers") / "python", f"PYTHONPATH='{TASKS}' exec '{PYTHON}'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTRL_VERIFIERS_PYTHON", script)
        yield script
        verifiers_agent.worker().end()


def load(taskset="mtrl_words", tasks=None, held_out=None, **fields):
    return verifiers_agent.load(DataConfig(), 0, tasks, held_out, taskset={"id": taskset, **fields})


def played(row, responses, codec, **limits):
    return by_agent(CallableRunner(verifiers_agent.run, 2), row, responses, codec, **limits)


class Doubling(ToolEnvironment):
    """The task of `mtrl_words` for mtrl's own loop."""

    @tool
    def double(self, n: int) -> str:
        """Twice a number."""
        return str(2 * n)

    def answer(self, response, ground_truth):
        return 0.0, None, True


class Guessing(BaseEnvironment):
    """The task of `mtrl_guess` for mtrl's own loop."""

    def step(self, response, ground_truth):
        done = response == "5"
        return 0.0, None if done else "higher", done


@real
def test_tasks_become_rows_of_two_splits(interpreter):
    splits = load()
    assert [row["id"] for row in splits.test] == ["test-0", "test-8"]
    assert [row["task"]["answer"] for row in splits.train] == [str(2 * n) for n in range(16) if n % 8]
    assert splits.train[0]["prompt"] == [
        {"role": "system", "content": "count"},
        {"role": "user", "content": "double 1"},
    ]
    assert (len(load(tasks=4).train), len(load(tasks=4).test)) == (3, 1)


@real
def test_held_out_settings_give_the_held_out_rows(interpreter, caplog):
    splits = load(held_out={"split": "test"})
    assert [row["task"]["answer"] for row in splits.test] == [str(2 * n) for n in range(14, 30)]
    assert [row["task"]["answer"] for row in splits.train] == [str(2 * n) for n in range(14)], "14 and 15 are held out"
    assert "dropped 2 training tasks that are held out as well" in caplog.text
    with pytest.raises(UserError, match="every one of the 16 training tasks is held out as well; set env"):
        load(held_out={"split": "train"})


@real
@pytest.mark.parametrize(
    ("responses", "reward", "right"),
    [
        (["6"], 1.0, 1.0),
        (["7"], 0.25, 0.0),
        ([format_call("double", {"n": 3}), "6"], 1.0, 1.0),
        ([format_call("double", {"n": 3}), format_call("double", {"n": 5}), "a long wrong answer"], 0.0, 0.0),
    ],
)
def test_a_task_with_a_tool_gives_its_rewards_and_the_tokens_of_the_native_loop(
    interpreter, tiny_codec, responses, reward, right
):
    row = load().train[2]
    trajectory = played(row, responses, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, reward)
    native = by_environment(SimpleNamespace(environment=Doubling), row, responses, tiny_codec, max_turns=8)
    assert tokens(trajectory) == tokens(native)
    assert trajectory.metrics["turns"] == len(responses)
    assert (trajectory.metrics["right"], trajectory.metrics["short"]) == (right, float(reward > 0))


@real
def test_a_conversation_of_the_environment_gives_the_tokens_of_the_native_loop(interpreter, tiny_codec):
    row, responses = load("mtrl_guess").train[4], ["1", "3", "5"]
    trajectory = played(row, responses, tiny_codec)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 3)
    native = by_environment(SimpleNamespace(environment=Guessing), row, responses, tiny_codec, max_turns=8)
    assert tokens(trajectory) == tokens(native)


@real
@pytest.mark.parametrize(
    ("calls", "context", "turns", "reason"),
    [(2, 4000, 2, StopReason.MAX_TURNS), (8, 78, 1, StopReason.CONTEXT_LIMIT)],
)
def test_an_episode_that_reaches_a_limit_is_scored(interpreter, tiny_codec, calls, context, turns, reason):
    responses = [format_call("double", {"n": 3})] * 9
    trajectory = played(load().train[2], responses, tiny_codec, calls=calls, context=context)
    assert (trajectory.error, trajectory.stop_reason, len(trajectory.turns)) == (None, reason, turns)
    assert (trajectory.metrics["turns"], trajectory.metrics["right"]) == (turns, 0.0)


@real
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (format_call("triple", {"n": 3}), "error: there is no tool 'triple'; the tools are double"),
        (format_call("double", {"n": "three"}), "validation error"),
        (format_call("double", {}), "validation error"),
    ],
)
def test_a_mistake_in_a_tool_call_is_an_observation(interpreter, tiny_codec, call, answer):
    trajectory = played(load().train[2], [call, "6"], tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert answer in trajectory.turns[1].observation[0]["content"]


@real
def test_a_reward_that_is_no_number_fails_its_episode(interpreter, tiny_codec):
    row = load().train[2]
    for response, sentence in (
        ("nan", "the function right of mtrl_words gave nan; let it return a finite number"),
        ("text", "'no number'; let the functions of @vf.reward and @vf.metric return numbers"),
        ("metric", "'many'; let the functions of @vf.reward and @vf.metric return numbers"),
    ):
        trajectory = played(row, [response], tiny_codec)
        assert trajectory.stop_reason == StopReason.ENV_ERROR and sentence in trajectory.error


@real
def test_a_dead_process_costs_its_episodes_and_is_started_again(interpreter, tiny_codec):
    row = load().train[2]

    async def die(row, client):
        process = verifiers_agent.worker()
        playing = asyncio.ensure_future(verifiers_agent.run(row, client))
        await client.achat(row["prompt"])
        os.kill(process.process.pid, signal.SIGKILL)
        return await playing

    first = verifiers_agent.worker()
    trajectory = by_agent(CallableRunner(die, 2), row, ["6"] * 9, tiny_codec)
    assert "the process of verifiers was killed by SIGKILL" in trajectory.error
    trajectory = played(row, ["6"], tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    second = verifiers_agent.worker()
    assert second is not first and second is verifiers_agent.worker()


@real
def test_a_cancelled_episode_ends_in_the_process(interpreter):
    row = load().train[2]

    async def cancelled():
        asked, gone = asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            asked.set()
            while await reader.read(2**16):
                pass
            gone.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = SimpleNamespace(base_url=f"http://{host}:{port}/v1", model="m")
        playing = asyncio.ensure_future(verifiers_agent.run(row, client))
        await asked.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await gone.wait()
        server.close()

    asyncio.run(asyncio.wait_for(cancelled(), 60))
    assert load(tasks=9).train, "the process answers further requests"


@real
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"taskset": "no_such_words"},
            "^environment.config.taskset.id=no_such_words needs the module no_such_words, which is not installed; .* "
            "with: .*python -m pip install PACKAGE$",
        ),
        ({"fault": "download"}, "taskset.id=mtrl_words needs a download that failed .*set HF_HOME"),
        ({"fault": "endless"}, "has tasks without an end; set environment.config.tasks"),
        ({"falt": 1}, "^environment.config.taskset.falt=1 is refused by verifiers .Extra inputs are not permitted.; "),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_sentence(interpreter, fields, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        load(**fields)
    assert "\n" not in str(caught.value)


@real
def test_an_environment_with_two_agents_of_the_policy_is_refused(interpreter):
    with pytest.raises(UserError, match="the policy would play 2 agents .player, rival., and exactly one"):
        verifiers_agent.load(DataConfig(), 0, taskset={"id": "mtrl_guess"}, rival={"client": None})


@pytest.fixture
def unstarted(monkeypatch):
    monkeypatch.setattr(verifiers_agent, "_worker", None)


def test_a_missing_interpreter_is_one_sentence(unstarted, monkeypatch, tmp_path):
    monkeypatch.delenv("MTRL_VERIFIERS_PYTHON", raising=False)
    with pytest.raises(UserError, match="^MTRL_VERIFIERS_PYTHON is not set; .*") as caught:
        load()
    assert SENTENCE_OF_INSTALL in str(caught.value)
    monkeypatch.setenv("MTRL_VERIFIERS_PYTHON", str(tmp_path / "python"))
    with pytest.raises(UserError, match="^MTRL_VERIFIERS_PYTHON=.*/python is no program; set it"):
        load()


def test_an_interpreter_without_verifiers_is_one_sentence(unstarted, monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_VERIFIERS_PYTHON", program(tmp_path / "python", f"exec '{sys.executable}' -I -S"))
    with pytest.raises(UserError, match="^MTRL_VERIFIERS_PYTHON: .* has no verifiers 0.4 .*; make an interp"):
        load()


def test_a_program_that_is_no_python_is_one_sentence(unstarted, monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_VERIFIERS_PYTHON", program(tmp_path / "python", "echo 7; exec cat"))
    with pytest.raises(UserError, match="^MTRL_VERIFIERS_PYTHON: the process of verifiers .* last output: 7; make"):
        load()


def test_settings_that_are_missing_or_not_read_are_refused(unstarted):
    with pytest.raises(UserError, match="^environment.config.taskset.id is not set"):
        verifiers_agent.load(DataConfig(), 0)
    with pytest.raises(UserError, match="^data.path=rows is not read"):
        verifiers_agent.load(DataConfig(path="rows"), 0, taskset={"id": "mtrl_words"})
