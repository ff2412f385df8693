"""Keys of the algorithm: some combinations are refused, some cause a warning, and no others do."""

import subprocess
import sys

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.config.overrides import CONF
from mtrl.errors import UserError


def words(value) -> str:
    return " ".join(value) if isinstance(value, list) else ""


def method(name: str) -> str:
    return f"algorithm.advantage_method={name}"


def on_grpo(overrides: list[str]) -> list[str]:
    """Return the words with algorithm=grpo if they name no other, since the default has a credit of few methods."""
    return overrides if any(word.startswith("algorithm=") for word in overrides) else ["algorithm=grpo", *overrides]


PASSK = method("grpo_passk")
TWO_PARTS = "reward.components.turn_penalty=0.1"

REFUSED = [
    # what is compared
    (
        ["algorithm.group_size=1"],
        "algorithm.group_size=1 gives algorithm.advantage_method=grpo nothing to compare; set it to 2 or more",
    ),
    (
        ["algorithm.credit=turns"],
        "algorithm.credit=turns is not known; did you mean turn? Choose one of trajectory, turn, turn+outcome",
    ),
    (
        [method("group_based_per_turn"), "algorithm.credit=trajectory"],
        "algorithm.credit=trajectory is not what algorithm.advantage_method=group_based_per_turn has; "
        "choose one of turn, or null",
    ),
    (
        [method("reinforce_pp_baseline"), "algorithm.credit=turn+outcome"],
        "algorithm.credit=turn+outcome is not what algorithm.advantage_method=reinforce_pp_baseline has; "
        "choose one of trajectory, turn, or null",
    ),
    (
        [method("gigpo"), "algorithm.credit=turn"],
        "algorithm.credit=turn does not fit algorithm.advantage_method=gigpo, which fixes the credit of a turn "
        "itself; set algorithm.credit=null",
    ),
    (
        [method("statistics.mean"), "algorithm.credit=turn"],
        "algorithm.credit=turn does not fit algorithm.advantage_method=statistics.mean, which fixes the credit of a "
        "turn itself; set algorithm.credit=null",
    ),
    (
        ["algorithm.credit=turn", "reward.level=trajectory"],
        "reward.level=trajectory puts the whole reward on the last turn, and algorithm.credit=turn compares single "
        "turns; set reward.level=turn, or algorithm.credit=trajectory",
    ),
    (
        ["algorithm=group_based_per_turn", "reward.level=trajectory"],
        "reward.level=trajectory puts the whole reward on the last turn, and "
        "algorithm.advantage_method=group_based_per_turn compares single turns; set reward.level=turn, or a method of "
        "whole trajectories, such as algorithm.advantage_method=grpo",
    ),
    # pass@k
    ([PASSK, "algorithm.passk.k=0"], "algorithm.passk.k=0 must be at least 1"),
    (
        [PASSK, "algorithm.passk.k=16"],
        "algorithm.passk.k=16 is more than algorithm.group_size=8, which has no best of 16; "
        "set algorithm.passk.k to 8 or less, or raise algorithm.group_size",
    ),
    (
        [PASSK, "algorithm.passk.k=8", "algorithm.passk.estimator=pkpo_sloo"],
        "algorithm.passk.k=8 must be below algorithm.group_size=8 with algorithm.passk.estimator=pkpo_sloo, which "
        "compares with the best of k others; lower algorithm.passk.k, or take algorithm.passk.estimator=pkpo_sloo1",
    ),
    (
        [PASSK, "algorithm.passk.k=8", "algorithm.passk.estimator=chen"],
        "algorithm.passk.k=8 must be below algorithm.group_size=8 with algorithm.passk.estimator=chen, which gives no "
        "advantage where k is the whole group; lower algorithm.passk.k, or take algorithm.passk.estimator=pkpo_sloo1",
    ),
    (
        [PASSK, "algorithm.passk.estimator=pkpo"],
        "algorithm.passk.estimator=pkpo is not known; did you mean pkpo_sloo? "
        "Choose one of pkpo_sloo1, pkpo_sloo, chen, top2",
    ),
    (
        [PASSK, "algorithm.passk.estimator=chen", "algorithm.kl_reward_coef=0.1"],
        "algorithm.kl_reward_coef=0.1 makes rewards other than 0 and 1, which algorithm.passk.estimator=chen cannot "
        "use; set algorithm.kl_loss_coef, or take algorithm.passk.estimator=pkpo_sloo1",
    ),
    # components
    (
        [method("gdpo")],
        "algorithm.advantage_method=gdpo normalises each component of the reward by itself, and reward.components has "
        "only environment with a weight; add another one, or take algorithm.advantage_method=grpo",
    ),
    (
        [method("gdpo"), "reward.components={environment: 0, turn_penalty: 0.0}"],
        "algorithm.advantage_method=gdpo normalises each component of the reward by itself, and reward.components has "
        "none with a weight; add another one, or take algorithm.advantage_method=grpo",
    ),
    (
        [method("gdpo"), TWO_PARTS, "algorithm.kl_reward_coef=0.01"],
        "algorithm.kl_reward_coef=0.01 lowers the reward, and algorithm.advantage_method=gdpo reads its components "
        "instead; set algorithm.kl_loss_coef",
    ),
    # the critic
    ([method("gae"), "algorithm.gae_lambda=1.5"], "algorithm.gae_lambda=1.5 must be at most 1"),
    ([method("gae"), "algorithm.gae_lambda=-0.1"], "algorithm.gae_lambda=-0.1 must be at least 0"),
    (["algorithm.gamma=-1"], "algorithm.gamma=-1.0 must be at least 0"),
    ([method("gae"), "algorithm.critic.value_clip=0"], "algorithm.critic.value_clip=0.0 must be above 0"),
    ([method("gae"), "algorithm.critic.warmup_steps=-1"], "algorithm.critic.warmup_steps=-1 must be at least 0"),
    (
        [method("turn_gae"), "algorithm.critic.warmup_steps=10", "trainer.max_steps=10"],
        "algorithm.critic.warmup_steps=10 leaves no step for the policy of trainer.max_steps=10; "
        "lower the first or raise the second",
    ),
    ([method("gae"), "algorithm.critic.optimizer.lr=0"], "algorithm.critic.optimizer.lr=0.0 must be above 0"),
    (
        [method("gae"), "algorithm.critic.optimizer.betas=[0.9,1.0]"],
        "algorithm.critic.optimizer.betas=[0.9,1.0] must be two numbers from 0 to below 1; write [0.9,0.95]",
    ),
    (
        [method("gae"), "algorithm.critic.optimizer.schedule=cosin"],
        "algorithm.critic.optimizer.schedule=cosin is not known; did you mean cosine? "
        "Choose one of constant, linear, cosine",
    ),
    # the loss
    (
        ["algorithm.loss_fn=pppo"],
        "algorithm.loss_fn=pppo is not known; did you mean ppo? Choose one of cispo, decoupled_ppo, dppo, gspo, "
        "importance_sampling, ppo, regular, reinforce_is, sapo, or package.module.function",
    ),
    (
        ["algorithm.loss_fn=dppo_kl"],
        "algorithm.loss_fn=dppo_kl is another framework's spelling; "
        "write algorithm.loss_fn=dppo algorithm.dppo.divergence=kl",
    ),
    (
        ["algorithm.clip_high_threshold=0.28"],
        "algorithm.clip_high_threshold=0.28 must be at least 1 "
        "(it is a bound on the probability ratio, 1.2 for an epsilon of 0.2)",
    ),
    (
        ["algorithm.clip_low_threshold=1.2"],
        "algorithm.clip_low_threshold=1.2 must be at most 1 "
        "(it is a bound on the probability ratio, 0.8 for an epsilon of 0.2)",
    ),
    (
        ["algorithm.loss_fn=dppo", "algorithm.dppo.divergence=js"],
        "algorithm.dppo.divergence=js is not known; choose one of tv, kl",
    ),
    (["algorithm.loss_fn=dppo", "algorithm.dppo.delta_low=0"], "algorithm.dppo.delta_low=0.0 must be above 0"),
    (["algorithm.loss_fn=dppo", "algorithm.dppo.delta_high=-1"], "algorithm.dppo.delta_high=-1.0 must be above 0"),
    (["algorithm.loss_fn=sapo", "algorithm.sapo.tau_positive=0"], "algorithm.sapo.tau_positive=0.0 must be above 0"),
    (["algorithm.loss_fn=sapo", "algorithm.sapo.tau_negative=-1"], "algorithm.sapo.tau_negative=-1.0 must be above 0"),
    (
        ["algorithm.loss_fn=decoupled_ppo"],
        "algorithm.loss_anchor=rollout leaves algorithm.loss_fn=decoupled_ppo nothing to decouple: it needs the old "
        "policy apart from the one that sampled; set algorithm.loss_anchor=old",
    ),
    (
        ["algorithm.loss_fn=decoupled_ppo", "algorithm.loss_anchor=old", "algorithm.off_policy_correction=mis"],
        "algorithm.off_policy_correction=mis weights the loss for the mismatch, as algorithm.loss_fn=decoupled_ppo "
        "does already; set algorithm.off_policy_correction=none, or algorithm.loss_fn=ppo",
    ),
    (
        ["algorithm.loss_reduction=token-mean"],
        "algorithm.loss_reduction=token-mean is another framework's spelling; "
        "write algorithm.loss_reduction=token_mean",
    ),
    (
        ["algorithm.loss_reduction=seq_mean_token_sum_norm"],
        "algorithm.loss_reduction=seq_mean_token_sum_norm divides by a constant; "
        "set algorithm.max_sequence_length to a number of tokens",
    ),
    # the KL
    (
        ["algorithm.kl_estimator=low_var_kl"],
        "algorithm.kl_estimator=low_var_kl is another framework's spelling; write algorithm.kl_estimator=k3",
    ),
    (["algorithm.kl_reward_coef=-0.1"], "algorithm.kl_reward_coef=-0.1 must be at least 0"),
    (
        ["algorithm.kl_loss_coef=0.01", "algorithm.kl_reward_coef=0.02"],
        "algorithm.kl_loss_coef=0.01 and algorithm.kl_reward_coef=0.02 penalise the KL to the reference twice; "
        "set one of them to 0",
    ),
    (["algorithm.kl_loss_coef=0.01", "algorithm.kl_target=0"], "algorithm.kl_target=0.0 must be above 0"),
    (["algorithm.kl_loss_coef=0.01", "algorithm.kl_horizon=0"], "algorithm.kl_horizon=0 must be at least 1"),
    # corrections
    (
        ["algorithm.off_policy_correction=tiss"],
        "algorithm.off_policy_correction=tiss is not known; did you mean tis? Choose one of geometric, icepop, mis, "
        "none, sequence_tis, tis, or package.module.function",
    ),
    *(
        (
            [f"algorithm.off_policy_correction={name}"],
            f"algorithm.off_policy_correction={name} with algorithm.loss_anchor=rollout counts the mismatch twice, as "
            "the loss's own ratio is to the engine's log-probs already; set algorithm.loss_anchor=old",
        )
        for name in ("tis", "sequence_tis", "icepop")
    ),
    (
        ["algorithm.off_policy_correction=mis", "algorithm.correction_low=2", "algorithm.correction_high=1"],
        "algorithm.correction_low=2.0 is above algorithm.correction_high=1.0, so no token would count; "
        "lower the first or raise the second",
    ),
    (
        ["algorithm.off_policy_correction=mis", "algorithm.correction_low=3"],
        "algorithm.correction_low=3.0 is above algorithm.correction_high=2.0 as algorithm.off_policy_correction=mis "
        "has it, so no token would count; lower the first or raise the second",
    ),
    (["algorithm.correction_low=-1"], "algorithm.correction_low=-1.0 must be at least 0"),
    (["algorithm.correction_high=0"], "algorithm.correction_high=0.0 must be above 0"),
    # signal
    (["algorithm.dynamic_sampling_rounds=-1"], "algorithm.dynamic_sampling_rounds=-1 must be at least 0"),
    *(
        (
            [method(name), "algorithm.dynamic_sampling_rounds=2"],
            f"algorithm.dynamic_sampling_rounds=2 replaces groups without an advantage, and "
            f"algorithm.advantage_method={name} compares no groups; set it to 0",
        )
        for name in ("gae", "turn_gae", "monte_carlo", "reinforce_pp")
    ),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=words)
def test_refused(overrides, said):
    with pytest.raises(UserError) as caught:
        compose(on_grpo(overrides))
    assert str(caught.value) == said


ALLOWED = [
    [method("gae"), "algorithm.group_size=1", "algorithm.gae_lambda=0.95", "algorithm.critic.warmup_steps=5"],
    [method("turn_gae"), "algorithm.group_size=1", "algorithm.gamma=0.9", "algorithm.critic.value_clip=null"],
    [method("turn_gae"), "reward.level=trajectory", "algorithm.whiten_advantages=false"],
    [method("monte_carlo"), "algorithm.group_size=1", "algorithm.gamma=0.95"],
    [method("monte_carlo"), "reward.level=trajectory"],
    [method("reinforce_pp"), "reward.level=trajectory", "algorithm.gamma=0.95"],
    [method("reinforce_pp_baseline"), "reward.level=trajectory"],
    [method("gigpo"), "reward.level=trajectory", "algorithm.gamma=0.95", "algorithm.turn_advantage_coef=0.5"],
    ["algorithm=turn_rloo", "reward.level=trajectory"],
    ["algorithm=rloo", "algorithm.credit=turn+outcome", "reward.level=trajectory"],
    ["algorithm=mt_grpo", "reward.level=trajectory"],
    [method("gdpo"), TWO_PARTS],
    [method("gdpo"), TWO_PARTS, "reward.level=trajectory"],  # the level moves the sum; the components stay
    [method("gdpo"), "reward.components.length_penalty={weight: 0.2, max_tokens: 64}"],
    [method("mt_grpo"), "algorithm.turn_advantage_coef=0.5", "algorithm.gamma=0.9"],
    [method("group_based_per_turn"), "algorithm.credit=turn", "algorithm.gamma=0.9"],
    ["algorithm.credit=turn+outcome", "algorithm.turn_advantage_coef=0.2", "algorithm.gamma=0.9"],
    [PASSK, "algorithm.passk.k=8"],
    [PASSK, "algorithm.passk.k=7", "algorithm.passk.estimator=chen"],
    [PASSK, "algorithm.passk.estimator=top2", "algorithm.group_size=2"],  # k is not read
    ["algorithm.group_size=2"],  # passk.k=4 is not read
    ["algorithm.critic.warmup_steps=0", "trainer.max_steps=0"],
    ["algorithm.loss_fn=decoupled_ppo", "algorithm.loss_anchor=old", "algorithm.is_cap=5", "algorithm.dual_clip=3"],
    ["algorithm.off_policy_correction=tis", "algorithm.loss_anchor=old", "algorithm.correction_high=5"],
    ["algorithm.off_policy_correction=icepop", "algorithm.loss_anchor=old", "algorithm.correction_low=0.1"],
    ["algorithm.off_policy_correction=mis", "algorithm.correction_low=0.1", "algorithm.correction_high=0.9"],
    ["algorithm.off_policy_correction=geometric", "algorithm.correction_high=1.01"],
    ["algorithm.loss_fn=gspo", "algorithm.clip_low_threshold=0.9997", "algorithm.clip_high_threshold=1.0004"],
    ["algorithm.loss_fn=cispo"],  # with the narrow clip of PPO
    ["algorithm.loss_fn=sapo", "algorithm.sapo.tau_negative=1.5"],
    ["algorithm.loss_fn=dppo", "algorithm.dppo.delta_low=0.1", "algorithm.is_cap=20"],
    ["algorithm.loss_fn=reinforce_is", "algorithm.is_cap=3"],
    ["algorithm.loss_fn=importance_sampling", "algorithm.is_cap=inf"],  # one update: no ratio but the engine's
    ["algorithm.dual_clip=3", "algorithm.clip_high_threshold=1.28"],
    ["algorithm.kl_loss_coef=0.01", "algorithm.kl_estimator=k2", "algorithm.kl_target=0.1", "algorithm.kl_horizon=9"],
    ["algorithm.kl_reward_coef=0.01", "algorithm.kl_target=0.1", "algorithm.kl_reference=folder"],
    ["algorithm.dynamic_sampling_rounds=3", "algorithm.overlong_filtering=true"],
    ["algorithm.extra={tau: 0.5}", "algorithm.extra.mine=2"],
    [method("statistics.mean"), "algorithm.gamma=0.5", "algorithm.passk.k=3", "algorithm.dynamic_sampling_rounds=1"],
    ["algorithm.loss_fn=statistics.mean", "algorithm.sapo.tau_positive=2", "algorithm.is_cap=7"],
]


@pytest.mark.parametrize("overrides", ALLOWED, ids=words)
def test_allowed_and_not_warned_about(overrides):
    assert check(compose(on_grpo(overrides))) == []


GSPO = (
    "algorithm.loss_fn=gspo clips nothing at algorithm.clip_low_threshold={} and algorithm.clip_high_threshold={}: its "
    "ratio is a mean over the tokens of a trajectory, and its paper takes 0.9997 and 1.0004"
)
PUBLISHED = ["algorithm.loss_fn=gspo", "algorithm.clip_low_threshold=0.9997", "algorithm.clip_high_threshold=1.0004"]
LOST = (
    "algorithm.loss_fn=gspo with algorithm.loss_anchor=rollout bounds the ratio to the engine's log-probs, and most "
    "trajectories leave algorithm.clip_low_threshold=0.9997 and algorithm.clip_high_threshold=1.0004 by the drift of "
    "an engine or by stale tokens (generator.backend={}, async_config.max_steps_off_policy={}), so 77 to 96 % of the "
    "gradient are lost at a policy shift of 0.02; set algorithm.loss_anchor=old, or algorithm.clip_low_threshold=0.98 "
    "and algorithm.clip_high_threshold=1.02"
)
GEOMETRIC = "algorithm.off_policy_correction=geometric"
REJECTED = (
    "algorithm.off_policy_correction=geometric trains on trajectories whose mean ratio is from {} to 1.001, and with "
    "async_config.max_steps_off_policy=1 hardly any has one: at a policy shift of 0.02 it trained on 0 to 29 % of the "
    "tokens; set algorithm.correction_low=0.95 and algorithm.correction_high=1.05, or take "
    "algorithm.off_policy_correction=mis, or sequence_tis with algorithm.loss_anchor=old"
)
SERVED = {name: [f"generator={name}", f"generator.{name}.python={sys.executable}"] for name in ("vllm", "sglang")}
OVERLAP = "async_config.max_steps_off_policy=1"

WARNED = [
    (
        ["algorithm=rloo", "algorithm.norm_by_std=false"],
        "algorithm.norm_by_std=false has no effect with algorithm.advantage_method=rloo; it is read with "
        "algorithm.advantage_method=grpo|mt_grpo|gigpo",
    ),
    (
        ["algorithm=rloo", "algorithm.gamma=0.9"],
        "algorithm.gamma=0.9 has no effect with algorithm.advantage_method=rloo; it is read with "
        "algorithm.advantage_method=gigpo|turn_gae|gae or algorithm.credit=turn|turn+outcome",
    ),
    (
        [method("group_based"), "algorithm.turn_advantage_coef=0.5"],
        "algorithm.turn_advantage_coef=0.5 has no effect with algorithm.advantage_method=group_based; it is read with "
        "algorithm.advantage_method=gigpo or algorithm.credit=turn+outcome",
    ),
    (
        ["algorithm.gae_lambda=0.9"],
        "algorithm.gae_lambda=0.9 has no effect with algorithm.advantage_method=grpo; "
        "it is read with algorithm.advantage_method=gae|turn_gae",
    ),
    (
        ["algorithm.whiten_advantages=false"],
        "algorithm.whiten_advantages=false has no effect with algorithm.advantage_method=grpo; "
        "it is read with algorithm.advantage_method=gae|turn_gae",
    ),
    (
        ["algorithm.critic.optimizer.lr=1e-4"],
        "algorithm.critic.optimizer.lr=0.0001 has no effect with algorithm.advantage_method=grpo; "
        "it is read with algorithm.advantage_method=gae|turn_gae",
    ),
    (
        ["algorithm.passk.k=2"],
        "algorithm.passk.k=2 has no effect with algorithm.advantage_method=grpo; "
        "it is read with algorithm.advantage_method=grpo_passk",
    ),
    (
        [PASSK, "algorithm.passk.estimator=top2", "algorithm.passk.k=2"],
        "algorithm.passk.k=2 has no effect with algorithm.passk.estimator=top2; "
        "it is read with algorithm.passk.estimator=pkpo_sloo1|pkpo_sloo|chen",
    ),
    (
        ["algorithm=importance_sampling", "algorithm.clip_low_threshold=0.5"],
        "algorithm.clip_low_threshold=0.5 has no effect with algorithm.loss_fn=importance_sampling; "
        "it is read with algorithm.loss_fn=ppo|cispo|gspo|decoupled_ppo",
    ),
    (
        ["algorithm=cispo", "algorithm.dual_clip=3"],
        "algorithm.dual_clip=3.0 has no effect with algorithm.loss_fn=cispo; "
        "it is read with algorithm.loss_fn=ppo|gspo|decoupled_ppo",
    ),
    (
        ["algorithm.is_cap=3"],
        "algorithm.is_cap=3.0 has no effect with algorithm.loss_fn=ppo; "
        "it is read with algorithm.loss_fn=importance_sampling|dppo|decoupled_ppo",
    ),
    (
        ["algorithm.sapo.tau_positive=2"],
        "algorithm.sapo.tau_positive=2.0 has no effect with algorithm.loss_fn=ppo; "
        "it is read with algorithm.loss_fn=sapo",
    ),
    (
        ["algorithm.loss_fn=sapo", "algorithm.dppo.divergence=kl"],
        "algorithm.dppo.divergence=kl has no effect with algorithm.loss_fn=sapo; "
        "it is read with algorithm.loss_fn=dppo",
    ),
    (
        ["algorithm.max_sequence_length=64"],
        "algorithm.max_sequence_length=64 has no effect with algorithm.loss_reduction=token_mean; "
        "it is read with algorithm.loss_reduction=seq_mean_token_sum_norm",
    ),
    (
        ["algorithm.correction_high=3"],
        "algorithm.correction_high=3.0 has no effect with algorithm.off_policy_correction=none; "
        "it is read with algorithm.off_policy_correction=tis|sequence_tis|icepop|mis|geometric",
    ),
    (["algorithm.kl_estimator=k2"], "algorithm.kl_estimator=k2 has no effect with algorithm.kl_loss_coef=0"),
    (
        ["algorithm.kl_reward_coef=0.1", "algorithm.kl_estimator=k2"],
        "algorithm.kl_estimator=k2 has no effect with algorithm.kl_loss_coef=0",
    ),
    (
        ["algorithm.kl_target=0.1"],
        "algorithm.kl_target=0.1 has no effect with algorithm.kl_loss_coef=0 and algorithm.kl_reward_coef=0",
    ),
    (
        ["algorithm.kl_reference=folder"],
        "algorithm.kl_reference=folder has no effect with algorithm.kl_loss_coef=0 and algorithm.kl_reward_coef=0",
    ),
    (
        ["algorithm.kl_loss_coef=0.1", "algorithm.kl_horizon=5"],
        "algorithm.kl_horizon=5 has no effect with algorithm.kl_target=null",
    ),
    (
        ["algorithm.kl_loss_coef=0.1", "algorithm.kl_estimator=k1"],
        "algorithm.kl_estimator=k1 in the loss has a mean gradient of zero; k2 and k1_unbiased have a gradient towards "
        "the reference",
    ),
    (["algorithm.loss_fn=gspo"], GSPO.format("0.8", "1.2")),
    (["algorithm.loss_fn=gspo", "algorithm.clip_high_threshold=1.0004"], GSPO.format("0.8", "1.0004")),
    (
        ["algorithm.loss_fn=importance_sampling", "algorithm.is_cap=inf", "trainer.update_epochs=2"],
        "algorithm.is_cap=inf leaves the weights of later updates of a step without a bound (trainer.mini_batches=1, "
        "trainer.update_epochs=2); algorithm.is_cap=2 or algorithm.loss_fn=ppo has one",
    ),
    ([*PUBLISHED, OVERLAP], LOST.format("local", 1)),
    ([*PUBLISHED, *SERVED["vllm"]], LOST.format("vllm", 0)),
    ([*PUBLISHED, *SERVED["sglang"]], LOST.format("sglang", 0)),
    ([GEOMETRIC, OVERLAP], REJECTED.format(0.999)),
    ([GEOMETRIC, "algorithm.correction_low=0.996", OVERLAP], REJECTED.format(0.996)),
]


@pytest.mark.parametrize(("overrides", "said"), WARNED, ids=words)
def test_warned(overrides, said):
    assert check(compose(on_grpo(overrides))) == [said]


@pytest.mark.parametrize(
    "overrides",
    [
        PUBLISHED,
        [*PUBLISHED, "trainer.mini_batches=2"],  # another anchor would change nothing
        [*PUBLISHED, *SERVED["vllm"], "algorithm.loss_anchor=old"],
        [*PUBLISHED, OVERLAP, "algorithm.loss_anchor=old"],
        ["algorithm=gspo", OVERLAP],
        ["algorithm.loss_fn=gspo", "algorithm.clip_low_threshold=0.98", "algorithm.clip_high_threshold=1.02", OVERLAP],
        [GEOMETRIC],
        [GEOMETRIC, "algorithm.correction_low=0.95", "algorithm.correction_high=1.05", OVERLAP],
        ["algorithm.off_policy_correction=mis", OVERLAP],
        ["algorithm.off_policy_correction=sequence_tis", "algorithm.loss_anchor=old", OVERLAP],
    ],
    ids=words,
)
def test_bounds_that_fit_the_age_of_tokens_and_the_fixes_of_those_that_do_not_are_not_warned_about(overrides):
    assert check(compose(on_grpo(overrides))) == []


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml")))
def test_the_algorithms_as_they_are_warn_of_nothing(option):
    more = [TWO_PARTS] if option == "gdpo" else []
    assert check(compose([f"algorithm={option}", *more])) == []


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(
        UserError, match="algorithm.advantage_method=group_bassed is not known; did you mean group_based"
    ):
        compose([method("group_bassed")])


@pytest.mark.parametrize("key", ["advantage_method", "loss_fn", "loss_reduction", "kl_estimator"])
def test_a_function_of_the_users_own_is_looked_for_at_once(key):
    compose(on_grpo([f"algorithm.{key}=statistics.mean"]))
    with pytest.raises(UserError) as caught:
        compose([f"algorithm.{key}=no_such.function"])
    assert str(caught.value) == (
        f"algorithm.{key}=no_such.function cannot be imported (No module named 'no_such'); "
        "write package.module.function"
    )


def test_checking_the_algorithm_needs_no_torch():
    lines = [
        ["algorithm.loss_fn=gspo", "algorithm.off_policy_correction=mis", "algorithm.kl_loss_coef=0.1"],
        [method("gigpo"), "algorithm.loss_reduction=turn_mean"],
        [method("gdpo"), TWO_PARTS],
        [PASSK],
    ]
    code = (
        "import sys\nfrom mtrl.command.compose import compose\n"
        f"for line in {lines!r}: compose(['algorithm=grpo', *line])\n"
        "print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
