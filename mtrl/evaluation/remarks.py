"""Remarks on an evaluation in words, each with one thing to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from mtrl.config.schema import Config
from mtrl.evaluation.comparison import ModelComparison
from mtrl.evaluation.results import ModelResult
from mtrl.evaluation.rollouts import Source
from mtrl.scoring.measures import is_completed, is_cut
from mtrl.scoring.statistics import mcnemar
from mtrl.types import StopReason, Trajectory
from mtrl.utils.text import percent

WIDE = 0.10
"""Width of an interval above which its rate should not be quoted without the interval."""
FEW = 30
"""Number of rows below which one row changes the rate by more than three points."""
TOKEN_CAP_SHARE, OUT_OF_TURNS_SHARE = 0.05, 0.10
"""Largest allowed shares of episodes that reach the limit of tokens per turn, and the limit of turns."""
NEARLY_ALL, FEW_FINISH, FEW_SOLVED = 0.8, 0.8, 0.3
POOR_RANKING = 0.8
SURE = 0.05


class Level(StrEnum):
    PROBLEM = "problem"
    CAUTION = "caution"
    NOTE = "note"


@dataclass(frozen=True)
class Remark:
    """One or two sentences, and the recommended change."""

    level: Level
    topic: str
    """failures | foothold | generosity | severity | completion | answers | turns | tokens | context | ranking |
    interval | pairs | difference"""
    model: str
    """Label of the model that the remark is about."""
    text: str
    change: str
    kind: str = ""
    """greedy | sampled; empty if the text names the kind."""

    @property
    def about(self) -> str:
        return f"{self.model}, {self.kind}" if self.kind else self.model


def remarks_on(model: str, result: ModelResult, kind: str, config: Config) -> list[Remark]:
    """Return the remarks on the episodes of the evaluated model, of one kind."""
    remarks = [
        *_completion(model, result),
        *_budgets(model, result, config),
        *_ranking(model, result),
        *_width(model, result, config, kind),
    ]
    return [*remarks_on_other(model, result, kind), *(replace(remark, kind=kind) for remark in remarks)]


def remarks_on_other(model: str, result: ModelResult, kind: str) -> list[Remark]:
    """Return the remarks on a model that is compared with the evaluated one. They concern the fairness of the
    comparison."""
    remarks = [*_failures(model, result), *_foothold(model, result), *_generosity(model, result)]
    return [replace(remark, kind=kind) for remark in remarks]


def remarks_on_comparisons(found: Sequence[ModelComparison]) -> list[Remark]:
    return [remark for comparison in found for remark in _difference(comparison)]


def most_severe_first(remarks: Iterable[Remark]) -> list[Remark]:
    """Sort the remarks by level, and return only the most severe remark per model and topic, because greedy and sampled
    episodes often show the same."""
    first: dict[tuple[str, str, str], Remark] = {}
    for remark in sorted(remarks, key=lambda remark: list(Level).index(remark.level)):
        about = remark.text if remark.topic in ("pairs", "difference") else ""
        first.setdefault((remark.model, remark.topic, about), remark)
    return list(first.values())


def generalisation(split: str, rows: int, source: Source, validation_rows: int) -> str:
    """Return the answer to the first of the two questions: whether the success rate holds for new rows, as far as split
    and model show."""
    if split == "train":
        return (
            f"Not shown here. These {rows} rows are of the train split, which training may have seen: the numbers show "
            "how well the task was learnt, not how well it generalises. Use evaluation.split=test."
        )
    if split == "validation":
        return (
            f"These {rows} rows were not trained on, but checkpoints may have been chosen by them, which makes the "
            "numbers slightly too high. Use evaluation.split=test for the number to report."
        )
    head = f"These {rows} rows are of the test split, which is never trained on"
    if _is_chosen(source) and not validation_rows:
        return (
            f"{head}, but the run was evaluated on them as well, and a checkpoint that was chosen by that looks "
            "slightly too good here. Compare with the last checkpoint, or set data.validation_rows in the next run."
        )
    if source.kind in ("endpoint", "hub", "folder"):
        head += " here (whether this model was trained on them elsewhere is unknown)"
    return f"{head}: the success rate is what to expect of new rows like them. It does not cover rows of another kind."


def _is_chosen(source: Source) -> bool:
    """Whether the user named this checkpoint and not the newest one."""
    path = Path(source.text)
    return source.kind == "checkpoint" and path.parent.name == "checkpoints" and path.name != "latest"


NO_SCORER = (
    "No. This task has no scorer of its own: success is a reward sum of at least 1, so an episode that "
    "exploits the reward counts as success as well. Give the environment a `score` that judges the trajectory itself."
)
"""Answer to the second question if the task has no scorer, so the reward judges itself."""


def independence(result: ModelResult) -> str:
    """Return the answer to the second question: whether a judge other than the reward confirms the success."""
    agreement = result.agreement
    head = (
        "Success is judged by the task's scorer, which shares no code with the reward. On these episodes the two agree "
        f"on {percent(agreement.agree.value)}: "
    )
    if not agreement.lenient and not agreement.strict:
        return head + "no episode is solved for one of them and not for the other."
    return (
        head
        + f"the reward counts {_count(agreement.lenient, 'episode')} as solved that the scorer does not (lenient), and "
        f"misses {agreement.strict} that the scorer counts as solved (strict)."
    )


# -- one model -------------------------------------------------------------------------------------------------------


def _failures(model: str, result: ModelResult) -> Iterator[Remark]:
    lost = sum(result.failures.values())
    if lost:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(result.failures.items()))
        yield Remark(
            Level.CAUTION if lost < 0.05 * (result.episodes + lost) else Level.PROBLEM,
            "failures",
            model,
            f"{_count(lost, 'episode')} of {result.episodes + lost} failed ({why}) and {'is' if lost == 1 else 'are'} "
            f"left out of all rates: success is {percent(result.success.value)}, and would be "
            f"{percent(result.success_with_failures)} with {'it' if lost == 1 else 'them'} as not solved.",
            "See the first line of the error of these trajectories, fix the cause, and evaluate again.",
        )


def _foothold(model: str, result: ModelResult) -> Iterator[Remark]:
    if result.success.value == 0:
        yield Remark(
            Level.PROBLEM,
            "foothold",
            model,
            f"No episode of {result.episodes} was solved (success is at most {percent(result.success.high)}). Training "
            "from here has nothing to reinforce: groups without a success give no gradient.",
            "Give easier rows, a warm start on demonstrations, or a stronger base model, before any training.",
        )


def _generosity(model: str, result: ModelResult) -> Iterator[Remark]:
    agreement = result.agreement
    if agreement.lenient > agreement.strict and mcnemar(agreement.lenient, agreement.strict) < SURE:
        yield Remark(
            Level.PROBLEM,
            "generosity",
            model,
            f"The reward is more generous than the scorer: it counts {percent(agreement.claims)} of the episodes "
            f"as solved, the scorer {percent(result.success.value)}. A policy learns to exploit the difference.",
            "Make the reward's parser reject the disagreements below, and check it with mtrl rescore.",
        )
    elif agreement.lenient:
        yield Remark(
            Level.CAUTION,
            "generosity",
            model,
            f"The reward counts {_count(agreement.lenient, 'episode')} of {result.episodes} as solved that the scorer "
            "does not: a policy learns to exploit this.",
            "Read the disagreements below, and decide for each which of the two is right.",
        )
    if agreement.strict > agreement.lenient and mcnemar(agreement.lenient, agreement.strict) < SURE:
        yield Remark(
            Level.CAUTION,
            "severity",
            model,
            f"The reward misses {_count(agreement.strict, 'episode')} of {result.episodes} that the scorer counts "
            "as solved: success without a reward is not learnt.",
            "Let the reward accept what the scorer accepts, or set evaluation.claim_threshold to the reward of such "
            "episodes.",
        )


def _completion(model: str, result: ModelResult) -> Iterator[Remark]:
    """Low completion with high success is a problem of budgets; the reverse is a problem of the reward."""
    success, completion = result.success.value, result.completion.value
    if success and completion < FEW_FINISH and success >= NEARLY_ALL * completion:
        yield Remark(
            Level.PROBLEM,
            "completion",
            model,
            f"Only {percent(completion)} of the episodes finish, and success ({percent(success)}) is nearly as high: "
            "episodes fail because they do not finish, not because answers are wrong.",
            _widest_limit(result),
        )
    elif completion >= 0.9 and success < FEW_SOLVED:
        yield Remark(
            Level.CAUTION,
            "answers",
            model,
            f"{percent(completion)} of the episodes finish, but only {percent(success)} are solved: the agent "
            "answers, and the answers are wrong.",
            "Look at the rewards of such episodes, and redesign the reward so that a wrong answer earns less.",
        )


def _widest_limit(result: ModelResult) -> str:
    """Return the change for the most frequent cause of an episode without an answer that the task can read."""
    unfinished = [e.trajectory for e in result.seen if not is_completed(e.trajectory)]
    ((change, _),) = Counter(map(_change_for, unfinished)).most_common(1)
    return change


def _change_for(unfinished: Trajectory) -> str:
    if unfinished.stop_reason == StopReason.MAX_TURNS:
        return "Raise generator.max_turns: turns that ran out cut most of the others."
    if unfinished.stop_reason == StopReason.CONTEXT_LIMIT:
        return "Raise generator.max_context_length: a full context cut most of the others."
    if is_cut(unfinished):
        return "Raise the max_generate_length of the sampling: tokens per turn cut most of the others."
    return "Name the form of the answer in the prompt: most of the others ended without a limit and without an answer."


def _budgets(model: str, result: ModelResult, config: Config) -> Iterator[Remark]:
    budgets = result.budgets
    if budgets.out_of_turns > OUT_OF_TURNS_SHARE:
        yield Remark(
            Level.CAUTION,
            "turns",
            model,
            f"{percent(budgets.out_of_turns)} of the episodes used up generator.max_turns={config.generator.max_turns} "
            f"without a final answer; more than {OUT_OF_TURNS_SHARE:.0%} suggests that the budget limits success.",
            "Set generator.max_turns to 1.5 times the turns that a person needs.",
        )
    if budgets.at_token_cap > TOKEN_CAP_SHARE:
        yield Remark(
            Level.CAUTION,
            "tokens",
            model,
            f"{percent(budgets.at_token_cap)} of the episodes have a turn that the limit of tokens per turn cut; more "
            f"than {TOKEN_CAP_SHARE:.0%} suggests that responses need more tokens.",
            "Raise generator.sampling_params.max_generate_length (and that of eval_sampling_params, if it is set).",
        )
    if budgets.out_of_context > TOKEN_CAP_SHARE:
        yield Remark(
            Level.CAUTION,
            "context",
            model,
            f"{percent(budgets.out_of_context)} of the episodes ended because the context was full.",
            "Raise generator.max_context_length, or shorten the observations of the environment.",
        )


def _ranking(model: str, result: ModelResult) -> Iterator[Remark]:
    ranking = result.agreement.ranking
    if ranking is not None and ranking < POOR_RANKING:
        yield Remark(
            Level.CAUTION,
            "ranking",
            model,
            f"The reward ranks a solved episode above an unsolved one in only {percent(ranking)} of the pairs (50% is "
            "chance): training optimises something other than what the scorer measures.",
            "Give the outcome more weight than all other parts of the reward.",
        )


def _width(model: str, result: ModelResult, config: Config, kind: str) -> Iterator[Remark]:
    rate = result.success
    width = rate.high - rate.low
    rows = _rows_key(kind)
    if result.rows < FEW:
        yield Remark(
            Level.CAUTION,
            "interval",
            model,
            f"{_count(result.rows, 'row')} are few: success is between {percent(rate.low)} and "
            f"{percent(rate.high)}, and a single row changes it by {percent(1 / result.rows)}.",
            f"Set {rows} to 200 or more.",
        )
    elif width > WIDE:
        needed = int(result.rows * (width / WIDE) ** 2 / 50 + 1) * 50
        yield Remark(
            Level.NOTE,
            "interval",
            model,
            f"The interval of success is {100 * width:.0f} points wide ({percent(rate.low)} to {percent(rate.high)}): "
            "report it with the rate.",
            f"For one of {100 * WIDE:.0f} points, set {rows} to about {needed}.",
        )


# -- two models ------------------------------------------------------------------------------------------------------


def _difference(c: ModelComparison) -> Iterator[Remark]:
    if c.left_out:
        yield Remark(
            Level.CAUTION,
            "pairs",
            c.model,
            f"{_count(c.left_out, 'row')} could not be compared with {c.other} ({c.kind}): one of the two has no "
            "episode of them that did not fail.",
            "Fix the failures and evaluate again; the comparison covers the rows that both models ran.",
        )
    interval = f"{points(c.difference.low)} to {points(c.difference.high)}"
    shows_sign = c.difference.low > 0 or c.difference.high < 0
    if c.p_adjusted >= SURE and shows_sign:
        yield Remark(
            Level.NOTE,
            "difference",
            c.model,
            f"The difference to {c.other} ({c.kind}) is borderline: {points(c.difference.value)} points ({interval}), "
            f"but p = {c.p_adjusted:.2g}.",
            f"Set {_rows_key(c.kind)} higher before relying on it.",
        )
    elif c.p_adjusted >= SURE:
        yield Remark(
            Level.NOTE,
            "difference",
            c.model,
            f"No difference to {c.other} is shown ({c.kind}): {points(c.difference.value)} points, and any "
            f"difference from {interval} fits these {c.rows} rows. This does not show that the models are equal.",
            f"To see smaller differences, set {_rows_key(c.kind)} higher.",
        )
    elif not shows_sign:  # with several samples per row, few large changes can outweigh many small ones
        yield Remark(
            Level.CAUTION,
            "difference",
            c.model,
            f"It is better than {c.other} ({c.kind}) on {_count(c.paired.wins, 'row')} and worse on {c.paired.losses} "
            f"(p = {c.p_adjusted:.2g}), but success differs by {points(c.difference.value)} points ({interval}): the "
            "rows do not show which of the two succeeds more often.",
            f"Read the rows that changed, and set {_rows_key(c.kind)} higher before relying on it.",
        )
    elif c.difference.value < 0:
        yield Remark(
            Level.PROBLEM,
            "difference",
            c.model,
            f"It is worse than {c.other} ({c.kind}): {points(c.difference.value)} points ({interval}).",
            "Read the rows that are no longer solved, and use an earlier checkpoint.",
        )


def points(difference: float) -> str:
    """Format a difference of rates in percentage points."""
    return f"{100 * difference + 0.0:+.1f}"


def _rows_key(kind: str) -> str:
    return "evaluation.rows" if kind == "greedy" else "evaluation.sampled_rows"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
