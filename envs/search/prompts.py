"""All texts of the environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtrl.environments.worked_example import Line, with_example
from mtrl.retrieval import Hit
from mtrl.types import Message, Row

SYSTEM = """You answer questions with the help of a search engine, within a limited number of turns.
In each turn, first reason inside <think> and </think>; then do exactly one of these:
- <search>query</search> searches. The passages that fit best come back inside <information> and </information>.
- <answer>answer</answer> answers and ends the task. Write the answer alone: a name, a number or a few words.
Search for one fact at a time, and answer from the passages."""
EXAMPLE: list[Line] = [
    ("User", "Which river flows through the city in which Marta Olsen was born?"),
    ("Assistant", "<think>First I need her place of birth.</think><search>Marta Olsen born in</search>"),
    (
        "User",
        "<information>Doc 1(Title: Marta Olsen) Marta Olsen, a painter, was born in Uppsala.\n</information>\n"
        "You have 3 turns left.",
    ),
    ("Assistant", "<think>Now I need the river of Uppsala.</think><search>river through Uppsala</search>"),
    (
        "User",
        "<information>Doc 1(Title: Uppsala) The river Fyris flows through Uppsala.\n"
        "Doc 2(Title: Marta Olsen) Marta Olsen, a painter, was born in Uppsala.\n</information>\n"
        "You have 2 turns left.",
    ),
    ("Assistant", "<think>The passage names the river.</think><answer>Fyris</answer>"),
]
EXAMPLE_ROW: Row = {
    "id": "worked example",
    "prompt": [],
    "ground_truth": {
        "target": ["Fyris"],
        "passages": [
            ["Marta Olsen", "Marta Olsen, a painter, was born in Uppsala."],
            ["Uppsala", "The river Fyris flows through Uppsala."],
        ],
    },
}
"""The row that the example solves."""

SEARCH_R1_SYSTEM = "You are a helpful and harmless assistant."
SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as you want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
)
"""The exact prompt of Search-R1 and of SkyRL's search rows, on which published checkpoints were trained."""

_BRACKETS = str.maketrans("<>[]", "()()")
"""Translation of the brackets of tags and of chat templates' control tokens into characters that exact match
ignores."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return retrieved text as harmless data: on one line, without brackets that could form a tag or a role marker."""
    return " ".join(_CONTROL.sub(" ", text).translate(_BRACKETS).split())


@dataclass(frozen=True)
class Style:
    """Wording and layout of observations."""

    topk: int
    characters: int
    """Maximum number of characters of all titles and texts together; a cut text ends in an ellipsis."""
    passage: str
    information: str
    nothing: str
    malformed: str
    reminder: str

    def fit(self, hits: Sequence[Hit]) -> list[tuple[str, str]]:
        """Return title and text of the passages to show, best first, within the character limit."""
        fitting, room = [], self.characters
        for passage in (hit.passage for hit in hits):
            title, text = plain(passage.title), plain(passage.text)
            if room <= 0:
                break
            fitting.append((_cut(title, room), _cut(text, room - len(title))))
            room -= len(title) + len(text)
        return fitting

    def show(self, passages: Sequence[tuple[str, str]]) -> str:
        """Format the passages that `fit` returned."""
        numbered = enumerate(passages, start=1)
        shown = "".join(self.passage.format(number=n, title=title, text=text) for n, (title, text) in numbered)
        return self.information.format(shown or self.nothing)

    def observation(self, text: str, turns_left: int) -> str:
        """Return the observation after a turn."""
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
"""Style for models with contexts of a few dozen tokens."""


def style_of(row: Row | None) -> Style:
    """Return the style of a row. Generated rows are short with `environment.prompt=short`."""
    return SHORT if row and row.get("style") == "short" else FULL


def full_prompt(question: str) -> list[Message]:
    """Return the prompt for a language model."""
    return [{"role": "system", "content": with_example(SYSTEM, EXAMPLE)}, {"role": "user", "content": question}]


def search_r1_prompt(question: str) -> list[Message]:
    """Return Search-R1's prompt, which rows of `data.path` get with `environment.prompt=short`."""
    return [{"role": "system", "content": SEARCH_R1_SYSTEM}, {"role": "user", "content": SEARCH_R1 + question}]
