"""Errors of a job are one sentence, before any build or request."""

import re

import pytest

from mtrl.errors import UserError
from mtrl.sagemaker.job import dry_run, main, plan
from tests.sagemaker.offers import BUCKET, JOB, ROLE, SHARED, SPOT, without

pytest.importorskip("botocore", reason="needs pip install 'mtrl-agents[sagemaker]'")

pytestmark = pytest.mark.usefixtures("composed_once")

WRONG = {
    "no role": (without(JOB, "sagemaker.role"), "sagemaker.role is missing"),
    "a role's name": ([*JOB, "sagemaker.role=trainer"], "write for example sagemaker.role=arn:aws:iam::"),
    "a user's ARN": ([*JOB, "sagemaker.role=arn:aws:iam::123456789012:user/me-myself"], "does not look like"),
    "no bucket": (without(JOB, "sagemaker.bucket"), "sagemaker.bucket is missing"),
    "s3//": ([*JOB, "sagemaker.bucket=s3//ours"], "the name alone; write sagemaker.bucket=ours"),
    "s3://": ([*JOB, "sagemaker.bucket='s3://ours'"], "the name alone; write sagemaker.bucket=ours"),
    "upper case": ([*JOB, "sagemaker.bucket=Ours"], "lower case; write sagemaker.bucket=ours"),
    "underscore": ([*JOB, "sagemaker.bucket=our_bucket"], "is no name of a bucket"),
    "a slash": ([*JOB, "sagemaker.prefix=/mtrl/"], "without a slash at its ends"),
    "instance type": ([*JOB, "sagemaker.instance_type=ml.p5.48xlrage"], "did you mean ml.p5.48xlarge?"),
    "no instance": ([*JOB, "sagemaker.instance_count=0"], "instance_count=0 must be at least 1"),
    "no rank": ([*JOB, "sagemaker.processes=0"], "sagemaker.processes=0 must be at least 1"),
    "name": ([*JOB, "sagemaker.name='my run'"], "both ends, such as sagemaker.name=my-run"),
    "sweep": ([*JOB, "sweep=seeds"], "sweep=seeds: a sweep starts many runs, and a job is one run"),
    "values": ([*JOB, "sagemaker.volume_gb=1,2"], "sagemaker.volume_gb=1,2 is several values, and a job takes one"),
    "key": ([*JOB, "sagemaker.instance_typ=ml.m5.large"], "did you mean sagemaker.instance_type?"),
    "preset": (["sagemaker=spott", *JOB], "did you mean sagemaker=spot?"),
    "type": ([*JOB, "sagemaker.instance_count=two"], "sagemaker: Value 'two'"),
    "spot alone": ([*JOB, "sagemaker.spot=true"], "needs sagemaker.max_wait"),
    "short wait": ([*JOB, *SPOT, "sagemaker.max_wait=60"], "must be at least sagemaker.max_run=3600"),
    "wait alone": ([*JOB, "sagemaker.max_wait=60"], "add sagemaker.spot=true"),
    "nothing kept": ([*JOB, *SPOT, "sagemaker.checkpoints=null"], "write sagemaker.checkpoints=auto"),
    "never saved": ([*JOB, *SPOT, "trainer.checkpoint.every_steps=0"], "has nothing to go on from"),
    "spot kept warm": ([*JOB, *SPOT, "sagemaker.keep_alive=600"], "does not go with sagemaker.spot=true"),
    "checkpoints": ([*JOB, "sagemaker.checkpoints=s3//ours/x"], "is not an address in S3"),
    "two places": ([*JOB, *SHARED, "sagemaker.checkpoints='s3://ours/x'"], "does not go with sagemaker.file_system"),
    "own folder": ([*JOB, "run_dir=mine"], "the folder of the run is the job's own"),
    "own resume": ([*JOB, "resume=latest"], "write sagemaker.checkpoints="),
    "own variable": ([*JOB, "sagemaker.environment.SM_CHECKPOINT_DIR=/x"], "because sagemaker.checkpoints sets this"),
    "several runs": ([*JOB, "seed=1,2"], "seed=1,2 is several values; write one of them"),
    "two alone": ([*JOB, "sagemaker.instance_count=2"], "instances share none; add sagemaker.file_system"),
    "two alone, spot": ([*JOB, *SPOT, "sagemaker.instance_count=2"], "add sagemaker.file_system=fs-ID with its"),
    "no network": ([*JOB, *SHARED[:2]], "is reached through your VPC"),
    "half a network": ([*JOB, "sagemaker.subnets=[subnet-1]"], "needs sagemaker.security_groups"),
    "file system": ([*JOB, *SHARED, "sagemaker.file_system=volume"], "has 6 characters, and 11 to 21 are allowed"),
    "engine": ([*JOB, "generator=sglang"], "name it in sagemaker.image"),
    "mlflow": ([*JOB, "sagemaker.mlflow='http://tracker'"], "is not the ARN of an MLflow server"),
    "data": ([*JOB, "data.path='s3:/rows'"], "data.path=s3:/rows is not an address in S3"),
    "other data": ([*JOB, "environment.config.database='s3://b/x'"], "only data.path and model.path may lie in S3"),
    "of the run": ([*JOB, "trainer.max_step=3"], "did you mean trainer.max_steps=3?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_is_one_sentence(case, capsys):
    words, told = WRONG[case]
    with pytest.raises(SystemExit) as ended:
        main([*words, "sagemaker.dry_run=true"])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert told in said.err
    assert said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    ("name", "told"), [("''", "include: '' does not exist"), ("/", "include: / is the whole file system")]
)
def test_neither_nothing_nor_everything_travels(name, told):
    with pytest.raises(UserError, match=told):
        dry_run(plan([*JOB, f"sagemaker.include=[{name}]"]))


def test_a_bucket_that_is_a_version_number_or_an_address_is_refused():
    for name in ("10.0.0.1", "a..b", "ab", "-ab", "a" * 64):
        with pytest.raises(UserError, match="is no name of a bucket"):
            plan([*without(JOB, "sagemaker.bucket"), f"sagemaker.bucket='{name}'"])


def test_s3_addresses_become_channels_and_other_words_stay_unchanged():
    words = ["+experiment=search", "model=hf", "model.path=s3://models/qwen", "data.path='s3://rows/a b'", ROLE, BUCKET]
    job = plan([*words, "name=x"])
    assert job.overrides == ("+experiment=search", "model=hf", "name=x")
    assert job.channels == {"model": "s3://models/qwen", "data": "s3://rows/a b"}


def test_a_path_of_this_machine_alone_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    told = r"data.path=rows.jsonl is on this machine, .* with the code: 'sagemaker.include=\[rows.jsonl\]' data.path="
    with pytest.raises(UserError, match=told):
        plan([*JOB, "data.path=rows.jsonl"])
    with pytest.raises(UserError, match="is on this machine, and the job does not have it"):
        plan([*JOB, f"data.path={tmp_path}/rows.jsonl", "sagemaker.include=[rows.jsonl]"])
    assert plan([*JOB, "data.path=./rows.jsonl", "sagemaker.include=[rows.jsonl]"]).overrides[-1] == (
        "data.path=./rows.jsonl"
    )
    assert plan([*JOB, f"data.path={tmp_path}/rows.jsonl", "sagemaker.image=ours"])


def test_a_job_without_a_name_is_named_after_the_run():
    assert plan([*JOB, "name='my é run'"]).name == "mtrl-my-run"


def test_presets_and_later_words():
    job = plan(["sagemaker=spot", *JOB, "sagemaker.max_wait=100000", "sagemaker.tags.team=rl", "sagemaker.tags.cost=7"])
    settings = job.settings
    assert (settings.spot, settings.max_run, settings.max_wait) == (True, 86400, 100000)
    assert settings.tags == {"team": "rl", "cost": "7"}


def test_an_mlflow_server_is_reported_to():
    arn = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/runs"
    overrides = plan([*JOB, f"sagemaker.mlflow='{arn}'"]).overrides
    assert overrides[-2:] == (f"tracker.mlflow.uri='{arn}'", "tracker.report_to=[mlflow]")


def test_the_help_names_the_guide(capsys):
    main([])
    assert re.search(r"docs/sagemaker\.md", capsys.readouterr().out)
