"""Recall and speed of the retrievers, which search the paragraph about which a question was asked.

The data is a file in the form of SQuAD or XQuAD, for example xquad.en.json of https://github.com/google-deepmind/xquad.
Its paragraphs are the corpus, and its questions are the queries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtrl.errors import UserError
from mtrl.retrieval import Hit, Passage, Retriever, load_corpus, make_retriever
from mtrl.retrieval.client import ServerRetriever

SERVER = Path(__file__).parent.parent / "scripts" / "retriever_server.py"
TOPK = 5
KINDS: dict[str, dict[str, Any]] = {"bm25": {}, "dense": {"encoder": "hashing"}}

Found = list[list[Hit]]


def load_questions(path: Path) -> tuple[list[Passage], list[str], list[str]]:
    """Return the passages, the questions, and the id of the passage about which each question was asked."""
    passages = load_corpus(path)
    articles = json.loads(path.read_bytes())["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    asked = [
        (question["question"], passage.id)
        for passage, paragraph in zip(passages, paragraphs, strict=True)
        for question in paragraph["qas"]
    ]
    return passages, [question for question, _ in asked], [gold for _, gold in asked]


def recall(found: Found, gold: Sequence[str], topk: int) -> float:
    """Return the share of queries whose own passage is among their first `topk` hits."""
    return sum(any(hit.passage.id == own for hit in hits[:topk]) for hits, own in zip(found, gold, strict=True)) / len(
        gold
    )


def timed(work: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Return the result of a call, and its wall seconds."""
    start = time.perf_counter()
    return work(*arguments, **options), time.perf_counter() - start


def one_by_one(retriever: Retriever, queries: Sequence[str], threads: int) -> Found:
    """Search for each query by a call of its own, from `threads` threads at the same time."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda query: retriever.search([query], TOPK)[0], queries))


@contextmanager
def server(data: Path, kind: str) -> Iterator[str]:
    """Start a retriever server in a process of its own, and yield its address."""
    encoder = [f"--encoder={KINDS[kind]['encoder']}"] if kind == "dense" else []
    command = [sys.executable, str(SERVER), f"--corpus={data}", f"--retriever={kind}", *encoder, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = process.stdout.readline().split() if process.stdout else []
            if ready[:1] != ["ready"]:
                raise UserError(f"the server of {kind} did not start; see its output above")
            yield ready[1]
        finally:
            process.terminate()


def measure(data: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Measure all retrievers, and return the results as JSON values."""
    passages, questions, gold = load_questions(data)
    rows = []
    for kind, options in KINDS.items():
        retriever, build_s = timed(make_retriever, kind, passages, **options)
        times = [timed(retriever.search, questions, TOPK) for _ in range(repeats)]
        found = times[0][0]
        with server(data, kind) as url:
            client = ServerRetriever(url)
            answered, server_s = timed(one_by_one, client, questions, threads)
            client.close()
        rows.append(
            {
                "retriever": kind,
                "recall@1": recall(found, gold, 1),
                f"recall@{TOPK}": recall(found, gold, TOPK),
                "build_s": build_s,
                "queries_per_s": len(questions) / min(seconds for _, seconds in times),
                "server_queries_per_s": len(questions) / server_s,
                "server_answers_equal": answered == found,
            }
        )
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]}
    return {
        "data": data.name, "passages": len(passages), "questions": len(questions), "threads": threads,
        "machine": machine, "retrievers": rows,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    on = result["machine"]
    return "\n".join(
        [
            f"{result['data']}: {result['passages']} passages, {result['questions']} questions",
            f"{on['cores']} cores, Python {on['python']}, load average {on['load_average']:.1f}",
            "in process: all questions in one call; server: one question per request, "
            f"{result['threads']} requests at the same time",
            "",
            f"{'retriever':<12}{'recall@1':>10}{'recall@5':>10}{'build s':>10}{'queries/s':>12}{'server/s':>12}  equal",
            *(
                f"{row['retriever']:<12}{row['recall@1']:>10.3f}{row[f'recall@{TOPK}']:>10.3f}{row['build_s']:>10.2f}"
                f"{row['queries_per_s']:>12.0f}{row['server_queries_per_s']:>12.0f}"
                f"  {'yes' if row['server_answers_equal'] else 'NO'}"
                for row in result["retrievers"]
            ),
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSON in the form of SQuAD or XQuAD")
    parser.add_argument("--threads", type=int, default=200, help="concurrent requests; default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of the search in process; default %(default)s")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    arguments = parser.parse_args(words)
    if arguments.threads < 1 or arguments.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    try:
        result = measure(arguments.data, arguments.threads, arguments.repeats)
    except UserError as error:
        parser.error(str(error))
    print(table(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["server_answers_equal"] for row in result["retrievers"]) else 1


if __name__ == "__main__":
    sys.exit(main())
