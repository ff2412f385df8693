"""Entry point: `mtrl serve retriever --corpus FILE` serves a corpus to search agents."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mtrl.config.outputs import check_local
from mtrl.errors import UserError
from mtrl.retrieval import load_corpus, make_retriever
from mtrl.retrieval.client import TOKEN_VARIABLE, token_of
from mtrl.retrieval.server import create_app
from mtrl.retrieval.wire import LARGEST_TOPK
from mtrl.utils.quiet_pipe import quiet_pipe
from mtrl.utils.serving import address_of, bind, serve

DESCRIPTION = """\
Serve the passages of a file over HTTP: POST /retrieve {"queries": [...], "topk": 3, "return_scores": true} and
GET /health. Prints one line that begins with `ready` and the address once it accepts requests."""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument(
        "--corpus", required=True, help="JSONL of {id, contents} or {id, title, text}, SQuAD's JSON; .gz"
    )
    parser.add_argument("--retriever", choices=("bm25", "dense"), default="bm25", help="default %(default)s")
    parser.add_argument("--encoder", help="dense: hashing (default), or a folder or Hub name of a transformers encoder")
    parser.add_argument("--index", help="dense: folder in which vectors are cached")
    parser.add_argument("--topk", type=int, default=3, help="passages per query, if a request sets none; default 3")
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s; others only with a token")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0: a free one")
    parser.add_argument("--token", help=f"token of the clients; better: the environment variable {TOKEN_VARIABLE}")
    parser.add_argument("--workers", type=int, default=4, help="threads that search; default %(default)s")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the server. Return the exit status: 2 for an error that the user must fix."""
    arguments = parse(words)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("mtrl").setLevel(logging.INFO)
    try:
        run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.topk <= LARGEST_TOPK or arguments.workers < 1:
        raise UserError(
            f"--topk {arguments.topk} must be from 1 to {LARGEST_TOPK}, --workers {arguments.workers} 1 or more"
        )
    given = {name: value for name in ("encoder", "index") if (value := getattr(arguments, name)) is not None}
    if given and arguments.retriever != "dense":
        raise UserError(f"--{next(iter(given))} has no effect with --retriever bm25; add --retriever dense")
    check_local(f"--index {arguments.index}", arguments.index)
    token = token_of(arguments.token)
    with bind(arguments.host, arguments.port, token, TOKEN_VARIABLE) as bound:
        passages = load_corpus(arguments.corpus)
        retriever = make_retriever(arguments.retriever, passages, **given)
        about = {"passages": len(passages), "retriever": arguments.retriever}
        pool = ThreadPoolExecutor(arguments.workers, thread_name_prefix="mtrl-retriever")
        app = create_app(retriever, arguments.topk, about, token, pool)
        ready = f"ready {address_of(bound)} ({len(passages)} passages, {arguments.retriever})"
        try:
            serve(app, bound, lambda: print(ready, flush=True))
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    with quiet_pipe():
        sys.exit(main())
