"""SWE-bench rows in containers, with a program in place of docker. The tests use no real daemon."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from envs.mini_swe import FAMILY
from envs.mini_swe.container_grading import evaluation_script, resolved, statuses
from envs.mini_swe.container_task import ContainerTask
from envs.mini_swe.patches import source_patch
from mtrl.environments.base import Resources
from mtrl.errors import UserError
from mtrl.types import StopReason
from tests.envs.mini_swe.repositories import CHECK, INSTANCE, instance_row, write_repository


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A folder with programs named docker and podman on PATH, and the image of all containers."""
    home = tmp_path / "docker"
    image = home / "image"
    (home / "containers").mkdir(parents=True)
    image.mkdir()
    write_repository(image)
    for name in ("docker", "podman"):
        shutil.copy(Path(__file__).with_name("fake_docker.py"), home / f"{name}.py")
        (home / name).write_text(f"#!{sys.executable} -IS\n{(home / f'{name}.py').read_text()}")
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    # The pytest of a container would load the plugins of this environment, which takes most of its time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return home


def calls_of(docker, kind):
    lines = (docker / "log.jsonl").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == kind]


@pytest.fixture
def episode(play, make_trajectory):
    """Reward, score and observations of an episode in containers."""

    def run(instance, responses, backend="docker", **settings):
        settings = {"command_seconds": 20, "grading_seconds": 60, "max_turns": 5, **settings}
        results = play(instance, responses, backend=backend, **settings)
        final = [{"role": "user", "content": results[-1].observation}] if results[-1].done else []
        trajectory = make_trajectory(responses[: len(results)], StopReason.DONE, final)
        return results[-1].reward, FAMILY.score(trajectory, instance), [result.observation for result in results]

    return run


@pytest.mark.parametrize("backend", ["docker", "podman"])
def test_gold_resolves_and_all_containers_are_removed(docker, episode, say, backend):
    instance = instance_row()
    responses = [say("cat calc.py"), *FAMILY.gold(instance)]
    limits = {"container_memory": "2g", "container_processes": 99, "container_disk_mb": 9}
    reward, score, observations = episode(instance, responses, backend, **limits)
    assert (reward, score) == (1.0, 1.0) and "return a - b" in observations[0]
    assert not list((docker / "containers").iterdir())
    starts = calls_of(docker, "run")
    assert len(starts) == 2, "one to work in, a fresh one for the tests"
    for words in starts:
        text = " ".join(words)
        assert "--rm --network none --memory 2g --memory-swap 2g --pids-limit 99 --ulimit fsize=9437184:9437184" in text
        assert " --security-opt no-new-privileges " in text
        assert "--entrypoint bash -w /testbed docker.io/swebench/sweb.eval.x86_64.owner_1776_repo-1:latest" in text
    assert all("timeout -s KILL" in " ".join(words) for words in calls_of(docker, "exec"))


def test_tests_are_not_in_the_agents_container_and_no_repair_fails(docker, episode, say, submit):
    instance = instance_row(eval_script="echo hidden-marker; " + CHECK)
    reward, score, observations = episode(instance, [say("grep -r hidden-marker . ; echo searched"), say(submit)])
    assert (reward, score) == (0.0, 0.0) and "searched" in observations[0]
    agents = [words for words in calls_of(docker, "exec") if "searched" in words[-1] or "git add" in words[-1]]
    assert not any("evaluate.sh" in words[-1] for words in agents)


def test_later_commits_are_removed(docker, episode, say, submit):
    """The image contains the repairing commit in another branch."""
    look = "git log --all --format=%s; git cat-file --batch-check --batch-all-objects | wc -l; git rev-list --all"
    _, _, observations = episode(
        instance_row(), [say(look + "; git grep future $(git rev-list --all) | wc -l"), say(submit)]
    )
    assert "base" in observations[0] and "the repair" not in observations[0]


TESTS = {"eval_script": "", "FAIL_TO_PASS": '["test_new.py::test_add"]', "PASS_TO_PASS": ["test_calc.py::test_old"]}
TEST_PATCH = (
    "diff --git a/test_new.py b/test_new.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_new.py\n"
    "@@ -0,0 +1,4 @@\n+import calc\n+\n+def test_add():\n+    assert calc.add(2, 3) == 5\n"
)


def test_named_tests_must_pass(docker, episode, say, submit):
    instance = instance_row(**TESTS, test_patch=TEST_PATCH)
    assert episode(instance, FAMILY.gold(instance))[:2] == (1.0, 1.0)
    worse = "printf 'def add(a, b):\\n    return 5\\n' > calc.py"
    assert episode(instance, [say(worse), say(submit)])[:2] == (0.0, 0.0), "a test that passed before fails"


CHEATS = {
    "its own tests": "printf 'def test_add(): pass\\n' > test_new.py",
    "conftest": "printf 'def pytest_collection_modifyitems(items): items.clear()\\n' > conftest.py",
    "settings": "printf '[pytest]\\npython_functions = nothing\\n' > pytest.ini",
    "leaves at import": "printf 'import os\\nos._exit(0)\\n' > calc.py",
    "a link": "printf 'def add(a, b): return a + b\\n' > /tmp/x.py; rm calc.py; ln -s /tmp/x.py calc.py",
    "a commit": "git -c user.name=x -c user.email=x commit -qam x --allow-empty",
    "hooks and filters": "git config diff.external 'echo diff --git a/calc.py'; echo '*.py diff=x' > .gitattributes",
}


@pytest.mark.parametrize("command", CHEATS.values(), ids=CHEATS.keys())
def test_cheats_in_containers(docker, episode, say, submit, command):
    instance = instance_row(**TESTS, test_patch=TEST_PATCH)
    assert episode(instance, [say(command), say(submit)])[:2] == (0.0, 0.0)


def test_committed_changes_count(docker, episode, say, submit):
    mend = "sed -i 's/-/+/' calc.py && git -c user.name=x -c user.email=x commit -qam mended"
    assert episode(instance_row(base_commit=None), [say(mend), say(submit)])[:2] == (1.0, 1.0)


def test_limits_on_output_and_time(docker, episode, say):
    _, _, observations = episode(
        instance_row(), [say("yes"), say("sleep 50"), say("echo alive")], command_seconds=1, max_turns=4
    )
    assert "<exception>the command was stopped" in observations[0] and len(observations[0]) < 12_000
    assert "<exception>the command was stopped: it took more than 1 s" in observations[1]
    assert "alive" in observations[2]


@pytest.mark.parametrize("state", ["no_image", "dies_after_start"])
def test_a_container_that_does_not_start_voids_the_episode_and_is_removed(docker, play, say, state):
    (docker / state).touch()
    with pytest.raises(RuntimeError, match="docker cannot start a container of docker.io/swebench/"):
        play(instance_row(), [say("ls")], backend="docker")
    assert not list((docker / "containers").iterdir())


def test_containers_are_removed_after_a_crash(docker, say):
    environment = FAMILY.environment(backend="docker")
    environment.reset(instance_row())
    environment.step(say("ls"), instance_row()["ground_truth"])
    assert list((docker / "containers").iterdir())
    environment.close()
    assert not list((docker / "containers").iterdir())


def test_a_command_after_the_end_of_the_episode_leaves_no_container(docker):
    resources = Resources()
    task = ContainerTask(instance_row()["ground_truth"], resources, executable="docker")
    resources.close()
    with pytest.raises(RuntimeError, match="the episode is over"):
        task.execute({"command": "ls"})
    assert not list((docker / "containers").iterdir())


# Patches

GOOD_PART = INSTANCE["patch"]


def test_patches_of_sources_are_applied_and_others_dropped():
    assert source_patch(GOOD_PART) == GOOD_PART
    for path in ("tests/test_x.py", "conftest.py", "setup.cfg", "a/.hidden/x.py", "x.pth", "test_calc.py"):
        assert source_patch(GOOD_PART.replace("calc.py", path)) == "", path
    assert source_patch(GOOD_PART.replace("calc.py", "conftest.py") + GOOD_PART) == GOOD_PART


@pytest.mark.parametrize(
    "part",
    [
        GOOD_PART.replace("+++ b/calc.py", "+++ b/conftest.py"),
        GOOD_PART.replace("--- a/calc.py", "--- a/tests/test_x.py"),
        GOOD_PART.replace("a/calc.py b/calc.py", "a/calc.py b/conftest.py"),
        GOOD_PART.replace("--- a", "new file mode 120000\n--- a", 1),
        GOOD_PART.replace("--- a", "index 000..111 120000\n--- a", 1),
        GOOD_PART.replace("--- a", "rename from conftest.py\nrename to calc.py\n--- a", 1),
        'diff --git "a/calc\\n.py" "b/calc\\n.py"\nnew file mode 100644\n',
        "diff --git a/calc.py b/calc.py\nindex 1..2 100644\nGIT binary patch\nliteral 3\n",
        "diff --git a/calc.py b/calc.py\nold mode 100644\nnew mode 100755\n",
        "no patch at all\n",
    ],
)
def test_patches_with_inconsistent_paths_are_dropped(part):
    assert source_patch(part) == ""


# Logs


def test_logs_are_read():
    log = "PASSED outside\n>>>>> Start Test Output\nPASSED a.py::x\nFAILED a.py::y - assert 1\nERROR b.py\n"
    log += "test_z (m.Case) ... ok\ntest_w (m.Case) ... FAIL\n>>>>> End Test Output\nPASSED later\n"
    right = {"a.py::x": {"PASSED"}, "a.py::y": {"FAILED"}, "b.py": {"ERROR"}}
    right |= {"test_z (m.Case)": {"PASSED"}, "test_w (m.Case)": {"FAILED"}, "outside": set(), "later": set()}
    assert statuses(log, right) == right


@pytest.mark.parametrize(
    ("log", "good"),
    [
        ("PASSED a::x\nPASSED a::y", True),
        ("PASSED a::x", False),
        ("PASSED a::x\nFAILED a::y - boom", False),
        ("PASSED a::x\nPASSED a::y\nFAILED a::y", False),
        ("say PASSED a::x\nPASSED a::y", False),
        ("a::x ... ok\na::y ... ok", True),
        ("", False),
    ],
)
def test_reward_and_scorer_read_the_same_of_a_log(log, good, make_trajectory):
    truth = {"image": "x", "fail_to_pass": ["a::x"], "pass_to_pass": ["a::y"]}
    final = [{"role": "user", "content": f"graded ; exit 1\n{log}"}]
    assert resolved(log, 1, truth) == good
    assert FAMILY.score(make_trajectory(["x"], StopReason.DONE, final), {"ground_truth": truth}) == float(good)


@pytest.mark.parametrize(
    ("name", "log", "good"),
    [
        ("a::x[not", "PASSED a::x[not not b]", True),  # a row of SWE-bench holds the first word of a name
        ("a::x[not", "PASSED a::x[not not b]\nFAILED a::x[not c] - boom", False),
        ("a::x[not not b]", "PASSED a::x[not not b]", True),
        ("a::x[b - c]", "PASSED a::x[b - c]", True),
        ("a::x[b - c]", "FAILED a::x[b - c] - boom\nPASSED a::x[b - c]", False),
        ("a::x", "PASSED a::xy\nPASSED a::x[b]", False),
    ],
)
def test_names_of_tests_may_have_spaces(name, log, good, make_trajectory):
    truth = {"image": "x", "fail_to_pass": [name], "pass_to_pass": []}
    assert resolved(log, 1, truth) == good
    final = [{"role": "user", "content": f"graded ; exit 1\n{log}"}]
    assert FAMILY.score(make_trajectory(["x"], StopReason.DONE, final), {"ground_truth": truth}) == float(good)


def test_a_line_of_many_dashes_takes_little_memory(make_trajectory):
    log = "PASSED x" + " - y" * 4000 + "\nPASSED a::x - slow"
    truth = {"image": "x", "fail_to_pass": ["a::x"], "pass_to_pass": []}
    trajectory = make_trajectory(["x"], StopReason.DONE, [{"role": "user", "content": f"graded ; exit 0\n{log}"}])
    for solves in (lambda: resolved(log, 0, truth), lambda: FAMILY.score(trajectory, {"ground_truth": truth})):
        tracemalloc.start()
        assert solves()
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


def test_an_agent_cannot_forge_the_log(make_trajectory):
    truth = {"image": "x", "fail_to_pass": [], "pass_to_pass": []}
    text = "graded ; exit 0\n"
    for final in ([], [{"role": "assistant", "content": text}], [{"role": "user", "content": f"x {text}"}]):
        assert FAMILY.score(make_trajectory([text], StopReason.DONE, final), {"ground_truth": truth}) == 0.0


def test_the_script_for_named_tests():
    truth = {"eval_script": "", "test_patch": "", "fail_to_pass": ["a.py::x"], "pass_to_pass": ["b c.py::y"]}
    assert "python -m pytest -rA -p no:cacheprovider a.py 'b c.py'" in evaluation_script(truth)
    assert evaluation_script({**truth, "eval_script": "mine"}) == "mine"


def test_without_the_package_the_extra_is_named(monkeypatch):
    from envs.mini_swe.package import mini_swe_agent

    for name in [name for name in sys.modules if name.partition(".")[0] == "minisweagent"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "minisweagent", None)
    with pytest.raises(UserError, match=r"pip install 'mtrl-agents\[swe\]'"):
        mini_swe_agent("environments.docker")


def test_importing_the_package_touches_neither_the_home_nor_the_environment(tmp_path):
    (tmp_path / ".config" / "mini-swe-agent").mkdir(parents=True)
    (tmp_path / ".config" / "mini-swe-agent" / ".env").write_text("SECRET_OF_MINE=1\n")
    program = (
        "import os; before = dict(os.environ); from envs.mini_swe.package import mini_swe_agent; "
        "mini_swe_agent('environments.docker'); assert dict(os.environ) == before; "
        "import logging; assert not logging.getLogger('minisweagent').handlers"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    environment.pop("MSWEA_SILENT_STARTUP", None)
    folder = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
