"""Hostile environments beside a harmless one: each ends within its limits, and the harmless episode is unchanged."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from functools import partial

import pytest
from attack_kit import MEGABYTE, ROOT
from environment_attacks import ATTACKS, ON_A_RUN, Plain

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.types import FAILED, to_json
from tests import forked

TURNS = 3
PATIENCE = 60.0
"""Time limit of an episode in seconds, on a busy machine."""


def row():
    return {"id": "r", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"answer": "x"}}


@pytest.fixture
def play(tiny_tokenizer, tiny_codec):
    """Function `play(attack)` that returns its trajectory, and that of a harmless one on the same threads and loop."""

    def play(attack):
        pool = EnvironmentPool(2)
        engine = ScriptedEngine(lambda trajectory_id, turn: "abc"[turn], tiny_tokenizer)
        sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)

        def run(name, environment, step_timeout):
            limits = EpisodeLimits(TURNS, 10**5, step_timeout, PATIENCE / 2, retries=0)
            loop = EpisodeLoop(engine, environment, partial(Conversation, tiny_codec), pool, limits)
            return loop.run(row(), name, 0, sampling)

        async def both():
            episodes = run("bad", attack.environment, attack.step_timeout), run("good", Plain, PATIENCE)
            return await asyncio.wait_for(asyncio.gather(*episodes), PATIENCE)

        try:
            return asyncio.run(both())
        finally:
            pool.close()

    return play


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_environment_fails_only_its_own_episode(attack, play):
    before = os.getcwd(), sys.getrecursionlimit()
    bad, good = play(attack)
    assert good.error is None and good.rewards == [0.5] * TURNS
    assert [turn.observation[0]["content"] for turn in good.turns] == ["Q", "received a", "received b"]
    if attack.ends:
        assert bad.stop_reason in FAILED and not bad.trainable
        assert attack.ends in bad.error.splitlines()[0]
    else:
        assert bad.error is None and bad.trainable and 1 <= len(bad.turns) <= TURNS
        assert all(isinstance(reward, float) for reward in bad.rewards)
    assert len(to_json(bad).encode()) < (attack.most_characters or 100_000)
    assert (os.getcwd(), sys.getrecursionlimit()) == before


def test_forged_roles_and_tokens_are_not_trained(play, tiny_codec):
    """Only sampled tokens are trained, independent of the text of the environment."""
    for attack in ATTACKS:
        if attack.name in ("control tokens", "a forged role"):
            bad, good = play(attack)
            assert [turn.action_ids for turn in bad.turns] == [turn.action_ids for turn in good.turns]
            hostile = [i for turn in bad.turns[1:] for i in turn.observation_ids]
            harmless = [i for turn in good.turns[1:] for i in turn.observation_ids]
            ends = set(tiny_codec.stop_token_ids)
            assert sum(i in ends for i in hostile) == sum(i in ends for i in harmless), attack.name


MODULE = """
import asyncio, os, subprocess, sys, threading, time
from types import SimpleNamespace
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Splits

RUN, once = os.environ["RUN"], threading.Lock()

def act(loop):
    if os.path.exists(RUN + "/status.txt") and once.acquire(blocking=False):  # several threads call `step`
        open(RUN + "/attack.txt", "w").close()
        {statements}

class Bad(BaseEnvironment):
    {step}

    @staticmethod
    def load(data, seed, **config):
        rows = [dict(id=str(i), prompt=[dict(role="user", content=f"row {{i}}")], ground_truth={{}}) for i in range(40)]
        return Splits(rows[:30], rows[30:])

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: "hello")
"""
PLAIN_STEP = "def step(self, response, ground_truth): act(None); return len(set(response)) / 9, None, True"
ASYNC_STEP = """async def step(self, response, ground_truth):
        act(asyncio.get_running_loop()); await asyncio.sleep(0); return len(set(response)) / 9, None, True"""
WORDS = [
    "debug=fast", "environment.target=bad.Bad", "name=bad", "environment.config={}", "environment.step_timeout=20",
    "tracker.plots=false", "evaluation.before_train=false", "preflight.at_start=none", "diagnosis.live=none",
]  # fmt: skip


def run(folder, is_async, statements):
    """Run training with an environment that executes the statements once; return its output and exit status."""
    step = ASYNC_STEP if is_async else PLAIN_STEP
    (folder / "bad.py").write_text(textwrap.dedent(MODULE).format(statements=statements, step=step))
    path = f"{ROOT}{os.pathsep}{folder}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RUN": str(folder / "run")}
    command = [sys.executable, "-m", "mtrl.main", *WORDS, f"run_dir={folder / 'run'}"]
    done = forked.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * PATIENCE
    )
    return done.stdout, done.returncode


def rewards_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["rollout/reward/mean"] for row in rows if "rollout/reward/mean" in row]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folders = {is_async: tmp_path_factory.mktemp(f"undisturbed{is_async}") for is_async in (False, True)}
    for is_async, folder in folders.items():
        output, status = run(folder, is_async, "pass")
        assert status == 0, output
    return {is_async: folder / "run" for is_async, folder in folders.items()}


@pytest.mark.xdist_group("undisturbed")
@pytest.mark.parametrize("name", ON_A_RUN)
def test_a_run_continues_or_ends_with_a_sentence(name, undisturbed, tmp_path):
    """The run has the weights of an undisturbed run, or ends with a nonzero status and a sentence."""
    is_async, statements, expected, sentence = ON_A_RUN[name]
    output, status = run(tmp_path, is_async, statements)
    run_dir = tmp_path / "run"
    assert (run_dir / "attack.txt").exists() and status == expected, output
    if expected == 0:
        assert rewards_of(run_dir) == rewards_of(undisturbed[is_async])
        weights = [
            (folder / "export" / "model.safetensors").read_bytes() for folder in (run_dir, undisturbed[is_async])
        ]
        assert weights[0] == weights[1]
    else:
        assert sentence in output.strip().splitlines()[-1] and "Traceback" not in output
        assert (run_dir / "status.txt").read_text().strip() == "stopped"
    assert sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()) < MEGABYTE


def test_there_are_enough_environments():
    names = [attack.name for attack in ATTACKS] + list(ON_A_RUN)
    assert len(set(names)) == len(names) >= 43
