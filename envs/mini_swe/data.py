"""Rows of the mini_swe family: generated repositories with a bug, a user's own repositories with hidden calls, and
SWE-bench's instances for containers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

from envs.mini_swe.backends import check_backend
from envs.mini_swe.bugs import Bug, is_held_out, pairs
from envs.mini_swe.calls import Call, check_calls
from envs.mini_swe.functions import EXPRESSIONS, FOLDER, NAMINGS, Function, make, place, results
from envs.mini_swe.prompts import EXAMPLE_ROW, full_prompt
from envs.mini_swe.swebench import is_swebench, swebench_row
from mtrl.datasets import Splits, cap, load_splits, to_row
from mtrl.environments.config_values import check_positive
from mtrl.errors import UserError
from mtrl.types import Row
from mtrl.utils.json_cells import from_cell

FILE = "f.py"
"""Path of the only file in repositories with one function."""


def load(
    data: Any,
    seed: int,
    backend: str = "sandbox",
    functions: int = 1,
    prompt: str = "short",
    **config: Any,
) -> Splits:
    """Return the rows of `data.path`; without a path, generated repositories.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated repositories.
        backend: where commands will run; rows that cannot run there are rejected.
        functions: number of functions of a generated repository. One function is a line in a single file; more
            functions are a package. Rows of `data.path` have their own repositories and ignore this key.
        prompt: full, for a language model, or short: one line for generated rows, with short observations, and the full
            prompt without a worked example for other rows.
        config: the environment's own keys.

    Raises:
        UserError: a row lacks a column or does not fit the backend, or a setting is invalid.
    """
    check_backend(backend)
    _refuse_idle_settings(backend, config)
    full = prompt == "full"
    if data.path is not None:
        splits = load_splits(data, partial(_loaded_row, backend=backend, path=str(data.path), example=full))
        return _timed(splits, **config)
    if backend != "sandbox":
        raise UserError(
            f"environment.config.backend={backend} needs rows with images, and generated ones have none; set data.path "
            "to SWE-bench rows, or backend to sandbox"
        )
    if isinstance(functions, bool) or not isinstance(functions, int) or not 1 <= functions <= len(EXPRESSIONS):
        raise UserError(f"environment.config.functions={functions!r} must be a number from 1 to {len(EXPRESSIONS)}")
    return _timed(cap(_generated(data, seed, functions, full), data), **config)


def _refuse_idle_settings(backend: str, config: dict[str, Any]) -> None:
    contained = {name: name in config for name in ("container_memory", "container_processes", "container_disk_mb")}
    for name, is_set in contained.items():
        if is_set and backend == "sandbox":
            raise UserError(f"environment.config.{name} is for containers, and the backend is sandbox; leave it out")


def _timed(splits: Splits, command_seconds: float = 30, grading_seconds: float = 30, **_: Any) -> Splits:
    """Write the time limits of an episode into each row, so that the scorer, which has only the row, applies the same
    limits.

    Raises:
        UserError: a limit is no positive number, or the limit of a single call is larger than that of all calls.
    """
    check_positive("command_seconds", command_seconds)
    check_positive("grading_seconds", grading_seconds)
    for row in (*splits.train, *splits.test):
        limits = (Call.of(call).seconds or 0 for call in row["ground_truth"].get("calls", ()))
        if (longest := max(limits, default=0)) > grading_seconds:
            raise UserError(
                f"row {row['id']} has a call with seconds={longest:g}, and environment.config.grading_seconds="
                f"{grading_seconds:g} is less; raise it, and environment.step_timeout above it"
            )
        row["ground_truth"]["seconds"] = [command_seconds, grading_seconds]
    return splits


def worked_example(row: Row) -> Row | None:
    """Return the row that the worked example of full prompts solves; None for containers, which have no image of it."""
    return None if "image" in row["ground_truth"] else EXAMPLE_ROW


def located(files: Mapping[str, str], bug: Bug) -> tuple[str, int]:
    """Return the path and the line number of the broken line."""
    found = bug.broken
    for path, text in files.items():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith(found.signature):
                return path, number + (1 if line != found.signature else 2)
    raise ValueError(f"{bug.name} is in none of the files")


def _generated(data: Any, seed: int, functions: int, full: bool) -> Splits:
    rows = {}
    for split, wanted in (("train", data.synthetic_train_rows), ("test", data.synthetic_test_rows)):
        rng = random.Random(f"mini_swe/{seed}/{split}")
        bugs = islice(_bugs(split == "test", rng), wanted)
        rows[split] = [
            _generated_row(f"{split}-{index}", split, bug, functions, full, rng) for index, bug in enumerate(bugs)
        ]
    return Splits(**rows)


def _bugs(held_out: bool, rng: random.Random) -> Iterator[Bug]:
    """Yield every bug of a split once, then every bug again with other parameter names, and so on."""
    chosen = [
        (name, wrong, rng.randrange(len(NAMINGS[place(name)])))
        for name, wrong in pairs()
        if is_held_out(f"{name}: {wrong}") == held_out
    ]
    for naming in count():
        rng.shuffle(chosen)
        for name, wrong, first in chosen:
            yield Bug(name, wrong, (first + naming) % len(NAMINGS[place(name)]))


def _generated_row(row_id: str, split: str, bug: Bug, functions: int, full: bool, rng: random.Random) -> Row:
    others = rng.sample([name for name in EXPRESSIONS if name != bug.name], functions - 1)
    whole = [make(name, EXPRESSIONS[name], rng.choice(NAMINGS[place(name)])) for name in others]
    files = _package([bug.broken, *whole]) if functions > 1 else {FILE: _line(bug.broken)}
    values, wrong, right = bug.example(rng.randrange(100))
    calls = [call for name in (bug.name, *others) for call in _calls(name, functions > 1)]
    return {
        "id": row_id,
        "prompt": full_prompt(_issue(bug, values, wrong, right)) if full else _short(bug.name, values, wrong, right),
        "ground_truth": {"files": files, "calls": calls},
        "source": "synthetic",
        "split": split,
        "key": bug.key,
        "style": "full" if full else "short",
        "bug": asdict(bug),
    }


def _line(function: Function) -> str:
    return f"{function.signature} return {function.expression}\n"


def _package(functions: list[Function]) -> dict[str, str]:
    """Return the files of a package with one module per kind of function."""
    modules: dict[str, list[Function]] = {}
    for function in sorted(functions, key=lambda function: function.name):
        modules.setdefault(place(function.name), []).append(function)
    files = {f"{FOLDER}/__init__.py": '"""Small functions."""\n'}
    for kind, members in sorted(modules.items()):
        bodies = [f"{member.signature}\n    return {member.expression}\n" for member in members]
        files[f"{FOLDER}/{kind}.py"] = "\n\n".join([f'"""Functions of {kind}."""\n', *bodies])
    return files


@lru_cache(maxsize=len(EXPRESSIONS) * 2)
def _calls(name: str, package: bool) -> list[list[Any]]:
    """Return the hidden calls of a function, with the expected results."""
    module = f"{FOLDER}.{place(name)}" if package else FILE.removesuffix(".py")
    return [[f"{module}.{name}", list(values), value] for values, value in results(name)]


def _issue(bug: Bug, values: tuple[Any, ...], wrong: str, right: str) -> str:
    call = f"{bug.name}({', '.join(map(repr, values))})"
    what = f"raises {wrong}" if wrong.endswith("Error") else f"returns {wrong}"
    return f"`{bug.name}` gives wrong results. For example, `{call}` {what}; it should return {right}."


def _short(name: str, values: tuple[Any, ...], wrong: str, right: str) -> list[dict[str, str]]:
    arguments = " ".join(map(repr, values))
    return [{"role": "user", "content": f"{FILE} : {name} {arguments} gives {wrong} not {right}"}]


# Rows of files


def _loaded_row(raw: dict[str, Any], split: str, index: int, backend: str, path: str, example: bool) -> Row:
    if is_swebench(raw):
        return swebench_row(raw, split, index, backend, path, example)
    asked = raw.get("prompt") or raw.get("issue")  # parquet and CSV give a row without a prompt an empty one
    row = to_row({**raw, "prompt": asked}, split, index)
    if backend != "sandbox":
        raise UserError(
            f"row {row['id']} has no instance_id, and environment.config.backend={backend} runs SWE-bench rows only; "
            "set it to sandbox"
        )
    truth = row["ground_truth"]
    files, calls = (from_cell(raw.get(name) or truth.get(name)) for name in ("files", "calls"))
    row["ground_truth"] = {"files": _checked_files(files, row["id"]), "calls": check_calls(calls, row["id"])}
    if isinstance(raw.get("issue"), str) and not raw.get("prompt"):
        row["prompt"] = full_prompt(raw["issue"], example)
    return row


def _checked_files(files: Any, row_id: str) -> dict[str, str]:
    if not isinstance(files, dict) or not files or not all(isinstance(text, str) for text in files.values()):
        raise UserError(
            f"row {row_id} has no repository; it needs a column files (path to text) and calls, or SWE-bench's columns"
        )
    folders = {
        "/".join(parts[:depth]) for parts in (path.split("/") for path in files) for depth in range(1, len(parts))
    }
    for path in files:
        if path.startswith("/") or {"..", "", "."} & set(path.split("/")) or "\0" in path or path in folders:
            raise UserError(
                f"row {row_id} has files[{path!r}]; write paths inside the repository, such as src/module.py, of which "
                "none is a folder of another"
            )
    return files
