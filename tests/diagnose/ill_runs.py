"""One generated run for every symptom: rule -> record."""

import numpy as np
from made_up_runs import configured, learning, record

FLAT = np.full(60, 0.35)
RISING = learning(0.2, 0.6, 60)


def noisy(values, spread, seed=0):
    values = np.asarray(values, float)
    return values + spread * np.random.default_rng(seed).standard_normal(len(values))


def of(chances, changes=None, **extra):
    return record(0, chances, configured(**{"trainer__max_steps": len(chances), **(changes or {})}), **extra)


def collapsing(**changes):
    """Return a run whose reward falls at step 55, with a spike of the gradient and a growing entropy."""
    chances = np.concatenate([learning(0.2, 0.7, 54), np.full(12, 0.01)])
    entropy = np.concatenate([noisy(np.full(54, 0.3), 0.02), np.full(12, 2.0)])
    return of(chances, {"trainer__max_steps": 100, **changes}, **{"train/entropy": entropy})


def unrewarded(**changes):
    """Return a run whose reward does not parse well-formed answers, of which the scorer solves a third."""
    zero = {key: 0.0 for key in ("rollout/reward/mean", "rollout/claims/mean", "rollout/reward/valid_mean")}
    ones = {"rollout/reward/zero_frac": 1.0, "analysis/zero_adv_frac": 1.0, "analysis/informative_groups": 0.0}
    return of(np.full(30, 0.3), changes, **zero, **ones, **{"val/reward/mean": 0.0})


def hacked(**changes):
    """Return a run whose reward rises, while success by the scorer does not."""
    reward = noisy(learning(0.1, 0.8, 30), 0.03)
    return of(np.full(30, 0.08), changes, **{
        "rollout/reward/mean": reward, "rollout/claims/mean": reward, "rollout/lenient_frac": reward - 0.08,
        "rollout/reward/zero_frac": 1 - reward, "val/reward/mean": np.concatenate([[0.1], reward]),
        "analysis/zero_adv_frac": 0.2,
    })  # fmt: skip


def overfitted(**changes):
    """Return a run that memorises sixteen training rows and solves no held-out rows."""
    return of(learning(0.3, 0.95, 60), {"data__synthetic_train_rows": 16, **changes}, **{
        "val/success/mean": 0.3, "val/success/sampled": 0.3, "val/reward/mean": 0.3, "val/success/pass_k_1": 0.3,
        "train/epoch": np.arange(1.0, 61.0),
    })  # fmt: skip


def hopeless(**changes):
    """Return a run without a success."""
    return of(np.full(20, 0.0), changes, **{
        "rollout/success/mean": 0.0, "rollout/reward/mean": 0.0, "val/success/mean": 0.0, "val/success/sampled": 0.0,
        "val/success/pass_k_1": 0.0, "val/reward/mean": 0.0,
    })  # fmt: skip


TASK, WEIGHED = {"environment": {"name": "gsm8k"}}, {"weight": [[0, 2], [9, 1]]}
PER_TURN = {"algorithm__advantage_method": "group_based_per_turn"}
WIDE = {"generator__max_turns": 20}
LONG = {"generator__sampling_params": {"max_generate_length": 2048}}
FALL_AND_RISE = np.r_[np.linspace(0.5, 0.2, 25), np.linspace(0.2, 1.5, 35)]

RUNS = {
    "no_evaluation": lambda: _without(of(RISING, {"evaluation": {"every_steps": 0, "before_train": False}}), "val/"),
    "small_evaluation": lambda: of(RISING, {"evaluation": {"rows": 16}}, **{"val/episodes": 16.0}),
    "zero_baseline": hopeless,
    "lenient_baseline": lambda: of(RISING, **{"val/lenient_frac": 0.2, "val/reward/mean": 0.4}),
    "guesses": lambda: of(np.full(60, 0.06), **{"rollout/turns/mean": noisy(np.full(60, 1.05), 0.02)}),
    "undecided_start": lambda: of(np.full(60, 0.15), **{"train/entropy": noisy(np.linspace(1.5, 0.7, 60), 0.1)}),
    "nothing_learnt": lambda: of(
        RISING, {"trainer__max_steps": 100}, **{"train/lr": np.r_[np.full(40, 1e-4), np.zeros(20)]}
    ),
    "ended_schedule": lambda: of(np.linspace(0.1, 0.7, 60)),
    "flat_from_start": unrewarded,
    "equal_groups": lambda: of(FLAT, **{"analysis/zero_adv_frac": 0.94, "analysis/informative_groups": 1.0}),
    "hacked_reward": hacked,
    "collapse": collapsing,
    "stall": lambda: of(np.r_[learning(0.1, 0.5, 30), np.full(90, 0.5)], **{"analysis/zero_adv_frac": 0.3}),
    "held_out_gap": overfitted,
    "variance_collapse": lambda: of(np.full(100, 0.5), **{
        "rollout/reward/valid_mean": noisy(np.linspace(0.5, 0.3, 100), 0.02),
        "analysis/zero_adv_frac": noisy(np.linspace(0.2, 0.72, 100), 0.02),
    }),
    "stagnant_pass_k": lambda: of(np.full(100, 0.4), **{"analysis/zero_adv_frac": 0.65, "val/success/pass_k_1": 0.4}),
    "many_zeros": lambda: of(np.full(60, 0.06), **{"analysis/zero_adv_frac": 0.6, "rollout/reward/zero_frac": 0.94}),
    "unfinished_success": lambda: of(np.full(60, 0.6), **{
        "val/completion/mean": 0.62, "val/success/pass_k_1": 0.6, "rollout/stop/max_turns": 0.35,
    }),
    "finished_failure": lambda: of(np.full(60, 0.1), **{"val/completion/mean": 1.0, "val/success/pass_k_1": 0.1}),
    "reward_without_completion": lambda: of(np.full(60, 0.3), **{
        "rollout/reward/mean": noisy(np.linspace(0.3, 0.9, 60), 0.02),
        "rollout/success/mean": noisy(np.full(60, 0.3), 0.02),
        "rollout/completion/mean": noisy(np.linspace(0.9, 0.4, 60), 0.02),
    }),
    "token_cap": lambda: of(RISING, **{"rollout/tokens/at_cap_frac": noisy(np.full(60, 0.12), 0.01)}),
    "turn_budget": lambda: of(FLAT, **{"rollout/stop/max_turns": noisy(np.full(60, 0.25), 0.02)}),
    "silent_truncation": lambda: of(FLAT, **{"rollout/stop/turn_token_limit": noisy(np.full(60, 0.12), 0.01)}),
    "oversized_turns": lambda: of(RISING, WIDE, **{"rollout/turns/p95": 4.0, "rollout/stop/max_turns": 0.0}),
    "oversized_tokens": lambda: of(RISING, LONG, **{"rollout/tokens/response_max": 40.0}),
    "context_growth": lambda: of(FLAT, **{"rollout/context/mean": noisy(np.linspace(300, 900, 60), 10)}),
    "memory_growth": lambda: of(RISING, **{"perf/memory_bytes": noisy(np.linspace(1e9, 3e9, 60), 1e7)}),
    "competing_tasks": lambda: of(FLAT, {"environment__name": "sop", "environment__config": {"domain": "all"}}, **{
        "rollout/reward/mean": noisy(0.45 + 0.35 * np.sin(np.arange(60)), 0.05),
    }),
    "logprob_drift": lambda: of(RISING, **{"analysis/logprob_drift/mean": noisy(np.full(60, 0.2), 0.01)}),
    "stale_tokens": lambda: of(learning(0.6, 0.3, 60), {"async_config": {"max_steps_off_policy": 4}}, **{
        "analysis/staleness/mean": 3.0, "train/clip_frac": 0.25,
    }),
    "entropy_collapse": lambda: of(FLAT, **{"train/entropy": noisy(np.geomspace(1.0, 0.02, 60), 0.002)}),
    "entropy_explosion": lambda: of(FLAT, **{"train/entropy": noisy(FALL_AND_RISE, 0.02)}),
    "gradient_spikes": lambda: of(RISING, **{"train/grad_norm": np.where(np.arange(60) % 9 == 8, 3.0, 0.1)}),
    "clipped_tokens": lambda: of(RISING, {"trainer__mini_batches": 4}, **{
        "train/clip_frac": noisy(np.full(60, 0.5), 0.02),
    }),
    "failing_episodes": lambda: of(RISING, **{"rollout/failed_episodes": 40.0, "rollout/stop/timeout": 0.3}),
    "paused_source": lambda: of(RISING, {"environments": {"words": {}, "sql": {}}}, **{
        "data/words/paused": np.r_[np.zeros(50), np.ones(10)], "data/sql/paused": 0.0,
    }),
    "unsolved_source": lambda: of(RISING, {"environments": {"words": TASK, "sql": TASK}}, **{
        "rollout/words/success/mean": RISING, "rollout/sql/success/mean": 0.0,
    }),
    "falling_source": lambda: of(RISING, {"environments": {"words": {**TASK, **WEIGHED}, "sql": TASK}}, **{
        "rollout/words/success/mean": noisy(learning(0.6, 0.2, 60), 0.05), "rollout/sql/success/mean": RISING,
    }),
    "template_breaks": lambda: of(RISING, **{"rollout/breaks": 200.0}),
    "idle_turn_credit": lambda: of(RISING, PER_TURN, **{"rollout/reward/early_frac": 0.0}),
    "lonely_turns": lambda: of(RISING, PER_TURN, **{
        "analysis/lonely_turns": 60.0, "rollout/reward/early_frac": 0.5,
    }),
    "slow_steps": lambda: of(RISING, **{"time/step": np.r_[np.full(30, 1.0), np.full(30, 6.0)]}),
}  # fmt: skip


def _without(run, prefix):
    from mtrl.diagnose.record import Record

    shortened = Record(run.config)
    for key in run.metrics():
        if not key.startswith(prefix) and key != "step":
            series = run.series(key)
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                shortened.add({"step": step, key: value})
    return shortened
