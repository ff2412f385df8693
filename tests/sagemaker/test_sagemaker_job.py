"""The request of a job: the SDK's own classes make it in a dry run, and a mocked AWS receives the same."""

import json
import logging
import socket
from pathlib import Path

import pytest

from mtrl.errors import UserError
from mtrl.sagemaker import service
from mtrl.sagemaker.job import dry_run, plan, submit
from mtrl.sagemaker.wire import Wire
from tests.sagemaker.offers import JOB, SHARED, SPOT, sdk

sdk()
import boto3  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # the SDK takes seconds to check its own configuration, again and again
    pytest.mark.usefixtures("composed_once", "packed_once"),
]

ROOT = Path(__file__).parents[2]
NAME = "mtrl-text-to-sql"
MLFLOW = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/runs"
OTHERS = (
    "sagemaker.tags.team=rl",
    f"sagemaker.mlflow='{MLFLOW}'",
    "data.path='s3://rows/sql'",
    "sagemaker.volume_gb=500",
    "sagemaker.environment.NCCL_DEBUG=INFO",
    "sagemaker.kms_key=0123-4567",
)
SHAPES = {"one": (), "spot": SPOT, "two": SHARED, "two, spot": (*SHARED, *SPOT), "others": OTHERS}


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Remove credentials and configuration, and let every connection fail."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    yield
    assert not tried


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dry_run_contacts_no_service(shape, no_network):
    request = dry_run(plan([*JOB, *SHAPES[shape]]))
    spot, two = "spot" in shape, "two" in shape
    assert request["EnableManagedSpotTraining"] is spot
    assert ("MaxWaitTimeInSeconds" in request["StoppingCondition"]) is spot
    assert request["ResourceConfig"]["InstanceCount"] == (2 if two else 1)
    assert ("CheckpointConfig" in request) is not two
    assert ("VpcConfig" in request) is two
    assert request["AlgorithmSpecification"]["TrainingImage"].endswith("/pytorch-training:2.9.0-gpu-py312")
    channels = {entry["ChannelName"]: entry["DataSource"] for entry in request["InputDataConfig"]}
    assert channels["code"]["S3DataSource"]["S3Uri"].startswith(f"s3://our-bucket/mtrl/{NAME}/{NAME}-")
    if two:
        assert channels["shared"]["FileSystemDataSource"]["FileSystemAccessMode"] == "rw"
    else:
        kept = request["CheckpointConfig"]
        assert kept["LocalPath"] == request["Environment"]["SM_CHECKPOINT_DIR"]
        assert kept["S3Uri"].startswith("s3://our-bucket/mtrl/")
    if shape == "others":
        assert request["Tags"] == [{"Key": "team", "Value": "rl"}]
        assert request["Environment"].items() >= {("MLFLOW_TRACKING_URI", MLFLOW), ("NCCL_DEBUG", "INFO")}
        assert channels["data"]["S3DataSource"]["S3Uri"] == "s3://rows/sql"
        assert request["ResourceConfig"].items() >= {("VolumeSizeInGB", 500), ("VolumeKmsKeyId", "0123-4567")}


def test_aws_receives_the_request_of_the_dry_run(no_network, monkeypatch):
    moto = pytest.importorskip("moto", reason="needs pip install 'mtrl-agents[dev]'")
    logging.getLogger("sagemaker").setLevel(logging.ERROR)
    job, sent, trusted = plan([*JOB, *OTHERS, *SPOT]), [], {"Service": "sagemaker.amazonaws.com"}
    with moto.mock_aws():
        session = boto3.Session(region_name="us-west-2", aws_access_key_id="x", aws_secret_access_key="x")
        with pytest.raises(UserError, match="sagemaker.bucket=our-bucket does not exist"):
            submit(job, session)
        assert not session.client("s3").list_buckets()["Buckets"]  # the SDK alone would have made it
        region = {"LocationConstraint": "us-west-2"}
        session.client("s3").create_bucket(Bucket="our-bucket", CreateBucketConfiguration=region)
        statement = {"Effect": "Allow", "Principal": trusted, "Action": "sts:AssumeRole"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        session.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument=policy)
        session.events.register_first("before-call.iam.SimulatePrincipalPolicy", Wire().answer)  # moto has it not
        session.events.register_first(
            "before-send.sagemaker.CreateTrainingJob", lambda request, **_: sent.append(json.loads(request.body))
        )
        name = submit(job, session)
        kept = session.client("sagemaker").describe_training_job(TrainingJobName=name)
        uploaded = {entry["Key"] for entry in session.client("s3").list_objects_v2(Bucket="our-bucket")["Contents"]}
    assert [anonymous(request) for request in sent] == [anonymous(dry_run(job))]
    assert kept["RoleArn"] == "arn:aws:iam::123456789012:role/trainer"
    assert {f"mtrl/{NAME}/{name}/input/{path}" for path in ("code/code.tar.gz", "sm_drivers/sm_train.sh")} <= uploaded


def anonymous(request):
    """Return the request without the time in the name of the job."""
    return json.loads(json.dumps(request).replace(request["TrainingJobName"], NAME))


def test_a_role_without_permission_is_one_sentence(no_network):
    moto = pytest.importorskip("moto", reason="needs pip install 'mtrl-agents[dev]'")
    with moto.mock_aws():
        session = boto3.Session(region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        session.client("s3").create_bucket(Bucket="our-bucket")
        policy = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [policy]})
        session.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument=document)
        session.events.register_first("before-call.iam.SimulatePrincipalPolicy", Wire().answer)
        with pytest.raises(UserError, match=r"trainer.*trust"):
            submit(plan([*JOB, "sagemaker.region=us-east-1"]), session)


def test_containers_and_regions(no_network):
    with pytest.raises(UserError, match=r"sagemaker.torch=9.9.0 with sagemaker.python=py312 is no container"):
        dry_run(plan([*JOB, "sagemaker.torch=9.9.0"]))
    own = dry_run(plan([*JOB, "sagemaker.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/mtrl:1", "generator=vllm"]))
    assert own["AlgorithmSpecification"]["TrainingImage"].endswith("/mtrl:1")
    cpu = dry_run(plan(["sagemaker=cpu", *JOB]))
    assert "-cpu-" in cpu["AlgorithmSpecification"]["TrainingImage"]
    with pytest.raises(UserError, match="there is no region"):
        dry_run(plan([word for word in JOB if "region" not in word]))


@pytest.mark.parametrize(
    "change, told",
    [
        ({"RoleArn": None}, "Invalid type for parameter RoleArn"),
        ({"Unheard": 1}, 'Unknown parameter in input: "Unheard"'),
        ({"TrainingJobName": "under_score"}, "TrainingJobName=under_score does not look like"),
        ({"Environment": {"LONG": "x" * 513}}, "513 characters, and 0 to 512 are allowed"),
        ({"ResourceConfig": {"InstanceType": "ml.x1", "VolumeSizeInGB": 1}}, "InstanceType=ml.x1 is not one of"),
        ({"Tags": [{"Key": "a?", "Value": "b"}]}, r"Tags\[0\].Key=a\? does not look like"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 0}}, "MaxRuntimeInSeconds"),
    ],
)
def test_requests_that_the_service_would_refuse(change, told):
    fine = {
        "TrainingJobName": "name",
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "RoleArn": "arn:aws:iam::123456789012:role/trainer",
        "OutputDataConfig": {"S3OutputPath": "s3://our-bucket/x"},
        "Tags": [{"Key": "größe +1", "Value": ""}],
    }
    service.check_request("CreateTrainingJob", fine)
    with pytest.raises(UserError, match=told):
        service.check_request("CreateTrainingJob", fine | change)


def test_the_sdks_driver_starts_the_entry(monkeypatch, tmp_path):
    """The test runs the driver's torchrun command for the second of two instances."""
    import runpy

    from sagemaker.train.constants import SM_DRIVERS_LOCAL_PATH

    request = dry_run(plan([*JOB, *SHARED]))
    assert request["HyperParameters"] == {}  # they would be written into a shell script
    driver = runpy.run_path(str(Path(SM_DRIVERS_LOCAL_PATH) / "distributed_drivers" / "torchrun_driver.py"))
    for name, value in {
        "SM_ENTRY_SCRIPT": "scripts/sagemaker_entry.py",
        "SM_DISTRIBUTED_CONFIG": '{"process_count_per_node": null}',
        "SM_HPS": "{}",
        "SM_HOST_COUNT": "2",
        "SM_NUM_GPUS": "8",
        "SM_MASTER_ADDR": "algo-1",
        "SM_MASTER_PORT": "7777",
        "SM_CURRENT_HOST_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    command = driver["create_commands"]()
    assert command[:3] == ["torchrun", "--nnodes=2", "--nproc_per_node=8"]
    assert command[-1] == "scripts/sagemaker_entry.py" and (ROOT / command[-1]).is_file()
