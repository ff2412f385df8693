"""Helpers of the tests of SageMaker: the words of commands, and their settings."""

import pytest

ROLE = "sagemaker.role=arn:aws:iam::123456789012:role/trainer"
BUCKET = "sagemaker.bucket=our-bucket"
REGION = "sagemaker.region=us-west-2"
JOB = ("experiment=text_to_sql", "debug=fast", ROLE, BUCKET, REGION)
MANAGED = (
    "experiment=text_to_sql",
    "algorithm=rloo",
    "trainer.prompts_per_step=32",
    "generator.max_context_length=4096",
    "generator.sampling_params.max_generate_length=1024",
    "managed.region=us-west-2",
    "managed.model=openai-reasoning-gpt-oss-20b",
    "managed.agent=arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/agent",
    "managed.role=arn:aws:iam::123456789012:role/trainer",
    "managed.bucket=our-bucket",
    "managed.mlflow=arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app",
)
SPOT = ("sagemaker.spot=true", "sagemaker.max_run=3600", "sagemaker.max_wait=7200")
SHARED = (
    "sagemaker.instance_count=2",
    "sagemaker.file_system=fs-0123456789abcdef0",
    "sagemaker.subnets=[subnet-1]",
    "sagemaker.security_groups=[sg-1]",
)


def sdk():
    """Return the SDK. Without it the test is skipped with the name of the extra."""
    pytest.importorskip("sagemaker.train", reason="needs pip install 'mtrl-agents[sagemaker]'")


def without(words, key):
    return [word for word in words if not word.startswith(f"{key}=")]
