"""SWE-bench rows in containers of Podman and Docker, for real where this machine can run them, in a small image."""

import pytest

from envs.mini_swe import FAMILY
from mtrl.sandbox.container_supervisor import owner_label
from mtrl.sandbox.engine_container import engine_path
from mtrl.types import StopReason
from tests.container_root import ENGINES, PROGRAMS, fill, has_image, import_image, need_engine
from tests.envs.mini_swe.repositories import instance_row, write_repository
from tests.sandbox.container_kills import containers

IMAGE = "localhost/mtrl-test-repository:1"
TOOLS = ("git", "grep", "sed", "xargs")
CHECK = "grep -qx '    return a + b' calc.py"
LIMITS = {"container_memory": "128m", "container_processes": 64, "container_disk_mb": 64}


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    """The name of each engine, which has the image and no container of this process after a test."""
    need_engine(request.param, tmp_path)
    if not has_image(request.param, IMAGE):
        fill(tmp_path / "with-git", (*PROGRAMS, *TOOLS))
        (tmp_path / "with-git" / "testbed").mkdir()
        write_repository(tmp_path / "with-git" / "testbed")
        import_image(request.param, tmp_path / "with-git", IMAGE)
    yield request.param
    assert containers(request.param, owner_label(engine_path(request.param))) == []


@pytest.fixture
def episode(play, make_trajectory):
    """Reward, score and the first observation of an episode."""

    def run(engine, responses):
        instance = instance_row(eval_script=CHECK, docker_image=IMAGE)
        settings = {"backend": engine, "command_seconds": 20, "grading_seconds": 60, "max_turns": 5}
        results = play(instance, responses, **settings, **LIMITS)
        final = [{"role": "user", "content": results[-1].observation}]
        trajectory = make_trajectory(responses, StopReason.DONE, final)
        return results[-1].reward, FAMILY.score(trajectory, instance), results[0].observation

    return run


def test_a_repair_resolves_in_a_fresh_container(engine, episode, say):
    """The agent's repository has no trace of the repair in its history."""
    look = say("git log --all --format=%s; git cat-file --batch-check --batch-all-objects | wc -l; cat calc.py")
    reward, score, seen = episode(engine, [look, *FAMILY.gold(instance_row())])
    assert (reward, score) == (1.0, 1.0)
    assert "base\n4\ndef add" in seen and "the repair" not in seen


def test_a_wrong_repair_and_a_test_of_the_agent_earn_nothing(engine, episode, say, submit):
    worse = "sed -i 's/-/*/' calc.py; echo exit 0 > /tmp/evaluate.sh; echo 'exit 0' > grep; chmod +x grep"
    assert episode(engine, [say(worse), say(submit)])[:2] == (0.0, 0.0)
