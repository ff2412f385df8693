"""Every rule on a run that has its symptom: it is found, in time, and the first thing to change is the right one."""

import json

import numpy as np
import pytest
from ill_runs import FLAT, RUNS, collapsing, hacked, hopeless, of, unrewarded
from made_up_runs import configured, learning, record, rows, without

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.proposals import Proposals
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import RULES
from mtrl.diagnose.rules.collapse import collapse
from mtrl.diagnose.rules.equal_groups import share_equal, spread_of
from mtrl.diagnose.rules.held_out import held_out_gap
from mtrl.diagnose.rules.stall import larger_model
from mtrl.diagnose.walk import walk

PROPOSALS = {}
"""One per configuration, because it composes the configuration when it settles its first proposal."""


def found(run, rule):
    proposals = PROPOSALS.setdefault(json.dumps(run.config, sort_keys=True), Proposals(run.config))
    diagnosis = walk(run, lambda finding: proposals.settle(finding) if finding.rule == rule else finding)
    assert not diagnosis.broken
    return next((finding for finding in diagnosis.findings if finding.rule == rule), None)


def words(finding):
    return [str(proposal) for proposal in finding.proposals]


def test_every_rule_has_a_made_up_run():
    assert set(RUNS) == {rule.name for rule in RULES}


def test_rules_are_checked_in_their_order():
    """Prerequisites come first, then the five rules in the order of the requirements."""
    names = [rule.name for rule in RULES]
    five = ["flat_from_start", "equal_groups", "hacked_reward", "collapse", "stall"]
    assert [name for name in names if name in five] == five
    assert names.index("zero_baseline") < names.index("lenient_baseline") < names.index("flat_from_start")
    assert all(names.index(name) > names.index("stall") for name in ("variance_collapse", "token_cap", "slow_steps"))


@pytest.mark.parametrize("name", RUNS)
def test_every_rule_finds_its_symptom(name):
    finding = found(RUNS[name](), name)
    assert finding is not None
    rule = next(rule for rule in RULES if rule.name == name)
    assert finding.requirements == rule.requirements and rule.summary
    assert finding.title and not finding.title.endswith(".") and finding.metrics and finding.expect
    assert finding.proposals or finding.advice, "it says what to do"
    assert Finding.from_dict(finding.to_dict()) == finding


def test_turns_cut_in_episodes_that_the_environment_ended_are_a_silent_truncation():
    key = "rollout/tokens/at_cap_frac"
    run = of(FLAT, **{key: np.ones(60), "rollout/stop/turn_token_limit": 0.0, "rollout/stop/context_limit": 0.0})
    finding = found(run, "silent_truncation")
    assert finding is not None and finding.title.startswith("100.0%") and key in finding.metrics


LOSS = "algorithm.loss_fn=ppo algorithm.clip_low_threshold=0.8 algorithm.clip_high_threshold=1.2"
LARGER = "model.tiny.hidden_size=256 model.tiny.intermediate_size=384 model.tiny.layers=4"
SMALLER = "algorithm.group_size=4 trainer.prompts_per_step=32"
CISPO = {"algorithm__loss_fn": "cispo", "algorithm__clip_low_threshold": 0.0, "algorithm__clip_high_threshold": 5.0}
STALE = {"async_config": {"max_steps_off_policy": 4}}


@pytest.mark.parametrize(
    ("run", "rule", "severity", "change"),
    [
        (lambda: unrewarded(reward__scheme="guide"), "flat_from_start", "alarm", "reward.scheme=default"),
        (RUNS["equal_groups"], "equal_groups", "alarm", SMALLER),
        (collapsing, "collapse", "alarm", None),
        (lambda: collapsing(**STALE, **CISPO), "collapse", "alarm", "async_config.max_steps_off_policy=0"),
        (lambda: collapsing(**CISPO), "collapse", "alarm", LOSS),
        (RUNS["stall"], "stall", "warning", LARGER),
        (RUNS["variance_collapse"], "variance_collapse", "warning", SMALLER),
        (RUNS["token_cap"], "token_cap", "warning", "generator.sampling_params.max_generate_length=128"),
        (RUNS["turn_budget"], "turn_budget", "warning", "generator.max_turns=6"),
        (RUNS["unfinished_success"], "unfinished_success", "warning", "generator.max_turns=6"),
        (RUNS["oversized_turns"], "oversized_turns", "note", "generator.max_turns=6"),
        (RUNS["entropy_collapse"], "entropy_collapse", "warning", "algorithm.clip_high_threshold=1.28"),
        (RUNS["idle_turn_credit"], "idle_turn_credit", "note", "algorithm.advantage_method=rloo"),
        (RUNS["zero_baseline"], "zero_baseline", "alarm",
         "model.warm_start.success_band=[0.5,0.75] model.warm_start.max_steps=2000"),
    ],
)  # fmt: skip
def test_the_first_thing_to_change(run, rule, severity, change):
    finding = found(run(), rule)
    assert finding.severity == severity
    assert change is None or str(finding.change) == change


def _stalled_with_lora(rank, alpha, **model):
    """Return the first change for a run that stalled with these adapters, before the proposal is checked."""
    run = RUNS["stall"]()
    model = {"name": "hf", "path": "x/y", "lora_rank": rank, "lora_alpha": alpha} | model
    run.config = {**run.config, "model": model}
    found = next(rule for rule in RULES if rule.name == "stall").check(run)
    return found.change.words, found.advice


@pytest.mark.parametrize(
    ("rank", "alpha", "doubled"),
    [(32, 64, (64, 128)), (8, 16, (64, 128)), (64, 128, (128, 256)), (128, 16, (256, 32)), (40, 40, (80, 80))],
)
def test_lora_is_doubled_where_there_is_lora(rank, alpha, doubled):
    """R152, R018: rank and alpha rise to at least 64 and 128, and double from there on."""
    words, advice = _stalled_with_lora(rank, alpha)
    assert words == (f"model.lora_rank={doubled[0]}", f"model.lora_alpha={doubled[1]}")
    assert "adapters" in advice


def test_the_tiny_policys_adapters_double_until_its_matrices_have_no_more_rank():
    assert _stalled_with_lora(64, 128, name="tiny")[0] == ("model.lora_rank=128", "model.lora_alpha=256")
    assert _stalled_with_lora(128, 256, name="tiny")[0][0] == "model.tiny.hidden_size=256"
    assert _stalled_with_lora(16, 32, name="tiny", tiny={"hidden_size": 32})[0][0] == "model.tiny.hidden_size=64"


def test_the_next_larger_model():
    assert larger_model("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-1.5B-Instruct"
    assert larger_model("Qwen/Qwen2.5-32B-Instruct") is None
    assert larger_model("someone/model") is None


def test_smaller_groups_agree_more_often_and_more_of_them_have_advantages():
    """Worked numbers for 128 groups of 8 and 256 groups of 4."""
    assert share_equal(0.05, 0, 8) == pytest.approx(0.663, abs=5e-4)
    assert share_equal(0.05, 0, 4) == pytest.approx(0.815, abs=5e-4)
    assert share_equal(0.5, 0, 8) == pytest.approx(0.008, abs=5e-4)
    assert share_equal(0.5, 0, 4) == pytest.approx(0.125, abs=5e-4)
    assert 128 * (1 - share_equal(0.1, 0, 8)) == pytest.approx(72.9, abs=0.05)
    assert 256 * (1 - share_equal(0.1, 0, 4)) == pytest.approx(88.0, abs=0.05)


def test_the_spread_of_prompts_explains_how_many_groups_agree():
    for rewarded, equal, size in ((0.3, 0.5, 8), (0.1, 0.9, 4), (0.5, 0.3, 8)):
        assert share_equal(rewarded, spread_of(rewarded, equal, size), size) == pytest.approx(equal, abs=1e-6)
    assert spread_of(0.5, 0.001, 8) == 0.0


def test_the_finding_has_both_group_sizes_and_further_advice():
    guide = {"reward__scheme": "guide"}
    finding = found(of(np.full(60, 0.1), guide, **{"analysis/zero_adv_frac": 0.8}), "equal_groups")
    evidence = " ".join(finding.evidence)
    assert "with groups of 4 and 32 prompts" in evidence and "groups with one become" in evidence
    assert "algorithm.dynamic_sampling_rounds=3" in words(finding) and "reward.scheme=default" in words(finding)


def test_groups_of_four_are_not_made_smaller():
    run = of(np.full(60, 0.1), {"algorithm__group_size": 4}, **{"analysis/zero_adv_frac": 0.95})
    assert str(found(run, "equal_groups").change) == "algorithm.dynamic_sampling_rounds=3"


def test_groups_without_any_reward_are_not_resized():
    """No group has a reward, so other groups would agree as well."""
    finding = found(unrewarded(reward__scheme="guide"), "equal_groups")
    assert str(finding.change) == "reward.scheme=default"
    assert not {SMALLER, "algorithm.dynamic_sampling_rounds=3"} & set(words(finding))


@pytest.mark.parametrize("first", [[0.44], [0.4, 0.3], [0.45, 0.5, 0.2, 0.3]])
def test_a_policy_that_its_first_updates_destroyed_gets_smaller_ones(first):
    """Larger groups are not proposed either."""
    run = of(np.r_[first, np.zeros(20)], {"trainer__optimizer": {"lr": 1e-2}}, **{
        "analysis/zero_adv_frac": np.r_[np.full(len(first), 0.1), np.ones(20)],
    })  # fmt: skip
    finding = found(run, "collapse")
    assert str(finding.change) == "trainer.optimizer.lr=0.001"
    assert finding.severity == "alarm" and found(run, "equal_groups") is None


def test_an_entropy_bonus_is_removed_after_a_collapse_into_randomness():
    fall = np.r_[np.full(30, 0.5), np.zeros(30)]
    entropy = np.r_[np.full(30, 0.3), np.full(30, 4.0)]
    drift = np.r_[np.full(30, 4e-7), np.full(30, 9e-7)]
    metrics = {"train/entropy": entropy, "analysis/logprob_drift/mean": drift}
    finding = found(of(fall, {"algorithm__entropy_coef": 0.3}, **metrics), "collapse")
    assert str(finding.change) == "algorithm.entropy_coef=0"
    assert not [word for word in words(finding) if "off_policy_correction" in word], "that is rounding"


@pytest.mark.parametrize("last", [0.5, 0.3], ids=["stands", "falls"])
@pytest.mark.parametrize("scored", [True, False])
def test_training_that_held_out_rows_do_not_follow(last, scored):
    """R135, R150: training reward goes from .3 to .95; held-out reward, success and pass@1 stay at .5, or fall to .3.
    With scores the rows are memorised; without scores the reward does not measure success."""
    held_out = np.r_[0.5, np.linspace(0.5, last, 60)]
    keys = ("val/success/mean", "val/success/sampled", "val/reward/mean", "val/success/pass_k_1")
    run = of(learning(0.3, 0.95, 60), **dict.fromkeys(keys, held_out))
    if not scored:
        run = without(run, "rollout/success/mean", "rollout/lenient_frac", "rollout/claims/mean")
    finding = found(run, "held_out_gap" if scored else "hacked_reward")
    assert finding.severity in ("alarm", "warning")
    if scored:
        assert finding.severity == "alarm"
        assert ("checkpoint of step" in finding.advice) is (last < 0.5)


UNSCORED = ("rollout/success/mean", "rollout/lenient_frac", "rollout/claims/mean")
EVALUATED = ("val/success/mean", "val/success/sampled", "val/reward/mean", "val/success/pass_k_1")


def _evaluated(train, held_out, every=20, episodes=200.0):
    """A run with this success in training and other success in its evaluations."""
    count = len(train)
    chances = np.interp(np.linspace(0, 1, count + 1), np.linspace(0, 1, len(held_out)), held_out)
    given = dict.fromkeys(EVALUATED, chances) | {"val/episodes": episodes}
    return record(0, train, configured(trainer__max_steps=count), every=every, **given)


@pytest.mark.parametrize("last", [0.5, 0.3], ids=["stands", "falls"])
@pytest.mark.parametrize("episodes", [64.0, 100.0, 200.0])
@pytest.mark.parametrize(("steps", "every"), [(20, 10), (40, 20), (60, 20), (60, 60), (100, 50), (200, 50)])
def test_few_evaluations_show_that_they_did_not_follow(steps, every, episodes, last):
    run = _evaluated(np.linspace(0.3, 0.95, steps), [0.5, last], every, episodes)
    assert found(run, "held_out_gap") is not None


def test_a_last_evaluation_decides_alone_where_it_is_certain():
    """Without sampled evaluations, at steps 0 and 60 only."""
    run = _evaluated(np.linspace(0.3, 0.95, 60), [0.5, 0.3], every=60)
    run = without(run, "val/success/sampled")
    assert found(run, "held_out_gap") is not None


@pytest.mark.parametrize("every", [10, 20])
@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ((0.3, 0.95), (0.3, 0.75, 0.75, 0.55, 0.55)),
        ((0.3, 0.95), (0.3, 0.8, 0.8, 0.6, 0.6)),
        ((0.8, 0.95), (0.8, 0.8, 0.7, 0.6, 0.6)),
        ((0.9, 0.9), (0.9, 0.6, 0.3)),
    ],
)
def test_held_out_success_that_peaks_and_falls_is_a_gap(train, held_out, every):
    run = _evaluated(np.linspace(*train, 80), held_out, every)
    finding = found(run, "held_out_gap")
    top = run.series("val/success/mean")
    assert finding.severity == "alarm"
    assert f"Use the checkpoint of step {int(top.steps[np.argmax(top.values)])}" in finding.advice


def test_noise_is_neither_a_gap_nor_a_fall():
    """Runs whose held-out success equals that of training, or stays a tenth behind it, at every evaluation."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        for start, end, steps, behind, episodes in (
            (0.1, 0.9, 100, 0.0, 64), (0.3, 0.95, 60, 0.1, 200), (0.6, 0.6, 150, 0.1, 200), (0.9, 0.9, 100, 0.1, 64)
        ):  # fmt: skip
            chances = learning(start, end, steps)
            rates = np.r_[chances[0], chances] - behind
            held_out = {key: rng.binomial(episodes, rates) / episodes for key in EVALUATED}
            made = rows(seed, chances, every=5, **held_out, **{"val/episodes": float(episodes)})
            growing = Record(configured(trainer__max_steps=steps))
            for row in made:
                growing.add(row)
                assert "val/success/mean" not in row or held_out_gap(growing) is None, (seed, start, row["step"])


def test_training_that_falls_with_the_evaluations_is_no_gap():
    run = _evaluated(np.r_[np.full(40, 0.9), np.linspace(0.9, 0.3, 40)], (0.7, 0.7, 0.1))
    assert held_out_gap(run) is None


def test_the_title_of_an_unscored_run_does_not_mention_the_scorer():
    run = _evaluated(np.linspace(0.3, 0.95, 60), [0.5, 0.3])
    run = without(run, *UNSCORED)
    title = found(run, "hacked_reward").title
    assert title.endswith(", and held-out success is 30.0%") and title.startswith("The reward rose from 0.")


def test_an_overfitted_run_gets_more_rows():
    finding = found(RUNS["held_out_gap"](), "held_out_gap")
    assert str(finding.change) == "data.synthetic_train_rows=4096"


def test_evaluations_that_follow_late_or_by_chance_are_no_gap():
    """Greedy success changes in jumps, and a hundred rows measure it to ten points."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        chances = learning(0.3, 0.9, 80)
        greedy = np.r_[0.05, np.where(np.arange(80) < 30, 0.05, chances)]
        run = of(chances, **{"val/success/mean": rng.binomial(100, greedy) / 100, "val/episodes": 100.0})
        assert held_out_gap(run) is None


def test_a_lucky_first_step_is_no_fall():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rewards = rng.binomial(128, 0.1, 40) / 128
        rewards[0] = max(rewards) + 0.05
        assert collapse(of(rewards)) is None


def test_groups_that_agree_since_their_turns_are_cut_get_room_first():
    cut = {"rollout/tokens/at_cap_frac": 0.9, "rollout/tokens/response_mean": 40.0}
    run = of(np.full(60, 0.1), **{"analysis/zero_adv_frac": 0.95}, **cut)
    assert str(found(run, "equal_groups").change) == "generator.sampling_params.max_generate_length=128"


def test_a_change_without_expected_gain_is_not_proposed():
    """Every group agrees although a third of the rollouts have a reward, so groups of half the size would agree too."""
    run = of(np.full(60, 0.35), **{"analysis/zero_adv_frac": 1.0, "rollout/reward/zero_frac": 0.65})
    assert str(found(run, "equal_groups").change) == "algorithm.group_size=16"


def test_groups_that_agree_at_a_low_temperature_are_first_sampled_at_one():
    run = of(np.full(60, 0.35), {"generator__sampling_params": {"temperature": 0.3}}, **{"analysis/zero_adv_frac": 0.9})
    assert str(found(run, "equal_groups").change) == "generator.sampling_params.temperature=1"


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ({"trainer__optimizer": {"lr": 1e-6}}, "trainer.optimizer.lr=0.0004"),
        ({"trainer__optimizer": {"lr": 4e-4}}, "trainer.optimizer.lr=0.004"),
        ({"algorithm__kl_loss_coef": 10.0}, "algorithm.kl_loss_coef=0"),
    ],
)
def test_penalties_are_removed_from_a_policy_that_does_not_follow_its_gradient(setting, change):
    """Groups differ, and the reward does not change."""
    run = of(np.full(60, 0.35), setting, **{"analysis/zero_adv_frac": 0.06})
    finding = found(run, "flat_from_start")
    assert str(finding.change) == change and "formats" not in finding.advice


def test_the_default_scheme_is_replaced_by_no_other():
    """Other schemes may reward behaviour that never solves the task."""
    for rule in ("flat_from_start", "equal_groups"):
        assert not [word for word in words(found(unrewarded(), rule)) if word.startswith("reward.scheme=")]


BAND = "model.warm_start.success_band"


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ({"name": "tiny"}, f"{BAND}=[0.5,0.75] model.warm_start.max_steps=2000"),
        (
            {"name": "tiny", "warm_start": {"enabled": True, "success_band": [0, 1], "max_steps": 150}},
            f"{BAND}=[0.3,0.5] model.warm_start.max_steps=300",
        ),
        (
            {"name": "hf", "path": "x/y", "warm_start": {"enabled": True, "success_band": [0.05, 0.2]}},
            f"{BAND}=[0.3,0.5] model.warm_start.max_steps=2000",
        ),
        ({"name": "hf", "path": "x/y"}, "model.warm_start.enabled=true"),
    ],
    ids=["held out it fails", "a fixed number of updates", "hf", "hf without a warm start"],
)
def test_a_policy_without_a_success_gets_a_longer_warm_start(model, change):
    assert str(found(hopeless(model=model), "zero_baseline").change) == change


@pytest.mark.parametrize(
    "environment",
    [
        {"name": "gsm8k", "target": "tests.diagnose.undemonstrated.FAMILY"},
        {"name": "gsm8k", "target": "not.installed.FAMILY"},
        {"name": "unheard_of"},
    ],
    ids=["no demonstrator", "not installed", "unknown"],
)
def test_a_warm_start_is_proposed_only_where_there_is_a_demonstrator(environment):
    finding = found(hopeless(model={"name": "hf", "path": "x/y"}, environment=environment), "zero_baseline")
    assert not finding.proposals and "supervised examples first" in finding.advice


@pytest.mark.parametrize(("weights", "is_proposed"), [({"format": 0.2}, True), ({"format": 0}, False), ({}, False)])
def test_the_only_component_of_the_reward_is_not_removed(weights, is_proposed):
    run = hacked()
    for row in _rows(run):
        run.add({"step": row["step"], "rollout/components/correct": row.get("rollout/reward/mean")})
    run.config = {**run.config, "reward": {"components": {"environment": 0, "correct": 1, **weights}}}
    assert ("reward.components.correct=0" in words(found(run, "hacked_reward"))) == is_proposed


def test_a_hacked_reward_is_found_within_thirty_steps():
    run = hacked()
    assert found(run, "hacked_reward").severity == Severity.ALARM
    growing = Record(configured(trainer__max_steps=100))
    for row in _rows(run)[:31]:
        growing.add(row)
    assert found(growing, "hacked_reward").severity == Severity.ALARM


def test_partial_credit_that_leads_to_success_is_no_hack():
    """A dense reward is always above success; the rule checks whether success follows."""
    success = learning(0.1, 0.8, 60)
    run = of(
        success, **{"rollout/reward/mean": 0.4 + 0.6 * success, "val/reward/mean": np.r_[0.46, 0.4 + 0.6 * success]}
    )
    assert found(run, "hacked_reward") is None


@pytest.mark.parametrize("step", [12, 30, 54])
def test_a_collapse_is_found_within_ten_steps_at_any_step(step):
    chances = np.concatenate([learning(0.3, 0.7, step), np.full(10, 0.005)])
    run = record(1, chances, configured(trainer__max_steps=100))
    finding = found(run, "collapse")
    assert finding.severity == Severity.ALARM
    assert any(finding.title.endswith(f"at step {step + late}") for late in range(3))


def test_a_bad_step_or_two_is_no_collapse():
    chances = np.concatenate([learning(0.3, 0.7, 40), [0.05, 0.1], np.full(3, 0.7)])
    for count in (42, 43, 45):
        assert found(record(1, chances[:count], configured(trainer__max_steps=100)), "collapse") is None


def test_the_evidence_of_a_collapse_names_what_moved():
    finding = found(collapsing(), "collapse")
    assert any(sentence.startswith("entropy went from") for sentence in finding.evidence)
    assert "train/entropy" in finding.metrics


def test_a_collapse_explains_groups_that_agree():
    """One symptom, one finding: after the fall every group scores 0."""
    chances = np.concatenate([learning(0.2, 0.7, 50), np.full(30, 0.0)])
    run = record(0, chances, configured(trainer__max_steps=100))
    assert found(run, "collapse") and found(run, "equal_groups") is None


def test_a_finding_of_a_step_needs_enough_steps():
    early = {rule.name: rule for rule in RULES}
    run = record(0, np.full(12, 0.5), configured(trainer__max_steps=100))
    assert not early["stall"].is_due(run) and early["collapse"].is_due(run)
    assert "stall" in walk(run).early


def test_a_failed_rule_does_not_stop_the_others(monkeypatch):
    import mtrl.diagnose.walk as walking
    from mtrl.diagnose.registry import Rule

    broken = Rule("broken", (), "", lambda record: 1 / 0, 0.0)
    monkeypatch.setattr(walking, "RULES", [broken, *RULES])
    diagnosis = walk(hacked())
    assert diagnosis.broken == ["broken: ZeroDivisionError: division by zero"]
    assert any(finding.rule == "hacked_reward" for finding in diagnosis.findings)


def test_the_most_severe_finding_is_first():
    severities = [finding.severity.rank for finding in walk(hacked()).findings]
    assert severities == sorted(severities)


def _rows(run):
    made = {}
    for key in run.metrics():
        series = run.series(key)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            made.setdefault(step, {"step": step})[key] = value
    return [made[step] for step in sorted(made)]


def test_rows_are_those_of_the_run():
    made = rows(0, learning(0.2, 0.6, 20))
    assert len(_rows(Record({}, None, made))) == len(made)


def test_a_single_jump_of_the_memory_is_no_leak():
    """The metric is the peak memory, which longer episodes raise once."""
    jumped = np.r_[np.full(20, 7e8), np.linspace(8e8, 1.1e9, 5), np.full(35, 1.1e9)]
    assert found(of(learning(0.2, 0.6, 60), **{"perf/memory_bytes": jumped}), "memory_growth") is None


SEARCH_RUNS = {
    107: ("0.08 0.06 0 0.06 0.06 0.08 0.02 0.05 0 0.22 0.02 0.03 0.09 0.03 0.08 0 0.03 0.03 0.09 0",
          "1.92 1.11 1.39 1.3 0.78 0.88 0.8 0.7 0.85 1.06 0.87 0.75 0.68 0.54 0.5 0.49 0.55 0.43 0.43 0.54"),
    117: ("0.17 0.06 0.06 0.03 0.08 0.2 0.11 0.08 0.05 0.19 0.41 0.08 0.08 0.52 0.05 0.06 0.34 0.25 0.19 0.14",
          "1.53 1.3 1.37 1.62 1.41 1.02 1.39 1.01 1.06 0.95 0.72 0.82 0.69 0.56 0.8 0.74 0.99 0.7 0.79 0.65"),
    112: ("0.11 0.34 0.38 0.42 0.5 0.47 0.48 0.84 0.75 0.84 0.94 0.88 0.86 0.86 0.88 0.84 0.8 0.92 0.81 0.95",
          "0.51 0.38 0.31 0.4 0.32 0.29 0.23 0.16 0.18 0.15 0.2 0.24 0.13 0.12 0.15 0.13 0.1 0.09 0.16 0.08"),
    116: ("0.08 0.34 0.47 0.62 0.64 0.45 0.53 0.75 0.88 0.75 0.84 0.66 0.78 0.84 0.89 0.92 0.89 0.69 0.81 0.92",
          "0.56 0.45 0.41 0.31 0.22 0.29 0.21 0.24 0.19 0.25 0.2 0.13 0.17 0.13 0.13 0.13 0.12 0.13 0.11 0.09"),
}  # fmt: skip
"""Success and entropy of 20 steps with 64 episodes, by seed (`experiments/smollm2`): two runs that learned nothing or
little, and two that began with as few successes and learned."""


@pytest.mark.parametrize("seed", SEARCH_RUNS)
def test_an_undecided_start_is_told_from_a_low_one(seed):
    """Real runs of search: the entropy of the first steps tells those that learned from those that did not."""
    success, entropy = (np.array(values.split(), float) for values in SEARCH_RUNS[seed])
    metrics = {"rollout/success/mean": success, "rollout/reward/mean": success, "train/entropy": entropy}
    warm = {"enabled": True, "success_band": [0.05, 0.4]}
    run = of(success, {"model": {"name": "hf", "path": "x/y", "warm_start": warm}}, **metrics)
    finding = found(run, "undecided_start")
    if seed in (112, 116):
        assert finding is None
    else:
        assert finding is not None and str(finding.change) == "model.warm_start.success_band=[0.3,0.5]"
