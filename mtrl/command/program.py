"""The start and the end of every program: its import path, its errors in one sentence, and its exit status."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hydra.errors import HydraException

from mtrl.config.messages import explain
from mtrl.errors import UserError, unwritable
from mtrl.utils.process import collect_rarely
from mtrl.utils.quiet_pipe import quiet_pipe


def run_program(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main` and exit with the status that it returns, or with 2 and one sentence if the command is wrong."""
    logging.getLogger("mtrl").setLevel(logging.ERROR)  # the program prints the outcome of episodes itself
    start_program()
    with one_sentence():
        try:
            status = main(argv)
        except NotImplementedError as error:
            refuse(f"NotImplementedError: {error}")
        except KeyboardInterrupt:  # usually while modules are loaded
            raise SystemExit(130) from None
    raise SystemExit(status)


def start_program() -> None:
    """Let the configuration name modules of the current folder, as in `environment.target=my_package.MyEnv`, and let
    garbage collections be rare while modules are imported."""
    collect_rarely()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextmanager
def one_sentence() -> Iterator[None]:
    """Context for entry points: print a `UserError`, an error of Hydra, or that of a full disk or of a path that is too
    long to stderr as one sentence, and exit with status 2. The program ends quietly if the reader of its output has
    ended."""
    try:
        with quiet_pipe():
            yield
    except UserError as error:
        sentence = str(error)
    except HydraException as error:
        sentence = str(explain(error))
    except Exception as error:
        found = unwritable(error) or _too_long(error)
        if found is None:
            raise
        sentence = found
    else:
        return
    refuse(sentence)


def _too_long(error: Exception) -> str | None:
    """Return the sentence about a path whose name the file system refuses; None for any other error."""
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    return f"{os.fsdecode(error.filename or 'a path'):.80}… is too long for the name of a file; give a shorter one"


def refuse(sentence: str) -> NoReturn:
    """Print the sentence to stderr and exit with status 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)
