"""The Python of an agent that needs other packages than mtrl, in an environment of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mtrl.errors import UserError


def own_interpreter(variable: str, package: str, install: str) -> Path:
    """Return the absolute path of the interpreter that an environment variable names.

    Args:
        variable: name of the environment variable; its value is a path, or a program on the PATH.
        package: name of what is installed in that interpreter, for the message of an error.
        install: command that makes such an interpreter, for the message of an error.

    Raises:
        UserError: the variable is not set, or names no program.
    """
    named = os.environ.get(variable)
    fix = f"set it to a Python with {package}, made by: {install}"
    if not named:
        raise UserError(f"{variable} is not set; {fix}")
    if (found := shutil.which(named)) is None:
        raise UserError(f"{variable}={named} is no program; {fix}")
    return Path(found).absolute()
