"""The schema: one dataclass per config group, one attribute per key. The docstrings are the configuration reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING

from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.checks_schema import DiagnosisConfig, PreflightConfig
from mtrl.config.distillation_schema import DistillationConfig
from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.config.engine_schema import AgentConfig, LocalEngineConfig, SglangConfig, VllmConfig
from mtrl.config.field import number, one_of, setting
from mtrl.config.model_schema import ModelConfig
from mtrl.config.rollout_schema import AsyncConfig, ContextConfig, ResourcesConfig, RolloutsConfig
from mtrl.config.trainer_schema import TrainerConfig

EVALUATE = "mtrl evaluate"


@dataclass
class DataConfig:
    """The data set."""

    path: str | None = None
    """A folder with train/test files, one file (.jsonl, .json, .parquet, .csv) or a Hub name; null: synthetic data."""
    train_split: str = "train"
    test_split: str = "test"
    max_train_rows: int | None = number(None, at_least=1)
    max_test_rows: int | None = number(256, at_least=1)
    """Maximum number of held-out rows for evaluations; always the first rows of the split."""
    synthetic_train_rows: int = number(4096, at_least=1)
    synthetic_test_rows: int = number(256, at_least=1)
    validation_rows: int = number(0, at_least=0)
    """Number of rows that are moved from the training split, chosen by their content, to a validation split for the
    evaluations of a run, so that the choice of the best checkpoint never uses the test split; 0: a run evaluates on the
    test split."""
    sampler: str = "uniform"
    """Order of the training rows. uniform: every row once in each pass; difficulty: without the rows that almost always
    or almost never succeed; stages: one set of rows after another; or `package.module.Class` of a
    `mtrl.trainer.data.sampler.Sampler`."""
    sampler_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the sampler, such as {band: [0.1, 0.9], forgetting: 0.5, exploration: 0.1} for difficulty."""


@dataclass
class PlacementConfig:
    """The machines that a run is planned for. They are not detected: `mtrl doctor --plan` assumes them, and a
    run with another number of ranks prints a warning."""

    name: str | None = None
    """Name of the placement in `model.recipe` whose settings apply."""
    machines: int = number(1, at_least=1)
    gpus: int | None = number(None, at_least=1)
    """Number of GPUs of each machine; null: as many as ranks and servers need."""
    ranks: int | None = number(None, at_least=1)
    """Number of processes that torchrun starts on each machine; null: the number that it has started."""
    gpu_memory: float = number(79.0, above=0)
    """Memory of each GPU, in GiB; 79 is the size that torch reports for a GPU of 80 GB."""


@dataclass
class EnvironmentConfig:
    """The task."""

    name: str = MISSING
    target: str | None = None
    """`package.module.Name` of a Family or a BaseEnvironment class outside of this tree."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the task family, passed to its environment and loader."""
    prompt: str = one_of("auto", "short", "full")
    """Prompt of the rows that the task family writes. short: for the tiny policy, which learns the task's form from its
    warm start; full: instructions, answer format, tools and a worked example, for a language model; auto: short with
    model=tiny, else full. Rows of `data.path` with a prompt of their own keep it."""
    opponent: str = one_of("scripted", "policy", "frozen")
    """What takes the other roles in the training episodes of an environment with several roles. scripted: the fixed
    opponent of the environment, which all evaluations use; policy: the policy, and all roles are trained; frozen: the
    policy at the start of the run, or the one of `opponent_path`."""
    opponent_path: str | None = None
    """opponent=frozen: model folder with the weights of the opponent, such as the export of an earlier run; null: the
    policy at the start of the run."""
    step_timeout: float = number(30.0, above=0)
    """Time limit of reset or of one step, in seconds."""
    episode_timeout: float = number(600.0, above=0)
    """Time limit of a whole episode, of loading the rows, and of scoring one episode, in seconds each."""
    retries: int = number(1, at_least=0)
    """Maximum number of retries of an episode after an environment error, before the whole group is replaced."""
    max_failed_share: float = number(0.5, at_least=0, at_most=1)
    """Maximum share of failed episodes in a step; above it the run stops. In `environments` it holds for the last
    groups of each source, which is paused above it."""
    max_workers: int = number(16, at_least=1, affects_policy=False)
    """Number of threads that run synchronous environments."""
    resources: ResourcesConfig = setting(factory=ResourcesConfig, affects_policy=False)


@dataclass
class RewardConfig:
    """The reward of a turn and its components."""

    scheme: str = "default"
    """Name of the reward rule, one of those that the environment offers."""
    level: str = one_of("turn", "trajectory")
    """turn: each turn keeps its reward; trajectory: the last turn receives the sum, the other turns 0."""
    components: dict[str, Any] = field(default_factory=lambda: {"environment": 1.0})
    """Weight of each component by its name: `environment` (the reward that step returned), a component that the
    environment reports, or a built-in shaping."""


@dataclass
class SamplingConfig:
    """Sampling of turns."""

    max_generate_length: int = number(1024, at_least=1)
    """Maximum number of sampled tokens per turn."""
    temperature: float = number(
        1.0, above=0, why="greedy trajectories of one prompt are all the same and teach nothing"
    )
    top_p: float = number(1.0, above=0, at_most=1)
    top_k: int = -1
    stop: list[str] = field(default_factory=list)


@dataclass
class EvalSamplingConfig(SamplingConfig):
    """Sampling of turns in evaluations: greedy, with all other settings as in training."""

    max_generate_length: int = number(II("generator.sampling_params.max_generate_length"), at_least=1)
    temperature: float = number(0.0, at_least=0, why="0 is greedy")
    top_p: float = number(II("generator.sampling_params.top_p"), above=0, at_most=1)
    top_k: int = II("generator.sampling_params.top_k")
    stop: list[str] = II("generator.sampling_params.stop")  # noqa: RUF009


@dataclass
class GeneratorConfig:
    """Rollouts."""

    backend: str = one_of("local", "vllm", "sglang")
    use_conversation_multi_turn: bool = True
    max_turns: int = number(5, at_least=1)
    max_context_length: int | None = number(None, at_least=1)
    """Maximum length of a whole conversation, in tokens; null: the limit of the model."""
    context: ContextConfig = field(default_factory=ContextConfig)
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling_params: EvalSamplingConfig | None = None
    """Sampling parameters of evaluations; null: sampling_params, but greedy."""
    max_num_seqs: int | None = number(None, at_least=1)
    """Maximum number of trajectories that the engine holds at once. Null: 128; servers on GPUs: from 32 to 512, by the
    memory that they have for keys and values. The embedded engine holds fewer if the memory of its GPU requires it."""
    gpu_memory_utilization: float = number(0.8, above=0, at_most=1)
    """vllm, sglang: share of a GPU's memory that a server takes; 0.7 leaves headroom for long conversations."""
    local: LocalEngineConfig = field(default_factory=LocalEngineConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)


@dataclass
class EvaluationConfig:
    """Held-out evaluation by the scorer."""

    every_steps: int = number(20, at_least=0, affects_policy=False)
    before_train: bool = True
    rows: int = number(200, at_least=1, why="every evaluation runs them, greedily")
    sampled_rows: int = number(200, at_least=0)
    """Number of rows of the temperature-1 evaluation before and after training; 0 skips this evaluation."""
    samples_per_row: int = number(1, at_least=1)
    """Number of trajectories per row; with more than 1, they are sampled at temperature 1 and give pass@k."""
    pass_k_values: list[int] = field(default_factory=lambda: [1])
    success_threshold: float = 1.0
    """Smallest score that makes an episode a success."""
    claim_threshold: float | None = None
    """Smallest reward with which the reward counts an episode as a success; null: success_threshold. Reward and scorer
    disagree about an episode if this verdict differs from the scorer's."""
    keep_disagreements: int = number(16, at_least=0, affects_policy=False)
    """Maximum number of trajectories per training step that are saved because reward and scorer disagree; all
    disagreements are counted."""
    model: str | None = setting(None, program=EVALUATE)
    """Model to evaluate. A run, a checkpoint, a folder, a Hub name, or an endpoint written
    MODEL@http://HOST:PORT/v1; null: the policy that a run of this configuration would start from."""
    compare: list[str] = setting(factory=list, program=EVALUATE)
    """Further models, each compared with `model` on the same rows; `base` is the policy before
    training."""
    split: str = one_of("test", "validation", "train", program=EVALUATE)
    """Split of the rows."""
    source: str | None = setting(None, program=EVALUATE)
    """Name of the source of a mixture (`environments`) whose rows are evaluated; null: all sources."""
    confidence: float = number(0.95, above=0, below=1, why="0.95 is the usual level", affects_policy=False)
    """Confidence level of the intervals."""
    output: str | None = setting(None, program=EVALUATE)
    """Folder of the report; null: outputs/evaluations/NAME/TIME. An evaluation in an existing folder is
    resumed."""
    endpoint: EndpointConfig = setting(factory=EndpointConfig, program=EVALUATE)


@dataclass
class MlflowConfig:
    uri: str | None = None
    """Tracking server; null: MLFLOW_TRACKING_URI, else the SQLite file mlflow.db beside the folders of the runs."""
    experiment: str | None = None
    """Name of the experiment; null: tracker.project."""


@dataclass
class WandbConfig:
    mode: str = one_of("online", "offline")
    entity: str | None = None


@dataclass
class TrackerConfig:
    """Destinations of a run's metrics and trajectories besides its folder."""

    console: bool = True
    plots: bool = True
    project: str = "mtrl"
    report_to: list[str] = field(default_factory=list)
    """Trackers: mlflow | wandb | tensorboard. They read the folder of the run, and data that cannot be sent at once is
    sent later."""
    trajectories: int = number(64, at_least=0)
    """Maximum number of trajectories of each trajectory file that are sent to the trackers; the folder of the run holds
    all."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class Config:
    """A run."""

    name: str = "gsm8k"
    seed: int = number(0, at_least=0, at_most=2**63 - 1)
    run_dir: str = setting("outputs/${name}/${now:%Y-%m-%d_%H-%M-%S}", affects_policy=False)
    """Folder of the run; in a multirun the folder of the sweep, with one folder per job in it."""
    resume: str = setting("none", affects_policy=False)
    """Run or checkpoint to resume from. none: start a new run | latest: the run in `run_dir`, or the newest run of this
    name if `run_dir` is not set | PATH of a checkpoint or run"""
    plugins: list[str] = setting(factory=list, affects_policy=False)
    """Your own modules to import first, so that the configuration can name the functions that they register."""
    objective: str = setting("success_after", affects_policy=False)
    """Key of summary.json whose value `main` returns to a sweep."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    environments: dict[str, Any] = field(default_factory=dict)
    """A mixture of tasks, each a source of rows by its name, with the keys weight, environment, data, reward, generator
    and algorithm. A source starts from these sections of the run, and its weight is its share of the prompts, relative
    to the other weights: a number, or a schedule such as [[0,3],[1600,1]] over the training rows that are drawn. Empty:
    one task, `environment`."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: TrackerConfig = setting(factory=TrackerConfig, affects_policy=False)
    preflight: PreflightConfig = setting(factory=PreflightConfig, affects_policy=False)
    diagnosis: DiagnosisConfig = setting(factory=DiagnosisConfig, affects_policy=False)
    async_config: AsyncConfig = field(default_factory=AsyncConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    parent: str | None = setting(None, affects_policy=False)
    """Folder of the run that this run differs from by one change; `mtrl diagnose` then reports the effect of
    the change."""
