"""The schema: one dataclass per config group, one attribute per key. The docstrings are the configuration reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING

from mtrl.config.agent_schema import AgentConfig
from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.config.engine_schema import LocalEngineConfig, SglangConfig, VllmConfig
from mtrl.config.model_schema import ModelConfig


@dataclass
class DataConfig:
    """Where the rows come from."""

    path: str | None = None
    """A folder with train/test files, one file (.jsonl, .json, .parquet, .csv) or a Hub name; null: synthetic data."""
    train_split: str = "train"
    test_split: str = "test"
    max_train_rows: int | None = None
    max_test_rows: int | None = 256
    """The held-out rows that evaluations use; the first ones, always the same."""
    synthetic_train_rows: int = 4096
    synthetic_test_rows: int = 256
    validation_rows: int = 0
    """Rows taken from the training split, by their content, for the evaluations of a run, so that choosing the best
    checkpoint never looks at the test split; 0: a run evaluates on the test split."""


@dataclass
class PlacementConfig:
    """The machines that a run is laid out for. They are not looked for: `python -m mtrl.doctor --plan` counts on them,
    and a run that is started by another number of ranks warns."""

    name: str | None = None
    """Which part of `model.recipe` applies."""
    machines: int = 1
    gpus: int | None = None
    """Of each machine; null: as many as ranks and servers need."""
    ranks: int | None = None
    """Processes that torchrun starts on each machine; null: those that it has started."""
    gpu_memory: float = 79.0
    """GiB of each GPU; 79 is what torch shows of one of 80 GB."""


@dataclass
class EnvironmentConfig:
    """The task."""

    name: str = MISSING
    target: str | None = None
    """`package.module.Name` of a Family or a BaseEnvironment class outside of this tree."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the family itself, passed to its environment and loader."""
    step_timeout: float = 30.0
    """Seconds that reset or one step may take."""
    episode_timeout: float = 600.0
    """Seconds that a whole episode may take."""
    retries: int = 1
    """Fresh attempts after an environment error, before the whole group is replaced."""
    max_failed_share: float = 0.5
    """The run stops when more than this share of a step's episodes fail."""
    max_workers: int = 16
    """Threads that run synchronous environments."""


@dataclass
class RewardConfig:
    """What is paid, and where."""

    scheme: str = "default"
    """Which of the environment's own reward rules applies."""
    level: str = "turn"
    """turn: each turn keeps its reward; trajectory: the sum is paid at the last turn."""
    components: dict[str, Any] = field(default_factory=lambda: {"environment": 1.0})
    """Weight by name: `environment` (what step returned), what the environment reports, or a built-in shaping."""


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    """constant | linear | cosine"""
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    offload: bool = False
    """Keep the moments in the memory of the CPU between updates; for models on a GPU."""


@dataclass
class PassKConfig:
    """advantage_method=grpo_passk: reward the best of k."""

    k: int = 4
    estimator: str = "pkpo_sloo1"
    """pkpo_sloo1 | pkpo_sloo | chen | top2"""


@dataclass
class CriticConfig:
    """advantage_method=gae or turn_gae: a value model, a copy of the policy's body with a head of its own."""

    path: str | None = None
    """Model folder that the critic starts from; null: the policy's weights at the start of the run."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: float | None = 0.2
    """How far a value may move from that of the rollout before its loss is clipped; null: no clip."""
    warmup_steps: int = 0
    """First steps in which only the critic learns."""


@dataclass
class SapoConfig:
    """loss_fn=sapo: temperatures of the soft gate."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass
class DppoConfig:
    """loss_fn=dppo: how far a token's probability may move before it is masked."""

    divergence: str = "tv"
    """tv: total variation | kl: of the two-way choice "this token or another" """
    delta_low: float = 0.2
    delta_high: float = 0.2


@dataclass
class AlgorithmConfig:
    """Credit and loss."""

    advantage_method: str = "turn_rloo"
    """grpo (also group_based) | dr_grpo | rloo | opo | gpg | maxrl | gdpo | reinforce_pp | reinforce_pp_baseline |
    monte_carlo | grpo_passk | turn_rloo | group_based_per_turn | mt_grpo | gigpo | turn_gae | gae |
    package.module.function"""
    credit: str | None = None
    """What a turn answers for. trajectory: the sum of all rewards | turn: the rewards from this turn on, against the
    peers that reached it | turn+outcome: the last turn's reward, plus the turn rewards from here on; null: as the
    method is published"""
    group_size: int = 8
    norm_by_std: bool = True
    """grpo, mt_grpo, gigpo: divide by the group's standard deviation."""
    gamma: float = 1.0
    """Discount per turn (gae: per token)."""
    gae_lambda: float = 1.0
    turn_advantage_coef: float = 1.0
    """Weight of the turn's own part: mt_grpo and credit=turn+outcome, gigpo."""
    whiten_advantages: bool = True
    """gae, turn_gae: mean 0 and standard deviation 1 over the sampled tokens of a step."""
    passk: PassKConfig = field(default_factory=PassKConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loss_fn: str = "ppo"
    """ppo | cispo | importance_sampling | gspo | sapo | dppo | decoupled_ppo | package.module.function"""
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    """Bounds on the probability ratio."""
    dual_clip: float | None = None
    is_cap: float = 2.0
    """importance_sampling, dppo: cap on the ratio; decoupled_ppo: cap on the behaviour weight."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    loss_reduction: str = "token_mean"
    """token_mean | sequence_mean | seq_mean_token_sum | seq_mean_token_sum_norm | turn_mean | prompt_mean"""
    max_sequence_length: int | None = None
    """seq_mean_token_sum_norm: the constant divisor."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference as a term of the loss."""
    kl_reward_coef: float = 0.0
    """Weight of the KL to the reference as a penalty on the reward of each turn."""
    kl_estimator: str = "k3"
    """k1 | k2 | k3 | k3_plus | k1_unbiased | k3_unbiased; in the reward it is always k1"""
    kl_target: float | None = None
    """Nats per token that the coefficient is steered to; null: it stays fixed."""
    kl_horizon: int = 10_000
    """kl_target: trajectories over which an error of a fifth of the target changes the coefficient by a fifth."""
    kl_reference: str | None = None
    """Model folder of the reference; null: the policy at the start of the run."""
    entropy_coef: float = 0.0
    loss_anchor: str = "rollout"
    """rollout: the engine's log-probs are the old policy; old: recompute them with the trainer first."""
    off_policy_correction: str = "none"
    """What is done about engine and trainer disagreeing: none | tis | sequence_tis | icepop | mis | geometric"""
    correction_low: float | None = None
    correction_high: float | None = None
    """Bounds of the correction; null: those of its paper."""
    drop_zero_advantage: bool = True
    """Leave trajectories without advantage out of the update; denominators still count them."""
    dynamic_sampling_rounds: int = 0
    """Replace groups without an advantage by groups of new prompts, at most so many times a step; 0: train as they
    are."""
    overlong_filtering: bool = False
    """Do not train on trajectories that a length limit cut; their rewards still count in the group's baseline."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Settings of your own estimators and losses, which find them as `config.extra`."""


@dataclass
class SamplingConfig:
    """How turns are sampled."""

    max_generate_length: int = 1024
    """Tokens per turn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)


@dataclass
class EvalSamplingConfig(SamplingConfig):
    """How turns of evaluations are sampled: greedy, and else as in training."""

    max_generate_length: int = II("generator.sampling_params.max_generate_length")
    temperature: float = 0.0
    top_p: float = II("generator.sampling_params.top_p")
    top_k: int = II("generator.sampling_params.top_k")
    stop: list[str] = II("generator.sampling_params.stop")  # noqa: RUF009


@dataclass
class GeneratorConfig:
    """Rollouts."""

    backend: str = "local"
    """local | vllm | sglang"""
    use_conversation_multi_turn: bool = True
    max_turns: int = 5
    max_context_length: int | None = None
    """Tokens of a whole conversation; null: what the model can hold."""
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling_params: EvalSamplingConfig | None = None
    """Null: as sampling_params, greedy."""
    max_num_seqs: int = 128
    """Trajectories that the engine holds at once."""
    gpu_memory_utilization: float = 0.8
    """vllm, sglang: share of a GPU's memory that a server takes; 0.7 leaves headroom for long conversations."""
    local: LocalEngineConfig = field(default_factory=LocalEngineConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)


@dataclass
class CheckpointConfig:
    every_steps: int = 20
    """0: only at the end."""
    keep_last: int = 2
    keep_best: bool = True
    background: bool = True
    """Write while the run goes on."""


@dataclass
class FsdpConfig:
    """How `torchrun`'s ranks share models (FSDP2, `fully_shard`): every rank holds a shard of each parameter."""

    param_dtype: str | None = None
    """bfloat16 | float16 | float32: of forward and backward, while the weights stay in model.dtype; null: that."""
    reduce_dtype: str = "float32"
    """float32 | bfloat16: what gradients are summed in."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass and gather them again for the backward; false: faster, more
    memory."""
    cpu_offload: bool = False
    """Keep parameters, gradients and moments in the memory of the CPU."""
    replicas: int = 1
    """Hybrid sharding (HSDP): so many copies of the model, each sharded over ranks / replicas."""
    timeout: float = 600.0
    """Seconds that ranks wait for each other before the job ends."""


@dataclass
class TrainerConfig:
    """The loop."""

    max_steps: int = 100
    epochs: float | None = None
    """Passes over the training rows, in place of `max_steps`: as many steps as draw each row so often. What dynamic
    sampling and failed groups draw besides is not counted. config.yaml of the run holds the steps."""
    prompts_per_step: int = 16
    mini_batches: int = 1
    """Optimiser updates per step of rollouts."""
    update_epochs: int = 1
    max_tokens_per_microbatch: int = 16384
    """Of one forward and backward pass, padding included. `model=tiny` sets 2048."""
    packing: bool = False
    """Lay the samples of a micro-batch end to end in one row instead of padding each to the longest. FlashAttention and
    sdpa attend sample by sample; eager, and models with a sliding window, by a mask of tokens x tokens, which is
    slower than padding."""
    threads: int | None = None
    """CPU threads; null: 1 for models under 5 M parameters, else all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    max_logits_per_chunk: int = 2**27
    """Tokens x vocabulary whose logits are held at once; the log-probs of more tokens are computed in chunks."""
    compile: bool = False
    """torch.compile each layer of the models that are trained."""
    profile_step: int | None = None
    """Step (from 1) of which a trace for Perfetto or chrome://tracing is kept in the folder of the run."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    max_steps_without_signal: int = 20
    """Stop after this many steps in a row in which no group had an advantage."""
    save_trajectories_every: int = 10
    """Steps between saved training trajectories; 0: never. Evaluations are always saved."""


@dataclass
class EvaluationConfig:
    """Held-out evaluation by the scorer."""

    every_steps: int = 20
    before_train: bool = True
    rows: int = 200
    sampled_rows: int = 200
    """Rows of the temperature-1 evaluation before and after training; 0 leaves it out."""
    samples_per_row: int = 1
    """Trajectories per row; more than 1 samples at temperature 1 and gives pass@k."""
    pass_k_values: list[int] = field(default_factory=lambda: [1])
    success_threshold: float = 1.0
    """Score from which an episode is a success."""
    claim_threshold: float | None = None
    """Reward from which the reward says that an episode is a success; null: success_threshold. Where this verdict and
    the scorer's differ, the two disagree."""
    keep_disagreements: int = 16
    """Of a training step: so many of the trajectories on which reward and scorer disagree are kept; all are counted."""
    model: str | None = None
    """mtrl.evaluate: what is evaluated. A run, a checkpoint, a folder, a Hub name, or an endpoint written
    MODEL@http://HOST:PORT/v1; null: the policy that a run of this configuration would start from."""
    compare: list[str] = field(default_factory=list)
    """mtrl.evaluate: models beside it, each compared with it on the same rows; `base` is the policy before training."""
    split: str = "test"
    """mtrl.evaluate: test | validation | train"""
    confidence: float = 0.95
    """Level of the intervals."""
    output: str | None = None
    """mtrl.evaluate: folder of the report; null: outputs/evaluations/NAME/TIME. One that is there is gone on with."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class MlflowConfig:
    uri: str | None = None
    """Tracking server; null: MLFLOW_TRACKING_URI, else the SQLite file mlflow.db beside the folders of the runs."""
    experiment: str | None = None
    """Null: tracker.project."""


@dataclass
class WandbConfig:
    mode: str = "online"
    """online | offline"""
    entity: str | None = None


@dataclass
class TrackerConfig:
    """Where the record of a run goes besides its folder."""

    console: bool = True
    plots: bool = True
    project: str = "mtrl"
    report_to: list[str] = field(default_factory=list)
    """mlflow | wandb | tensorboard. They follow the folder of the run: what cannot be sent now is sent later."""
    trajectories: int = 64
    """Of each file of trajectories, so many are sent to the trackers; all are in the folder of the run."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class DiagnosisConfig:
    """The rules of `python -m mtrl.diagnose`, while a run goes on."""

    live: str = "warn"
    """What a symptom does to the run. warn: it is told | stop: a collapse, a hacked reward or a wide gap to held-out
    rows ends it, saved | none"""
    window: int = 25
    """Steps that a decision looks at; 25 to 50 is what a change of one setting takes to show."""


@dataclass
class PreflightConfig:
    """The checklist before a run, `python -m mtrl.preflight`, and the short one that a run makes at its start."""

    at_start: str = "warn"
    """Of a run: what its cheap checks find. warn: it is told, and the run goes on | stop: a failed check ends it |
    none: they are left out"""
    rows: int = 64
    """Rows that are played, half of them held out."""
    seconds: float = 20.0
    """Limit for each time that episodes are played; what is not over by then is left out, and counted."""
    processes: int = 2
    """Fresh processes that repeat the episodes; fewer than 2 leaves that check out."""
    model: bool = True
    """Let the policy play as well; false leaves out whatever needs it."""
    rollouts: int = 100
    """Episodes of the policy."""
    json: str | None = None
    """File of the results; null: preflight.json in the folder of the run. A run keeps what is there of
    the whole checklist."""


@dataclass
class AsyncConfig:
    """Rollouts and updates side by side."""

    max_steps_off_policy: int = 0
    """By how many updates the weights that a token trains may be newer than those that sampled it; 0: rollouts and
    updates take turns."""
    on_stale: str = "wait"
    """What is done about a group that would become too old. wait: the next update waits for it | requeue: it is
    dropped, and its prompt is played again"""
    in_flight: str = "continue"
    """What new weights do to turns that are being sampled. continue: they go on under the new weights | drain: they are
    finished first"""
    max_concurrent_groups: int | None = None
    """Groups that are played at once; null: as many as max_steps_off_policy allows."""


@dataclass
class Config:
    """A run."""

    name: str = "gsm8k"
    seed: int = 0
    run_dir: str = "outputs/${name}/${now:%Y-%m-%d_%H-%M-%S}"
    """Folder of the run; in a multirun the folder of the sweep, with one folder per job in it."""
    resume: str = "none"
    """none | latest: `run_dir`, else the newest run of this name | PATH of a checkpoint or run"""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import first: what they register can then be named."""
    objective: str = "success_after"
    """The key of summary.json that `main` returns to a sweep."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    async_config: AsyncConfig = field(default_factory=AsyncConfig)
    parent: str | None = None
    """The run that this one was made from by changing one thing; `python -m mtrl.diagnose` then tells what it did."""
