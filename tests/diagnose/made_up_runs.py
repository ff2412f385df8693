"""Generated runs with and without faults, with the noise of the episodes of a step."""

import numpy as np

from mtrl.diagnose.record import Record

CONFIG = {
    "name": "gsm8k",
    "run_dir": "outputs/gsm8k/made_up",
    "environment": {"name": "gsm8k", "config": {"calculator": True}},
    "model": {"name": "tiny", "warm_start": {"enabled": True}},
    "generator": {"max_turns": 4, "sampling_params": {"max_generate_length": 64}},
    "algorithm": {"group_size": 8, "norm_by_std": False},
    "trainer": {"max_steps": 100, "prompts_per_step": 16, "optimizer": {"lr": 4e-4, "schedule": "constant"}},
    "reward": {"scheme": "default", "level": "turn", "components": {"environment": 1.0}},
}
"""The settings of the default experiment that differ from the schema."""


def configured(**changes):
    """Return `CONFIG` with other values, such as `trainer__max_steps=80`."""
    config = {section: dict(value) if isinstance(value, dict) else value for section, value in CONFIG.items()}
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = config
        for section in sections:
            place[section] = dict(place.get(section, {}))
            place = place[section]
        place[last] = value
    return config


def rates(rng, chances, prompts=16, size=8, alike=3.0):
    """Return the number of solved rollouts per step and prompt for these mean probabilities of success.

    `alike`: a + b of the Beta distribution of the probabilities of prompts, which is narrower the larger it is.
    """
    chances = np.clip(chances, 1e-3, 1 - 1e-3)[:, None]
    own = rng.beta(chances * alike, (1 - chances) * alike, (len(chances), prompts))
    return rng.binomial(size, own)


def rows(seed, chances, every=20, **extra):
    """Return rows of a run with these probabilities of success, in which reward and scorer agree.

    `extra`: metric -> values or value.
    """
    rng = np.random.default_rng(seed)
    solved = rates(rng, np.asarray(chances, float))
    count = len(solved)
    equal = ((solved == 0) | (solved == 8)).mean(1)
    mean = solved.mean(1) / 8
    columns = {
        "rollout/reward/mean": mean,
        "rollout/reward/zero_frac": 1 - mean,
        "rollout/success/mean": mean,
        "rollout/lenient_frac": np.zeros(count),
        "rollout/claims/mean": mean,
        "analysis/zero_adv_frac": equal,
        "analysis/informative_groups": 16 * (1 - equal),
        "rollout/completion/mean": 0.95 + 0.02 * rng.standard_normal(count).clip(-2, 2),
        "rollout/turns/mean": 3 + 0.1 * rng.standard_normal(count),
        "rollout/tokens/response_mean": 12 + rng.standard_normal(count),
        "train/entropy": 0.5 * np.exp(0.1 * rng.standard_normal(count)) * (1 - 0.6 * mean),
        "train/grad_norm": 0.1 * np.exp(0.4 * rng.standard_normal(count)),
        "train/lr": np.full(count, 4e-4),
        "train/clip_frac": np.zeros(count),
        "analysis/logprob_drift/mean": 3e-7 * np.exp(0.2 * rng.standard_normal(count)),
        "time/step": 2 * np.exp(0.3 * rng.standard_normal(count)),
        "perf/tokens_per_second": 1000 * np.exp(0.3 * rng.standard_normal(count)),
    }
    if (valid := [step[(step > 0) & (step < 8)] for step in solved]) and "rollout/reward/valid_mean" not in extra:
        columns["rollout/reward/valid_mean"] = np.array([part.mean() / 8 if len(part) else np.nan for part in valid])
    columns |= {key: np.broadcast_to(value, count) for key, value in extra.items() if not key.startswith("val/")}
    made = [{"step": i + 1, **{key: float(value[i]) for key, value in columns.items()}} for i in range(count)]
    made.insert(0, {"step": 0})
    for step in {0, *range(every, count + 1, every), count}:
        chance = float(np.clip(chances[max(step - 1, 0)], 1e-3, 1 - 1e-3))
        seen = rng.binomial(200, chance) / 200
        held_out = {
            "val/success/mean": seen,
            "val/success/sampled": rng.binomial(200, chance) / 200,
            "val/reward/mean": seen,
            "val/success/pass_k_1": rng.binomial(200, chance) / 200,
            "val/completion/mean": 0.95,
            "val/episodes": 200.0,
        }
        given = {
            key: value[step] if np.ndim(value) else value for key, value in extra.items() if key.startswith("val/")
        }
        made[step] |= {**held_out, **{key: float(value) for key, value in given.items()}}
    return made


def record(seed, chances, config=None, **extra):
    return Record(config or configured(trainer__max_steps=len(chances)), None, rows(seed, chances, **extra))


def without(run, *keys):
    """Return the same run without these metrics."""
    rows = {step: {"step": step} for step in range(run.step + 1)}
    for key in {*run.metrics()} - {*keys}:
        series = run.series(key)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            rows[step][key] = value
    return Record(run.config, run.path, rows.values())


def learning(start, end, steps, speed=6.0, middle=0.4):
    """Return probabilities that rise as a logistic curve."""
    time = np.linspace(0, 1, steps)
    curve = 1 / (1 + np.exp(-speed * (time - middle)))
    curve = (curve - curve[0]) / (curve[-1] - curve[0])
    return start + (end - start) * curve
