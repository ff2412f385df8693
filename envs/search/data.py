"""Rows of the search family: generated worlds, Search-R1's and SkyRL's rows, plain questions with answers, and SQuAD's
files."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from envs.search.prompts import EXAMPLE_ROW, full_prompt, search_r1_prompt
from envs.search.retrievers import RetrieverSettings
from envs.search.world import Chain, World, draw, is_held_out
from mtrl.datasets import Splits, cap, load_splits, to_row
from mtrl.errors import UserError
from mtrl.types import Message, Row
from mtrl.utils.json_cells import from_cell

log = logging.getLogger(__name__)

MOST_MISSES = 2000
"""Maximum number of consecutive worlds without a new question, after which the questions count as exhausted."""


def load(
    data: Any,
    seed: int,
    retriever: str = RetrieverSettings.retriever,
    url: str | None = None,
    corpus: str | None = None,
    topk: int | None = None,
    observation_characters: int | None = None,
    prompt: str = "short",
    **options: Any,
) -> Splits:
    """Return the rows of `data.path`; without a path, generated worlds.

    The retriever is created here, so that its errors are raised before the first episode, and no episode waits for the
    corpus to load.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated worlds.
        retriever: bm25, dense or server.
        url: address of the server.
        corpus: file of passages; None: the passages of the SQuAD file at `data.path`.
        topk: used only by the environment, as is `observation_characters`.
        prompt: full, with sentences, instructions and a worked example for a language model, or short: a few words for
            generated rows, and Search-R1's prompt for other rows.
        options: other options of the retriever.
    """
    settings, full = RetrieverSettings.of(retriever, url, corpus, options), prompt == "full"
    if data.path is None:
        if settings != RetrieverSettings():
            raise UserError(
                "data.path=null: generated rows bring their own passages and search them with BM25; set data.path, or "
                "leave environment.config.retriever, url, corpus and their options out"
            )
        return _generated(data, seed, full)
    path = Path(str(data.path)).expanduser()
    articles = _squad(path)
    if articles is None:
        settings.check()
        return load_splits(data, partial(_loaded_row, full=full))
    own = str(path.resolve()) if corpus is None and retriever != "server" else None
    (replace(settings, corpus=own) if own else settings).check()
    return cap(_squad_splits(articles, own, path, full), data)


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of full prompts solves."""
    return EXAMPLE_ROW


# Generated


def _generated(data: Any, seed: int, full: bool) -> Splits:
    rng = random.Random(f"search/{seed}")
    trained = islice(_drawn(rng, _trained), data.synthetic_train_rows)
    train = [_row(f"train-{n}", "train", *found, full) for n, found in enumerate(trained)]
    test: list[Row] = []
    seen: set[str] = set()
    for world, chain in islice(_drawn(rng, partial(_tested, seen=seen)), data.synthetic_test_rows):
        seen.add(chain.key)
        test.append(_row(f"test-{len(test)}", "test", world, chain, full))
    if len(test) < data.synthetic_test_rows:
        log.warning(
            "search: %d different test rows instead of %d: there are no more", len(test), data.synthetic_test_rows
        )
    return cap(Splits(train, test), data)


def _drawn(rng: random.Random, choose: Callable[[list[Chain]], list[Chain]]) -> Iterator[tuple[World, Chain]]:
    """Draw worlds, and yield those with a chain of `choose` and one of these chains, until `MOST_MISSES` consecutive
    worlds have none."""
    misses = 0
    while misses < MOST_MISSES:
        world = draw(rng)
        chains = choose(world.chains())
        misses = 0 if chains else misses + 1
        if chains:
            yield world, rng.choice(chains)


def _trained(chains: list[Chain]) -> list[Chain]:
    """Return all chains of a world without held-out questions; none otherwise, so that no training world contains a
    held-out answer."""
    return [] if any(is_held_out(chain.key) for chain in chains) else chains


def _tested(chains: list[Chain], seen: set[str]) -> list[Chain]:
    return [chain for chain in chains if is_held_out(chain.key) and chain.key not in seen]


def _row(row_id: str, split: str, world: World, chain: Chain, full: bool) -> Row:
    return {
        "id": row_id,
        "prompt": full_prompt(chain.question) if full else [{"role": "user", "content": chain.terse}],
        "ground_truth": {"target": [chain.value], "passages": [list(p) for p in world.passages(terse=not full)]},
        "question": chain.question,
        "source": "synthetic",
        "split": split,
        "key": chain.key,
        "style": "full" if full else "short",
        "chain": asdict(chain),
    }


# Search-R1, SkyRL, plain


def _loaded_row(raw: dict[str, Any], split: str, index: int, full: bool) -> Row:
    raw = {**raw, "answer": _answers(raw)}
    extra = raw.get("extra_info")
    question = raw.get("question") or (extra.get("question") if isinstance(extra, dict) else None)
    if not raw.get("prompt") and isinstance(question, str) and question:
        raw["prompt"] = _prompt(question, full)
    row = to_row(raw, split, index)
    target = _targets(row["ground_truth"])
    if not target:
        raise UserError(
            f"row {row['id']} of data.path has no answer; write answer or answers, or SkyRL's "
            "reward_spec.ground_truth.target, as text or a list of texts"
        )
    row["ground_truth"] = {"target": target}
    row["question"] = question if isinstance(question, str) and question else str(row["prompt"][-1]["content"])
    return row


def _prompt(question: str, full: bool) -> list[Message]:
    return full_prompt(question) if full else search_r1_prompt(question)


def _answers(raw: dict[str, Any]) -> Any:
    """Return the value of the answer column, which has one of several names."""
    return next((raw[name] for name in ("answer", "answers", "golden_answers") if raw.get(name) is not None), None)


def _targets(truth: dict[str, Any]) -> list[str]:
    """Return the accepted answers, from text, a list of texts, SQuAD's `{"text": [...]}`, or the JSON text of these."""
    named = (truth.get(name) for name in ("target", "answer", "answers", "text"))
    value = from_cell(next((value for value in named if value is not None), None))
    if isinstance(value, dict):
        return _targets(value)
    values = value if isinstance(value, list | tuple) else [value]
    return list(
        dict.fromkeys(str(each) for each in values if isinstance(each, str | int | float) and str(each).strip())
    )


# SQuAD


def _squad(path: Path) -> list[Any] | None:
    """Return the articles of a file in SQuAD's format; None if the file has another format, which `load_splits`
    reads."""
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return None  # may hold one object per line
    articles = content.get("data") if isinstance(content, dict) else None
    return articles if isinstance(articles, list) else None


def _squad_splits(articles: list[Any], corpus: str | None, path: Path, full: bool) -> Splits:
    """Split the questions, so that all questions of a passage are in the same split."""
    splits = Splits([], [])
    without = 0
    for number, article in enumerate(articles):
        try:
            asked = [_asked(context, question, full) for context, question in _questions(article)]
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"data.path={path}: data[{number}] is not in SQuAD's form ({type(error).__name__}: {error}); it needs "
                "paragraphs with context and qas, and those question and answers"
            ) from error
        without += asked.count(None)
        for row in filter(None, asked):
            rows = getattr(splits, row["split"])
            row["id"] = row["id"] or f"{row['split']}-{len(rows)}"
            rows.append(row | ({"corpus": corpus} if corpus else {}))
    ids = Counter(row["id"] for row in (*splits.train, *splits.test))
    if twice := next((row_id for row_id, count in ids.items() if count > 1), None):
        raise UserError(
            f"data.path={path}: two questions have id={twice}; make the ids unique, or leave them out of all questions"
        )
    held_out = {row["question"] for row in splits.test}
    train = [row for row in splits.train if row["question"] not in held_out]
    if without or len(train) < len(splits.train):
        log.warning(
            "data.path=%s: left out %d questions without an answer, and %d of training that are held out as well",
            path,
            without,
            len(splits.train) - len(train),
        )
    splits = Splits(train, splits.test)
    for split, rows in (("training", splits.train), ("held-out", splits.test)):
        if not rows:
            raise UserError(
                f"data.path={path} leaves no {split} rows: an eighth of its passages is held out; give a file with more"
            )
    return splits


def _questions(article: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pairs of passage and question, in the order of the file."""
    for paragraph in article["paragraphs"]:
        for question in paragraph.get("qas") or []:
            yield paragraph["context"], question


def _asked(context: str, question: dict[str, Any], full: bool) -> Row | None:
    """Return the row of a question; None if the question has no answer."""
    target = _targets({"target": [answer["text"] for answer in question.get("answers") or []]})
    if not isinstance(question["question"], str):
        raise TypeError("a question that is no text")
    if not target:
        return None
    return {
        "id": str(question.get("id") or ""),
        "prompt": _prompt(question["question"], full),
        "ground_truth": {"target": target},
        "question": question["question"],
        "split": "test" if is_held_out(context) else "train",
    }
