"""Writes the questions of XQuAD, or another file in SQuAD's form, as rows for `environment=search`.

    python experiments/smollm2/xquad.py xquad.en.json outputs/xquad

XQuAD (https://github.com/google-deepmind/xquad, CC BY-SA 4.0) has 1,190 questions about 240 passages of Wikipedia. The
search family itself holds out an eighth of the passages of such a file, which leaves 94 questions; this script holds
out a quarter, so that the intervals of success are narrower. All questions about a passage are in the same split. The
agent searches the passages of both splits (`environment.config.corpus`).
"""

from __future__ import annotations

import argparse
import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

HELD_OUT = 4
"""Number of passages of which one is held out, on average."""


def is_held_out(passage: str) -> bool:
    """Whether the questions about the passage belong to the test split."""
    return sha256(passage.encode()).digest()[0] % HELD_OUT == 0


def rows_of(articles: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split. A question that is asked about passages of both splits is a row of the test split
    alone."""
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for article in articles:
        for paragraph in article["paragraphs"]:
            rows = splits["test" if is_held_out(paragraph["context"]) else "train"]
            for asked in paragraph["qas"]:
                answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                rows.append({"id": asked["id"], "question": asked["question"], "answers": answers})
    held_out = {row["question"] for row in splits["test"]}
    splits["train"] = [row for row in splits["train"] if row["question"] not in held_out]
    return splits


def write(source: Path, folder: Path) -> dict[str, int]:
    """Write train.jsonl and test.jsonl, and return the number of rows of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = rows_of(json.loads(source.read_text(encoding="utf-8"))["data"])
    for split, rows in splits.items():
        random.Random(0).shuffle(rows)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return {split: len(rows) for split, rows in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="xquad.en.json, or another file in SQuAD's form")
    parser.add_argument("folder", type=Path, help="folder that the files are written to")
    arguments = parser.parse_args()
    print(write(arguments.questions, arguments.folder))


if __name__ == "__main__":
    main()
