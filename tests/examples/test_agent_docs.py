"""The code of docs/agents.md and of the examples works; tests/test_docs.py composes the commands of the document."""

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mtrl.agents.callable import CallableRunner
from mtrl.agents.remote import rollout_request
from mtrl.agents.runner import Assignment
from mtrl.main import prepare
from tests.examples.agent_episodes import by_agent
from tests.gateway.live_gateway import Live

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples" / "agents").glob("*.py"))
ROW = {"id": "one", "prompt": [{"role": "user", "content": "how many?"}], "ground_truth": {"answer": "46"}}
KEY = "a-key-of-your-own"


def block(language, holds):
    """Return the only block of the guide in this language that contains these words."""
    (found,) = [text for text in re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.M | re.S) if holds in text]
    return found


def shown(name):
    """Execute a Python block of the guide, and return its names."""
    namespace = {}
    exec(block("python", f"# {name}"), namespace)
    return namespace


@pytest.mark.parametrize(("responses", "reward"), [(["45", "46"], 1.0), (["45", "47", "48"], 0.0)])
def test_the_function_of_the_guide_agrees_with_its_scorer(tiny_codec, responses, reward):
    run, family = shown("riddle_agent.py")["run"], shown("riddles.py")["FAMILY"]
    trajectory = by_agent(CallableRunner(run, 1), ROW, responses, tiny_codec)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, reward, len(responses))
    assert (family.name, family.score(trajectory, ROW)) == ("riddles", reward)
    assert all(turn.break_reason is None for turn in trajectory.turns)


def test_the_documented_request_is_the_one_that_is_sent():
    sent = rollout_request(Assignment(ROW, "http://h/v1", "sk", "mtrl", "t", 1.0, 1.0, 64, "http://h"))
    documented = json.loads(block("json", '"metadata"').replace("[…]", "[]").replace("{…}", "{}"))
    camel = {"jobArn", "trajectoryId", "rolloutId", "inferenceParams"}
    assert documented.keys() == sent.keys() - camel
    assert documented["metadata"].keys() == sent["metadata"].keys() - camel
    assert documented["inference_params"].keys() == sent["inference_params"].keys()
    assert camel <= sent.keys() | sent["metadata"].keys()


def test_the_service_in_the_guide_exists():
    from examples.agents import rft_agent

    (command,) = [line for line in block("sh", "uvicorn").splitlines() if "uvicorn" in line]
    assert shlex.split(command)[-1] == "examples.agents.rft_agent:app"
    assert {"/rollout", "/health"} <= {route.path for route in rft_agent.app.routes}


def test_the_curl_script_samples_rewards_and_completes(tiny_codec, tmp_path):
    live, opened = Live(tiny_codec, lambda name, turn: "46"), []
    live.gateway.allow_admin(KEY, lambda name: opened.append(live.gateway.open(name, sampling)) or opened[-1])
    with live:
        sampling = live.open("other").sampling
        script = block("sh", "# ask.sh").replace("127.0.0.1:8123", "{}:{}".format(*live.address))
        environment = {"PATH": os.environ["PATH"], "MTRL_GATEWAY_KEY": KEY, "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            ["bash", "-euc", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert '"content":"46"' in done.stdout
        (session,) = opened
        assert (session.name, session.status) == ("one", "ready")
        assert [turn.reward for turn in live.turns(session)] == [1.0]


def commands_of(path):
    """Return the training commands in the docstring of a module."""
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip().startswith("mtrl train")]


COMMANDS = {f"{path.stem}{i}": words for path in EXAMPLES for i, words in enumerate(commands_of(path))}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_commands_of_the_examples_compose(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    prepare(words[2:])


def test_every_agent_has_its_command_and_its_row_in_the_guide():
    agents = {path.stem for path in EXAMPLES} - {
        "word_problems",
        "command_line_sandbox",
        "own_interpreter",
        "verifiers_worker",
    }
    assert {re.sub(r"\d+$", "", name) for name in COMMANDS} == agents
    assert agents == set(re.findall(r"^\| \[`(\w+)\.py`\]", GUIDE, re.M))


def test_the_extras_that_are_named_exist(monkeypatch):
    handed = {}
    monkeypatch.setattr("setuptools.setup", lambda **keywords: handed.update(keywords))
    exec(compile((ROOT / "setup.py").read_text(), str(ROOT / "setup.py"), "exec"), {"__file__": str(ROOT / "setup.py")})
    texts = [GUIDE, *(path.read_text(encoding="utf-8") for path in EXAMPLES)]
    named = {extra for text in texts for extra in re.findall(r"'mtrl-agents\[([\w-]+)\]'", text)}
    assert named >= {"swe", "litellm", "langchain", "pydantic-ai", "smolagents", "strands", "sagemaker"}
    assert named <= handed["extras_require"].keys()
