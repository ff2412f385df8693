"""The keys `sagemaker.*` of `scripts/launch_sagemaker.py` and `managed.*` of `scripts/launch_managed_rl.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

HOUR = 3600


@dataclass
class JobConfig:
    """A SageMaker training job that runs `python -m mtrl.main` with the same overrides."""

    role: str | None = None
    """ARN of the role that the job runs as; examples/sagemaker/execution_role.json is a policy for it."""
    bucket: str | None = None
    """Bucket for code, checkpoints and the trained model: its name, without s3://."""
    prefix: str = "mtrl"
    """Everything of a job lies below s3://BUCKET/PREFIX."""
    region: str | None = None
    """Null: that of the AWS configuration (AWS_DEFAULT_REGION, or the profile)."""
    name: str | None = None
    """First part of the job's name; null: the experiment's."""
    instance_type: str = "ml.g5.2xlarge"
    instance_count: int = 1
    processes: int | None = None
    """Ranks per instance; null: one per GPU, or one."""
    volume_gb: int = 200
    """Disk of each instance."""
    keep_alive: int = 0
    """Seconds that the instances are kept for the next job (a warm pool); not with spot."""
    max_run: int = 24 * HOUR
    """Seconds of training after which SageMaker ends the job."""
    spot: bool = False
    """Spare capacity at a lower price; it may be taken away, and the job then goes on from its last checkpoint."""
    max_wait: int | None = None
    """With spot: seconds for waiting and training together, at least max_run."""
    checkpoints: str | None = "auto"
    """Where in S3 the folder of the run is copied while it trains. auto: below the job | s3://…: continue what is there
    | null: not at all"""
    file_system: str | None = None
    """Id (fs-…) of a file system that all instances share; more than one instance needs it."""
    file_system_type: str = "FSxLustre"
    """FSxLustre | EFS"""
    file_system_path: str = "/fsx"
    """Folder of the file system; of FSx for Lustre it begins with the mount name."""
    subnets: list[str] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)
    image: str | None = None
    """Container image; null: AWS's deep learning container for PyTorch."""
    torch: str = "2.9.0"
    """PyTorch of AWS's container."""
    python: str = "py312"
    """Python of AWS's container."""
    install: list[str] = field(default_factory=lambda: [".[data]"])
    """What pip installs in the container before training, as in a requirements file; []: the image has it all."""
    include: list[str] = field(default_factory=list)
    """Files and folders of your own that go with the code, such as the module of environment.target."""
    mlflow: str | None = None
    """ARN of an MLflow tracking server or app of SageMaker; the run reports to it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the container. They are readable in the console: no secrets."""
    tags: dict[str, str] = field(default_factory=dict)
    kms_key: str | None = None
    """Encrypts the volumes and what is written to S3."""
    wait: bool = False
    """Stay until the job ends, and show its log."""
    dry_run: bool = False
    """Print the request and check it; nothing is sent, and no credentials are needed."""


@dataclass
class ManagedConfig:
    """A job of SageMaker's managed multi-turn RL (serverless): its dataset, its agent, its model."""

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
    """s3://…: prompts that lie there; null: the rows of the experiment, written as parquet and uploaded."""
    validation: str | None = None
    """As dataset, of held-out prompts; null: the experiment's."""
    package_group: str | None = None
    """Model package group of the trained adapters; null: the SDK makes one, named after the model."""
    checkpoint_group: str | None = None
    """The same for those of the way; null: the SDK makes one."""
    mlflow: str | None = None
    """ARN of an MLflow app. It is required, since without it the SDK would make one of its own accord."""
    subnets: list[str] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    kms_key: str | None = None
    accept_eula: bool = False
    """You have read the licence of the model and accept it."""
    evaluate: str | None = None
    """Evaluate instead of training. base: the model itself | ARN of a model package: what was trained"""
    compare_base: bool = False
    """Evaluate the model before training beside it."""
    max_run: int = 24 * HOUR
    """Seconds after which an evaluation is ended; at most 72 hours."""
    wait: bool = False
    dry_run: bool = False
    """Print what would be called, with the SDK's own classes and nothing sent."""
