"""Agents that are programs: what they are told, what they say, and that nothing of them is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from agent_programs import COUNT, SPREAD, assignment, gone, pids, read_json, running, script

from mtrl.agents.output import MAX_BYTES, Output
from mtrl.agents.program import MAX_RESULT_BYTES, ProgramRunner
from mtrl.agents.runner import AgentError, Outcome

ROW = {"id": "7", "prompt": [{"role": "user", "content": "Größe?"}], "ground_truth": {"answer": "x"}}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Where episodes have their folders."""
    folder = tmp_path / "episodes"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def play(tmp_path, body, row=ROW, env=None, seconds=30, command=None, passed=()):
    async def one():
        runner = ProgramRunner(command or [sys.executable, script(tmp_path, body)], env or {}, 2, passed)
        try:
            async with asyncio.timeout(seconds):
                return await runner.run(assignment(row))
        finally:
            await runner.close()

    return asyncio.run(one())


def test_a_program_is_told_of_its_episode_and_pays(tmp_path, folders, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "the trainer's")
    monkeypatch.setenv("HF_TOKEN", "the trainer's")
    monkeypatch.setenv("OPENAI_API_KEY", "the trainer's")
    monkeypatch.setenv("PYTHONPATH", "/the/trainers")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    body = """
told = {name: value for name, value in os.environ.items()}
here = {"files": os.listdir(), "folder": os.getcwd(), "row": row, "told": told, "arguments": sys.argv[1:]}
Path(row["out"]).write_text(json.dumps(here))
pay({"reward": [0.5, 1], "metrics": {"tests": 3}})
"""
    command = [sys.executable, script(tmp_path, body), "--fast"]
    row = {**ROW, "out": str(tmp_path / "out.json")}
    outcome = play(tmp_path, body, row, env={"MINE": "1"}, command=command)
    assert outcome == Outcome([0.5, 1.0], {"tests": 3.0})
    seen = read_json(tmp_path / "out.json")
    assert seen["row"] == row and seen["files"] == [] and seen["arguments"] == ["--fast"]
    told = seen["told"]
    assert (
        told["OPENAI_BASE_URL"].endswith("/trajectories/secret-token/v1") and told["OPENAI_API_KEY"] == "secret-token"
    )
    assert told["MTRL_MODEL"] == "mtrl" and told["MTRL_FEEDBACK_URL"].endswith("/trajectories/secret-token")
    assert told["MINE"] == "1" and told["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "127.0.0.1" in told["NO_PROXY"]
    assert "the trainer's" not in told.values() and "PYTHONPATH" not in told
    assert not Path(seen["folder"]).exists() and not list(folders.iterdir())


def test_files_beside_the_trainer_are_found_in_the_folder_of_the_episode(tmp_path, monkeypatch):
    script(tmp_path, "pay(1)")
    monkeypatch.chdir(tmp_path)
    assert play(tmp_path, "", command=["python", "agent.py"]) == Outcome(1.0)


def test_a_program_that_writes_nothing_has_no_outcome(tmp_path):
    assert play(tmp_path, "print('done')") is None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "print('so far so good'); raise KeyError('the tests')",
            r"python\S* ended with status 1: KeyError: 'the tests'",
        ),
        ("print('bye', file=sys.stderr); sys.exit(3)", r"python\S* ended with status 3: bye"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"python\S* was killed by SIGKILL"),
        ("Path(os.environ['MTRL_RESULT']).write_text('{')", "MTRL_RESULT holds no JSON"),
        ("Path(os.environ['MTRL_RESULT']).write_text('[' * 100_000)", "MTRL_RESULT holds no JSON"),
        ("os.mkfifo(os.environ['MTRL_RESULT'])", "MTRL_RESULT is no plain file"),
        ("os.symlink(os.environ['MTRL_ROW'], os.environ['MTRL_RESULT'])", "MTRL_RESULT cannot be read"),
        (f"Path(os.environ['MTRL_RESULT']).write_bytes(b' ' * {MAX_RESULT_BYTES + 1})", "MTRL_RESULT has more than"),
    ],
)
def test_what_went_wrong_is_told(tmp_path, folders, body, told):
    with pytest.raises(AgentError, match=told) as error:
        play(tmp_path, body)
    assert ("so far so good" in str(error.value)) == ("so far" in body)
    assert not list(folders.iterdir())


def test_a_result_that_is_no_reward_is_told(tmp_path):
    with pytest.raises(TypeError, match=r"in MTRL_RESULT, returned 'much'"):
        play(tmp_path, "pay('much')")


def test_a_program_that_is_not_there_is_told(tmp_path):
    with pytest.raises(AgentError, match="ended with status 127: cannot start /no/such/program"):
        play(tmp_path, "", command=["/no/such/program"])


def test_the_token_is_in_no_message(tmp_path):
    with pytest.raises(AgentError) as error:
        play(tmp_path, "raise ValueError(os.environ['OPENAI_API_KEY'], os.environ['OPENAI_BASE_URL'])")
    assert "***" in str(error.value) and "secret-token" not in str(error.value)


SECRETS = (
    *("PGPASSWORD", "MYSQL_PWD", "DATABASE_URL", "GH_PAT", "OPENAI_APIKEY", "SECRET_KEY_BASE", "DOCKER_AUTH_CONFIG"),
    *("AWS_PROFILE", "SSH_AUTH_SOCK", "KUBECONFIG", "VAULT_ADDR", "SOMETHING_OF_OURS"),
)


def test_nothing_is_passed_on_that_is_not_on_the_list(tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "only-the-trainers")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:only-the-trainers@proxy:3128")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    body = 'Path(row["out"]).write_text(json.dumps(dict(os.environ)))'
    play(tmp_path, body, {**ROW, "out": str(tmp_path / "out.json")}, passed=("GH_PAT",))
    told = read_json(tmp_path / "out.json")
    assert {name for name, value in told.items() if "only-the-trainers" in value} == {"GH_PAT"}
    assert told["LC_ALL"] == "C.UTF-8" and told["HOME"] == os.environ["HOME"]


def test_what_is_passed_on_is_in_no_message(tmp_path, monkeypatch):
    monkeypatch.setenv("SOMETHING_OF_OURS", "only-the-trainers")
    with pytest.raises(AgentError) as error:
        play(tmp_path, "raise ValueError(dict(os.environ))", passed=("SOMETHING_OF_OURS",))
    assert "SOMETHING_OF_OURS" in str(error.value) and "only-the-trainers" not in str(error.value)


def test_nor_is_what_the_run_gives_it_in_secret(tmp_path):
    with pytest.raises(AgentError) as error:
        play(tmp_path, "raise ValueError(dict(os.environ))", env={"SEARCH_API_KEY": "mine-alone"})
    assert "SEARCH_API_KEY" in str(error.value) and "mine-alone" not in str(error.value)


def test_of_what_it_says_the_end_is_kept(tmp_path):
    with pytest.raises(AgentError) as error:
        play(tmp_path, "sys.stdout.write('x' * 5_000_000 + 'the end'); sys.stdout.flush(); sys.exit(1)")
    said = str(error.value).partition("The end of its output:\n")[2]
    assert len(said) == MAX_BYTES and said.endswith("xxx" + "the end")


def test_output_that_is_read_in_pieces_is_the_end_of_all():
    output = Output()
    whole = bytes(range(32, 127)) * 2000
    for start in range(0, len(whole), 777):
        output.data_received(whole[start : start + 777])
    assert output.text == whole[-MAX_BYTES:].decode() and len(output._text) <= 2 * MAX_BYTES


@pytest.mark.parametrize("end", ["it ends", "its time is over"])
def test_no_process_is_left(tmp_path, folders, end):
    row = {**ROW, "pids": str(tmp_path / "pids")}
    last = {"it ends": "pay(1)", "its time is over": "time.sleep(600)"}[end]
    if end == "it ends":
        assert play(tmp_path, SPREAD + last, row) == Outcome(1.0)
    else:

        async def cut_short():
            runner = ProgramRunner([sys.executable, script(tmp_path, SPREAD + last)], {}, 1)
            playing = asyncio.ensure_future(runner.run(assignment(row)))
            found = await asyncio.to_thread(pids, row["pids"])
            assert running(found) == found
            playing.cancel()
            await asyncio.wait((playing,))
            assert playing.cancelled()
            await runner.close()

        asyncio.run(cut_short())
    found = pids(row["pids"])
    assert len(found) == COUNT and not running(found)
    assert not list(folders.iterdir())


TRAINER = """
import asyncio, sys
from agent_programs import assignment
from mtrl.agents.program import ProgramRunner
runner = ProgramRunner([sys.executable, sys.argv[1]], {}, 1)
asyncio.run(runner.run(assignment({"pids": sys.argv[2], "prompt": []})))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_no_process_outlives_a_trainer_that_is_ended(tmp_path, end):
    path = tmp_path / "pids"
    command = [sys.executable, "-c", TRAINER, script(tmp_path, SPREAD + "time.sleep(600)"), str(path)]
    path_of_modules = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path_of_modules, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        found = pids(path)
        assert running(found) == found
        trainer.send_signal(end)
        trainer.wait(60)
        assert gone(found)
    finally:
        trainer.kill()
        trainer.wait()
