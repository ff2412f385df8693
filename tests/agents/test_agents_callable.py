"""Functions that misbehave: other episodes continue, and no resource leaks."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agent_programs import assignment

from mtrl.agents import callable as module
from mtrl.agents.callable import CallableRunner
from mtrl.agents.runner import AgentError, ProgramResult

ROW = {"prompt": []}


async def run_agent(runner, row=ROW, seconds=30.0):
    async with asyncio.timeout(seconds):
        return await runner.run(assignment(row))


def test_the_number_of_hanging_threads_is_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_HANGING_THREADS", 2)
    gate, inside, ended = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def hangs(row, client):
        if row.get("hang"):
            inside.release()
            gate.wait(60)
            ended.release()
        return 1.0

    async def cut_short(runner):
        running = asyncio.ensure_future(runner.run(assignment({**ROW, "hang": True})))
        await asyncio.to_thread(inside.acquire)
        running.cancel()
        await asyncio.wait((running,))

    async def until_it_runs(runner):
        while True:
            try:
                return await run_agent(runner)
            except AgentError:  # the threads are past the function, and not yet counted as ended
                await asyncio.sleep(0.01)

    async def story():
        runner = CallableRunner(hangs, 1)
        for _ in range(2):
            assert await run_agent(runner) == ProgramResult(1.0)
            await cut_short(runner)
        with pytest.raises(
            AgentError, match=r"^2 calls of .*hangs still run although their episodes have ended; add a time limit"
        ):
            await run_agent(runner)
        gate.set()
        for _ in range(2):
            await asyncio.to_thread(ended.acquire)
        assert await until_it_runs(runner) == ProgramResult(1.0)
        await runner.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def exits(row, client):
    sys.exit(3)


async def exits_later(row, client):
    await asyncio.sleep(0)
    sys.exit(3)


@pytest.mark.parametrize("agent", [exits, exits_later], ids=["sync", "async"])
def test_a_function_that_exits_fails_only_its_episode(agent):
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        asyncio.run(run_agent(CallableRunner(agent, 1)))


TRAINER = """
import asyncio, time
from agent_programs import assignment
from mtrl.agents.callable import CallableRunner

def hangs(row, client):
    time.sleep(600)

async def stubborn(row, client):
    while True:
        try:
            await asyncio.sleep(600)
        except BaseException:
            pass

async def play(runner):
    try:
        async with asyncio.timeout(0.1):
            await runner.run(assignment({"prompt": []}))
    except TimeoutError:
        print("late")
    await runner.close()

for agent in (hangs, stubborn):
    asyncio.run(play(CallableRunner(agent, 1)))
"""


def test_hanging_functions_do_not_block_the_end_of_a_run():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", TRAINER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["late", "late"]), done.stderr
