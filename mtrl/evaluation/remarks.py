"""Remarks on an evaluation in words, each with one thing to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from mtrl.config.schema import Config
from mtrl.evaluation.comparison import Comparison
from mtrl.evaluation.results import Result
from mtrl.evaluation.rollouts import Source
from mtrl.scoring.statistics import mcnemar
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


def remarks_on(model: str, result: Result, kind: str, config: Config) -> list[Remark]:
    """Return the remarks on the episodes of the evaluated model, of one kind."""
    said = [
        *_completion(model, result),
        *_budgets(model, result, config),
        *_ranking(model, result),
        *_width(model, result, config, kind),
    ]
    return [*remarks_on_other(model, result, kind), *(replace(remark, kind=kind) for remark in said)]


def remarks_on_other(model: str, result: Result, kind: str) -> list[Remark]:
    """Return the remarks on a model that is compared with the evaluated one. They concern the fairness of the
    comparison."""
    said = [*_failures(model, result), *_foothold(model, result), *_generosity(model, result)]
    return [replace(remark, kind=kind) for remark in said]


def remarks_on_comparisons(found: Sequence[Comparison]) -> list[Remark]:
    return [remark for comparison in found for remark in _difference(comparison)]


def gravest_first(remarks: Iterable[Remark]) -> list[Remark]:
    """Sort the remarks by level, and keep only the gravest remark per model and topic, because greedy and sampled
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
            f"Not shown here. These {rows} rows are of the train split, which training may have seen: the numbers tell "
            "how well the task was learnt, not how well it carries over. Use evaluation.split=test."
        )
    if split == "validation":
        return (
            f"These {rows} rows were not trained on, but checkpoints may have been chosen by them, which makes the "
            "numbers a little too good. Use evaluation.split=test for the number to report."
        )
    head = f"These {rows} rows are of the test split, which is never trained on"
    if _is_chosen(source) and not validation_rows:
        return (
            f"{head}, but the run was evaluated on them as well, and a checkpoint that was chosen by that looks a "
            "little too good here. Compare with the end of the run, or set data.validation_rows in the next one."
        )
    if source.kind in ("endpoint", "hub", "folder"):
        head += " here (whether this model has met them elsewhere, nobody here can tell)"
    return (
        f"{head}: the success rate is what to expect of new rows like them. It says nothing about rows of another kind."
    )


def _is_chosen(source: Source) -> bool:
    """Whether the user named this checkpoint and did not ask for the newest."""
    path = Path(source.text)
    return source.kind == "checkpoint" and path.parent.name == "checkpoints" and path.name != "latest"


NO_SCORER = (
    "No. This task has no scorer of its own: success is a reward sum of at least 1, so whatever deceives the reward "
    "counts as success here as well. Give the environment a score, which reads the trajectory in its own way."
)
"""Answer to the second question if the task has no scorer, so the reward judges itself."""


def independence(result: Result) -> str:
    """Return the answer to the second question: whether a judge other than the reward confirms the success."""
    agreement = result.agreement
    head = (
        "Success is judged by the task's scorer, which shares no code with the reward. On these episodes the two agree "
        f"on {percent(agreement.agree.value)}: "
    )
    if not agreement.lenient and not agreement.strict:
        return head + "there is no episode that one of them calls solved and the other does not."
    return (
        head
        + f"the reward calls {_count(agreement.lenient, 'episode')} solved that the scorer does not (lenient), and "
        f"misses {agreement.strict} that the scorer does (strict)."
    )


# -- one model -------------------------------------------------------------------------------------------------------


def _failures(model: str, result: Result) -> Iterator[Remark]:
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
            "See the first line of the error of these trajectories, mend the cause, and evaluate again.",
        )


def _foothold(model: str, result: Result) -> Iterator[Remark]:
    if result.success.value == 0:
        yield Remark(
            Level.PROBLEM,
            "foothold",
            model,
            f"No episode of {result.episodes} was solved (success is at most {percent(result.success.high)}). Training "
            "from here has nothing to reinforce: groups in which nobody succeeds give no gradient.",
            "Give easier rows, a warm start on demonstrations, or a stronger base model, before any training.",
        )


def _generosity(model: str, result: Result) -> Iterator[Remark]:
    agreement = result.agreement
    if agreement.lenient > agreement.strict and mcnemar(agreement.lenient, agreement.strict) < SURE:
        yield Remark(
            Level.PROBLEM,
            "generosity",
            model,
            f"The reward is more generous than the scorer: it calls {percent(agreement.claims)} of the episodes "
            f"solved, the scorer {percent(result.success.value)}. A policy learns whatever the difference pays for.",
            "Tighten the reward's parser until it agrees on the disagreements below; python -m mtrl.rescore tells.",
        )
    elif agreement.lenient:
        yield Remark(
            Level.CAUTION,
            "generosity",
            model,
            f"The reward calls {_count(agreement.lenient, 'episode')} of {result.episodes} solved that the scorer does "
            "not: what is paid so is what a policy comes to exploit.",
            "Read the disagreements below, and decide for each which of the two is right.",
        )
    if agreement.strict > agreement.lenient and mcnemar(agreement.lenient, agreement.strict) < SURE:
        yield Remark(
            Level.CAUTION,
            "severity",
            model,
            f"The reward misses {_count(agreement.strict, 'episode')} of {result.episodes} that the scorer calls "
            "solved: success that is not paid is not learnt.",
            "Let the reward accept what the scorer accepts, or set evaluation.claim_threshold to what it pays then.",
        )


def _completion(model: str, result: Result) -> Iterator[Remark]:
    """Low completion with high success is a problem of budgets; the reverse is a problem of the reward."""
    success, completion = result.success.value, result.completion.value
    if success and completion < FEW_FINISH and success >= NEARLY_ALL * completion:
        yield Remark(
            Level.PROBLEM,
            "completion",
            model,
            f"Only {percent(completion)} of the episodes finish, and success ({percent(success)}) is nearly as high: "
            "what holds it back is finishing, not knowing.",
            _widest_limit(result),
        )
    elif completion >= 0.9 and success < FEW_SOLVED:
        yield Remark(
            Level.CAUTION,
            "answers",
            model,
            f"{percent(completion)} of the episodes finish, but only {percent(success)} are solved: the agent answers, "
            "and answers wrong.",
            "Look at what the reward pays such episodes, and redesign it so that a wrong answer is worth less.",
        )


def _widest_limit(result: Result) -> str:
    limits = {
        "Raise generator.max_turns: turns that ran out cut most of the others.": result.budgets.out_of_turns,
        "Raise the max_generate_length of the sampling: tokens per turn cut most of the others.": (
            result.stops.get("turn_token_limit", 0) / result.episodes
        ),
        "Raise generator.max_context_length: a full context cut most of the others.": result.budgets.out_of_context,
    }
    return max(limits, key=limits.__getitem__)


def _budgets(model: str, result: Result, config: Config) -> Iterator[Remark]:
    budgets = result.budgets
    if budgets.out_of_turns > OUT_OF_TURNS_SHARE:
        yield Remark(
            Level.CAUTION,
            "turns",
            model,
            f"{percent(budgets.out_of_turns)} of the episodes used up generator.max_turns={config.generator.max_turns} "
            f"without a final answer; more than {OUT_OF_TURNS_SHARE:.0%} is a sign that the budget decides.",
            "Set generator.max_turns to half as many again as a person takes.",
        )
    if budgets.at_token_cap > TOKEN_CAP_SHARE:
        yield Remark(
            Level.CAUTION,
            "tokens",
            model,
            f"{percent(budgets.at_token_cap)} of the episodes have a turn that the limit of tokens per turn cut; more "
            f"than {TOKEN_CAP_SHARE:.0%} is a sign that responses do not fit.",
            "Raise generator.sampling_params.max_generate_length (and that of eval_sampling_params, if it is set).",
        )
    if budgets.out_of_context > TOKEN_CAP_SHARE:
        yield Remark(
            Level.CAUTION,
            "context",
            model,
            f"{percent(budgets.out_of_context)} of the episodes ended because the context was full.",
            "Raise generator.max_context_length, or let the environment say less.",
        )


def _ranking(model: str, result: Result) -> Iterator[Remark]:
    ranking = result.agreement.ranking
    if ranking is not None and ranking < POOR_RANKING:
        yield Remark(
            Level.CAUTION,
            "ranking",
            model,
            f"The reward ranks a solved episode above an unsolved one in only {percent(ranking)} of the pairs (50% is "
            "a coin): what training climbs is not what the scorer measures.",
            "Give the outcome more weight than everything else that is paid.",
        )


def _width(model: str, result: Result, config: Config, kind: str) -> Iterator[Remark]:
    rate = result.success
    width = rate.high - rate.low
    rows = _rows_key(kind)
    if result.rows < FEW:
        yield Remark(
            Level.CAUTION,
            "interval",
            model,
            f"{_count(result.rows, 'row')} are few: success is somewhere between {percent(rate.low)} and "
            f"{percent(rate.high)}, and a single row moves it by {percent(1 / result.rows)}.",
            f"Set {rows} to 200 or more.",
        )
    elif width > WIDE:
        needed = int(result.rows * (width / WIDE) ** 2 / 50 + 1) * 50
        yield Remark(
            Level.NOTE,
            "interval",
            model,
            f"The interval of success is {100 * width:.0f} points wide ({percent(rate.low)} to {percent(rate.high)}): "
            "quote it with the rate.",
            f"For one of {100 * WIDE:.0f} points, set {rows} to about {needed}.",
        )


# -- two models ------------------------------------------------------------------------------------------------------


def _difference(c: Comparison) -> Iterator[Remark]:
    if c.left_out:
        yield Remark(
            Level.CAUTION,
            "pairs",
            c.model,
            f"{_count(c.left_out, 'row')} could not be compared with {c.other} ({c.kind}): one of the two has no "
            "episode of them that did not fail.",
            "Mend the failures and evaluate again; the comparison is of the rows that both played.",
        )
    interval = f"{points(c.difference.low)} to {points(c.difference.high)}"
    if c.p_adjusted >= SURE and (c.difference.low > 0 or c.difference.high < 0):
        yield Remark(
            Level.NOTE,
            "difference",
            c.model,
            f"The difference to {c.other} ({c.kind}) is on the edge: {points(c.difference.value)} points ({interval}), "
            f"but p = {c.p_adjusted:.2g}.",
            f"Set {_rows_key(c.kind)} higher before you rely on it.",
        )
    elif c.p_adjusted >= SURE:
        yield Remark(
            Level.NOTE,
            "difference",
            c.model,
            f"No difference to {c.other} is shown ({c.kind}): {points(c.difference.value)} points, and anything from "
            f"{interval} fits these {c.rows} rows. That is not proof that they are alike.",
            f"To see smaller differences, set {_rows_key(c.kind)} higher.",
        )
    elif c.difference.value < 0:
        yield Remark(
            Level.PROBLEM,
            "difference",
            c.model,
            f"It is worse than {c.other} ({c.kind}): {points(c.difference.value)} points ({interval}).",
            "Read the rows that it broke, and go back to a checkpoint from before.",
        )


def points(difference: float) -> str:
    """Format a difference of rates in percentage points."""
    return f"{100 * difference + 0.0:+.1f}"


def _rows_key(kind: str) -> str:
    return "evaluation.rows" if kind == "greedy" else "evaluation.sampled_rows"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
