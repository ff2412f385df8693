"""NeMo Gym: rows, and episodes with the real resources servers of its package."""

import asyncio
import json
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from foreign import observed

from mtrl.config.schema import DataConfig
from mtrl.engines.server.supervised_process import SupervisedProcess
from mtrl.environments.adapters.nemo_gym import NemoGym, row_of
from mtrl.environments.family import get_family
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from mtrl.types import StopReason

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("MTRL_NEMO_GYM_PYTHON")
real = pytest.mark.skipif(PYTHON is None, reason="needs MTRL_NEMO_GYM_PYTHON=$(scripts/install_nemo_gym.sh)")
pytestmark = pytest.mark.xdist_group("nemo_gym")
TOOL = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


def raw(given="Q", **settings):
    return {"responses_create_params": {"input": given, **settings}, "expected": 1, "id": 7}


def test_a_row_keeps_its_columns_for_the_server():
    row = row_of(raw(), "train", 3)
    assert row == {
        "id": "train-3",
        "prompt": [{"role": "user", "content": "Q"}],
        "ground_truth": {},
        "split": "train",
        "task": raw(),
    }


def test_all_forms_of_an_input_become_messages():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = [{"role": "developer", "content": "D"}, {"type": "message", "role": "user", "content": parts}]
    assert row_of(raw(given, instructions="I"), "test", 0)["prompt"] == [
        {"role": "system", "content": "I"},
        {"role": "system", "content": "D"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "Q"}, r"has no responses_create_params.input; .* has prompt"),
        (raw([{"role": "tool", "content": "x"}]), r"each item must be a message of text with role system"),
        (raw([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]), r"item .*input_image"),
        (raw(["Q"]), r"item Q in responses_create_params.input"),
    ],
)
def test_a_row_of_another_form_is_refused(row, problem):
    with pytest.raises(UserError, match=f"row 4 of data.path .*{problem}"):
        row_of(row, "train", 4)


def test_rows_and_an_address_are_required():
    with pytest.raises(UserError, match=r"environment\.config\.base_url='' is no address"):
        NemoGym()
    with pytest.raises(UserError, match=r"data\.path=null, and a NeMo Gym resources server has no rows"):
        NemoGym.load(DataConfig())


def test_a_server_that_cannot_be_reached_fails_the_episode(play):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        trajectory = play(NemoGym, ["a"], row_of(raw(), "train", 0), base_url=url)
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert f"{url}/seed_session cannot be reached" in trajectory.error


@contextmanager
def served(name, folder):
    """Run a resources server of the package, and yield its address and the path of its example rows."""
    log = folder / "log"
    with open(folder / "address", "wb") as address, open(log, "wb") as errors:
        words = [PYTHON, str(ROOT / "scripts" / "nemo_gym_server.py"), name]
        process = SupervisedProcess(words, os.environ, address, name, folder, errors=errors)
    try:
        while not (url := (folder / "address").read_text()).endswith("\n"):
            assert process.running, log.read_text()
            time.sleep(0.05)
        find = "import resources_servers; print(list(resources_servers.__path__)[0])"
        found = subprocess.run([PYTHON, "-c", find], capture_output=True, text=True, check=True, timeout=60)
        yield url.strip(), Path(found.stdout.strip()) / name / "data" / "example.jsonl"
    finally:
        process.end(2)


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """The example with a counter in each session: the address and the rows."""
    with served("example_session_state_mgmt", tmp_path_factory.mktemp("counter")) as (url, path):
        family = get_family("x", "mtrl.environments.adapters.nemo_gym.NemoGym")
        splits = family.load(DataConfig(path=str(path)), 0)
        yield url, splits


def add(count):
    return format_call("increment_counter", {"count": count})


GET = format_call("get_counter_value", {})


@real
def test_the_rows_of_the_package_have_two_splits(counter):
    _, splits = counter
    assert (len(splits.train), len(splits.test)) == (4, 1)
    assert splits.test[0]["prompt"] == [{"role": "user", "content": "add 1 then add 2 then get the count"}]
    assert splits.test[0]["task"]["expected_count"] == 6


@real
def test_an_episode_has_a_session_tools_and_the_reward_of_the_server(counter, play):
    url, splits = counter
    trajectory = play(NemoGym, [f"{add(1)}{add(2)}", GET, "It is 6."], splits.test[0], base_url=url)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.DONE)
    assert trajectory.rewards == [0.0, 0.0, 1.0]
    assert observed(trajectory)[1:] == [['{"success":true}', '{"success":true}'], ['{"count":6}'], []]


@real
def test_the_state_of_the_session_determines_the_reward(counter, play):
    url, splits = counter
    for _ in range(2):  # the second episode begins at the initial count again
        trajectory = play(NemoGym, [add(1), "It is 6."], splits.test[0], base_url=url)
        assert (trajectory.error, trajectory.rewards) == (None, [0.0, 0.0])


@real
def test_the_limit_of_turns_ends_the_episode_with_the_reward(counter, play):
    url, splits = counter
    trajectory = play(NemoGym, [add(1), add(2)], splits.test[0], max_turns=2, base_url=url)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.MAX_TURNS)
    assert trajectory.rewards == [0.0, 1.0]


@real
def test_mistakes_of_the_model_are_observations(counter, play):
    url, splits = counter
    calls = [add("x"), format_call("verify", {}), "<tool_call>{</tool_call>", f"{add(3)}{GET}", "6"]
    trajectory = play(NemoGym, calls, splits.test[0], base_url=url)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    (status,), (unknown,), (unread,) = observed(trajectory)[1:4]
    assert status.startswith('Error: {"detail":[{"type":"int_parsing"')
    assert unknown.startswith("Error: there is no tool verify; ")
    assert unread.startswith("Error: ")


@real
def test_a_row_that_the_server_refuses_fails_the_episode(counter, play):
    url, splits = counter
    task = {name: value for name, value in splits.test[0]["task"].items() if name != "initial_count"}
    trajectory = play(NemoGym, ["6"], {**splits.test[0], "task": task}, base_url=url)
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert "/seed_session answered with status 422" in trajectory.error and "initial_count" in trajectory.error


@real
def test_a_tool_with_the_name_of_a_path_is_refused(counter, play):
    url, splits = counter
    settings = {"input": "Q", "tools": [{**TOOL, "name": "verify"}]}
    task = {**splits.test[0]["task"], "responses_create_params": settings}
    trajectory = play(NemoGym, ["6"], {**splits.test[0], "task": task}, base_url=url)
    assert "responses_create_params.tools has" in trajectory.error


@real
def test_the_server_reads_the_calls_of_the_response(tmp_path):
    """Its prompt of 2,000 words is too long for the tests' episodes, so the environment is called directly."""
    with served("example_multi_step", tmp_path) as (url, path):
        row = NemoGym.load(DataConfig(path=str(path)), 0).test[0]
        assert row["task"]["expected_synonym_values"] == [711, 407]
        rewards = [asyncio.run(multi_step(url, row, values)) for values in ([711, 407], [407, 711], [711])]
        with pytest.raises(UserError, match="/verify answered with status 500"):
            asyncio.run(multi_step(url, row, None))
    assert [(result.reward, result.metrics["set_overlap"]) for result in rewards] == [
        (1.0, 1.0),
        (0.0, 1.0),
        (0.0, 0.5),
    ]
    assert rewards[1].metrics["order_instruction_following_failure"] == 1.0
    assert "minefield_label_value" not in rewards[0].metrics, "a number of the row is no metric"


async def multi_step(url, row, values):
    """Return the result of the last turn; with `values=None` the last call lacks the key that the verifier reads."""
    env = NemoGym(base_url=url)
    try:
        assert env.reset(row) == row["prompt"] and [message["role"] for message in row["prompt"]] == ["system", "user"]
        found = await env.step(f"I look.{format_call('get_synonym_value', {'synonym': 'Warm'})}", {})
        assert json.loads(found.observation[0]["content"]) == {"synonym_value": 407}
        await env.step(format_call("extract_synonym_values", {"synonym_values": values} if values else {}), {})
        return await env.step("done", {})
    finally:
        env.close()
