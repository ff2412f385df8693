"""OpenEnv's own example environment and its servers, played over a socket by the real package."""

import importlib
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from foreign import observed, real

from mtrl.engines.server.supervised_process import SupervisedProcess
from mtrl.environments.adapters import adapt
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from mtrl.types import StopReason

pytestmark = pytest.mark.xdist_group("openenv")
FOLDER = Path(__file__).parent
NAME = "echo_words"


@pytest.fixture(autouse=True, scope="module")
def openenv():
    return real("openenv.core", "openenv")


@contextmanager
def served(folder, log, *arguments):
    """Run `python ARGUMENTS` until it listens on a free port of 127.0.0.1, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, *(str(port) if each == "PORT" else each for each in arguments)]
    with open(log, "wb") as output:
        process = SupervisedProcess(words, os.environ, output, "the server", folder)
    try:
        while True:
            assert process.running, log.read_text()
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.end(2)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The environment that `openenv init` writes, which echoes: its package, and the address of its server."""
    folder = tmp_path_factory.mktemp("openenv")
    init = [sys.executable, "-m", "openenv.cli", "init", NAME, "--output-dir", str(folder)]
    subprocess.run(init, check=True, capture_output=True, timeout=120)
    server = ("-m", f"{NAME}.server.app", "--host", "127.0.0.1", "--port", "PORT")
    with pytest.MonkeyPatch.context() as patch, served(folder, folder / "log", *server) as url:
        patch.syspath_prepend(folder)
        yield importlib.import_module(NAME), url
        for module in [each for each in sys.modules if each.partition(".")[0] == NAME]:
            del sys.modules[module]


READY = 'Q\n\n{"echoed_message": "Echo Words environment ready!", "message_length": 0}'


def echoed(text):
    return f'{{"echoed_message": "{text}", "message_length": {len(text)}}}'


def test_the_example_in_this_process(example, play, row):
    package, _ = example
    module = importlib.import_module(f"{package.__name__}.server.{NAME}_environment")
    trajectory = play(adapt(module.EchoWordsEnvironment), ["abc", "hello world"], row, max_turns=2)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.MAX_TURNS)
    assert trajectory.rewards == pytest.approx([0.3, 1.0])
    assert observed(trajectory) == [[READY], [echoed("abc")], [echoed("hello world")]]
    assert [turn.metrics["step"] for turn in trajectory.turns] == [1.0, 2.0]


def test_the_example_by_its_own_client(example, play, row):
    package, url = example
    trajectory = play(adapt(package.EchoWordsEnv), ["abc", "hello world"], row, max_turns=2, base_url=url)
    assert trajectory.error is None and trajectory.rewards == pytest.approx([0.3, 1.0])
    assert observed(trajectory) == [[READY], [echoed("abc")], [echoed("hello world")]]


def test_an_action_that_the_server_refuses_does_not_fail_the_episode(example, play, row, openenv):
    responses = ["abc", '{"word": "abc"}', '{"message": "abc"}']
    trajectory = play(adapt(openenv.GenericEnvClient), responses, row, max_turns=3, base_url=example[1])
    assert trajectory.error is None and trajectory.rewards == pytest.approx([0.0, 0.0, 0.3])
    invalid = "Invalid action: write a JSON object with the fields of the action"
    assert observed(trajectory) == [[READY], [invalid], [invalid], [echoed("abc")]]
    assert [turn.metrics["invalid_action"] for turn in trajectory.turns] == [1.0, 1.0, 0.0]


def test_a_server_without_a_free_place_fails_the_episode_with_its_own_words(example, play, row):
    """The example has one place; it is free again as soon as an episode ends."""
    package, url = example
    adapted = adapt(package.EchoWordsEnv)
    first = adapted(base_url=url)
    try:
        first.reset(row)
        assert "Server at capacity: 1/1 sessions active" in play(adapted, ["abc"], row, base_url=url).error
    finally:
        first.close()
    assert play(adapted, ["abc"], row, max_turns=1, base_url=url).error is None


@pytest.fixture(scope="module", params=["environment", "client"])
def till(request, tmp_path_factory):
    """The environment with tools as an adapted class with its config: in this process, or behind a server."""
    real("openenv.core", "openenv")
    if request.param == "environment":
        from openenv_tools_example import Till

        yield adapt(Till), {}
    else:
        from openenv.core.mcp_client import MCPToolClient

        script = FOLDER / "openenv_tools_example.py"
        with served(FOLDER, tmp_path_factory.mktemp("till") / "log", str(script), "PORT") as url:
            yield adapt(MCPToolClient), {"base_url": url}


def test_tools_are_listed_and_called(till, play, row):
    adapted, config = till
    price, pay = format_call("price", {"item": "apple"}), format_call("pay", {"cents": 90})
    trajectory = play(adapted, [price, f"{price}{pay}"], row, **config)
    assert (trajectory.error, trajectory.rewards, trajectory.stop_reason) == (None, [0.0, 1.0], StopReason.DONE)
    assert observed(trajectory) == [["Q"], ["30"], ["30", "thanks"]]
    assert [turn.metrics["tool/price/calls"] for turn in trajectory.turns] == [1.0, 1.0]
    assert trajectory.turns[0].metrics["asked"] == 1.0


def test_the_schemas_are_those_of_the_environment(till, row):
    adapted, config = till
    env = adapted(**config)
    try:
        env.reset(row)
        assert [each["function"]["name"] for each in env.tools] == ["price", "pay"]
        function = env.tools[0]["function"]
        assert function["description"] == "The price of an item, in cents."
        assert function["parameters"]["properties"] == {"item": {"type": "string"}}
    finally:
        env.close()


def test_a_mistake_of_the_model_is_an_observation(till, play, row):
    adapted, config = till
    calls = [format_call("price", {}), format_call("steal", {}), format_call("price", {"item": "pear"}), "enough"]
    trajectory = play(adapted, calls, row, **config)
    assert (trajectory.error, trajectory.rewards) == (None, [0.0] * 4)
    errors = [text for texts in observed(trajectory)[1:4] for text in texts]
    assert len(errors) == 3 and all(text.startswith("Error: ") for text in errors)


def test_an_environment_without_a_text_asks_for_an_instruction(till, play, row):
    adapted, config = till
    blank = {**row, "prompt": []}
    env = adapted(**config)
    try:
        with pytest.raises(UserError, match=r"set environment\.config\.instruction"):
            env.reset(blank)
    finally:
        env.close()
    trajectory = play(adapted, ["no"], blank, instruction="Pay for three apples.", **config)
    assert trajectory.error is None and observed(trajectory)[0] == ["Pay for three apples."]


def test_a_tool_that_cannot_be_reached_fails_the_episode(play, row):
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation, ToolError
    from openenv_tools_example import Till

    class Lost(Till):
        def step(self, action, timeout_s=None, **kwargs):
            if not isinstance(action, CallToolAction):
                return super().step(action, timeout_s, **kwargs)
            error = ToolError(error_type="transport_error", message="the line is dead")
            return CallToolObservation(tool_name=action.tool_name, error=error)

    trajectory = play(adapt(Lost), [format_call("price", {"item": "apple"})], row)
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert "Lost cannot reach the tool price: the line is dead" in trajectory.error
