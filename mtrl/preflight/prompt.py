"""The prompt against the ground truth: the answer format and fields in the prompt are those that the task requires."""

from __future__ import annotations

import re

from mtrl.preflight.context import CheckContext, at_most
from mtrl.preflight.responses import BOXED, TAGGED, THINKING, json_object, parts, tag_names
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.preflight.stage import ScriptedEpisode
from mtrl.types import Message, Row
from mtrl.utils.images import content_text

FIELD = re.compile(r'"([^"\n]{1,60})"\s*:')
OPENED = re.compile(r"<([A-Za-z_][\w-]*)>")


def prompt(context: CheckContext) -> CheckResult:
    """Check that the answer format in the prompt matches the gold response and the ground truth."""
    if reason := context.needs_gold():
        return skipped(reason)
    checked = [(episode, _shown(episode)) for episode in context.solved]
    problems = [f"row {e.row['id']}: {p}" for e, text in checked for p in (*_tags(e, text), *_fields(e, text))]
    if problems:
        return failed(
            f"the prompt shows another answer format than the task requires on {len(problems)} of {len(checked)} rows. "
            f"{problems[0]}",
            "write the example of the prompt in the form that reward and scorer read, with the ground truth's fields",
            problems,
        )
    unused = _unused(checked, [_words(row["prompt"]) for row in context.rows])
    if unused:
        return warned(
            f"every prompt shows tags that neither gold nor the environment uses: {at_most(unused)}",
            "leave them out of the prompt, or correct their spelling",
            unused,
        )
    shows = [text for _, text in checked if tag_names(text) or FIELD.search(text) or "####" in text]
    if not shows:
        return passed(
            f"{len(checked)} prompts show no form of the answer: only a model that was trained on it can know it"
        )
    return passed(f"{len(checked)} prompts show the tags and fields that gold uses and the ground truth holds")


def _shown(episode: ScriptedEpisode) -> str:
    """Return all text before the first response."""
    return _words(episode.trajectory.turns[0].observation)


def _words(messages: list[Message]) -> str:
    return "\n".join(content_text(message.get("content")) for message in messages)


def _tags(episode: ScriptedEpisode, text: str) -> list[str]:
    """Return the mismatches between the tag or marker around gold's last answer and those that the prompt shows, if
    any."""
    final = episode.responses[-1]
    wanted = [tag for tag in tag_names(final) if tag.lower() not in THINKING]
    shown = [tag for tag in OPENED.findall(text) if tag.lower() not in THINKING]
    missing = [tag for tag in wanted[-1:] if shown and tag not in shown]
    found = [f"gold answers in <{tag}>, the prompt shows <{'>, <'.join(dict.fromkeys(shown))}>" for tag in missing]
    markers = {"####": ("####" in text, "####" in final), "\\boxed": ("\\boxed" in text, bool(BOXED.search(final)))}
    for marker, (is_shown, is_used) in markers.items():
        others = [name for name, (also_shown, _) in markers.items() if also_shown and name != marker]
        if is_used and not is_shown and others:
            found.append(f"gold answers with {marker}, the prompt shows {', '.join(others)}")
    return found


def _fields(episode: ScriptedEpisode, text: str) -> list[str]:
    """Return the mismatches between the JSON fields of the prompt's example and gold's, and of gold's and the ground
    truth's."""
    final = episode.responses[-1]
    answer = json_object(parts(final).answer)
    if answer is None:
        return []
    found = []
    shown = _example_fields(text, tag_names(final)[-1:], set(answer))
    if shown and shown != set(answer):
        found.append(f"the example {_difference(shown, set(answer))} compared with gold")
    truth = _truth_fields(episode.row, set(answer))
    if truth and truth != set(answer):
        found.append(f"gold {_difference(set(answer), truth)} compared with the ground truth")
    return found


def _example_fields(text: str, tags: list[str], expected: set[str]) -> set[str]:
    """Return the fields of the JSON in the prompt's answer tag; without JSON there, of all JSON that shares a field
    with gold."""
    inside = [match[2] for match in TAGGED.finditer(text) if match[1] in tags]
    fields = [set(FIELD.findall(example)) for example in inside if FIELD.search(example)]
    if not fields:
        objects = re.findall(r"\{[^{}]*\}", text, re.DOTALL)
        fields = [found for found in (set(FIELD.findall(o)) for o in objects) if found & expected]
    return set().union(*fields)


def _truth_fields(row: Row, answer: set[str]) -> set[str]:
    """Return the fields of the ground truth, or of the mapping in it that shares most fields with the answer; empty if
    none does."""
    truth = row["ground_truth"]
    mappings = [truth, *(value for value in truth.values() if isinstance(value, dict))]
    best = max(mappings, key=lambda mapping: len(set(map(str, mapping)) & answer))
    fields = set(map(str, best))
    return fields if fields & answer else set()


def _difference(has: set[str], wanted: set[str]) -> str:
    lacks, extra = sorted(wanted - has), sorted(has - wanted)
    parts = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(extra)} in excess"] * bool(extra)
    return " and ".join(parts)


def _unused(checked: list[tuple[ScriptedEpisode, str]], others: list[str]) -> list[str]:
    """Return the tags that all prompts show but neither gold nor the environment uses. Tags whose content differs
    between prompts are left out, since they mark a text of the row that the policy should read."""
    held: dict[str, set[str]] = {}
    for text in (*(text for _, text in checked), *others):
        for tag, inside in TAGGED.findall(text):
            held.setdefault(tag, set()).add(inside)
    shown = set.intersection(*(set(tag_names(text)) for _, text in checked))
    known = set(THINKING)
    for episode, _ in checked:
        replies = [_words(turn.observation) for turn in episode.trajectory.turns[1:]]
        known.update(OPENED.findall(" ".join([*episode.responses, *replies])))
    return [f"<{tag}>" for tag in sorted(shown - known) if len(held[tag]) == 1]
