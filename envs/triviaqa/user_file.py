"""Python files of the user, from which a run takes lists of functions. Their code is trusted."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrl.errors import UserError


def functions_of(path: str | Path, key: str, name: str) -> list[Callable[..., Any]]:
    """Return the functions that a file lists under `name`.

    Args:
        key: key of the configuration, for errors.

    Raises:
        UserError: the file does not exist or cannot be run, or `name` is not a list of at least one function.
    """
    where = f"{key}={path}"
    listed = getattr(_module(Path(path).expanduser(), where), name, None)
    if listed is None:
        raise UserError(f"{where} does not define {name}; add {name} = [your_function]")
    if not isinstance(listed, list):
        raise UserError(f"{where}: {name} is a {type(listed).__name__}; it must be a list of functions")
    if not listed:
        raise UserError(f"{where}: {name} is empty; list at least one function")
    for place, function in enumerate(listed):
        if not inspect.isfunction(function):
            raise UserError(f"{where}: {name}[{place}] is a {type(function).__name__}; it must be a function")
        if inspect.iscoroutinefunction(function):
            raise UserError(f"{where}: {name}[{place}], {function.__name__}, is async; write it with def alone")
    return listed


def _module(file: Path, where: str) -> ModuleType:
    if not file.is_file():
        raise UserError(f"{where} does not exist; give a Python file")
    return _run(file.resolve(), file.stat().st_mtime_ns, where)


@lru_cache(maxsize=32)
def _run(file: Path, changed: int, where: str) -> ModuleType:
    """Return the module of a file, which runs once for all episodes."""
    name = f"_triviaqa_{file.stem}_{hashlib.sha256(f'{file} {changed}'.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where} is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their modules up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        first_line = next(iter(str(error).splitlines()), "")
        raise UserError(f"{where} cannot be run ({type(error).__name__}: {first_line}); correct the file") from error
    return module
