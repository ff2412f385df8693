"""Rows of SWE-bench, SWE-Gym and data sets in their format, for containers."""

from __future__ import annotations

import json
import shlex
from typing import Any

from envs.mini_swe.prompts import full_prompt
from mtrl.errors import UserError
from mtrl.types import Row

CWD = "/testbed"
"""Folder of the repository in the images."""


def is_swebench(raw: dict[str, Any]) -> bool:
    """Whether the row has this format: it has an `instance_id`, or an `instance` as SkyRL's rows do."""
    return bool(raw.get("instance_id") or raw.get("instance"))


def swebench_row(
    raw: dict[str, Any], split: str, index: int, backend: str, path: str = "", example: bool = True
) -> Row:
    """Return the row of an instance.

    Raises:
        UserError: a column is missing or cannot be read, or `backend` is `sandbox`.
    """
    raw = _flat(raw)
    name = raw.get("instance_id")
    if not isinstance(name, str) or not name:
        raise UserError(f"row {index} of {split} has no instance_id; add the column")
    if backend == "sandbox":
        raise UserError(
            f"row {name} is SWE-bench's and needs its own image; set environment.config.backend to docker or podman"
        )
    issue = raw.get("problem_statement")
    if not isinstance(issue, str) or not issue.strip():
        raise UserError(f"row {name} has no problem_statement; add the column")
    return {
        "id": name,
        "prompt": full_prompt(issue, example),
        "ground_truth": _truth(raw, name, path),
        "source": raw.get("data_source") or raw.get("repo"),
        "split": split,
        "style": "full",
        "patch": raw.get("patch") or "",
    }


def image_name(raw: dict[str, Any], path: str = "") -> str:
    """Return the row's `image_name` or `docker_image`, or else the image's name in SWE-Gym or SWE-bench."""
    named = raw.get("image_name") or raw.get("docker_image")
    if named:
        return str(named)
    name = raw["instance_id"].lower()
    if "swe-gym" in f"{raw.get('data_source') or ''} {path}".lower():
        return f"docker.io/xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest"
    return f"docker.io/swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """Merge SkyRL's nested column `instance` into the row."""
    instance = raw.get("instance")
    if isinstance(instance, str):
        try:
            instance = json.loads(instance)
        except ValueError:
            instance = None
    return {**raw, **instance} if isinstance(instance, dict) else raw


def _truth(raw: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    lists = {key.lower(): _tests(raw.get(key), key, name) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    script, test_patch = raw.get("eval_script") or "", raw.get("test_patch") or ""
    if not script and not lists["fail_to_pass"]:
        raise UserError(f"row {name} has neither eval_script nor FAIL_TO_PASS, so nothing tests it; add one of them")
    if not script and not all("::" in test for tests in lists.values() for test in tests):
        raise UserError(
            f"row {name} has tests that pytest cannot be given by name and no eval_script; add the column eval_script"
        )
    base = str(raw.get("base_commit") or "")
    if shlex.quote(base) != base and base:
        raise UserError(f"row {name} has base_commit={base!r}; write a commit's hash")
    return {
        "image": image_name(raw, path),
        "cwd": CWD,
        "base_commit": base,
        "eval_script": script,
        "test_patch": test_patch,
        **lists,
    }


def _tests(value: Any, key: str, name: str) -> list[str]:
    """Parse a list of tests or the JSON text of one; a missing value gives an empty list."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    except ValueError:
        found = None
    found = list(found) if isinstance(found, list | tuple) else None
    if found is None or not all(isinstance(test, str) for test in found):
        raise UserError(f"row {name} has {key}={str(value)[:60]!r}; write a list of tests, or JSON text of one")
    return found
