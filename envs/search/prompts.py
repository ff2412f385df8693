"""Every text that the environment says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtrl.retrieval import Hit
from mtrl.types import Message, Row

SYSTEM = "You are a helpful and harmless assistant."
INSTRUCTIONS = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as you want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
)
"""The prompt of Search-R1 and of SkyRL's search rows, to the letter: checkpoints know it."""

_BRACKETS = str.maketrans("<>[]", "()()")
"""What tags and the control tokens of chat templates are made of -> what exact match does not mind."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Retrieved text as data: on one line, without brackets that could make a tag or a role marker."""
    return " ".join(_CONTROL.sub(" ", text).translate(_BRACKETS).split())


@dataclass(frozen=True)
class Style:
    """How observations are worded and laid out."""

    topk: int
    characters: int
    """Of all titles and texts together; what is cut ends in an ellipsis."""
    passage: str
    information: str
    nothing: str
    malformed: str
    reminder: str

    def fit(self, hits: Sequence[Hit]) -> list[tuple[str, str]]:
        """Title and text of the passages as they are shown, best first, as far as there is room."""
        fitting, room = [], self.characters
        for passage in (hit.passage for hit in hits):
            title, text = plain(passage.title), plain(passage.text)
            if room <= 0:
                break
            fitting.append((_cut(title, room), _cut(text, room - len(title))))
            room -= len(title) + len(text)
        return fitting

    def show(self, passages: Sequence[tuple[str, str]]) -> str:
        """What `fit` returned, in its frame."""
        numbered = enumerate(passages, start=1)
        shown = "".join(self.passage.format(number=n, title=title, text=text) for n, (title, text) in numbered)
        return self.information.format(shown or self.nothing)

    def observation(self, text: str, turns_left: int) -> str:
        """What the model reads after its turn."""
        return text + self.reminder.format(turns=turns_left, s="" if turns_left == 1 else "s")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room, 0)]}…"


FULL = Style(
    topk=3,
    characters=2000,
    passage="Doc {number}(Title: {title}) {text}\n",
    information="<information>{}</information>",
    nothing="Nothing was found.",
    malformed="Your last turn was not valid. Write one <search>query</search> or one <answer>answer</answer>.",
    reminder="\nYou have {turns} turn{s} left.",
)
SHORT = Style(
    topk=2,
    characters=200,
    # With a space before every word, a name is the same token here and in a query: a tiny model can copy it.
    passage=" {text} ;",
    information="<information>{}</information>",
    nothing=" nothing",
    malformed="write one <search> or one <answer>",
    reminder=" {turns} left",
)
"""For models that read a few dozen tokens."""


def style_of(row: Row | None) -> Style:
    """Generated rows are short unless `environment.config.full_prompt` asked otherwise."""
    return SHORT if row and row.get("style") == "short" else FULL


def full_prompt(question: str) -> list[Message]:
    """The prompt of a real question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": INSTRUCTIONS + question}]
