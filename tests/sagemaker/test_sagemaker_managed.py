"""The managed service: the requests of the SDK's own classes, and settings that the service does not have."""

import json
import os

import pytest

from mtrl.command.compose import compose
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.sagemaker import hyperparameters
from mtrl.sagemaker.dataset import check_size, write_parquet
from mtrl.sagemaker.managed import dry_run, main, plan, submit
from tests.sagemaker.offers import MANAGED, sdk, without

pytest.importorskip("botocore", reason="needs pip install 'mtrl-agents[sagemaker]'")

pytestmark = pytest.mark.usefixtures("composed_once")

WRONG = {
    "no agent": (without(MANAGED, "managed.agent"), "managed.agent is missing"),
    "no model": (without(MANAGED, "managed.model"), "managed.model is missing"),
    "no tracker": (without(MANAGED, "managed.mlflow"), "managed.mlflow is missing"),
    "no role": (without(MANAGED, "managed.role"), "managed.role is missing"),
    "key": ([*MANAGED, "managed.agnet=x"], "did you mean managed.agent?"),
    "algorithm": ([*MANAGED, "algorithm=gigpo"], "advantage_method=gigpo is not offered by the managed service"),
    "loss": ([*MANAGED, "algorithm=gspo"], "algorithm.loss_fn=gspo is not known"),
    "batch": ([*MANAGED, "trainer.prompts_per_step=48"], "is one of 32, 64, 128; write trainer.prompts_per_step=32"),
    "group": ([*MANAGED, "algorithm.group_size=64"], "lies from 2 to 32; write algorithm.group_size=32"),
    "adapters": ([*MANAGED, "model=hf", "model.path=a/b", "model.lora_rank=8"], "write model.lora_rank=16"),
    "half a network": ([*MANAGED, "managed.subnets=[subnet-1]"], "managed.subnets needs managed.security_groups"),
    "compared": ([*MANAGED, "managed.compare_base=true"], "compare_base=true is read by an evaluation only; leave"),
    "limited": ([*MANAGED, "managed.max_run=60"], "managed.max_run=60 is read by an evaluation only"),
    "group of models": (
        [*MANAGED, "managed.evaluate=base", "managed.package_group=mine"],
        "managed.package_group=mine is read in training only",
    ),
    "model": ([*MANAGED, "managed.evaluate=mine"], "write for example managed.evaluate=base, or arn:aws:sagemaker:"),
    "long": ([*MANAGED, "managed.evaluate=base", "managed.max_run=259201"], "must be from 1 to 259200 seconds"),
    "dataset": ([*MANAGED, "managed.dataset=rows.parquet"], "is not an address in S3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_is_one_sentence_of_the_service(case, capsys):
    words, told = WRONG[case]
    with pytest.raises(SystemExit) as ended:
        main([*words, "managed.dry_run=true"])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert told in said.err and said.err.count("\n") == 1 and not said.out


def test_every_name_is_a_key_of_ours():
    cfg = compose(["experiment=text_to_sql"])
    for entry in hyperparameters.TABLE:
        section, _, _ = entry.key.partition(".")
        assert hasattr(Config(), section)
        assert hyperparameters.OmegaConf.select(cfg, entry.key, default="missing") != "missing", entry.key


def test_settings_without_equivalent_are_named():
    words = [*MANAGED, "algorithm.kl_loss_coef=0.1", "async_config.on_stale=requeue", "generator.max_turns=7"]
    warnings = "\n".join(plan(words).warnings)
    assert "algorithm.kl_loss_coef=0.1 has no equal" in warnings
    assert "async_config.on_stale=requeue has no equal" in warnings
    assert "generator.max_turns=7, environment.* and reward.* are the agent's there" in warnings
    assert "algorithm.group_size" not in warnings


def test_a_training_as_the_sdk_would_ask_for_it(capsys, tmp_path, monkeypatch):
    sdk()
    monkeypatch.chdir(tmp_path)
    words = ["algorithm=rloo", "trainer.max_steps=60", "managed.accept_eula=true", "managed.tags.team=rl"]
    main([*MANAGED, *words, "managed.dry_run=true"])
    said = capsys.readouterr()
    request = json.loads(said.out)["CreateJob"]
    document = request["JobConfigDocument"]
    assert (request["JobCategory"], request["JobConfigSchemaVersion"]) == ("AgentRFT", "1.0.0")
    assert document["AgentConfig"]["BedrockAgentCoreConfig"]["Qualifier"] == "DEFAULT"
    channels = {
        entry["ChannelName"]: entry["DataSource"]["S3DataSource"]["S3Uri"] for entry in document["InputDataConfig"]
    }
    assert channels == {
        name: f"s3://our-bucket/mtrl/text_to_sql/data/{name}.parquet" for name in ("train", "validation")
    }
    sent = document["TrainingConfig"]["HyperParameters"]
    assert sent.items() >= {("global_batch_size", "32"), ("advantage_method", "rloo"), ("max_steps", "60")}
    assert "loss_fn" not in sent  # ppo is the service's default, and the SDK sends only other values
    assert {"Key": "team", "Value": "rl"} in request["Tags"]
    assert "nothing was sent" in said.err and not os.listdir(tmp_path)


@pytest.mark.parametrize("evaluated", ["base", "arn:aws:sagemaker:us-west-2:123456789012:model-package/trained/1"])
def test_an_evaluation_as_the_sdk_would_ask_for_it(evaluated, tmp_path, monkeypatch):
    sdk()
    monkeypatch.chdir(tmp_path)
    words = [
        f"managed.evaluate='{evaluated}'",
        "managed.compare_base=true",
        "managed.validation=s3://rows/held-out.jsonl",
    ]
    calls, warnings = dry_run(plan([*MANAGED, *words]))
    assert set(calls) == {"CreatePipeline", "StartPipelineExecution"} and not warnings
    text = json.dumps(calls["CreatePipeline"]["PipelineDefinition"])
    assert "AgentRFTEvaluation" in text and "s3://rows/held-out.jsonl" in text
    assert ("fine-tuned-model-eval" in text) is (evaluated != "base")
    assert "base-model-eval" in text and not os.listdir(tmp_path)


def test_the_started_job_equals_the_dry_run():
    """The connection fails, since moto does not know these jobs."""
    sdk()
    from mtrl.sagemaker import stand_in
    from mtrl.sagemaker.wire import Wire, offline

    job = plan([*MANAGED, "managed.dataset=s3://rows/a", "managed.validation=s3://rows/b"])
    wire = Wire(stand_in.answers(job))
    with offline(wire, "us-west-2") as session:
        arn, warnings = submit(job, session)
    # The second request is that of the job; the first is that of its own dry run.
    dry, real = wire.asked("CreateJob")
    assert arn.endswith(real["JobName"]) and not warnings
    assert real["JobConfigDocument"] == dry["JobConfigDocument"]
    assert "s3://rows/a" in real["JobConfigDocument"]


def test_an_unsupported_recipe_is_refused(monkeypatch):
    sdk()
    monkeypatch.setattr("mtrl.sagemaker.stand_in.specification", lambda job: {"group_size": {"default": 8}})
    calls, warnings = dry_run(plan([*MANAGED, "algorithm.group_size=16", "managed.dataset=s3://rows/a"]))
    document = calls["CreateJob"]["JobConfigDocument"]
    assert document["TrainingConfig"]["HyperParameters"] == {"group_size": "16"}
    assert "the recipe of this model has no global_batch_size, so global_batch_size=32 is left out" in warnings


def test_rows_as_the_service_reads_them(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'mtrl-agents[data]'")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "größer?"}]
    rows = [
        {"id": "1", "prompt": [{"role": "user", "content": "2 + 2"}], "ground_truth": {"answer": 4}},
        {"id": "2", "prompt": messages, "ground_truth": {"answer": "ja"}, "level": 3},
    ]
    write_parquet(rows, tmp_path / "rows.parquet")
    first, second = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert first == {"prompt": "2 + 2", "id": "1", "ground_truth": '{"answer": 4}'}
    assert json.loads(second["prompt"]) == messages and "ja" not in second["prompt"]


def test_too_few_rows():
    assert check_size(1280, 128) is None
    assert "AWS recommends ten times as many" in check_size(128, 128)
    with pytest.raises(UserError, match="the task has 127"):
        check_size(127, 128)
