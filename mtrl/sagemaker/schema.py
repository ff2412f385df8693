"""The keys `sagemaker.*` of `scripts/launch_sagemaker.py` and `managed.*` of `scripts/launch_managed_rl.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

HOUR = 3600


@dataclass
class JobConfig:
    """A SageMaker training job that runs `mtrl train` with the same overrides."""

    role: str | None = None
    """ARN of the role that the job runs as; examples/sagemaker/execution_role.json is a policy for the role."""
    bucket: str | None = None
    """Name of the bucket for code, checkpoints and the trained model, without s3://."""
    prefix: str = "mtrl"
    """Path in the bucket: all files of a job are below s3://BUCKET/PREFIX."""
    region: str | None = None
    """AWS region; null: the region of the AWS configuration (AWS_DEFAULT_REGION, or the profile)."""
    name: str | None = None
    """First part of the job's name; null: from the experiment's name."""
    instance_type: str = "ml.g5.2xlarge"
    instance_count: int = 1
    processes: int | None = None
    """Number of ranks per instance; null: one per GPU, or one without a GPU."""
    volume_gb: int = 200
    """Disk size of each instance, in GB."""
    keep_alive: int = 0
    """Seconds that the instances are retained for the next job (a warm pool); not with spot."""
    max_run: int = 24 * HOUR
    """Maximum training time, in seconds; SageMaker then ends the job."""
    spot: bool = False
    """Use spare capacity at a lower price; AWS may reclaim the instance, and the job then resumes from its last
    checkpoint."""
    max_wait: int | None = None
    """Maximum time for waiting and training together, in seconds, at least max_run; only with spot."""
    checkpoints: str | None = "auto"
    """Address in S3 to which the folder of the run is copied during training. auto: below the job | s3://…: continue
    the run at this address | null: no copy"""
    file_system: str | None = None
    """Id (fs-…) of a file system that all instances share; more than one instance needs it."""
    file_system_type: str = "FSxLustre"
    """Type of the file system: FSxLustre | EFS"""
    file_system_path: str = "/fsx"
    """Folder in the file system; with FSx for Lustre it begins with the mount name."""
    subnets: list[str] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)
    image: str | None = None
    """Container image; null: AWS's deep learning container for PyTorch."""
    torch: str = "2.9.0"
    """PyTorch version of AWS's container."""
    python: str = "py312"
    """Python version of AWS's container."""
    install: list[str] = field(default_factory=lambda: [".[data]"])
    """Packages that pip installs in the container before training, as in a requirements file; []: the image has all of
    them."""
    include: list[str] = field(default_factory=list)
    """Files and folders of your own that are uploaded with the code, such as the module of environment.target."""
    mlflow: str | None = None
    """ARN of an MLflow tracking server or app of SageMaker; the run reports to it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the container. The AWS console shows them, so they must hold no secrets."""
    tags: dict[str, str] = field(default_factory=dict)
    kms_key: str | None = None
    """Id of the KMS key that encrypts the volumes and the files in S3."""
    wait: bool = False
    """Wait until the job ends, and show its log."""
    dry_run: bool = False
    """Check and print the request without sending it; no credentials are needed."""


@dataclass
class ManagedConfig:
    """A job of SageMaker's managed multi-turn RL (serverless): dataset, agent and model."""

    role: str | None = None
    """ARN of the role of the job."""
    region: str | None = None
    model: str | None = None
    """Id of a model that the service trains, such as openai-reasoning-gpt-oss-20b, or the ARN of a model package."""
    agent: str | None = None
    """ARN of an AgentCore runtime or of a Lambda function."""
    agent_qualifier: str = "DEFAULT"
    bucket: str | None = None
    prefix: str = "mtrl"
    dataset: str | None = None
    """Address (s3://…) of the prompts; null: the rows of the experiment, written as parquet and uploaded."""
    validation: str | None = None
    """Address (s3://…) of held-out prompts; null: the held-out rows of the experiment."""
    package_group: str | None = None
    """Model package group of the trained adapters; null: the SDK creates one, named after the model."""
    checkpoint_group: str | None = None
    """Model package group of the intermediate checkpoints; null: the SDK creates one."""
    mlflow: str | None = None
    """ARN of an MLflow app. It is required, because the SDK would otherwise create one."""
    subnets: list[str] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    kms_key: str | None = None
    accept_eula: bool = False
    """Whether you have read the licence of the model and accept it."""
    evaluate: str | None = None
    """Model to evaluate; null: train instead. base: the model itself | ARN of a model package: a trained model"""
    compare_base: bool = False
    """Also evaluate the model before training, for comparison; only in an evaluation."""
    max_run: int = 24 * HOUR
    """Maximum duration of an evaluation, in seconds; at most 72 hours."""
    wait: bool = False
    dry_run: bool = False
    """Print the requests of the SDK's classes without sending them."""
