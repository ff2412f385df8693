"""Rows of the triviaqa family: questions about the synthetic encyclopaedia, TriviaQA's rows, and plain questions with
their answers."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Any

from envs.triviaqa import encyclopaedia
from envs.triviaqa.prompts import EXAMPLE_ROW, full_prompt
from envs.triviaqa.tools import load_tools
from mtrl.datasets import Splits, cap, load_splits
from mtrl.environments.tools import Tool
from mtrl.errors import UserError
from mtrl.types import Message, Row
from mtrl.utils.json_cells import from_cell

log = logging.getLogger(__name__)

HELD_OUT = 8
"""Number of places of which one is held out, on average, with all questions about it."""
HUB = {"mandarjoshi/trivia_qa": "rc.wikipedia.nocontext", "trivia_qa": "rc.wikipedia.nocontext"}
"""Hub configuration of each data set: the questions of `rc.wikipedia` without their articles, which the retriever
provides."""
HIDDEN = "<unk>"
"""Placeholder for the answers in TriviaQA's test split."""


def load(data: Any, seed: int, prompt: str = "short", tools_file: str | None = None, **config: Any) -> Splits:
    """Return the rows of `data.path`; without a path, questions about the synthetic encyclopaedia.

    Args:
        data: the `data` section of the config.
        seed: seed of the choice and order of the questions. The encyclopaedia is the same for every seed.
        prompt: full, for a language model, or short: only the question of generated rows, with short results, and the
            full prompt without a worked example for other rows.
        tools_file: file of the tools that prompts describe.
        config: the environment's own keys.

    Raises:
        UserError: the rows or the tools file are invalid, or generated questions are combined with another corpus or a
            server.
    """
    full = prompt == "full"
    if data.path is not None:
        return load_splits(data, partial(_loaded_row, tools=load_tools(tools_file), example=full), HUB)
    for key in ("corpus", "url"):
        if config.get(key):
            raise UserError(
                f"environment.config.{key}={config[key]} does not hold what generated questions ask for; "
                "set data.path to rows of your own, or leave the key out"
            )
    return cap(_generated(data, seed, load_tools(tools_file) if full else None), data)


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of full prompts solves."""
    return EXAMPLE_ROW


def is_held_out(place: str) -> bool:
    """Whether a place belongs to the test split. This depends only on the place, not on the seed."""
    return sha256(place.encode()).digest()[0] % HELD_OUT == 0


def _generated(data: Any, seed: int, tools: Mapping[str, Tool] | None) -> Splits:
    asked = [(place, kind) for place in encyclopaedia.places() for kind in encyclopaedia.FACTS]
    random.Random(f"triviaqa/{seed}").shuffle(asked)
    rows: dict[str, list[Row]] = {}
    for split, count in (("train", data.synthetic_train_rows), ("test", data.synthetic_test_rows)):
        chosen = [each for each in asked if is_held_out(each[0]) == (split == "test")][:count]
        if len(chosen) < count:
            log.warning("triviaqa: %d %s rows instead of %d: there are no more questions", len(chosen), split, count)
        rows[split] = [_generated_row(f"{split}-{n}", split, *each, tools) for n, each in enumerate(chosen)]
    return Splits(**rows)


def _generated_row(row_id: str, split: str, place: str, kind: str, tools: Mapping[str, Tool] | None) -> Row:
    question = encyclopaedia.question(place, kind)
    prompt: list[Message] = full_prompt(question, tools) if tools else [{"role": "user", "content": question}]
    return {
        "id": row_id,
        "prompt": prompt,
        "ground_truth": {"answers": [encyclopaedia.fact(place, kind)]},
        "question": question,
        "source": "synthetic",
        "split": split,
        "style": "full" if tools else "short",
        "place": place,
        "kind": kind,
    }


def _loaded_row(raw: dict[str, Any], split: str, index: int, tools: Mapping[str, Tool], example: bool) -> Row:
    row_id = str(raw.get("id") or raw.get("question_id") or f"{split}-{index}")
    question = raw.get("question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"row {row_id} of data.path has question={question!r}; write the question as text")
    return {
        "id": row_id,
        "prompt": full_prompt(question, tools, example),
        "ground_truth": {"answers": _answers(raw, row_id)},
        "question": question,
        "source": "data",
        "split": split,
    }


def _answers(raw: Mapping[str, Any], row_id: str) -> list[str]:
    """Return the accepted answers without duplicates, from TriviaQA's `answer` with its aliases, a list `answers`, one
    text or number, or the JSON text of a list or of TriviaQA's answer."""
    columns = (raw.get(name) for name in ("answers", "answer"))  # parquet and CSV give each row all columns
    given = from_cell(next((value for value in columns if value not in (None, "")), None))
    if isinstance(given, Mapping):
        given = [given.get("value"), *(given.get("aliases") or ())]
    values = given if isinstance(given, list | tuple) else [given]
    answers = list(
        dict.fromkeys(str(each) for each in values if isinstance(each, str | int | float) and str(each).strip())
    )
    if not answers or answers == [HIDDEN]:
        raise UserError(
            f"row {row_id} of data.path has no answer; write answers (a list of texts) or TriviaQA's answer, and for "
            "TriviaQA, whose test answers are hidden, set data.test_split=validation"
        )
    return answers
