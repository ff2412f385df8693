"""`mtrl serve environment`: an environment as an MCP server, with a real client of the protocol."""

import asyncio
import json
import sys
import threading

import pytest

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.tools import ToolError
from mtrl.errors import UserError
from mtrl.mcp.connection import Connection
from mtrl.mcp.environment import McpEnvironment
from mtrl.play.episode import Rules, TextEpisode
from mtrl.play.serve import main
from mtrl.types import read_trajectories
from tests.play.awkward import Tools, load
from tests.play.shown import ROOT, TASK

TOOLS = [*TASK, "environment.target=tests.play.awkward.WITH_TOOLS"]


def command(*words):
    return [sys.executable, "-m", "mtrl.play.serve", *words]


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Function that returns a context manager: a connection to the server with these words."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: Connection(command(*words), {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "", 120.0)


def call(connection, name, **arguments):
    return asyncio.run(connection.call(name, arguments))


def refused(connection, name, **arguments):
    with pytest.raises(ToolError) as caught:
        call(connection, name, **arguments)
    return str(caught.value)


def test_an_agent_takes_the_turns_of_episodes(client, tmp_path):
    with client(*TOOLS, "out=played.jsonl", "row=train-1") as server:
        assert [each.name for each in server.tools] == ["start_episode", "respond", "price"]
        price = next(each for each in server.tools if each.name == "price").schema["function"]
        assert price["parameters"]["properties"]["item"]["enum"] == ["tea", "rye"]
        assert call(server, "start_episode") == "Row train-1 of train; at most 5 turns.\n\nuser: say right 1"
        assert call(server, "price", item="tea") == "5"
        assert "item" in refused(server, "price", item="gold")
        assert "there is no tool prise; did you mean price?" in refused(server, "prise", item="tea")
        assert call(server, "respond", text="12") == "The episode is over: reward 1, score 1."
        assert "call start_episode first" in refused(server, "price", item="tea")
        assert call(server, "start_episode").startswith("Row train-2 of train")
        assert call(server, "start_episode").startswith("Row train-2 of train"), "an episode without turns was lost"
        assert "row=9 is no row of split=train" in refused(server, "start_episode", row="9")
        assert call(server, "start_episode", row="0").startswith("Row train-0 of train")
        assert call(server, "respond", text="scorer").endswith("its reward failed: ZeroDivisionError: no scorer today")
    (played,) = read_trajectories(tmp_path / "played.jsonl")
    assert [turn.text for turn in played.turns][-1] == "12" and played.reward == 1.0 and played.score == 1.0
    assert json.loads(played.turns[0].text[len("<tool_call>") : -len("</tool_call>")])["arguments"] == {"item": "tea"}


def test_failures_are_told_and_the_server_goes_on(client):
    with client(*TASK, "environment.target=tests.play.awkward.FAMILY", "environment.step_timeout=2") as server:
        assert "there is no tool price; the tools are start_episode and respond" in refused(server, "price", item="tea")
        assert call(server, "respond", text="four") == "heard 4 characters, 0 line breaks"
        assert "the environment failed: RuntimeError: no disk" in refused(server, "respond", text="raise")
        assert "call start_episode first" in refused(server, "respond", text="right")
        assert call(server, "start_episode").startswith("Row train-1")
        assert "the environment failed" in refused(server, "respond", text="hang")
        assert call(server, "start_episode").startswith("Row train-2")
        assert call(server, "respond", text="right") == "The episode is over: reward 1, score 1."
        assert "these were all rows of train" in refused(server, "start_episode")


def test_a_served_environment_is_the_environment(tmp_path, monkeypatch):
    """The tools of a served environment, as tools of an `McpEnvironment`, give the same observations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    served = McpEnvironment(command=command(*TOOLS), env={"PYTHONPATH": str(ROOT)}, offered_tools=["price"])
    direct = Tools()
    row = load(None, 0).train[0]
    calls = [{"function": {"name": "price", "arguments": item}} for item in ('{"item": "tea"}', '{"item": 1}', "{}")]
    try:
        for environment in (served, direct):
            environment.reset(dict(row))
        assert served.tools == direct.tools
        ours, theirs = (
            [
                asyncio.run(each.respond({"role": "assistant", "content": "", "tool_calls": [one]}, "", {})).observation
                for one in calls
            ]
            for each in (served, direct)
        )
        assert ours == theirs
    finally:
        served.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["player=gold"], "player=gold has no effect, because the client of the server is the player"),
        (["split=all"], "split=all"),
        (["row=99999999"], "row=99999999 is no row of split=train"),
        ([f"row={'9' * 5000}"], "row=9+ is no row of split=train"),
        (["split=test"], "split=test has no rows"),
    ],
)
def test_wrong_settings_are_named(words, problem, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(UserError, match=problem):
        main([*TASK, "environment.target=tests.play.awkward.UNTESTED", *words])


def test_a_turn_that_the_client_cancels_ends_its_episode():
    """The environment may still be taking the turn; the next call would step it at the same time."""
    begun, released = threading.Event(), threading.Event()

    class Held(BaseEnvironment):
        def step(self, response, ground_truth):
            begun.set()
            released.wait(60)
            return 0.0, None, False

    async def cancel():
        rules = Rules(Held, EnvironmentPool(2), max_turns=5, step_timeout=60.0, episode_timeout=60.0)
        episode = TextEpisode(rules, load(None, 0).train[0], "group")
        await episode.open()
        turn = asyncio.create_task(episode.say("look"))
        await asyncio.to_thread(begun.wait, 60)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        is_over = episode.over
        released.set()
        await episode.close()
        return is_over

    assert asyncio.run(cancel())
