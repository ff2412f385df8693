"""Agents that are programs: their inputs, their outputs, and that no process or folder remains."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from agent_programs import COUNT, SPREAD, assignment, has_ended, pids, read_json, running, script

from mtrl.agents.output import MAX_BYTES, Output
from mtrl.agents.program import MAX_RESULT_BYTES, ProgramRunner
from mtrl.agents.runner import AgentError, ProgramResult

ROW = {"id": "7", "prompt": [{"role": "user", "content": "Größe?"}], "ground_truth": {"answer": "x"}}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The folder in which episodes make their folders."""
    folder = tmp_path / "episodes"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run_agent(tmp_path, body, row=ROW, env=None, seconds=30, command=None, passed=()):
    async def one():
        runner = ProgramRunner(command or [sys.executable, script(tmp_path, body)], env or {}, 2, passed)
        try:
            async with asyncio.timeout(seconds):
                return await runner.run(assignment(row))
        finally:
            await runner.close()

    return asyncio.run(one())


def test_a_program_receives_its_episode_and_returns_a_reward(tmp_path, folders, monkeypatch):
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
    outcome = run_agent(tmp_path, body, row, env={"MINE": "1"}, command=command)
    assert outcome == ProgramResult([0.5, 1.0], {"tests": 3.0})
    seen = read_json(tmp_path / "out.json")
    assert seen["row"] == row and seen["files"] == [] and seen["arguments"] == ["--fast"]
    program = seen["told"]
    assert (
        program["OPENAI_BASE_URL"].endswith("/trajectories/secret-token/v1")
        and program["OPENAI_API_KEY"] == "secret-token"
    )
    assert program["MTRL_MODEL"] == "mtrl" and program["MTRL_FEEDBACK_URL"].endswith("/trajectories/secret-token")
    assert program["MINE"] == "1" and program["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "127.0.0.1" in program["NO_PROXY"]
    assert "the trainer's" not in program.values() and "PYTHONPATH" not in program
    assert not Path(seen["folder"]).exists() and not list(folders.iterdir())


def test_relative_files_of_the_command_become_absolute(tmp_path, monkeypatch):
    script(tmp_path, "pay(1)")
    monkeypatch.chdir(tmp_path)
    assert run_agent(tmp_path, "", command=["python", "agent.py"]) == ProgramResult(1.0)


def test_a_program_that_writes_nothing_has_no_outcome(tmp_path):
    assert run_agent(tmp_path, "print('done')") is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "print('so far so good'); raise KeyError('the tests')",
            r"python\S* ended with status 1: KeyError: 'the tests'",
        ),
        ("print('bye', file=sys.stderr); sys.exit(3)", r"python\S* ended with status 3: bye"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"python\S* was killed by SIGKILL"),
        ("Path(os.environ['MTRL_RESULT']).write_text('{')", "MTRL_RESULT holds no JSON"),
        ("Path(os.environ['MTRL_RESULT']).write_text('[' * 100_000)", "MTRL_RESULT holds no JSON"),
        ("os.mkfifo(os.environ['MTRL_RESULT'])", "MTRL_RESULT is not a regular file"),
        ("os.symlink(os.environ['MTRL_ROW'], os.environ['MTRL_RESULT'])", "MTRL_RESULT cannot be read"),
        ("os.mkdir(os.environ['MTRL_RESULT'])", r"MTRL_RESULT cannot be read \(Is a directory\)"),
        (f"Path(os.environ['MTRL_RESULT']).write_bytes(b' ' * {MAX_RESULT_BYTES + 1})", "MTRL_RESULT has more than"),
    ],
)
def test_failures_are_reported(tmp_path, folders, body, message):
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(AgentError, match=message) as error:
        run_agent(tmp_path, body)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert ("so far so good" in str(error.value)) == ("so far" in body)
    assert not list(folders.iterdir())


def test_an_invalid_result_is_reported(tmp_path):
    with pytest.raises(TypeError, match=r"in MTRL_RESULT, returned 'much'"):
        run_agent(tmp_path, "pay('much')")


def test_a_missing_program_is_reported(tmp_path):
    with pytest.raises(AgentError, match="ended with status 127: cannot start /no/such/program"):
        run_agent(tmp_path, "", command=["/no/such/program"])


def test_the_token_is_in_no_message(tmp_path):
    with pytest.raises(AgentError) as error:
        run_agent(tmp_path, "raise ValueError(os.environ['OPENAI_API_KEY'], os.environ['OPENAI_BASE_URL'])")
    assert "***" in str(error.value) and "secret-token" not in str(error.value)


SECRETS = (
    *("PGPASSWORD", "MYSQL_PWD", "DATABASE_URL", "GH_PAT", "OPENAI_APIKEY", "SECRET_KEY_BASE", "DOCKER_AUTH_CONFIG"),
    *("AWS_PROFILE", "SSH_AUTH_SOCK", "KUBECONFIG", "VAULT_ADDR", "SOMETHING_OF_OURS"),
)


def test_only_listed_variables_are_inherited(tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "only-the-trainers")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:only-the-trainers@proxy:3128")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    body = 'Path(row["out"]).write_text(json.dumps(dict(os.environ)))'
    run_agent(tmp_path, body, {**ROW, "out": str(tmp_path / "out.json")}, passed=("GH_PAT",))
    program = read_json(tmp_path / "out.json")
    assert {name for name, value in program.items() if "only-the-trainers" in value} == {"GH_PAT"}
    assert program["LC_ALL"] == "C.UTF-8" and program["HOME"] == os.environ["HOME"]


def test_passed_variables_are_redacted(tmp_path, monkeypatch):
    monkeypatch.setenv("SOMETHING_OF_OURS", "only-the-trainers")
    with pytest.raises(AgentError) as error:
        run_agent(tmp_path, "raise ValueError(dict(os.environ))", passed=("SOMETHING_OF_OURS",))
    assert "SOMETHING_OF_OURS" in str(error.value) and "only-the-trainers" not in str(error.value)


def test_secret_settings_are_redacted(tmp_path):
    with pytest.raises(AgentError) as error:
        run_agent(tmp_path, "raise ValueError(dict(os.environ))", env={"SEARCH_API_KEY": "mine-alone"})
    assert "SEARCH_API_KEY" in str(error.value) and "mine-alone" not in str(error.value)


def test_the_end_of_the_output_is_stored(tmp_path):
    with pytest.raises(AgentError) as error:
        run_agent(tmp_path, "sys.stdout.write('x' * 5_000_000 + 'the end'); sys.stdout.flush(); sys.exit(1)")
    message = str(error.value).partition("The end of its output:\n")[2]
    assert len(message) == MAX_BYTES and message.endswith("xxx" + "the end")


def test_a_cancelled_start_leaves_no_descriptor_open(folders):
    async def cancel_each_step():
        runner = ProgramRunner(["true"], {}, 1)
        before = len(os.listdir("/proc/self/fd"))
        for steps in range(5):
            starting = asyncio.ensure_future(runner.run(assignment(ROW)))
            for _ in range(steps):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait((starting,))
        await asyncio.sleep(0)  # asyncio closes a pipe in the next step of the event loop
        assert len(os.listdir("/proc/self/fd")) == before
        await runner.close()

    asyncio.run(cancel_each_step())
    assert not list(folders.iterdir())


def test_output_in_parts_keeps_only_the_end():
    output = Output()
    whole = bytes(range(32, 127)) * 2000
    for start in range(0, len(whole), 777):
        output.data_received(whole[start : start + 777])
    assert output.text == whole[-MAX_BYTES:].decode()


def test_output_without_an_end_takes_little_memory():
    output, part = Output(), bytes(1000)
    tracemalloc.start()
    try:
        for _ in range(1000):
            output.data_received(part)
        assert tracemalloc.get_traced_memory()[1] < 6 * MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", ["it ends", "its time is over"])
def test_no_process_remains_after_an_episode(tmp_path, folders, end):
    row = {**ROW, "pids": str(tmp_path / "pids")}
    last = {"it ends": "pay(1)", "its time is over": "time.sleep(600)"}[end]
    if end == "it ends":
        assert run_agent(tmp_path, SPREAD + last, row) == ProgramResult(1.0)
    else:

        async def cut_short():
            runner = ProgramRunner([sys.executable, script(tmp_path, SPREAD + last)], {}, 1)
            active = asyncio.ensure_future(runner.run(assignment(row)))
            found = await asyncio.to_thread(pids, row["pids"])
            assert running(found) == found
            active.cancel()
            await asyncio.wait((active,))
            assert active.cancelled()
            await runner.close()

        asyncio.run(cut_short())
    found = pids(row["pids"])
    assert len(found) == COUNT and not running(found)
    assert not list(folders.iterdir())


READ_ONLY = """
import asyncio, ctypes, os, sys
from agent_programs import assignment
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
if sys.argv[1] == "first":  # root may write to read-only folders, unless a new program starts without that capability
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
    os.execv(sys.executable, [*sys.orig_argv[:3], "second", *sys.argv[2:]])
from mtrl.agents.program import ProgramRunner
command = "mkdir -p a/b; touch a/b/c kept; ln -s $PWD/../../../outside link; chmod 500 a/b a . .."
asyncio.run(ProgramRunner(["sh", "-c", command], {}, 1).run(assignment({"prompt": []})))
"""


def test_a_folder_that_the_program_made_read_only_is_removed(tmp_path, folders):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    path_of_modules = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path_of_modules, "TMPDIR": str(folders)}
    subprocess.run([sys.executable, "-c", READ_ONLY, "first"], env=environment, check=True)
    assert not list(folders.iterdir())
    assert outside.stat().st_mode & 0o777 == 0o755, "a link leads out of the folder"


TRAINER = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it runs in the background without it
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
        assert has_ended(found)
    finally:
        trainer.kill()
        trainer.wait()
