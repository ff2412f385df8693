"""Jobs of a sweep that fail, are pruned or are stopped; training is a stand-in, in this process."""

import os
import sys
import types

import pytest
from sweeps import ROOT

from mtrl import main as main_module
from mtrl.errors import Interrupted, UserError
from mtrl.sweep.outcome import read_outcome
from mtrl.trainer.hooks import nothing
from tests import hydra_cache


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A list of the trained configurations; a test may set its attribute `train`."""
    seen = types.SimpleNamespace(cfgs=[], train=lambda cfg, on_evaluation: {"success_after": cfg.seed / 10})

    def train(cfg, hooks):
        seen.cfgs.append(cfg)
        return seen.train(cfg, hooks.on_evaluation)

    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", types.SimpleNamespace(train=train))
    monkeypatch.setattr(sys, "argv", ["mtrl"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    return seen


def outcomes(folder):
    found = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: int(path.name))
    return [read_outcome(path) for path in found]


def status_of(*words):
    with pytest.raises(SystemExit) as caught:
        main_module.cli(words)
    return caught.value.code


def test_typed_keys_have_priority_over_a_prepared_sweep(trained, tmp_path, capsys):
    main_module.cli(["sweep=credit", "seed=7", "run_dir=sweep"])
    assert [(cfg.seed, cfg.algorithm.advantage_method) for cfg in trained.cfgs] == [
        (7, "grpo"), (7, "group_based_per_turn")
    ]  # fmt: skip
    assert [o.value for o in outcomes(tmp_path / "sweep")] == [0.7, 0.7]
    assert capsys.readouterr().out.splitlines()[-1] == "  mtrl train algorithm=grpo seed=7"


def test_the_command_of_the_best_job_finds_the_users_own_groups(trained, tmp_path, capsys):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nname: mine\n")
    main_module.cli(["--config-dir", "conf", "-m", "experiment=mine", "seed=1,2", "run_dir=sweep"])
    again = capsys.readouterr().out.splitlines()[-1].split()
    assert again[:2] == ["mtrl", "train"] and again[3:] == ["experiment=mine", "seed=2"]
    main_module.cli([*again[2:], "run_dir=again"])
    assert (trained.cfgs[-1].name, trained.cfgs[-1].seed) == ("mine", 2)


def test_a_job_that_fails_loses_no_other(trained, tmp_path, capsys):
    def train(cfg, on_evaluation):
        if cfg.seed == 0:
            raise UserError("data.path=x holds no rows; name another")
        if cfg.seed == 2:
            raise ZeroDivisionError("a bug")
        return {"success_after": cfg.seed / 10}

    trained.train = train
    assert status_of("-m", "seed=0,2,3", "hydra.sweeper.max_batch_size=1", "run_dir=sweep") == 1
    assert [o.status for o in outcomes(tmp_path / "sweep")] == ["failed", "failed", "finished"]
    shown = capsys.readouterr()
    assert "job 0 failed: data.path=x holds no rows; name another" in shown.out
    assert "job 1 failed: ZeroDivisionError: a bug" in shown.out and "in train" in shown.err
    assert "best: job 2 in sweep/2" in shown.out


def test_a_job_that_changes_the_working_directory_moves_no_other(trained, tmp_path, capsys):
    """An environment may do it. The later jobs wrote into the other folder, and the table missed the earlier ones."""
    (tmp_path / "elsewhere").mkdir()

    def train(cfg, on_evaluation):
        os.chdir(tmp_path / "elsewhere")
        return {"success_after": cfg.seed / 10}

    trained.train = train
    main_module.cli(["-m", "seed=1,2", "run_dir=sweep"])
    assert [o.status for o in outcomes(tmp_path / "sweep")] == ["finished", "finished"]
    assert list((tmp_path / "elsewhere").iterdir()) == [] and "2 jobs" in capsys.readouterr().out


def test_each_job_warns_of_overrides_without_an_effect(trained, tmp_path, capsys):
    main_module.cli(["-m", "experiment=mixture", "environment.config.operations=2,3", "run_dir=sweep"])
    printed = capsys.readouterr().err
    for value in (2, 3):
        assert printed.count(f"warning: environment.config.operations={value} has no effect with environments") == 1


def test_a_job_without_its_objective_is_not_the_best(trained, tmp_path, capsys):
    trained.train = lambda cfg, on_evaluation: {"success_after": float("nan")}
    main_module.cli(["-m", "seed=0", "run_dir=sweep"])
    assert [(o.status, o.value) for o in outcomes(tmp_path / "sweep")] == [("finished", None)]
    assert "no job has finished with a success_after" in capsys.readouterr().out


def test_a_stopped_sweep_resumes(trained, tmp_path, capsys):
    def train(cfg, on_evaluation):
        (tmp_path / cfg.run_dir / "metrics.jsonl").touch()
        if cfg.seed == 1 and cfg.resume == "none":
            raise Interrupted("SIGTERM")
        return {"success_after": 0.5}

    trained.train = train
    assert status_of("-m", "seed=1,2", "run_dir=sweep") == 75
    assert [o.status for o in outcomes(tmp_path / "sweep")] == ["interrupted"]
    again = "mtrl train -m seed=1,2 run_dir=sweep resume=latest"
    assert f"the sweep stopped; go on with: {again}\n" in capsys.readouterr().err
    (stopped,) = outcomes(tmp_path / "sweep")
    stopped.started -= 100
    stopped.write(tmp_path / "sweep" / "0")
    main_module.cli(again.split()[2:])
    assert [o.status for o in outcomes(tmp_path / "sweep")] == ["finished"] * 2
    assert [o.seconds > 100 for o in outcomes(tmp_path / "sweep")] == [True, False]  # including its time before
    assert [cfg.resume for cfg in trained.cfgs[1:]] == ["latest", "none"]


def test_finished_jobs_are_run_again_only_with_other_settings(trained, tmp_path):
    words = ["-m", "seed=1,2", "run_dir=sweep"]
    main_module.cli(words)
    before = [(job / "job.json").read_bytes() for job in ((tmp_path / "sweep" / name) for name in "01")]
    (tmp_path / "sweep" / "1" / "job.json").unlink()  # job 1 was killed before its start
    main_module.cli([*words, "resume=latest"])
    assert [cfg.seed for cfg in trained.cfgs] == [1, 2, 2]
    assert (tmp_path / "sweep" / "0" / "job.json").read_bytes() == before[0]
    main_module.cli([*words, "trainer.max_steps=7", "resume=latest"])
    assert [(cfg.seed, cfg.trainer.max_steps) for cfg in trained.cfgs[3:]] == [(1, 7), (2, 7)]


def test_a_job_that_its_scheduler_starts_again_resumes(trained, tmp_path, monkeypatch):
    """SLURM repeats the first command, so that a job starts in the folder of a job."""
    from mtrl.sweep.outcome import JobResult

    def train(cfg, on_evaluation):
        (tmp_path / cfg.run_dir / "metrics.jsonl").touch()
        return {"success_after": 1.0}

    trained.train = train
    begin = JobResult.begin

    def begun_before(number, *rest):
        (tmp_path / "sweep" / "0" / "metrics.jsonl").touch()
        return begin(number, *rest)

    start = JobResult.begin(0, ["seed=0"], "success_after", "maximize")
    monkeypatch.setattr(
        "mtrl.main.check_jobs", lambda overrides, config_dir: start.write(tmp_path / "sweep/0") or "sweep"
    )
    monkeypatch.setattr(JobResult, "begin", begun_before)
    main_module.cli(["-m", "seed=0", "run_dir=sweep"])
    assert [cfg.resume for cfg in trained.cfgs] == ["latest"]


def test_under_torchrun_there_is_no_sweep(trained, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert status_of("sweep=seeds") == 2
    assert "torchrun's ranks share one; start torchrun once per run" in capsys.readouterr().err


def test_an_empty_folder_name_is_refused(trained, capsys):
    assert status_of("-m", "seed=0,2", "run_dir=") == 2
    assert "run_dir= names no folder; write run_dir=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sweep=optuna"], ["sweep=seeds", "hydra/launcher=joblib"],
                                   ["sweep=seeds", "hydra/launcher=slurm"]])  # fmt: skip
def test_missing_packages_are_named_with_their_extra(trained, monkeypatch, capsys, words):
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    for name in ("DEFAULTS", "MERGED", "LOADED"):  # an earlier test may have composed the same words
        monkeypatch.setattr(hydra_cache, name, {})
    Plugins.instance()  # registers the launchers that are installed; a later call would register them again
    store = ConfigStore.instance()
    launchers = store.repo["hydra"]["launcher"]
    left = {name: node for name, node in launchers.items() if not name.startswith(("joblib", "submitit"))}
    monkeypatch.setitem(store.repo["hydra"], "launcher", left)
    monkeypatch.setattr("mtrl.sweep.run.find_spec", lambda name: None)
    assert status_of(*words, "run_dir=sweep") == 2
    assert capsys.readouterr().err.endswith("is not installed; install it with: pip install 'mtrl-agents[sweep]'\n")
    assert trained.cfgs == []


# Optuna


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="pip install -e '.[sweep]'")


SPACE = ("sweep=optuna", "trainer.optimizer.lr=1e-3", "seed=interval(0,1000)", "run_dir=sweep")


def curve(cfg, on_evaluation):
    """A run whose score in all evaluations is its seed."""
    for step in (0, 5, 10):
        on_evaluation(step, {"val/success/mean": cfg.seed / 1000})
    return {"success_after": cfg.seed / 1000}


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("seed=interval(3,9)", "IntDistribution(high=9, log=False, low=3, step=1)"),
        (
            "trainer.optimizer.lr=tag(log,interval(1e-6,1e-3))",
            "FloatDistribution(high=0.001, log=True, low=1e-06, step=None)",
        ),
        ("++environment.config.size=interval(0,2)", "FloatDistribution(high=2.0, log=False, low=0.0, step=None)"),
        ("algorithm=grpo,rloo", "CategoricalDistribution(choices=('grpo', 'rloo'))"),
        ("algorithm.group_size=range(2,9,3)", "CategoricalDistribution(choices=('2', '5', '8'))"),
    ],
)  # fmt: skip
def test_each_kind_of_value_is_proposed(optuna, word, wanted):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from hydra_plugins.mtrl_optuna import distribution

    (override,) = OverridesParser.create().parse_overrides([word])
    assert repr(distribution(override)) == wanted


def test_the_worse_ones_are_pruned(optuna, trained, tmp_path):
    """A job that is worse at step 5 than the median of the finished jobs is pruned; the others continue."""
    trained.train = curve
    pruner = "hydra.sweeper.pruner.n_startup_trials=1"
    minimize = "hydra.sweeper.direction=minimize"  # test_sweep_runs.py tests the other direction with real runs
    main_module.cli([*SPACE, "hydra.sweeper.n_trials=4", pruner, minimize, "trainer.max_steps=10"])
    found, finished = outcomes(tmp_path / "sweep"), []
    for outcome in found:
        seed = int(outcome.overrides[-1].partition("=")[2]) / 1000
        finished.sort()
        middle = (finished[(len(finished) - 1) // 2] + finished[len(finished) // 2]) / 2 if finished else None
        is_worse = middle is not None and seed > middle
        assert outcome.status == ("pruned" if is_worse else "finished")
        if not is_worse:
            finished.append(seed)
    assert {outcome.status for outcome in found} == {"pruned", "finished"}


def test_trials_may_fail_and_without_a_pruner_none_is_judged(optuna, trained, tmp_path):
    def train(cfg, on_evaluation):
        assert on_evaluation is nothing
        if len(trained.cfgs) == 1:
            raise UserError("no luck")
        return {"success_after": 0.1}

    trained.train = train
    assert status_of(*SPACE, "hydra.sweeper.n_trials=2", "hydra.sweeper.pruner=null") == 1
    assert [trial.state.name for trial in study(optuna, tmp_path / "sweep").trials] == ["FAIL", "COMPLETE"]


def test_a_stopped_study_resumes_its_running_trial(optuna, trained, tmp_path):
    def train(cfg, on_evaluation):
        (tmp_path / cfg.run_dir / "metrics.jsonl").touch()
        if len(trained.cfgs) == 1:
            raise Interrupted("SIGTERM")
        return curve(cfg, on_evaluation)

    trained.train = train
    words = (*SPACE, "hydra.sweeper.n_trials=2")
    assert status_of(*words) == 75
    main_module.cli([*words, "resume=latest"])
    seeds = [cfg.seed for cfg in trained.cfgs]
    assert len(seeds) == 3 and seeds[0] == seeds[1]  # the first job began again with its earlier proposal
    assert [trial.params["seed"] for trial in study(optuna, tmp_path / "sweep").trials] == seeds[1:]


def study(optuna, folder):
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log"))
    return optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["objective=seconds"], "objective=seconds is not measured before a run ends, so no job can be pruned by it"),
        (["hydra.sweeper.sampler._target_=optuna.samplers.None"], "optuna.samplers.None cannot be made"),
    ],
    ids=["objective", "sampler"],
)
def test_invalid_optuna_settings_are_refused(optuna, trained, capsys, words, said):
    assert status_of(*SPACE, *words) == 2
    assert said in capsys.readouterr().err and trained.cfgs == []
