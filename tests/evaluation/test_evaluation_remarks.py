"""Remarks appear where they hold, are absent where they do not, and each has a fix."""

from dataclasses import replace

import pytest

from mtrl.evaluation.comparison import comparisons
from mtrl.evaluation.remarks import (
    Level,
    Remark,
    generalisation,
    independence,
    most_severe_first,
    remarks_on,
    remarks_on_comparisons,
    remarks_on_other,
)
from mtrl.evaluation.results import result_of
from mtrl.evaluation.rollouts import Source
from mtrl.types import StopReason
from tests.evaluation.made import config_of, family_of, groups_of, made_episode, scored


def result(episodes, kind="greedy"):
    return result_of(groups_of(episodes), kind, config_of().evaluation, family_of())


def remarks_of(episodes, kind="greedy"):
    return {remark.topic: remark for remark in remarks_on("new", result(episodes, kind), kind, config_of())}


def quiet(solved=380, unsolved=20):
    return scored([1] * solved + [0] * unsolved)


def test_a_good_evaluation_gets_no_remark():
    assert remarks_of(quiet()) == {}


def test_few_rows_and_a_wide_interval():
    assert "7 rows are few" in remarks_of(scored([1, 0] * 3 + [1]))["interval"].text
    wide = remarks_of(scored([1, 0] * 50))["interval"]
    assert wide.level == Level.NOTE and "20 points wide" not in wide.text and "19 points wide" in wide.text
    needed = int(wide.change.rpartition(" ")[2].rstrip("."))
    again = result(scored([1, 0] * (needed // 2)))
    assert again.success.high - again.success.low <= 0.101
    assert "evaluation.sampled_rows" in remarks_of(scored([1, 0] * 50), "sampled")["interval"].change


def test_an_evaluation_without_success_gets_a_remark():
    remark = remarks_of(scored([0] * 100))["foothold"]
    assert remark.level == Level.PROBLEM and "nothing to reinforce" in remark.text
    assert "foothold" not in remarks_of(scored([1] + [0] * 99))


def test_a_generous_reward():
    lenient = [made_episode(score=0.0, reward=1.0) for _ in range(12)]
    remark = remarks_of([*quiet(), *lenient])["generosity"]
    assert remark.level == Level.PROBLEM and "more generous than the scorer" in remark.text
    assert remarks_of([*quiet(), *lenient[:2]])["generosity"].level == Level.CAUTION
    strict = [made_episode(score=1.0, reward=0.0) for _ in range(12)]
    assert "not learnt" in remarks_of([*quiet(), *strict])["severity"].text
    assert "severity" not in remarks_of([*quiet(), *strict[:2]])


def test_low_completion_with_high_success_is_a_problem_of_budgets():
    cut = [made_episode(stop=StopReason.MAX_TURNS) for _ in range(200)]
    remark = remarks_of([*scored([1] * 200), *cut])["completion"]
    assert "generator.max_turns" in remark.change
    for episode in cut:
        episode.stop_reason = StopReason.CONTEXT_LIMIT
    assert "max_context_length" in remarks_of([*scored([1] * 200), *cut])["completion"].change


def test_episodes_that_end_without_an_answer_are_no_matter_of_a_limit():
    silent = [made_episode() for _ in range(200)]
    for episode in silent:
        episode.answered = False
    change = remarks_of([*scored([1] * 200), *silent])["completion"].change
    assert "form of the answer" in change and "Raise" not in change


def test_answers_are_wrong():
    assert "redesign" in remarks_of(quiet(40, 360))["answers"].change
    assert "answers" not in remarks_of(quiet(380, 20))


@pytest.mark.parametrize(
    ("topic", "share", "episode"),
    [
        ("turns", 0.10, {"stop": StopReason.MAX_TURNS}),
        ("tokens", 0.05, {"cut": True}),
        ("context", 0.05, {"stop": StopReason.CONTEXT_LIMIT}),
    ],
)
def test_budgets_are_reported_from_their_threshold_on(topic, share, episode):
    at = round(400 * share)
    assert topic not in remarks_of([*quiet(400 - at, 0), *(made_episode(score=1.0, **episode) for _ in range(at))])
    assert topic in remarks_of([*quiet(399 - at, 0), *(made_episode(score=1.0, **episode) for _ in range(at + 1))])


def test_a_reward_that_ranks_badly():
    assert "chance" in remarks_of([*(made_episode(score=1.0, reward=0.2) for _ in range(200)), *quiet(0, 0), *(
        made_episode(score=0.0, reward=0.2) for _ in range(200))])["ranking"].text  # fmt: skip


def test_failures():
    lost = [made_episode(stop=StopReason.TIMEOUT, error="x") for _ in range(2)]
    remark = remarks_of([*quiet(), *lost])["failures"]
    assert remark.level == Level.CAUTION and "2 episodes of 402 failed (2 timeout)" in remark.text
    assert "success is 95.0%, and would be 94.5% with them" in remark.text
    assert remarks_of([*quiet(), *lost * 20])["failures"].level == Level.PROBLEM


def test_other_models_get_remarks_only_on_the_fairness_of_the_comparison():
    others = remarks_on_other("base", result(scored([0] * 10)), "greedy")
    assert [(remark.topic, remark.about) for remark in others] == [("foothold", "base, greedy")]


def test_what_the_test_split_does_not_show_of_a_model():
    def generalised(kind, text, validation_rows=0):
        return generalisation("test", 5, Source(kind, "new", text), validation_rows)

    for name in ("best", "step_000020"):
        assert "a checkpoint that was chosen by that" in generalised("checkpoint", f"RUN/checkpoints/{name}")
        assert "chosen" not in generalised("checkpoint", f"RUN/checkpoints/{name}", 8)
    assert "chosen" not in generalised("checkpoint", "RUN/checkpoints/latest") + generalised("checkpoint", "RUN")
    assert "elsewhere is unknown" in generalised("endpoint", "m@http://h/v1") and "unknown" not in generalised(
        "base", "base"
    )


def compared(mine, theirs):
    return comparisons("new", groups_of(mine), [("old", groups_of(theirs))], "greedy", config_of().evaluation)


def test_differences():
    assert remarks_on_comparisons(compared(scored([1] * 20), scored([0] * 20))) == []
    (same,) = remarks_on_comparisons(compared(scored([1, 0] * 20), scored([0, 1] * 20)))
    assert same.level == Level.NOTE and "does not show that the models are equal" in same.text
    (edge,) = remarks_on_comparisons(compared(scored([1] * 5 + [0] * 15), scored([0] * 20)))
    assert "borderline" in edge.text and "p = 0.062" in edge.text
    (worse,) = remarks_on_comparisons(compared(scored([0] * 20), scored([1] * 20)))
    assert worse.level == Level.PROBLEM and worse.text.startswith("It is worse than old (greedy): -100.0 points")
    mine = scored([1] * 20)
    mine[0].stop_reason = StopReason.ENV_ERROR
    (missing,) = remarks_on_comparisons(compared(mine, scored([0] * 20)))
    assert missing.topic == "pairs" and missing.text.startswith("1 row could not")


@pytest.mark.parametrize("is_new", [True, False])
def test_few_large_changes_against_many_small_ones_show_no_difference(is_new):
    """The sign test finds more rows won, and the mean has the other sign: neither model is called worse."""
    often = [scored([1] * 6 + [0] * 4) for _ in range(30)] + [scored([0] * 10) for _ in range(8)]
    seldom = [scored([1] * 5 + [0] * 5) for _ in range(30)] + [scored([1] * 10) for _ in range(8)]
    mine, theirs = (groups_of(rows, "sampled") for rows in ((often, seldom) if is_new else (seldom, often)))
    found = comparisons("new", mine, [("old", theirs)], "sampled", config_of().evaluation)
    (remark,) = remarks_on_comparisons(found)
    won, lost = (30, 8) if is_new else (8, 30)
    assert remark.level == Level.CAUTION and f"on {won} rows and worse on {lost} (p = 0.00047)" in remark.text
    assert f"differs by {'-' if is_new else '+'}13.2 points" in remark.text


def test_the_most_severe_remark_is_first_and_none_is_repeated():
    few = remarks_of(scored([0] * 4))
    remarks = most_severe_first([*few.values(), *few.values(), replace(few["interval"], model="old")])
    levels = [list(Level).index(remark.level) for remark in remarks]
    assert levels == sorted(levels)
    assert len(remarks) == len(few) + 1
    assert all(remark.text and remark.change for remark in remarks)


def test_the_more_severe_of_two_remarks_on_a_topic_stays():
    few = Remark(Level.CAUTION, "failures", "new", "1 of 100", "mend", "greedy")
    many = replace(few, level=Level.PROBLEM, text="50 of 100", kind="sampled")
    assert most_severe_first([few, many]) == [many]


def test_the_two_questions_are_answered_separately():
    end = Source("export", "new", "RUN", "RUN/export")
    assert "never trained on: the success rate is what to expect" in generalisation("test", 5, end, 0)
    assert "may have seen" in generalisation("train", 5, end, 0)
    assert "slightly too high" in generalisation("validation", 5, end, 8)
    assert "no episode is solved for one of them" in independence(result(scored([1, 0])))
    odd = independence(
        result([made_episode(score=0.0, reward=1.0), made_episode(score=1.0, reward=0.0), *scored([1, 1])])
    )
    assert "agree on 50.0%" in odd and "counts 1 episode as solved" in odd and "misses 1" in odd
