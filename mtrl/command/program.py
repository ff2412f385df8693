"""The start and the end of every program: its import path, its errors in one sentence, and its exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hydra.errors import HydraException

from mtrl.config.messages import explain
from mtrl.errors import UserError, unwritable
from mtrl.utils.quiet_pipe import quiet_pipe


def run_program(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main` and exit with the status that it returns, or with 2 and one sentence if the command is wrong."""
    logging.getLogger("mtrl").setLevel(logging.ERROR)  # the program prints the outcome of episodes itself
    import_from_here()
    with one_sentence():
        try:
            status = main(argv)
        except NotImplementedError as error:
            refuse(f"NotImplementedError: {error}")
        except KeyboardInterrupt:  # usually while modules are loaded
            raise SystemExit(130) from None
    raise SystemExit(status)


def import_from_here() -> None:
    """Let the configuration name modules of the current folder, as in `environment.target=my_package.MyEnv`."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextmanager
def one_sentence() -> Iterator[None]:
    """Context for entry points: print a `UserError` or an error of Hydra to stderr as one sentence, and exit with
    status 2. The program ends quietly if the reader of its output has ended."""
    try:
        with quiet_pipe():
            yield
    except UserError as error:
        sentence = str(error)
    except HydraException as error:
        sentence = str(explain(error))
    except Exception as error:
        if (unwritable_file := unwritable(error)) is None:
            raise
        sentence = unwritable_file
    else:
        return
    refuse(sentence)


def refuse(sentence: str) -> NoReturn:
    """Print the sentence to stderr and exit with status 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)
