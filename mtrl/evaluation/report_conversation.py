"""One trajectory in report.html, turn by turn. Text of a model is cut, cleaned and escaped."""

from __future__ import annotations

import json

from mtrl.console.episode_view import message_text
from mtrl.evaluation.disagreements import Disagreement
from mtrl.scoring.measures import at_cap, sampled_tokens
from mtrl.types import ROLES, Message, Row, Trajectory, Turn
from mtrl.utils.text import cut, html_text, one_line, short, signed

MESSAGE_CHARACTERS, MESSAGE_LINES = 1600, 40
OTHER_CHARACTERS = {"system": 400, "expected": 600}
TURNS = 12
"""Maximum number of turns shown of one conversation: the first and the last ones."""


def conversation(disagreement: Disagreement) -> str:
    """Return the conversation as a closed `<details>` element."""
    trajectory, d = disagreement.episode.trajectory, disagreement
    facts = [
        f"row {one_line(d.row, 60)}",
        f"reward {short(d.reward)}",
        f"score {short(d.score or 0.0)}",
        f"{len(trajectory.turns)} turn{'' if len(trajectory.turns) == 1 else 's'}",
        str(trajectory.stop_reason),
        f"{one_line(d.model, 40)}, {d.kind}",
    ]
    verdict = d.verdict.value
    head = f'<span class="tag {verdict}">{verdict}</span>{html_text(" · ".join(facts))}'
    return (
        f'<details><summary>{head}</summary><div><p class="sub">trajectory {html_text(one_line(d.id))}</p>'
        f"{_block('expected', _expected(d.episode.row))}{_turns(trajectory)}</div></details>"
    )


def _expected(row: Row) -> str:
    """Return the ground truth of the row, which a reader needs to decide which verdict is right."""
    return json.dumps(row.get("ground_truth"), ensure_ascii=False, default=str)


def _turns(trajectory: Trajectory) -> str:
    turns = trajectory.turns
    hidden = range(TURNS // 2, len(turns) - TURNS // 2)
    parts = []
    for index, turn in enumerate(turns):
        if index not in hidden:
            parts += [*map(_message, turn.observation), _head(index, turn), _said(turn)]
        elif index == hidden[0]:
            parts.append(f'<p class="turn">… {len(hidden)} turns are left out …</p>')
    parts += map(_message, trajectory.final_observation)
    if trajectory.error:
        parts.append(f'<p class="turn">error: {html_text(one_line(trajectory.error.partition(chr(10))[0]))}</p>')
    return "".join(parts)


def _head(index: int, turn: Turn) -> str:
    facts = [f"turn {index + 1}", f"reward {signed(turn.reward)}"]
    facts += [f"{one_line(key, 40)} {signed(value)}" for key, value in turn.components.items() if value]
    if (tokens := sampled_tokens(turn)) is not None:
        facts.append(f"{tokens:,} tokens")
    if at_cap(turn):
        facts.append("cut at the limit of tokens per turn")
    return f'<p class="turn">{html_text(" · ".join(facts))}</p>'


def _said(turn: Turn) -> str:
    """Return the text of the turn, which holds the calls as the model wrote them; the message if there is no text."""
    return _block("assistant", turn.text or message_text(turn.message))


def _message(message: Message) -> str:
    return _block(str(message.get("role", "?")), message_text(message))


def _block(role: str, text: str) -> str:
    known = role if role in ROLES else "other"
    shown = cut(text.strip("\n"), OTHER_CHARACTERS.get(role, MESSAGE_CHARACTERS), MESSAGE_LINES)
    body = html_text(shown) if shown.strip() else "(empty)"
    return f'<div class="message {known}"><span>{html_text(one_line(role, 12))}</span><pre>{body}</pre></div>'
