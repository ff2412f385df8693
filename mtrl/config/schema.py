"""The schema: one dataclass per config group, one attribute per key. The docstrings are the configuration reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING

from mtrl.config.checks_schema import DiagnosisConfig, PreflightConfig
from mtrl.config.distillation_schema import DistillationConfig
from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.config.engine_schema import AgentConfig, LocalEngineConfig, SglangConfig, VllmConfig
from mtrl.config.field import number, one_of
from mtrl.config.model_schema import NO_FLOAT16, ModelConfig
from mtrl.config.rollout_schema import AsyncConfig, ContextConfig, ResourcesConfig, RolloutsConfig


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
    max_failed_share: float = number(0.5, at_most=1)
    """Maximum share of failed episodes in a step; above it the run stops. In `environments` it holds for the last
    groups of each source, which is paused above it."""
    max_workers: int = number(16, at_least=1)
    """Number of threads that run synchronous environments."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)


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
class OptimizerConfig:
    lr: float = number(1e-6, above=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = number(0.0, at_least=0)
    max_grad_norm: float = number(1.0, above=0)
    schedule: str = one_of("constant", "linear", "cosine")
    """constant | linear | cosine"""
    warmup_steps: int = number(0, at_least=0)
    min_lr_ratio: float = number(0.0, at_least=0, at_most=1)
    offload: bool = False
    """Store the optimiser's moments in CPU memory between updates; for models on a GPU."""


@dataclass
class PassKConfig:
    """advantage_method=grpo_passk: reward the best of k."""

    k: int = number(4, at_least=1)
    estimator: str = one_of("pkpo_sloo1", "pkpo_sloo", "chen", "top2")
    """pkpo_sloo1 | pkpo_sloo | chen | top2"""


@dataclass
class CriticConfig:
    """advantage_method=gae or turn_gae: a value model, which is a copy of the policy's body with its own head."""

    path: str | None = None
    """Model folder that the critic starts from; null: the policy's weights at the start of the run."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: float | None = number(0.2, above=0)
    """Maximum distance of a value from its value at rollout time before its loss is clipped; null: no clip."""
    warmup_steps: int = number(0, at_least=0)
    """Number of steps at the start of the run in which only the critic is trained."""


@dataclass
class SapoConfig:
    """loss_fn=sapo: temperatures of the soft gate."""

    tau_positive: float = number(1.0, above=0)
    tau_negative: float = number(1.05, above=0)


@dataclass
class DppoConfig:
    """loss_fn=dppo: limits on the change of a token's probability, beyond which the token is masked."""

    divergence: str = one_of("tv", "kl")
    """Divergence of the binary distribution "this token or another". tv: total variation | kl: KL divergence"""
    delta_low: float = number(0.2, above=0)
    delta_high: float = number(0.2, above=0)


@dataclass
class AlgorithmConfig:
    """Credit assignment and loss."""

    advantage_method: str = "turn_rloo"
    """grpo (also group_based) | dr_grpo | rloo | opo | gpg | maxrl | gdpo | reinforce_pp | reinforce_pp_baseline |
    monte_carlo | grpo_passk | turn_rloo | group_based_per_turn | mt_grpo | gigpo | turn_gae | gae |
    package.module.function"""
    credit: str | None = one_of(None, "trajectory", "turn", "turn+outcome")
    """Rewards that a turn gets credit for. trajectory: the sum of all rewards | turn: the rewards from this turn on,
    compared with the peers that reached it | turn+outcome: the last turn's reward, plus the turn rewards from this turn
    on | null: as the method is published"""
    group_size: int = number(8, at_least=1)
    norm_by_std: bool = True
    """grpo, mt_grpo, gigpo: divide by the group's standard deviation."""
    gamma: float = number(1.0, at_least=0, at_most=1)
    """Discount per turn (gae: per token)."""
    gae_lambda: float = number(1.0, at_least=0, at_most=1)
    turn_advantage_coef: float = 1.0
    """mt_grpo, gigpo, credit=turn+outcome: weight of the advantage that comes from the turn rewards."""
    whiten_advantages: bool = True
    """gae, turn_gae: normalise advantages to mean 0 and standard deviation 1 over the sampled tokens of a step."""
    passk: PassKConfig = field(default_factory=PassKConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loss_fn: str = "ppo"
    """ppo | cispo | importance_sampling | gspo | sapo | dppo | decoupled_ppo | package.module.function"""
    clip_low_threshold: float = number(
        0.8, at_least=0, at_most=1, why="it is a bound on the probability ratio, 0.8 for an epsilon of 0.2"
    )
    """Lower bound on the probability ratio."""
    clip_high_threshold: float = number(
        1.2, at_least=1, why="it is a bound on the probability ratio, 1.2 for an epsilon of 0.2"
    )
    """Upper bound on the probability ratio."""
    dual_clip: float | None = number(None, at_least=1)
    is_cap: float = number(2.0, above=0)
    """importance_sampling, dppo: cap on the ratio; decoupled_ppo: cap on the behaviour weight."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    loss_reduction: str = "token_mean"
    """token_mean | sequence_mean | seq_mean_token_sum | seq_mean_token_sum_norm | turn_mean | prompt_mean"""
    max_sequence_length: int | None = number(None, at_least=1)
    """seq_mean_token_sum_norm: the constant divisor."""
    kl_loss_coef: float = number(0.0, at_least=0)
    """Weight of the KL to the reference as a term of the loss."""
    kl_reward_coef: float = number(0.0, at_least=0)
    """Weight of the KL to the reference as a penalty on the reward of each turn."""
    kl_estimator: str = "k3"
    """k1 | k2 | k3 | k3_plus | k1_unbiased | k3_unbiased; in the reward it is always k1"""
    kl_target: float | None = number(None, above=0)
    """Target of the KL, in nats per token, that an adaptive coefficient holds; null: the coefficient is fixed."""
    kl_horizon: int = number(10_000, at_least=1)
    """kl_target: number of trajectories over which an error of a fifth of the target or more changes the coefficient by
    about a fifth."""
    kl_reference: str | None = None
    """Model folder of the reference; null: the policy at the start of the run."""
    entropy_coef: float = 0.0
    loss_anchor: str = one_of("rollout", "old")
    """Log-probs of the old policy in the loss. rollout: those of the engine | old: those of the trainer, recomputed
    before the update"""
    off_policy_correction: str = "none"
    """Correction for the difference between the log-probs of engine and trainer: none | tis | sequence_tis | icepop |
    mis | geometric"""
    correction_low: float | None = number(None, at_least=0)
    """Lower bound of the correction; null: the value of its paper."""
    correction_high: float | None = number(None, above=0)
    """Upper bound of the correction; null: the value of its paper."""
    drop_zero_advantage: bool = True
    """Leave trajectories without advantage out of the update; denominators still count them."""
    dynamic_sampling_rounds: int = number(0, at_least=0)
    """Maximum number of times per step that groups without an advantage are replaced by groups of new prompts; 0: such
    groups are not replaced."""
    overlong_filtering: bool = False
    """Do not train on trajectories that a length limit cut; their rewards still count in the group's baseline."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Settings of your own estimators and losses, which read them as `config.extra`."""


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
    top_p: float = II("generator.sampling_params.top_p")
    top_k: int = II("generator.sampling_params.top_k")
    stop: list[str] = II("generator.sampling_params.stop")  # noqa: RUF009


@dataclass
class GeneratorConfig:
    """Rollouts."""

    backend: str = one_of("local", "vllm", "sglang")
    """local | vllm | sglang"""
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
class CheckpointConfig:
    every_steps: int = number(20, at_least=0)
    """Number of steps between checkpoints; 0: only at the end."""
    keep_last: int = number(2, at_least=1)
    keep_best: bool = True
    background: bool = True
    """Write checkpoints in the background, while training continues."""


@dataclass
class FsdpConfig:
    """Sharding of models over `torchrun`'s ranks (FSDP2, `fully_shard`): every rank holds a shard of each parameter."""

    param_dtype: str | None = one_of(None, "bfloat16", "float32", refused={"float16": NO_FLOAT16})
    """Dtype of forward and backward passes: bfloat16 | float32; the weights stay in model.dtype. Null: model.dtype for
    model=tiny, else bfloat16 where GPU or CPU multiply it."""
    reduce_dtype: str = one_of("float32", "bfloat16")
    """Dtype of the sum of gradients over ranks: float32 | bfloat16"""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass and gather them again for the backward pass; false is faster and
    needs more memory."""
    cpu_offload: bool = False
    """Store parameters, gradients and moments in CPU memory."""
    replicas: int = number(1, at_least=1)
    """Hybrid sharding (HSDP): number of copies of the model, each sharded over ranks / replicas ranks."""
    timeout: float = number(600.0, above=0)
    """Maximum time that ranks wait for each other before the job ends, in seconds."""


@dataclass
class TrainerConfig:
    """The training loop."""

    max_steps: int = number(100, at_least=0)
    epochs: float | None = number(None, above=0)
    """Number of passes over the training rows. If set, it replaces `max_steps` by the smallest number of steps that
    draws each row that often. Rows that dynamic sampling and failed groups draw in addition are not counted.
    config.yaml of the run holds the number of steps."""
    prompts_per_step: int = number(16, at_least=1)
    mini_batches: int = number(1, at_least=1)
    """Number of optimiser updates per step of rollouts and per update epoch."""
    update_epochs: int = number(1, at_least=1)
    max_tokens_per_microbatch: int = number(16384, at_least=1)
    """Maximum number of tokens of one forward and backward pass, padding included. `model=tiny` sets 2048."""
    packing: bool | None = None
    """Concatenate the samples of a micro-batch in one row instead of padding each to the longest. With FlashAttention
    and sdpa each sample attends to itself only, and with sdpa a common prefix of 64 tokens or more, such as the prompt
    of a group, is computed once for all samples of a micro-batch; with eager, and for models with a sliding window, a
    mask of tokens x tokens separates the samples, which is slower than padding. Null: true for models other than
    model=tiny where sdpa computes no such mask."""
    threads: int | None = number(None, at_least=1)
    """Number of CPU threads; null: 1 for models under 5 M parameters, else all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    max_logits_per_chunk: int | None = number(None, at_least=1)
    """Maximum number of logits (tokens x vocabulary) in memory at once; the log-probs of more tokens are computed in
    chunks. Null: 2^27 on a GPU, 2^24 on a CPU."""
    compile: bool = False
    """Apply torch.compile to each layer of the models that are trained."""
    sequence_parallel: int = number(1, at_least=1)
    """Number of ranks that share each sequence: each computes an equal part of its tokens, and in attention an equal
    part of the heads for all tokens (DeepSpeed-Ulysses). It must divide the number of ranks and that of the attention
    heads; 1: each rank computes whole sequences."""
    profile_step: int | None = number(None, at_least=1)
    """Step (from 1) whose trace, for Perfetto or chrome://tracing, is written to the folder of the run."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    max_steps_without_signal: int = number(20, at_least=1)
    """Maximum number of consecutive steps in which no group has an advantage; after them the run stops."""
    save_trajectories_every: int = number(10, at_least=0)
    """Number of steps between saved training trajectories; 0: never. Trajectories of evaluations are always saved."""


@dataclass
class EvaluationConfig:
    """Held-out evaluation by the scorer."""

    every_steps: int = number(20, at_least=0)
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
    keep_disagreements: int = number(16, at_least=0)
    """Maximum number of trajectories per training step that are saved because reward and scorer disagree; all
    disagreements are counted."""
    model: str | None = None
    """mtrl evaluate: model to evaluate. A run, a checkpoint, a folder, a Hub name, or an endpoint written
    MODEL@http://HOST:PORT/v1; null: the policy that a run of this configuration would start from."""
    compare: list[str] = field(default_factory=list)
    """mtrl evaluate: further models, each compared with `model` on the same rows; `base` is the policy before
    training."""
    split: str = one_of("test", "validation", "train")
    """mtrl evaluate: split of the rows: test | validation | train"""
    source: str | None = None
    """mtrl evaluate: name of the source of a mixture (`environments`) whose rows are evaluated; null: all sources"""
    confidence: float = number(0.95, above=0, below=1, why="0.95 is the usual level")
    """Confidence level of the intervals."""
    output: str | None = None
    """mtrl evaluate: folder of the report; null: outputs/evaluations/NAME/TIME. An evaluation in an existing folder is
    resumed."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class MlflowConfig:
    uri: str | None = None
    """Tracking server; null: MLFLOW_TRACKING_URI, else the SQLite file mlflow.db beside the folders of the runs."""
    experiment: str | None = None
    """Name of the experiment; null: tracker.project."""


@dataclass
class WandbConfig:
    mode: str = one_of("online", "offline")
    """online | offline"""
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
    seed: int = 0
    run_dir: str = "outputs/${name}/${now:%Y-%m-%d_%H-%M-%S}"
    """Folder of the run; in a multirun the folder of the sweep, with one folder per job in it."""
    resume: str = "none"
    """Run or checkpoint to resume from. none: start a new run | latest: the run in `run_dir`, or the newest run of this
    name if `run_dir` is not set | PATH of a checkpoint or run"""
    plugins: list[str] = field(default_factory=list)
    """Your own modules to import first, so that the configuration can name the functions that they register."""
    objective: str = "success_after"
    """Key of summary.json whose value `main` returns to a sweep."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    environments: dict[str, Any] = field(default_factory=dict)
    """A mixture of tasks, each a source of rows by its name, with the keys weight, environment, data and reward. A
    source starts from `environment`, `data` and `reward` of the run, and its weight is its share of the prompts,
    relative to the other weights. Empty: one task, `environment`."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    async_config: AsyncConfig = field(default_factory=AsyncConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    parent: str | None = None
    """Folder of the run that this run differs from by one change; `mtrl diagnose` then reports the effect of
    the change."""
