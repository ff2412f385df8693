"""Rules for the policy: agreement of engine and trainer, staleness of tokens, and entropy."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.stats import running_mean
from mtrl.diagnose.views import (
    ENTROPY,
    REWARD,
    between_last,
    from_to,
    is_solved,
    known,
    level,
    over_the_run,
    propose,
    recent,
)
from mtrl.utils.text import short

DRIFT, STALE = "analysis/logprob_drift/mean", "analysis/staleness/mean"
MUCH_DRIFT, TOO_MUCH_DRIFT = 0.03, 0.1
"""Drift in nats per token: for a warning, and for an alarm. Bfloat16 with different kernels gives about 0.01."""


@rule("R016", windows=0.4)
def logprob_drift(record: Record) -> Finding | None:
    """Engine and trainer disagree on the log-probabilities of the tokens that are trained."""
    drift = recent(record, DRIFT)
    if drift is None or drift.value - 2 * drift.error < MUCH_DRIFT:
        return None
    sampling = "generator.sampling_params"
    found = []
    if float(record.setting(f"{sampling}.top_p")) < 1 or int(record.setting(f"{sampling}.top_k")) > 0:
        found.append(
            propose("sample from the whole distribution, which is what is trained",
                    generator__sampling_params__top_p=1.0, generator__sampling_params__top_k=-1)
        )  # fmt: skip
    if record.setting("model.dtype") != "float32":
        found.append(propose("more digits", model__dtype="float32"))
    found.append(
        propose("correct what they disagree on", algorithm__loss_anchor="old", algorithm__off_policy_correction="tis")
    )
    return Finding(
        severity=Severity.ALARM if drift.value >= TOO_MUCH_DRIFT else Severity.WARNING,
        title=f"Log-probs of engine and trainer differ by {short(drift.value)} nats a token",
        evidence=known(
            from_to("the drift", change) if (change := over_the_run(record, DRIFT)) else None,
            f"the largest of a step is {short(level(record, 'analysis/logprob_drift/max'))}",
        ),
        metrics=(DRIFT, "analysis/logprob_drift/max", REWARD),
        proposals=tuple(found),
        expect=f"{DRIFT} below {MUCH_DRIFT} from the first step",
    )


@rule("R016", "R151", windows=0.6)
def stale_tokens(record: Record) -> Finding | None:
    """Tokens are sampled by weights several updates old, and the reward falls or many tokens are clipped."""
    age, allowed = recent(record, STALE), int(record.setting("async_config.max_steps_off_policy"))
    if age is None or age.value < 1.5:
        return None
    reward, clipped = between_last(record, REWARD), level(record, "train/clip_frac")
    falls = reward is not None and reward.at_least() < 0
    if not falls and clipped < 0.2:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"Tokens are {short(age.value)} updates old in the mean, and "
        + ("the reward falls" if falls else f"{short(100 * clipped)}% of them are clipped"),
        evidence=known(
            f"async_config.max_steps_off_policy={allowed}", from_to("the reward", reward) if reward else None
        ),
        metrics=(STALE, "train/clip_frac", REWARD),
        proposals=(
            propose("strictly on-policy", async_config__max_steps_off_policy=0),
            propose("half the staleness", async_config__max_steps_off_policy=max(1, allowed // 2)),
        ),
        expect="the reward stops falling within 25 to 50 steps, perhaps at a lower level",
    )


@rule("R154", windows=1.0)
def entropy_collapse(record: Record) -> Finding | None:
    """The policy has become nearly deterministic before it solves the task, and explores no more."""
    change, reward = over_the_run(record, ENTROPY), between_last(record, REWARD)
    if change is None or reward is None or is_solved(record) or reward.at_least(2.0) > 0:
        return None
    if change.after > 0.1 * change.before or change.at_least() >= 0:
        return None
    high = float(record.setting("algorithm.clip_high_threshold"))
    lr = float(record.setting("trainer.optimizer.lr"))
    found: list[Proposal] = []
    if record.setting("algorithm.loss_fn") in ("ppo", "regular") and high < 1.28:
        found.append(propose("a wider clip range for rare tokens", algorithm__clip_high_threshold=1.28))
    found.append(propose("a reward for entropy", algorithm__entropy_coef=0.001))
    found.append(propose("half the learning rate", trainer__optimizer__lr=lr / 2))
    return Finding(
        severity=Severity.WARNING,
        title=f"Entropy has fallen to {short(change.after)} nats per token, a tenth of its first value, and the reward "
        "does not rise",
        evidence=(from_to("entropy", change), from_to("the reward of the last two windows", reward)),
        metrics=(ENTROPY, REWARD),
        proposals=tuple(found),
        expect="entropy stays above a tenth of its first value, and the reward rises within 25 to 50 steps",
    )


@rule("R154", "R153", windows=1.0)
def entropy_explosion(record: Record) -> Finding | None:
    """The policy becomes more and more random while the reward does not rise."""
    values = record.series(ENTROPY).values
    change, reward = over_the_run(record, ENTROPY), between_last(record, REWARD)
    now = recent(record, ENTROPY)
    if change is None or reward is None or now is None or len(values) < 2 * record.window or is_solved(record):
        return None
    lowest = float(running_mean(values[: -record.window], 5).min())
    grows = now.value - 3 * now.error > max(2.0 * lowest, 0.2) and now.value > change.before
    late = between_last(record, ENTROPY)
    if not grows or late is None or late.at_least() <= 0 or reward.at_least(2.0) > 0:
        return None
    lr = float(record.setting("trainer.optimizer.lr"))
    loss, low = record.setting("algorithm.loss_fn"), float(record.setting("algorithm.clip_low_threshold"))
    found = []
    if loss not in ("ppo", "regular") or low < 0.8:
        found.append(
            propose("the bounded loss with its safe thresholds", algorithm__loss_fn="ppo",
                    algorithm__clip_low_threshold=0.8, algorithm__clip_high_threshold=1.2)
        )  # fmt: skip
    if float(record.setting("algorithm.entropy_coef")) > 0:
        found.append(propose("no reward for entropy", algorithm__entropy_coef=0.0))
    found.append(propose("half the learning rate", trainer__optimizer__lr=lr / 2))
    found.append(propose("a penalty for leaving the first policy", algorithm__kl_loss_coef=0.01))
    return Finding(
        severity=Severity.WARNING,
        title=f"Entropy grew from {short(lowest)} to {short(now.value)} nats a token while the reward does not rise",
        evidence=(from_to("entropy over the run", change), from_to("the reward of the last two windows", reward)),
        metrics=(ENTROPY, REWARD, "train/grad_norm"),
        proposals=tuple(found),
        expect="entropy stops growing within 25 steps; unchecked, this ends in a collapse",
    )
