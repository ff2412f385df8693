"""Prerequisites of training: an evaluation, a policy with some success, a reward no more lenient than the scorer."""

from __future__ import annotations

import math

from mtrl.config.model_schema import WarmStartConfig
from mtrl.diagnose.disagreement import baseline_disagreement
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import HELD_OUT, REWARD, SAMPLED, SUCCESS, known, level, propose, rescoring
from mtrl.scoring.statistics import wilson
from mtrl.utils.text import percent, short

FEW = 50
"""Number of held-out episodes below which a 95 % interval is wider than ±14 points."""
ENOUGH = 200
"""Number of held-out episodes for an interval of ±7 points."""


@rule("R101", "R160", windows=0.6)
def no_evaluation(record: Record) -> Finding | None:
    """There is no held-out evaluation, so it is unknown whether the reward means success."""
    if record.has(HELD_OUT):
        return None
    return Finding(
        severity=Severity.NOTE,
        title=f"{record.steps} steps without an evaluation on held-out rows",
        evidence=("rules that compare the training reward with held-out success cannot decide",),
        metrics=(REWARD,),
        proposals=(propose("evaluate every 20 steps", evaluation__every_steps=20, evaluation__before_train=True),),
        expect="val/success/mean every 20 steps",
    )


@rule("R116", windows=1.0)
def small_evaluation(record: Record) -> Finding | None:
    """The held-out set is so small that a change within 25 steps cannot be seen."""
    episodes = record.series("val/episodes").values
    if not len(episodes) or episodes[-1] >= FEW:
        return None
    count = int(episodes[-1])
    low, high = wilson(count / 2, count)
    rows, limits = int(record.setting("evaluation.rows")), _limits_of_rows(record)
    is_whole = count < rows  # the split has no more rows
    more = {key.replace(".", "__"): ENOUGH for key in limits}
    if rows < ENOUGH and (limits or not is_whole):
        more["evaluation__rows"] = ENOUGH
    return Finding(
        severity=Severity.NOTE,
        title=f"Evaluations run {count} held-out episodes: a measured 50% could be {percent(low)} or {percent(high)}",
        metrics=(HELD_OUT,),
        proposals=(propose("a smaller interval", **more),) if more else (),
        advice=f"All {count} held-out rows of the data are in use: add rows to the split of the evaluations."
        if is_whole and (not limits or record.setting("environments"))
        else "",
        expect="an interval of ±7 points",
    )


def _limits_of_rows(record: Record) -> list[str]:
    """Return the keys of `data` that leave fewer than `ENOUGH` rows to the evaluations."""
    keys = ["data.max_test_rows", *([] if record.setting("data.path") else ["data.synthetic_test_rows"])]
    if record.setting("data.validation_rows"):
        keys = ["data.validation_rows"]
    return [key for key in keys if (value := record.setting(key)) is not None and value < ENOUGH]


@rule("R108", "R092", windows=0.2)
def zero_baseline(record: Record) -> Finding | None:
    """The policy never succeeds before training, so there is no success that a reward could reinforce."""
    first = record.series(SUCCESS).first(5).values
    before = [record.series(key) for key in (HELD_OUT, SAMPLED, "val/success/pass_k_1")]
    zero = [float(each.values[0]) for each in before if len(each) and each.steps[0] == 0]
    if len(first) < 5 or not zero or max(zero) > 0 or first.mean() > 1 / record.episodes:
        return None
    if max(level(record, SUCCESS, steps=5), *(float(each.values[-1]) for each in before if len(each))) >= 0.05:
        return None  # the policy has had some success since
    rewarded = level(record, REWARD) > 0.01 * record.unit
    return Finding(
        severity=Severity.WARNING if rewarded else Severity.ALARM,
        title="The policy had no success before training, and has hardly any now",
        evidence=known(
            f"0 successes of {int(record.series('val/episodes').values[0])} held-out episodes at step 0"
            if record.has("val/episodes")
            else None,
            f"{short(float(first.sum()) * record.episodes)} successes among the {5 * record.episodes} rollouts of the "
            "first five steps",
            f"the mean reward is {short(level(record, REWARD))}, so it rewards something else than success"
            if rewarded
            else None,
        ),
        metrics=(SUCCESS, HELD_OUT, REWARD),
        steps=(0, record.step),
        proposals=warmer(record, model__warm_start__max_steps=2 * int(record.setting("model.warm_start.max_steps"))),
        advice="Stop the run and make the task easier: easier rows, a stronger base model, or supervised examples "
        "first (mtrl sft). No reward and no group size replaces a first success.",
        expect="some successes at step 0, which training can increase",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )


def warmer(record: Record, **words: object) -> tuple[Proposal, ...]:
    """Propose a longer warm start until more episodes succeed, with further `words` as for `propose`, or a first one if
    the task has a demonstrator."""
    if record.setting("model.name") != "tiny" and not record.setting("model.warm_start.enabled"):
        why = "imitate the demonstrator of the task until some episodes succeed"
        return (propose(why, model__warm_start__enabled=True),) if has_demonstrator(record) else ()
    low, high = WarmStartConfig.success_band
    if record.setting("model.warm_start.success_band")[0] >= low:  # training rows reached the band, held-out rows not
        low, high = high, (1 + high) / 2
    why = "imitate the demonstrator until more episodes succeed"
    return (propose(why, model__warm_start__success_band=f"[{low:g},{high:g}]", **words),)


def has_demonstrator(record: Record) -> bool:
    """Return whether the task is installed here and has a demonstrator."""
    from mtrl.environments.family import get_family

    try:
        family = get_family(record.setting("environment.name"), record.setting("environment.target"))
        return family.demonstrate is not None
    except Exception:  # the task may not be installed here; the diagnosis continues without it
        return False


@rule("R136", "R095", "R090", windows=0.0)
def lenient_baseline(record: Record) -> Finding | None:
    """The reward counts rollouts of the untrained policy as solved that the scorer rejects: it is too lenient."""
    reward, success = record.series("val/reward/mean"), record.series(HELD_OUT)
    if not len(reward) or not len(success) or reward.steps[0] != 0 or success.steps[0] != 0:
        return None
    share, episodes = _lenient_share(record)
    if not episodes or share * episodes < 3:
        return None
    low, _ = wilson(share * episodes, episodes)
    if low < 0.02:
        return None
    seen = baseline_disagreement(record)
    misfit = seen.fitting_threshold is not None
    return Finding(
        severity=Severity.WARNING,  # `hacked_reward` raises an alarm once the policy exploits it
        title=f"Before training the reward counts {percent(share)} of the rollouts as solved that the scorer rejects",
        evidence=known(
            f"held out at step 0 the mean reward is {short(float(reward.values[0]))} and success "
            f"{percent(float(success.values[0]))}",
            f"every success by the scorer earns at least {short(seen.fitting_threshold)}"
            if seen.fitting_threshold is not None
            else None,
        ),
        metrics=("val/reward/mean", HELD_OUT, "val/lenient_frac"),
        steps=(0, 0),
        proposals=(
            (
                propose(
                    "the reward from which an episode is a success", evaluation__claim_threshold=seen.fitting_threshold
                ),
            )
            if misfit
            else ()
        ),
        advice=""
        if misfit
        else "The parser of the reward accepts answers that the scorer rejects: check tags, field names and several "
        "answers. Make the parser reject them, and rescore these trajectories before training.",
        expect="val/lenient_frac is 0 at step 0",
        look=(f"mtrl view {record.path or 'RUN'}", *rescoring(record, ())),
        witnesses=seen.witnesses,
    )


def _lenient_share(record: Record) -> tuple[float, float]:
    """Return the lenient share of the episodes at step 0 and their number, from the metrics, else from the stored
    trajectories."""
    measured = record.series("val/lenient_frac")
    if len(measured) and measured.steps[0] == 0:
        episodes = record.series("val/episodes")
        return float(measured.values[0]), float(episodes.values[0]) if len(episodes) else 0.0
    seen = baseline_disagreement(record)
    return seen.lenient_share, math.floor(seen.looked_at)
