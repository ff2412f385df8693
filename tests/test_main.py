"""The command line with a stand-in for training, and as a separate program where the output is tested."""

import json
import logging
import os
import re
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig

from mtrl import main as main_module
from mtrl.command.compose import CONF, compose
from mtrl.errors import UserError
from mtrl.preflight.at_start import check_at_start
from mtrl.training import start
from tests import forked

ROOT = Path(main_module.__file__).parent.parent


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The configurations with which training was called; the test runs in an empty folder."""
    seen = []

    def train(cfg, hooks):
        assert hooks.at_start is check_at_start
        seen.append(cfg)
        return {"success_after": 0.25 + cfg.seed, "steps": cfg.trainer.max_steps, "reward_after": None}

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    monkeypatch.setattr(sys, "argv", ["mtrl"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.chdir(tmp_path)
    return seen


def program(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return forked.run(
        [sys.executable, "-m", "mtrl.main", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_run_gets_the_composed_configuration_and_a_folder(jobs, tmp_path, capsys):
    main_module.cli(["seed=3", "+experiment=gsm8k_single_turn", "debug=fast"])
    (cfg,) = jobs
    assert (cfg.name, cfg.seed, cfg.trainer.max_steps) == ("gsm8k_single_turn", 3, 2)
    assert (tmp_path / cfg.run_dir).is_dir()
    assert list((tmp_path / cfg.run_dir).iterdir()) == []  # Hydra writes no files
    shown = capsys.readouterr().out
    assert shown.startswith(f"gsm8k_single_turn in {cfg.run_dir}") and "max_steps=2" in shown


def test_the_objective_is_returned(jobs):
    assert start(compose(["seed=1"])) == 1.25
    assert start(compose(["objective=steps", "trainer.max_steps=7"])) == 7.0
    assert start(compose(["objective=reward_after"])) is None


def test_flags_may_stand_between_overrides(jobs, tmp_path):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nname: mine\n")
    main_module.cli(["experiment=mine", "--config-dir", "conf", "seed=2"])
    assert (jobs[0].name, jobs[0].seed) == ("mine", 2)


def test_a_folder_with_special_characters(jobs, tmp_path):
    main_module.cli(["run_dir='a b/it\\'s, (1)=x'"])
    assert jobs[0].run_dir == "a b/it's, (1)=x"
    assert (tmp_path / jobs[0].run_dir).is_dir()


def test_resume_continues_in_the_folder_of_the_run(jobs, tmp_path):
    run = tmp_path / "outputs/gsm8k/first"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    main_module.cli(["resume=latest"])
    assert (jobs[0].run_dir, jobs[0].resume) == ("outputs/gsm8k/first", "latest")
    assert [path.name for path in run.parent.iterdir()] == ["first"]


def test_every_job_of_a_multirun_has_a_folder_in_that_of_the_sweep(jobs, tmp_path):
    main_module.cli(["-m", "seed=0,1", "algorithm=grpo,rloo", "run_dir=sweep"])
    assert [(cfg.seed, cfg.algorithm.advantage_method) for cfg in jobs] == [
        (0, "grpo"), (0, "rloo"), (1, "grpo"), (1, "rloo")
    ]  # fmt: skip
    assert [cfg.run_dir for cfg in jobs] == [str(tmp_path / "sweep" / str(number)) for number in range(4)]


def test_a_sweep_without_a_folder_of_its_own_goes_to_outputs(jobs, tmp_path):
    main_module.cli(["-m", "seed=0,1"])
    assert Path(jobs[0].run_dir).parent.parent == tmp_path / "outputs/gsm8k"


def test_no_job_of_a_sweep_starts_when_one_is_wrong(jobs, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main_module.cli(["-m", "seed=0,1", "algorithm.group_size=8,1"])
    assert caught.value.code == 2 and jobs == []
    assert capsys.readouterr().err == (
        "algorithm.group_size=1 gives algorithm.advantage_method=turn_rloo nothing to compare; set it to 2 or more\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_resuming_a_sweep_needs_its_folder(jobs, capsys):
    with pytest.raises(SystemExit):
        main_module.cli(["-m", "seed=0,1", "resume=latest"])
    assert (
        capsys.readouterr().err == "resume=latest does not say which sweep goes on; add run_dir=FOLDER of the sweep\n"
    )


def test_a_user_error_of_training_is_one_sentence(jobs, monkeypatch, capsys):
    def train(cfg, hooks):
        raise UserError("data.path=x holds no rows; name another")

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    with pytest.raises(SystemExit) as caught:
        main_module.cli([])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "data.path=x holds no rows; name another\n"


@pytest.mark.parametrize("words", [[], ["-m", "seed=0,1"]], ids=["run", "sweep"])
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_an_interrupted_run_has_its_own_exit_status_and_ends_its_sweep(jobs, monkeypatch, capsys, words, name, status):
    from mtrl.errors import Interrupted

    def train(cfg, hooks):
        jobs.append(cfg)
        raise Interrupted(name)

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    with pytest.raises(SystemExit) as caught:
        main_module.cli(words)
    assert caught.value.code == status and len(jobs) == 1
    assert capsys.readouterr().err.startswith("the sweep stopped; go on with: " if words else "")


@pytest.fixture
def followed(jobs, monkeypatch):
    """The actions of this process as a follower."""
    followed = []
    monkeypatch.setitem(
        sys.modules, "mtrl.trainer.run", types.SimpleNamespace(follow=lambda: followed.append("followed"))
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return followed


def test_a_follower_composes_nothing(jobs, followed, tmp_path, capsys):
    main_module.cli(["not.even=looked at"])
    assert followed == ["followed"] and jobs == [] and list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["--help"], ["seed=1", "--cfg", "job"], ["--info"], ["--hydra-help"]])
def test_a_follower_does_not_wait_for_a_leader_that_only_prints(jobs, followed, capsys, words):
    main_module.cli(words)
    assert followed == jobs == [] and capsys.readouterr() == ("", "")


def test_a_follower_ends_without_a_traceback_after_control_c(jobs, followed, monkeypatch, capsys):
    def follow():
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(follow=follow))
    with pytest.raises(SystemExit) as caught:
        main_module.cli([])
    assert caught.value.code == 130 and capsys.readouterr() == ("", "")


def test_control_c_before_the_run_starts_is_one_sentence(jobs, monkeypatch, capsys):
    def train(cfg, hooks):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    with pytest.raises(SystemExit) as caught:
        main_module.cli([])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "SIGINT: mtrl.main ended before it had a run to save\n"


def test_a_missing_peft_is_reported_before_a_folder_is_made(jobs, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("mtrl.command.checks.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        main_module.cli(["model.lora_rank=8"])
    assert caught.value.code == 2 and jobs == [] and not (tmp_path / "outputs").exists()
    assert "peft is not installed; install it with: pip install 'mtrl-agents[lora]'" in capsys.readouterr().err


def test_a_bug_in_training_keeps_its_traceback(jobs, monkeypatch):
    def train(cfg, hooks):
        raise NotImplementedError("a bug")

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    with pytest.raises(NotImplementedError, match="a bug"):
        main_module.cli([])


@pytest.mark.parametrize("words", [["seed=1"], ["--help"], ["trainer.max_steps=1", "algorithm.group_size=1"]], ids=str)
def test_one_run_is_composed_once(jobs, monkeypatch, words):
    """The checks, the help and the run share one configuration; `hydra.main` would compose it again."""
    composed = []
    compose_with_hydra = hydra.compose
    monkeypatch.setattr(
        hydra, "compose", lambda *args, **more: composed.append(args) or compose_with_hydra(*args, **more)
    )
    monkeypatch.setattr(hydra, "main", None)
    with suppress(SystemExit):
        main_module.cli(words)
    assert len(composed) == 1


def test_one_run_is_checked_once(jobs, monkeypatch):
    checked = []
    monkeypatch.setattr("mtrl.command.checks.check", lambda cfg: checked.append(cfg) or [])
    main_module.cli(["seed=1"])
    assert checked == jobs


def test_every_flag_of_hydra_is_parsed(tmp_path):
    flags = re.findall(r"^(--[a-z-]+)", program("--hydra-help", cwd=tmp_path).stdout, re.MULTILINE)
    known = {*flags} - {"--experimental-rerun", "--version"}  # mtrl writes no pickle that could be run again
    assert {"--cfg", "--info", "--multirun", "--package"} <= known
    for flag in known:
        value = {"--cfg": ["job"], "--info": ["config"]}.get(flag, ["--help"])
        with suppress(UserError):
            main_module.prepare([flag, *value])


@pytest.mark.parametrize(
    ("words", "flags"),
    [(["-m", "seed=1,2", "--cfg", "job"], "--multirun and --cfg"), (["-rm"], "--run and --multirun")],
)
def test_flags_of_which_hydra_takes_one_are_refused_together(words, flags):
    with pytest.raises(UserError, match=f"^{flags} exclude each other; leave one of them out$"):
        main_module.prepare(words)


def test_keys_of_hydra_that_only_a_sweep_reads_are_named(jobs, capsys):
    main_module.cli(["hydra.job.chdir=true", "hydra.verbose=true"])
    assert capsys.readouterr().err == (
        "warning: hydra.job.chdir=true has no effect on a single run; a sweep (-m) reads it\n"
    )


@pytest.mark.parametrize("flags", [[], ["-m"], ["--cfg", "job"]])
@pytest.mark.parametrize("setting", ["hydra.sweeper.params={seed: '1,2'}", "+hydra.sweeper.params.seed='1,2'"])
def test_values_of_a_sweep_are_typed_behind_their_keys(flags, setting, capsys):
    with pytest.raises(SystemExit):
        main_module.cli([*flags, setting])
    assert "; write the values behind their keys and add -m, for example mtrl train -m" in capsys.readouterr().err


def test_training_can_read_the_command_and_hydras_job_logging_is_configured(jobs, monkeypatch, tmp_path):
    """Commands that resume a run repeat its overrides and its folders of config groups."""
    seen = []

    def train(cfg, hooks):
        seen.append(HydraConfig.get())
        logging.getLogger("my.environment").info("an episode")
        return {}

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nname: mine\n")
    logging_of_hydra = ["hydra/job_logging=default", "run_dir=there"]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        main_module.cli(["--config-dir", "conf", "experiment=mine", *logging_of_hydra])
    finally:
        root.handlers[:], root.level = handlers, level
    assert list(seen[0].overrides.task) == ["experiment=mine", "run_dir=there"]
    assert str(tmp_path / "conf") in [source.path for source in seen[0].runtime.config_sources]
    assert "[my.environment][INFO] - an episode" in (tmp_path / "there/mtrl.log").read_text()
    assert not HydraConfig.initialized()


def test_warnings_go_to_stderr(jobs, capsys):
    main_module.cli(["algorithm.kl_estimator=k2"])
    printed = capsys.readouterr().err
    assert printed == "warning: algorithm.kl_estimator=k2 has no effect with algorithm.kl_loss_coef=0\n"
    main_module.cli(["experiment=mixture", "environment.config.operations=3"])
    assert capsys.readouterr().err == (
        "warning: environment.config.operations=3 has no effect with environments, since words and sql replace it; set "
        "environments.NAME.environment.config.operations\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm.group_sze=4"],
            "algorithm.group_sze=4 is not a key of mtrl; did you mean algorithm.group_size=4?",
        ),
        (
            ["generator.backend=sglang", "generator.use_conversation_multi_turn=false"],
            "NotImplementedError: `use_conversation_multi_turn=False` is not supported for SGLang backend",
        ),
    ],
    ids=["unknown key", "sglang"],
)
def test_program_refuses_in_one_sentence(tmp_path, words, message):
    done = program(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")
    assert list(tmp_path.iterdir()) == []


def test_program_prints_the_configuration(tmp_path):
    from omegaconf import OmegaConf

    done = program("--cfg", "job", "experiment=text_to_sql", "seed=4", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    cfg = OmegaConf.create(done.stdout)
    assert (cfg.name, cfg.seed, cfg.environment.name) == ("text_to_sql", 4, "text_to_sql")
    assert list(tmp_path.iterdir()) == []


def test_program_prints_its_help(tmp_path):
    done = program("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mtrl train experiment=text_to_sql" in done.stdout
    experiments = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
    assert f"experiment: {', '.join(experiments)}" in done.stdout
    assert list(tmp_path.iterdir()) == []


HEAVY = {
    *("asyncio", "bm25s", "datasets", "fastapi", "httpx", "huggingface_hub", "matplotlib", "numpy", "openai"),
    *("pydantic", "renderers", "rich", "safetensors", "scipy", "sqlglot", "sympy", "tokenizers", "torch"),
    *("transformers", "uvicorn"),
}
STAGES = {
    "mtrl.main --help": set(),
    "mtrl.main experiment=text_to_sql --cfg job": set(),
    "mtrl.main trainer.max_step=1": set(),
    "mtrl.view --help": set(),
    "mtrl.doctor --help": {"rich"},
    "mtrl.evaluate --help": {"rich", "asyncio"},
    "mtrl.gateway --help": {"rich", "asyncio"},
    "mtrl.play --help": {"rich", "asyncio"},
    "mtrl.preflight --help": {"rich", "asyncio"},
    "mtrl.trainer.run": {"rich", "asyncio", "httpx", "safetensors"},
    "mtrl.main algorithm.group_size=1": {"rich", "asyncio", "httpx", "safetensors", "numpy"},
    "mtrl.diagnose --help": {"rich", "asyncio", "httpx", "safetensors", "numpy"},
    "mtrl.figures --help": {"rich", "asyncio", "httpx", "safetensors", "numpy"},
}
"""Steps of one process, in this order -> packages of `HEAVY` that it may have imported by then."""
IMPORTS = """
import contextlib, importlib, io, json, runpy, sys

for stage in json.loads(sys.argv[1]):
    name, *sys.argv[1:] = stage.split()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        with contextlib.redirect_stderr(said):
            runpy.run_module(name, run_name="__main__") if sys.argv[1:] else importlib.import_module(name)
    assert said.getvalue() or not sys.argv[1:], stage
    print(json.dumps(sorted(sys.modules)))
"""


def test_commands_that_only_print_import_no_heavy_package(tmp_path):
    command = [sys.executable, "-c", IMPORTS, json.dumps(list(STAGES))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for (stage, may), line in zip(STAGES.items(), done.stdout.splitlines(), strict=True):
        assert HEAVY & {*json.loads(line)} <= may, stage
    assert list(tmp_path.iterdir()) == []
