"""Results of one model: counted episodes, left-out episodes and their report."""

import pytest

from mtrl.config.schema import EvaluationConfig
from mtrl.evaluation.results import failed, pass_at_k_rates, result_of
from mtrl.scoring.statistics import success_rate
from mtrl.types import StopReason
from tests.evaluation.made import family_of, groups_of, made_episode, scored

CONFIG = EvaluationConfig(pass_k_values=[1, 2, 4])


def greedy(episodes, config=CONFIG, family=None):
    return result_of(groups_of(episodes), "greedy", config, family or family_of())


def lost(stop=StopReason.ENV_ERROR, turns=True):
    trajectory = made_episode("#### 1", score=0.0, stop=stop, error="OSError: down\ntraceback")
    trajectory.score = None
    trajectory.turns = trajectory.turns if turns else []
    return trajectory


@pytest.mark.parametrize("stop", [StopReason.ENV_ERROR, StopReason.TIMEOUT, StopReason.PARSE_ERROR, StopReason.ABORTED])
def test_failed_episodes_are_in_no_rate_and_counted_apart(stop):
    result = greedy([made_episode(score=1.0), made_episode(score=0.0), lost(stop), lost(stop, turns=False)])
    assert (result.success.value, result.success_with_failures) == (0.5, 0.25)
    assert result.failures == {str(stop): 2}
    assert (result.episodes, result.rows, result.stops) == (2, 2, {"done": 2})
    assert result.completion.value == 1.0 and failed(lost(stop))


def test_an_evaluation_of_failed_episodes_has_no_result():
    assert greedy([lost()]) is None and greedy([]) is None


def test_ends_and_budgets():
    result = greedy(
        [
            made_episode(turns=4, stop=StopReason.MAX_TURNS),
            made_episode(turns=2, cut=True, stop=StopReason.TURN_TOKEN_LIMIT),
            made_episode(turns=1, stop=StopReason.CONTEXT_LIMIT),
            made_episode(turns=1),
        ]
    )
    assert vars(result.budgets) == {
        "out_of_turns": 0.25,
        "at_token_cap": 0.25,
        "cut_turns": 0.25,
        "out_of_context": 0.25,
    }
    assert result.stops == {"max_turns": 1, "turn_token_limit": 1, "context_limit": 1, "done": 1}
    assert result.completion.value == 0.25
    assert (result.lengths.turns.mean, result.lengths.turns.max) == (2.0, 4.0)
    assert (result.lengths.response_tokens.p95, result.lengths.episode_tokens.max) == (4.0, 16.0)


def test_a_turn_without_room_is_not_at_the_token_cap():
    """Engines also end such a turn by length, without a token, and the fix is another one."""
    full = made_episode(turns=2, cut=True, tokens=0, stop=StopReason.CONTEXT_LIMIT)
    assert greedy([full]).budgets.at_token_cap == 0.0
    for turn in full.turns:
        turn.metrics = {"completion_tokens": 0.0}  # an endpoint that reports no usage
    assert greedy([full]).budgets.at_token_cap == 1.0


def test_reward_and_score_are_compared():
    pairs = [(1.0, 1.0), (1.0, 0.2), (0.0, 1.0), (0.0, 1.5), (0.0, 0.0)]
    agreement = greedy([made_episode(score=s, reward=r) for s, r in pairs]).agreement
    assert (agreement.lenient, agreement.strict, agreement.claims) == (2, 1, 0.6)
    assert agreement.agree.value == 0.4
    assert agreement.ranking == pytest.approx((0.5 + 0 + 1 + 0 + 0 + 1) / 6)
    assert greedy(scored([1, 1])).agreement.ranking is None


def test_samples_of_a_row_are_one_cluster():
    rows = [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
    result = result_of(groups_of(scored(rows), "sampled"), "sampled", CONFIG, family_of())
    assert result.success == success_rate([[1.0] * 4, [0.0] * 4, [1.0] * 4])
    assert result.success.effective_samples == 3
    assert [(each.k, each.rate.value, each.rows) for each in result.pass_at_k] == [
        (k, pytest.approx(2 / 3), 3) for k in (1, 2, 4)
    ]


def test_rows_with_too_few_samples_are_in_no_pass_at_k():
    assert [(e.k, e.rate.value, e.rows) for e in pass_at_k_rates([[1, 0], [0]], [1, 2, 3], 0.95)] == [
        (1, 0.25, 2),
        (2, 1.0, 1),
    ]


def test_measures_of_the_family():
    result = greedy([made_episode("#### 7"), made_episode("hm"), made_episode("seven ####")])
    assert result.measures.format.value == pytest.approx(2 / 3)
    assert result.measures.fields["number"].value == pytest.approx(1 / 3)
    assert result.measures.field_accuracy.value == pytest.approx(1 / 3)
    assert result.measures.others == {}
    assert greedy([made_episode()], family=family_of(None)).measures.format is None


def test_a_key_that_fits_some_rows_is_over_those():
    family = family_of(lambda trajectory, row: {"executes": 1.0} if row["id"] == "row0" else {"format": 0.0})
    measures = greedy([made_episode(), made_episode()], family=family).measures
    assert measures.others["executes"].value == 1.0 and measures.format.value == 0.0
