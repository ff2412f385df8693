"""Full prompts against the environment: the worked example is rewarded and scored, and every name is accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from mtrl.config.derived import prompt_of
from mtrl.environments.tool_calls import OPEN
from mtrl.environments.worked_example import WorkedExample, read_example
from mtrl.preflight.context import CheckContext, at_most, lacks
from mtrl.preflight.responses import THINKING
from mtrl.preflight.result import CheckResult, failed, passed, skipped
from mtrl.preflight.stage import Script, ScriptedEpisode, scripted
from mtrl.types import Row
from mtrl.utils.images import content_text

FORM = re.compile(r"<([A-Za-z_][\w-]*)>|(?<!#)(####)(?!#)|(\\boxed)|(```\w+)")
"""A tag, or a marker of an answer or of a command."""
CODE_NAME = re.compile(r"[a-z]+[A-Z]\w*|\w*[A-Za-z0-9]_\w+")
"""A word that only code has: `getOrder`, `wiki_search`."""
NAMED = re.compile(r'"name"\s*:\s*"([\w-]+)"')
"""The name of a tool that a prompt describes in JSON."""
WORD = re.compile(r"\w+")
LONGEST_VALUE = 100
"""Maximum length of a text of the ground truth, in characters, that counts as a value of the answer."""
REJECTIONS = ("malformed", "_errors", "failed_commands")
"""Ends of the names of turn metrics that count responses that the environment did not accept."""


def worked_example(context: CheckContext) -> CheckResult:
    """Check that the worked example of each prompt earns the full reward and score, and that the prompt and the
    environment agree on tools and on the forms of responses."""
    shown = _examples(context.all_rows)
    if not shown:
        return skipped(_why_none(context))
    if context.family.worked_example is None:
        return skipped(lacks(context.family, "worked_example"))
    tasks = [(row, example, context.family.worked_example(row)) for row, example in shown]
    scripts = {
        number: Script(task, scripted(example.responses), str(number))
        for number, (_, example, task) in enumerate(tasks)
        if task is not None
    }
    episodes = context.stage.run(scripts.values())
    pairs = [(*tasks[int(episode.label)][:2], episode) for episode in episodes]
    if not pairs:
        return skipped("no worked example can run with these settings and within the time limit")
    problems = [
        f"prompt of row {row['id']}: {problem}"
        for row, example, episode in pairs
        for problem in (*_outcome(context, example, episode), *_names(context, row, example, episode))
    ]
    if problems:
        return failed(
            f"prompt and environment disagree in {len(problems)} places. {at_most(problems, 2)}",
            "write instructions and example with the tools and forms that environment, reward and scorer read",
            problems,
        )
    count = "1 worked example is" if len(pairs) == 1 else f"{len(pairs)} worked examples are"
    return passed(f"{count} rewarded and scored as solved, and the prompts name what the environment accepts")


def _examples(rows: Sequence[Row]) -> list[tuple[Row, WorkedExample]]:
    """Return the different worked examples of the prompts, each with the first row that shows it."""
    found: dict[str, tuple[Row, WorkedExample]] = {}
    for row in rows:
        first = content_text(row["prompt"][0].get("content")) if row["prompt"] else ""
        if first not in found and (example := read_example(row["prompt"][:1])) is not None:
            found[first] = row, example
    return list(found.values())


def _why_none(context: CheckContext) -> str:
    if prompt_of(context.config) == "short":
        return "environment.prompt is short: the tiny policy learns the form of responses from its warm start"
    return "the prompts of these rows have no worked example (see mtrl/environments/worked_example.py)"


def _outcome(context: CheckContext, example: WorkedExample, episode: ScriptedEpisode) -> list[str]:
    """Return what went wrong when the example ran."""
    if episode.error:
        return [f"its example fails: {episode.error}"]
    turns = episode.trajectory.turns
    rejected = [
        f"the environment rejects turn {number} of its example, {turn.text[-60:]!r}"
        for number, turn in enumerate(turns, start=1)
        if any(value and name.endswith(REJECTIONS) for name, value in turn.metrics.items())
    ]
    if len(turns) < len(example.responses):
        rejected.append(f"its example has {len(example.responses)} turns, and the episode ends after {len(turns)}")
    replies = ["".join(texts) for texts in _observations(episode)]
    for shown, given in zip(example.replies[1:], replies, strict=False):
        if _forms([shown]) != _forms([given]):
            rejected.append(f"its example shows the reply {shown[:60]!r}, and the environment replies {given[:60]!r}")
    if not context.succeeds(episode) or not context.claims(episode):
        rejected.append(f"its example gets reward {context.claimed_reward(episode):g} and score {episode.score:g}")
    return rejected


def _names(context: CheckContext, row: Row, example: WorkedExample, episode: ScriptedEpisode) -> list[str]:
    """Return the names that only the instructions, or only the environment, know."""
    gold = next((responses for other, responses in context.gold_responses if other is row), ())
    responses = [*example.responses, *gold]
    replies = [*example.replies, *(text for texts in _observations(episode) for text in texts)]
    used, shown = _forms(responses), _forms([example.instructions])
    used -= {OPEN} if episode.offers_tools else set()  # the chat template describes the notation of calls
    known = used | _forms(replies)
    tools = {tool["name"]: tool for tool in episode.tools}
    texts = [*responses, *replies, json.dumps([*tools.values()], default=str), *_truths(context.all_rows)]
    words = {word for text in texts for word in WORD.findall(text)}
    named = {*NAMED.findall(example.instructions), *CODE_NAME.findall(example.instructions)}
    undescribed = set() if episode.offers_tools else tools.keys() - set(WORD.findall(example.instructions))
    return [
        *(f"responses use {form}, which the instructions do not name" for form in sorted(used - shown)),
        *(f"the instructions name {form}, which nothing uses" for form in sorted(shown - known)),
        *(f"the instructions name {name}, which is no tool, argument or field" for name in sorted(named - words)),
        *(f"the instructions do not describe the tool {name}" for name in sorted(undescribed)),
    ]


def _truths(rows: Sequence[Row]) -> set[str]:
    """Return the keys of all ground truths, and the values that are short texts."""
    truths = [row["ground_truth"] for row in rows]
    values = {v for truth in truths for v in truth.values() if isinstance(v, str) and len(v) <= LONGEST_VALUE}
    return values | {str(key) for truth in truths for key in truth}


def _forms(texts: Iterable[str]) -> set[str]:
    """Return the tags and markers in texts; the tags of thinking do not count."""
    found = {match for text in texts for match in FORM.finditer(text)}
    return {match[0] for match in found if (match[1] or "").lower() not in THINKING}


def _observations(episode: ScriptedEpisode) -> list[list[str]]:
    """Return the texts of the environment's reply to each turn but the last."""
    replies = [turn.observation for turn in episode.trajectory.turns[1:]]
    return [[content_text(message.get("content")) for message in reply] for reply in replies]
