"""Task folders are read as Harbor reads them, and a folder that cannot run is refused in one sentence."""

import logging

import pytest

from envs.terminal.data import load
from envs.terminal.task import read_task
from envs.terminal.verdict import parse_reward
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.types import StopReason
from tests.envs.episodes import trajectory_of


@pytest.fixture
def folder(tmp_path):
    """A task folder with only the necessary files."""
    return make_task(tmp_path / "tasks" / "first")


def make_task(folder, toml=""):
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


OLDER = """
version = "1.0"
[agent]
timeout_sec = 900
[verifier]
timeout_sec = 30
env = {A = "b"}
[environment]
skills_dir = "x"
docker_image = "docker.io/x/y:1"
memory = "2G"
cpus = 1
storage = "10G"
allow_internet = true
"""


def test_settings_of_an_older_task(folder):
    (folder / "task.toml").write_text(OLDER)
    task = read_task(folder)
    assert (task.name, task.instruction, task.image, task.needs_image) == ("first", "Do it.", "docker.io/x/y:1", True)
    assert (task.agent_seconds, task.tests_seconds, task.build_seconds) == (900, 30, 600)
    assert (task.memory_mb, task.storage_mb, task.cpus, task.wants_network) == (2048, 10240, 1, True)
    assert (task.env, task.tests_env, task.solution, task.idle) == ({}, {"A": "b"}, None, ("skills_dir",))


def test_an_empty_task_toml_has_harbors_defaults(folder):
    task = read_task(folder)
    assert (task.agent_seconds, task.tests_seconds, task.memory_mb, task.wants_network) == (None, 600, None, None)
    assert not task.needs_image


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("x = ", "task first has a task.toml that is not valid TOML .*; correct it"),
        ("[[steps]]\nname = 'a'", "task first needs several steps, which mtrl does not support; leave the task out"),
        ("[environment]\nos = 'windows'\ngpus = 1", "needs Windows, GPUs, which"),
        ("[verifier]\nenvironment_mode = 'separate'", "needs a container for its tests alone"),
        ("[agent]\nuser = 'me'", "needs a user of its own"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.b']", "needs a list of allowed hosts"),
        ("[environment]\nnetwork_mode = 'some'", "environment.network_mode='some'; write public or no-network"),
        ("[environment]\nmemory = '2 GB'", "environment.memory='2 GB' in task.toml; write a size such as 2G"),
        ("[environment]\nmemory = '.G'", "environment.memory='.G' in task.toml; write a size such as 2G"),
        ("[environment]\nworkdir = 'app'", "environment.workdir='app' in task.toml; write a whole path such as /app"),
        ("[environment]\nworkdir = '/app/../x'", "write a whole path such as /app"),
        ("[environment]\nworkdir = 5", "environment.workdir=5 in task.toml; write a text"),
        ("[environment]\ndocker_image = 5", "environment.docker_image=5 in task.toml; write a text"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec=0 in task.toml; write a number above 0"),
        ("[verifier.env]\nKEY = '${KEY}'", "verifier.env.KEY='\\${KEY}', and mtrl passes no variable of this machine"),
        ("environment = 3", "task first has environment=3 in task.toml; write a table"),
    ],
)
def test_a_task_that_cannot_run_is_refused(folder, toml, sentence):
    (folder / "task.toml").write_text(toml)
    with pytest.raises(UserError, match=sentence):
        read_task(folder)


def test_missing_files_are_named(folder):
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(UserError, match="task first has no tests/test.sh; write the script that judges the episode"):
        read_task(folder)
    (folder / "instruction.md").unlink()
    with pytest.raises(UserError, match="task first has no instruction.md; write the task"):
        read_task(folder)
    (folder / "task.toml").rename(folder / "task.yaml")
    with pytest.raises(UserError, match="task.yaml, which is the format of Terminal-Bench 1; convert it with: harbor"):
        read_task(folder)


def test_splits_of_a_folder(tmp_path):
    for index in range(9):
        make_task(tmp_path / "all" / "deep" / f"t{index}")
    splits = load(DataConfig(path=str(tmp_path / "all")), 0)
    assert [row["id"] for row in splits.test] == ["deep/t0", "deep/t8"] and len(splits.train) == 7
    for name in ("train", "test"):
        make_task(tmp_path / "split" / name / name)
    splits = load(DataConfig(path=str(tmp_path / "split")), 0)
    assert [row["id"] for row in (*splits.train, *splits.test)] == ["train", "test"]


IDLE_HERE = "have keys in [environment] that have no effect with environment.config.backend="
COMPLAINTS = {
    "podman": [
        "ask for the network, and environment.config.network=false starts their containers without it",
        "ask for more memory than environment.config.memory_mb=2048",
        "ask for more storage than environment.config.disk_mb=10240",
    ],
    "sandbox": [
        "ask for the network, which environment.config.backend=sandbox does not have",
        "ask for more memory than environment.config.memory_mb=2048",
        f"{IDLE_HERE}sandbox (cpus, storage_mb)",
    ],
    "swerex": [f"{IDLE_HERE}swerex (cpus, memory_mb, storage_mb, network_mode)"],
}


@pytest.mark.parametrize("backend", COMPLAINTS)
def test_settings_of_tasks_without_an_effect_are_named(tmp_path, caplog, monkeypatch, backend):
    monkeypatch.setenv("MTRL_SWEREX_TOKEN", "token")
    for index in range(2):
        toml = "[environment]\nnetwork_mode = 'public'\nmemory_mb = 9000\nstorage_mb = 90000\n"
        make_task(tmp_path / f"t{index}", toml + ("docker_image = 'x'" if backend == "podman" else ""))
    with caplog.at_level(logging.WARNING):
        load(DataConfig(path=str(tmp_path)), 0, backend=backend, servers=["https://x"] if backend == "swerex" else [])
    assert [message.split("t1, ")[1] for message in caplog.messages] == COMPLAINTS[backend]


@pytest.mark.parametrize("workdir", ["/home/user/project", "/usr/src", "/etc", "/tests", "/"])
def test_a_working_directory_that_the_sandbox_cannot_have_is_refused_at_the_start(folder, workdir):
    make_task(folder.parent / "second", f"[environment]\nworkdir = '{workdir}'")
    with pytest.raises(UserError, match=f"task second has environment.workdir='{workdir}', and the sandbox has"):
        load(DataConfig(path=str(folder.parent)), 0)


def test_settings_that_do_not_fit_are_refused(folder, monkeypatch):
    monkeypatch.delenv("MTRL_SWEREX_TOKEN", raising=False)
    data = DataConfig(path=str(folder.parent))
    with pytest.raises(UserError, match="has 1 tasks, and training and evaluation need at least one each"):
        load(data, 0)
    make_task(folder.parent / "second", "[environment]\ndocker_image = 'x'")
    with pytest.raises(UserError, match="task second has an image of its own, and environment.config.backend=sandbox"):
        load(data, 0)
    with pytest.raises(UserError, match="task first has neither environment/Dockerfile nor environment.docker_image"):
        load(data, 0, backend="podman")
    for settings, sentence in (
        (
            {"backend": "lxc"},
            "environment.config.backend=lxc is not known; choose one of sandbox, podman, docker, swerex",
        ),
        (
            {"network": True},
            "network is for containers of podman and docker, and environment.config.backend is sandbox",
        ),
        ({"servers": ["https://x"]}, "servers is for servers of swerex, and environment.config.backend is sandbox"),
        ({"backend": "swerex", "memory_mb": 64}, "memory_mb is for containers of podman and docker, and environment.c"),
        ({"backend": "swerex"}, "environment.config.servers=\\(\\) must be a list of addresses, such as"),
        ({"backend": "swerex", "servers": "https://x"}, "servers='https://x' must be a list of addresses"),
        ({"backend": "swerex", "servers": ["https://x", "https://x/"]}, "names a server twice; name each address once"),
        ({"backend": "swerex", "servers": ["https://x"]}, "set the environment variable MTRL_SWEREX_TOKEN"),
        ({"memory_mb": "2g"}, "environment.config.memory_mb='2g' must be a whole number of at least 1"),
        ({"disk_mb": 5}, "disk_mb is for containers of podman and docker, and environment.config.backend is sandbox"),
        ({"backend": "podman", "disk_mb": 0}, "environment.config.disk_mb=0 must be a whole number of at least 1"),
        ({"warm_containers": 2}, "warm_containers is for containers of podman and docker, and environment.config.back"),
        ({"backend": "docker", "warm_containers": -1}, "environment.config.warm_containers=-1 must be a whole number"),
        ({"backend": "podman", "cpus": -1}, "environment.config.cpus=-1 must be a number above 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            load(data, 0, **settings)
    with pytest.raises(UserError, match="is no folder"):
        load(DataConfig(path=str(folder / "task.toml")), 0)


@pytest.mark.parametrize(
    ("file", "text", "reward"),
    [
        ("reward.txt", "1\n", 1.0),
        ("reward.txt", " 0.25 ", 0.25),
        ("reward.txt", "nan", None),
        ("reward.txt", "", None),
        ("reward.txt", "passed", None),
        ("reward.txt", "1_0", None),
        ("reward.txt", "\u0661", None),
        ("reward.txt", "infinity", None),
        ("reward.txt", "1e100", 1e100),
        ("reward.txt", "1e999", None),
        ("reward.json", "1e100", 1e100),
        ("reward.json", "1", 1.0),
        ("reward.json", '{"reward": 0.5, "speed": 3}', 0.5),
        ("reward.json", '{"passed": 1}', 1.0),
        ("reward.json", '{"a": 1, "b": 1}', None),
        ("reward.json", '{"reward": "1"}', None),
        ("reward.json", '{"reward": true}', None),
        ("reward.json", '{"reward": 1e999}', None),
        ("reward.json", "[1]", None),
        ("reward.json", "{}", None),
        ("reward.json", "{1", None),
        pytest.param("reward.json", '{"reward": ' + "[" * 20_000 + "]" * 20_000 + "}", None, id="nested"),
        pytest.param("reward.json", '{"reward": ' + "9" * 5000 + "}", None, id="digits"),
    ],
)
def test_reward_and_scorer_read_the_same_of_a_reward_file(file, text, reward):
    import json

    from envs.terminal.scorer import measure, score

    assert parse_reward(file, text) == reward
    content = json.dumps({"exit_code": 0, "file": file, "text": text, "output": ""})
    trajectory = trajectory_of(["done"], stop_reason=StopReason.DONE, final=[{"role": "user", "content": content}])
    assert measure(trajectory, {})["tests"] == min(1.0, reward or 0.0)
    assert score(trajectory, {}) == float((reward or 0.0) >= 1.0)


def test_the_model_cannot_write_the_report():
    from envs.terminal.scorer import score

    report = '{"exit_code": 0, "file": "reward.txt", "text": "1", "output": ""}'
    for final in ([], [{"role": "assistant", "content": report}], [{"role": "tool", "content": report}]):
        assert score(trajectory_of([report], final=final), {}) == 0.0
