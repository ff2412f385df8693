"""Errors are one sentence with the key, the value and the fix."""

import itertools
import re

import pytest

from mtrl.command.compose import compose
from mtrl.config.dialect_values import VALUES
from mtrl.config.dialects import FRAMEWORKS, RS_BOUNDS, SECTIONS
from mtrl.config.keys import find
from mtrl.config.overrides import CONF, dashed
from mtrl.errors import UserError


def sentence(*overrides: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        compose(overrides, **options)
    said = str(caught.value)
    assert "\n" not in said and "Traceback" not in said
    return said


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_misspelt_key(sign):
    said = sentence(f"{sign}algorithm.group_sze=4")
    assert said == "algorithm.group_sze=4 is not a key of mtrl; did you mean algorithm.group_size=4?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trianer.max_steps=3", "trainer.max_steps=3"),
        ("group_size=4", "algorithm.group_size=4"),
        ("trainer.group_size=4", "algorithm.group_size=4"),
        ("generator.temperature=1", "generator.sampling_params.temperature=1"),
        ("lr=1e-6", "trainer.optimizer.lr=1e-6"),
        ("trainer.optimizer.learningrate=1", None),
        ("generator.max_turn=3", "generator.max_turns=3"),
        ("model.tinny.layers=1", None),
        ("sed=1", "seed=1"),
    ],
)
def test_the_nearest_key(typed, meant):
    said = sentence(typed)
    assert said.startswith(f"{typed} is not a key of mtrl; ")
    assert meant is None or said.endswith(f"did you mean {meant}?")


def test_a_key_unlike_any_other_lists_what_its_section_has():
    assert sentence("tracker.zzz=1").startswith(
        "tracker.zzz=1 is not a key of mtrl; tracker has console, plots, project"
    )
    assert "its top level has name, seed, run_dir" in sentence("zzz=1")


def test_the_documented_example_matches_the_message():
    page = (CONF.parent / "docs" / "migration.md").read_text(encoding="utf-8")
    ((typed, said),) = re.findall(r"^\$ mtrl train (.+)\n(.+)\n```$", page, re.MULTILINE)
    assert sentence(typed) == said


@pytest.mark.parametrize(
    "typed", ["sagemaker=spot", "+sagemaker=spot", "sagemaker=null", "~sagemaker", "sagemaker.spot=1"]
)
def test_sagemaker_keys_name_their_launcher(typed):
    """conf/sagemaker/ is no group of a run, although `--help` lists it."""
    assert sentence(typed).endswith(
        "start that with python scripts/launch_sagemaker.py, which takes the settings of the run as well"
    )
    assert "scripts/launch_managed_rl.py" in sentence("managed.model=x")


def test_hydra_itself_is_no_group():
    assert sentence("hydra=x") == "hydra=x is not a key of Hydra; --cfg hydra shows what there is"


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("trainer.algorithm.advantage_estimator=grpo", "SkyRL's spelling; write algorithm.advantage_method=grpo"),
        ("trainer.algorithm.policy_loss_type=regular", "SkyRL's spelling; write algorithm.loss_fn=ppo"),
        ("trainer.algorithm.eps_clip_low=0.2", "SkyRL's spelling; write algorithm.clip_low_threshold=0.8"),
        ("trainer.algorithm.eps_clip_high=0.28", "SkyRL's spelling; write algorithm.clip_high_threshold=1.28"),
        ("generator.n_samples_per_prompt=5", "SkyRL's spelling; write algorithm.group_size=5"),
        ("environment.env_class=text2sql", "SkyRL's spelling; write experiment=text_to_sql"),
        (
            "trainer.fully_async.max_staleness_steps=4",
            "SkyRL's spelling; write async_config.max_steps_off_policy=4",
        ),
        ("trainer.train_batch_size=256", "SkyRL's spelling; write trainer.prompts_per_step=256"),
        ("algorithm.adv_estimator=rloo", "verl's spelling; write algorithm.advantage_method=rloo"),
        ("data.train_batch_size=256", "verl's spelling; write trainer.prompts_per_step=256"),
        ("actor_rollout_ref.rollout.n=8", "verl's spelling; write algorithm.group_size=8"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "verl's spelling; write trainer.optimizer.lr=1e-6"),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "verl's spelling; write algorithm.loss_reduction=sequence_mean",
        ),
        (
            "actor_rollout_ref.actor.clip_ratio=0.2",
            "verl's spelling; set algorithm.clip_low_threshold and clip_high_threshold: 0.8, 1.2 for 0.2",
        ),
        (
            "trainer.algorithm.advantage_estimator=reinforce++",
            "SkyRL's spelling; write algorithm.advantage_method=reinforce_pp",
        ),
        ("trainer.algorithm.grpo_norm_by_std=false", "SkyRL's spelling; write algorithm.norm_by_std=false"),
        ("trainer.algorithm.lambd=0.95", "SkyRL's spelling; write algorithm.gae_lambda=0.95"),
        ("trainer.algorithm.value_clip=0.2", "SkyRL's spelling; write algorithm.critic.value_clip=0.2"),
        ("trainer.algorithm.use_kl_loss=true", "SkyRL's spelling; set algorithm.kl_loss_coef, 0 is off"),
        ("trainer.algorithm.use_kl_in_reward=true", "SkyRL's spelling; set algorithm.kl_reward_coef, 0 is off"),
        ("trainer.algorithm.kl_ctrl.kl_target=0.1", "SkyRL's spelling; write algorithm.kl_target=0.1"),
        (
            "trainer.algorithm.kl_ctrl.type=adaptive",
            "SkyRL's spelling; set algorithm.kl_target for a coefficient that adapts, null for a fixed one",
        ),
        ("trainer.algorithm.cispo.cispo_eps_clip_high=4", "SkyRL's spelling; write algorithm.clip_high_threshold=5"),
        ("trainer.algorithm.sapo.tau_pos=1.0", "SkyRL's spelling; write algorithm.sapo.tau_positive=1.0"),
        ("trainer.algorithm.dppo.dppo_type=binary_kl", "SkyRL's spelling; write algorithm.dppo.divergence=kl"),
        (
            "trainer.algorithm.use_tis=true",
            "SkyRL's spelling; write algorithm.off_policy_correction=tis algorithm.loss_anchor=old, and its cap as "
            "algorithm.correction_high",
        ),
        (
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "SkyRL's spelling; write algorithm.off_policy_correction=tis algorithm.loss_anchor=old",
        ),
        (
            "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric",
            "SkyRL's spelling; write algorithm.off_policy_correction=geometric",
        ),
        (
            "trainer.algorithm.off_policy_correction.geo_mask_high=1.01",
            "SkyRL's spelling; write algorithm.correction_high=1.01",
        ),
        (
            "trainer.algorithm.dynamic_sampling.type=filter",
            "SkyRL's spelling; set algorithm.dynamic_sampling_rounds, 0 is off",
        ),
        (
            "trainer.algorithm.dynamic_sampling.max_sample_batches=30",
            "SkyRL's spelling; write algorithm.dynamic_sampling_rounds=30",
        ),
        ("trainer.algorithm.zero_variance_filter=true", "SkyRL's spelling; write algorithm.drop_zero_advantage=true"),
        ("generator.apply_overlong_filtering=true", "SkyRL's spelling; write algorithm.overlong_filtering=true"),
        ("trainer.critic.optimizer_config.lr=5e-6", "SkyRL's spelling; write algorithm.critic.optimizer.lr=5e-6"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "verl's spelling; write algorithm.norm_by_std=false"),
        ("algorithm.lam=0.95", "verl's spelling; write algorithm.gae_lambda=0.95"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "verl's spelling; write algorithm.kl_reward_coef=0.001"),
        (
            "algorithm.rollout_correction.rollout_is=sequence",
            "verl's spelling; write algorithm.off_policy_correction=sequence_tis algorithm.loss_anchor=old",
        ),
        (
            "algorithm.rollout_correction.bypass_mode=true",
            "verl's spelling; write algorithm.loss_anchor=rollout",
        ),
        (
            "algorithm.rollout_correction.rollout_rs_threshold=2.0",
            f"verl's spelling; {RS_BOUNDS}",
        ),
        (
            "algorithm.rollout_correction.rollout_rs_threshold_lower=0.5",
            f"verl's spelling; {RS_BOUNDS}",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl",
            "verl's spelling; write algorithm.loss_fn=dppo algorithm.dppo.divergence=kl",
        ),
        (
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "verl's spelling; micro-batches are always filled by tokens, not by a number of samples: set "
            "trainer.max_tokens_per_microbatch, about that number times the tokens of a trajectory",
        ),
        ("critic.optim.lr=1e-5", "verl's spelling; write algorithm.critic.optimizer.lr=1e-5"),
        ("trainer.critic_warmup=10", "verl's spelling; write algorithm.critic.warmup_steps=10"),
        (
            "algorithm.filter_groups.max_num_gen_batches=10",
            "verl's spelling; write algorithm.dynamic_sampling_rounds=10",
        ),
        ("num_generations=8", "TRL's spelling; write algorithm.group_size=8"),
        ("max_completion_length=512", "TRL's spelling; write generator.sampling_params.max_generate_length=512"),
        ("beta=0.04", "TRL's spelling; write algorithm.kl_loss_coef=0.04"),
        (
            "loss_type=dr_grpo",
            "TRL's spelling; write algorithm.loss_reduction=seq_mean_token_sum_norm "
            "algorithm.max_sequence_length='${generator.sampling_params.max_generate_length}'",
        ),
        ("loss_type=cispo", "TRL's spelling; write algorithm.loss_reduction=token_mean algorithm.loss_fn=cispo"),
        ("scale_rewards=none", "TRL's spelling; write algorithm.norm_by_std=false"),
        ("importance_sampling_level=sequence", "TRL's spelling; write algorithm.loss_fn=gspo"),
        ("mask_truncated_completions=true", "TRL's spelling; write algorithm.overlong_filtering=true"),
        ("multi_objective_aggregation=normalize_then_sum", "TRL's spelling; write algorithm.advantage_method=gdpo"),
        (
            "vllm_importance_sampling_mode=token_mask",
            "TRL's spelling; write algorithm.off_policy_correction=icepop algorithm.loss_anchor=old",
        ),
        ("use_vllm=true", "TRL's spelling; write generator.backend=vllm"),
        ("global_batch_size=128", "SageMaker's spelling; write trainer.prompts_per_step=128"),
        (
            "sampling_params.sampling_max_tokens=2048",
            "SageMaker's spelling; write generator.sampling_params.max_generate_length=2048",
        ),
        ("val_metrics_config.success_threshold=1", "SageMaker's spelling; write evaluation.success_threshold=1"),
        ("remove_constant_reward_groups=true", "Tinker's spelling; write algorithm.drop_zero_advantage=true"),
        ("kl_penalty_coef=0.01", "Tinker's spelling; write algorithm.kl_reward_coef=0.01"),
    ],
)
def test_keys_of_other_frameworks_suggest_our_key(theirs, said):
    assert sentence(theirs) == f"{theirs} is {said}"
    assert sentence(f"+{theirs}") == f"{theirs} is {said}"


def test_verls_rejection_bounds_name_the_bounded_ratio():
    """Its k1 modes bound rollout / trainer: passed on as they are, the bounds would reject the other tail."""
    said = sentence("algorithm.rollout_correction.rollout_rs_threshold=2.0")
    for word in ("correction_low", "correction_high", "seq_sum_k1", "seq_mean_k1", "rollout / trainer"):
        assert word in said
    assert "correction_low = 1 / upper and correction_high = 1 / lower" in said
    assert "correction_high=2.0" not in said


@pytest.mark.parametrize(
    "word",
    [
        *("global_batch_size", "group_size", "advantage_method", "loss_fn", "clip_low_threshold", "learning_rate"),
        *("clip_high_threshold", "pass_k_values", "max_steps", "lora_rank", "max_steps_off_policy"),
    ],
)
def test_the_managed_services_hyperparameters_lead_to_keys(word):
    """The bare names of the service's page: the error for each names one key."""
    words = {"advantage_method": "grpo", "loss_fn": "ppo", "clip_low_threshold": "0.8", "pass_k_values": "[1,4]"}
    fits = words.get(word, "7")
    assert re.search(rf"(did you mean|write) (\w+\.)+\w+={re.escape(fits)}", sentence(f"{word}={fits}"))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("warmup_steps=7", "trainer.optimizer.warmup_steps=7"),
        ("optimizer.lr=1", "trainer.optimizer.lr=1"),
        ("grad_clip=1", "trainer.optimizer.max_grad_norm=1"),
        ("optim.lr=1", "trainer.optimizer.lr=1"),
        ("max_gradnorm=1", "trainer.optimizer.max_grad_norm=1"),
        ("critic.lr=1", "algorithm.critic.optimizer.lr=1"),
        ("critic.max_gradnorm=1", "algorithm.critic.optimizer.max_grad_norm=1"),
    ],
)
def test_the_critics_keys_are_meant_only_where_the_critic_is_named(typed, meant):
    assert sentence(typed).endswith((f"did you mean {meant}?", f"write {meant}"))


def test_a_foreign_key_in_the_wrong_section():
    assert sentence("algorithm.num_generations=8") == (
        "algorithm.num_generations=8 is not a key of mtrl; it looks like TRL's num_generations: "
        "write algorithm.group_size=8"
    )
    assert sentence("generator.sampling_params.sampling_max_tokens=64").endswith(
        "write generator.sampling_params.max_generate_length=64"
    )


def test_the_tables_point_to_keys_that_exist_and_are_not_ours_already():
    for name, table in FRAMEWORKS.items():
        for theirs, ours in table.items():
            assert find(theirs) is None, f"{name}: {theirs} is a key of ours"
            words = [w.rstrip(",:;") for w in ours.split() if "." in w and w[0].isalpha()] if " " in ours else [ours]
            for word in words:
                key = word.partition("=")[0]
                elsewhere = ("experiment", "curves.png", "metrics.jsonl", "mtrl.main", "package.module.Class")
                assert find(key) or key in elsewhere, f"{name}: {theirs} -> {ours}"
    assert all(find(key) or key == "experiment" for key in VALUES)
    for path in SECTIONS:
        assert find(path) is None or path == "sampling_params", f"{path} is a section of ours"


def test_the_values_that_differ_point_to_values_that_work():
    """The value and the settings that it needs compose as in a command."""
    for key, table in VALUES.items():
        if key == "resume" or key == "generator.backend":
            continue  # needs a run, and packages that may not be installed
        for ours in dict.fromkeys(table.values()):
            first, *more = ours.split()
            needed = ["algorithm.max_sequence_length=64", "reward.components.turn_penalty=0.1", "algorithm.credit=null"]
            compose([f"{key}={first}", *more, *needed])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.group_size=eight", "algorithm.group_size=eight must be an integer; write for example "),
        ("algorithm.group_size=8.5", "algorithm.group_size=8.5 must be an integer; write for example "),
        ("algorithm.group_size=null", "algorithm.group_size=null must be an integer; write for example "),
        ("algorithm.dual_clip=high", "algorithm.dual_clip=high must be a number or null; write for example "),
        ("trainer.optimizer.lr=fast", "trainer.optimizer.lr=fast must be a number; write for example "),
        ("model.trust_remote_code=maybe", "model.trust_remote_code=maybe must be true or false; write for example "),
        ("name=[a,b]", "name=[a,b] must be text; write for example name=gsm8k"),
        ("evaluation.pass_k_values=3", "evaluation.pass_k_values=3 must be a list of integers; write for example "),
        ("evaluation.pass_k_values=[a]", "evaluation.pass_k_values=[a] must be a list of integers; write for example "),
        ("trainer.optimizer=3", "trainer.optimizer=3 must be a section with keys of its own: lr, betas, "),
        ("trainer.optimizer={lr: fast}", "trainer.optimizer.lr=fast must be a number; write for example "),
    ],
)
def test_wrong_types(override, said):
    assert sentence(override).startswith(said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "experiment=text2sql",
            "experiment=text2sql does not exist; did you mean experiment=text_to_sql? "
            f"There is {', '.join(sorted(path.stem for path in (CONF / 'experiment').glob('*.yaml')))}",
        ),
        ("model=tiney", "model=tiney does not exist; did you mean model=tiny? There is gpt_oss_20b, hf, llama3"),
        *(
            (f"debug={value}", f"debug={value} does not exist; there is fast")
            for value in ("quick", "1", "-.5", "1e-6", "nan", "true")
        ),
        ("debug=[1]", "debug=1 does not exist"),
        (
            "generator=[local, vllm]",
            "generator=[local, vllm] makes 2 choices for one part of the run; choose one of them, for example "
            "generator=local; mtrl train -m generator=local,vllm makes a run of each",
        ),
        (
            "hydra/sweeper=ax",
            "hydra/sweeper=ax is not installed; pip install hydra-ax-sweeper, or leave it out",
        ),
        ("gsm8k", "'gsm8k' is not a setting; write key=value, for example experiment=gsm8k"),
        (
            "evaluation.pass_k_values=1,8",
            "evaluation.pass_k_values=1,8 is several values; write one of them, or write "
            "evaluation.pass_k_values=[1,8] for a list; mtrl train -m makes a run of each",
        ),
        (
            "~trainer.max_steps",
            "~trainer.max_steps: a key of the schema cannot be removed; write trainer.max_steps=100",
        ),
        ("name=${nme}", "name cannot be resolved: Interpolation key 'nme' not found"),
        ("data.path=a b=c", "cannot read data.path=a b=c; write key=value, and quotes around special characters: "),
    ],
)
def test_other_wrong_inputs(override, said):
    assert sentence(override).startswith(said)


@pytest.mark.parametrize("override", ["seed=0,1", "generator=vllm,local"])
def test_several_values_of_a_key_that_takes_no_list(override):
    assert sentence(override) == f"{override} is several values; write one of them; mtrl train -m makes a run of each"


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        (
            "algorithm: {group_sze: 4}",
            "in experiment/mine.yaml: algorithm.group_sze is not a key of mtrl; did you mean algorithm.group_size?",
        ),
        (
            "generator: {n_samples_per_prompt: 4}",
            "in experiment/mine.yaml: generator.n_samples_per_prompt is SkyRL's spelling; write algorithm.group_size",
        ),
        (
            "trainer: {algorithm: {advantage_estimator: grpo}}",
            "in experiment/mine.yaml: trainer.algorithm is not a section of mtrl; its keys are in algorithm",
        ),
        (
            "algorithm: {group_size: many}",
            "in experiment/mine.yaml: algorithm.group_size=many must be an integer; write for example ",
        ),
        (
            "trainer: {optimizer: 3}",
            "in experiment/mine.yaml: algorithm.critic.optimizer or trainer.optimizer=3 must be a section with keys of "
            "its own: lr, betas, ",
        ),
        (
            "trainer: {algorithm: {kl_ctrl: {kl_target: 0.1}}}",
            "in experiment/mine.yaml: trainer.algorithm is not a section of mtrl; its keys are in algorithm",
        ),
        ("critic: {optim: {lr: 1}}", "critic is not a section of mtrl; its keys are in algorithm.critic"),
        ("algorithm: 3", "in experiment/mine.yaml: algorithm=3 must be a section with keys of its own: "),
        ("defaults: [override /algorithm: rloop]", "algorithm=rloop does not exist; did you mean algorithm=rloo? "),
        ("name: [a", "mine.yaml, line 3, is not valid YAML"),
    ],
)
def test_config_files_give_the_same_messages(tmp_path, yaml, said):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{yaml}\n")
    assert said in sentence("experiment=mine", config_dir=str(tmp_path))


def test_dashes():
    assert str(dashed("--trainer.max_steps=4")) == (
        "--trainer.max_steps=4 is not an option; keys are written without dashes: trainer.max_steps=4"
    )
    assert str(dashed("--learning_rate")).startswith("learning_rate is TRL's spelling; write trainer.optimizer.lr")


def test_no_two_frameworks_disagree_silently():
    """The same foreign key in two tables leads to the same place."""
    for one, other in itertools.combinations(FRAMEWORKS.values(), 2):
        for key in one.keys() & other.keys():
            assert one[key] == other[key], key
