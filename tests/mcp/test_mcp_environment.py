"""Tools of real MCP servers: their results, and servers that refuse, end, hang, flood or survive."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrl.environments.tools import Tool
from mtrl.errors import UserError
from mtrl.mcp.connection import Connection
from mtrl.mcp.environment import McpEnvironment

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server_example.py"))]


def started(**config):
    environment = McpEnvironment(**{"command": SERVER, **config})
    try:
        environment.reset()
    except BaseException:
        environment.close()
        raise
    return environment


def answers(environment, *calls):
    """The texts of the observation of one turn with these calls (name, arguments)."""
    message = {"tool_calls": [{"function": {"name": name, "arguments": json.dumps(each)}} for name, each in calls]}
    return [each["content"] for each in asyncio.run(environment.respond(message, "", {})).observation]


def wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


def test_an_episode_has_its_own_server_whose_faults_are_observations(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    first, second = started(env={"MINE": "1"}, tool_timeout=60.0), started(tool_timeout=2.0)
    try:
        schemas = {each["function"]["name"]: each["function"] for each in first.tools}
        assert schemas["add"]["parameters"]["properties"]["number"]["type"] == "integer"
        assert answers(first, ("add", {"number": 3}), ("add", {"number": 4})) == ["the count is 3", "the count is 7"]
        assert answers(second, ("add", {"number": 1})) == ["the count is 1"], "the episodes share a server"
        assert answers(first, ("variable", {"name": "MINE"}), ("variable", {"name": "MY_API_KEY"})) == ["1", "(none)"]
        refused, image, wrong = answers(first, ("refuse", {}), ("picture", {}), ("add", {"number": "x"}))
        assert refused.startswith("Error: ") and "refuse" in refused
        assert image == "Error: picture returned content that is no text (image)"
        assert wrong.startswith("Error: ") and "number" in wrong
        late, next_one = answers(second, ("hang", {}), ("add", {"number": 1}))
        assert late == "Error: hang took longer than 2 s" and next_one == "the count is 2"
        with pytest.raises(UserError, match=r"ended with status 3; the end of its standard error: .*out of ink"):
            answers(first, ("die", {}))
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("program", "start_timeout", "problem"),
    [
        ("import os\nwhile True: os.write(1, b'x' * 65536)", 60.0, "wrote a line of more than 4194304 bytes"),
        ("import time; print('hello', flush=True); time.sleep(600)", 60.0, r"no message of the protocol .*b'hello\\n'"),
        ("import sys; sys.exit('no licence')", 60.0, "ended with status 1; the end of its standard error: no licence"),
        ("import time; time.sleep(600)", 0.5, "did not list its tools within 0.5 s"),
    ],
)
def test_a_server_that_does_not_start_fails_the_episode(program, start_timeout, problem):
    with pytest.raises(UserError, match=problem):
        started(command=[sys.executable, "-I", "-S", "-c", program], start_timeout=start_timeout)


def test_a_server_on_http_serves_episodes_and_its_end_fails_them():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    episodes = []
    try:
        wait_until(lambda: accepts(port))
        episodes = [started(command=[], url=f"http://127.0.0.1:{port}/mcp", offered_tools=["add"]) for _ in range(2)]
        assert [each["function"]["name"] for each in episodes[0].tools] == ["add"]
        assert answers(episodes[0], ("add", {"number": 3})) == ["the count is 3"]
        assert answers(episodes[1], ("add", {"number": 4})) == ["the count is 7"], "this server has one count for all"
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="cannot be reached"):
            answers(episodes[0], ("add", {"number": 1}))
    finally:
        process.kill()
        for each in episodes:
            each.close()


def accepts(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_wrong_settings_are_named():
    for config, problem in [
        ({"command": "server"}, "is no list of texts"),
        ({"command": []}, "either command or url"),
        ({"command": [], "url": "host:80"}, "is no address"),
        ({"command": [], "url": "http://host/mcp", "env": {"A": "1"}}, "env has no effect"),
    ]:
        with pytest.raises(UserError, match=problem):
            McpEnvironment(**config)
    connection = Connection([], {}, "http://127.0.0.1:9/mcp", 60.0)
    with pytest.raises(UserError, match="cannot be reached"), connection:
        pass
    with pytest.raises(UserError, match="cannot be reached .*the session has ended"):  # and no fault of the tool
        asyncio.run(connection.call("add", {}))


def test_only_the_names_of_offered_tools_must_be_valid(monkeypatch):
    server = nullcontext(SimpleNamespace(name="the MCP server x", tools=[]))
    server.enter_result.tools += [Tool(name, {"function": {"name": name}}, print) for name in ("look", "shop.open")]
    monkeypatch.setattr("mtrl.mcp.environment.Connection", lambda *_: server)
    environment = started(offered_tools=["look"])
    assert [*environment.toolbox] == ["look"]
    environment.close()
    with pytest.raises(UserError, match=r"x has a tool named 'shop\.open', .* by environment\.config\.offered_tools"):
        started()


def test_a_server_ends_with_a_killed_trainer(tmp_path):
    file = tmp_path / "pid"
    server = f"import os, time; open({str(file)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    trainer = (
        "import sys; from mtrl.mcp.environment import McpEnvironment; "
        "McpEnvironment(command=[sys.executable, '-c', sys.argv[1]]).reset()"
    )
    process = subprocess.Popen([sys.executable, "-c", trainer, server], cwd=Path(__file__).parents[2])
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith(" "))
        pid = int(file.read_text())
        assert os.path.exists(f"/proc/{pid}")
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
