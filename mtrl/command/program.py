"""Common entry point of all programs except `mtrl.main`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from mtrl.config.messages import one_sentence, refuse


def run_program(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Call `main` and exit with the status that it returns, or with 2 and one sentence if the command is wrong."""
    logging.getLogger("mtrl").setLevel(logging.ERROR)  # the program prints the outcome of episodes itself
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for environment.target=my_package.MyEnv
    with one_sentence():
        try:
            status = main(argv)
        except NotImplementedError as error:
            refuse(f"NotImplementedError: {error}")
        except KeyboardInterrupt:  # usually while modules are loaded
            raise SystemExit(130) from None
    raise SystemExit(status)
