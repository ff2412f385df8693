"""A user's folder of one SOP-Bench domain, for evaluation only: its licence forbids training, and mtrl ships no part of
it.

The folder's `tools.py` is third-party code. It is never imported here, and never receives model output. During loading,
a separate process makes every call that the rows' own values allow, and episodes replay the recorded results. Therefore
results are the same in every episode, even for tools with random results, and calls with other values have no result.
The process is not sandboxed, because such tools need pandas, which the sandbox does not have: use only folders that you
trust.

Format: https://github.com/amazon-science/SOP-Bench
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.sop import record_tools
from envs.sop.domain import Call, recording
from envs.sop.prompts import full_prompt
from envs.sop.spec import Spec, read_specs
from mtrl.datasets import read_file
from mtrl.errors import UserError
from mtrl.types import Row
from mtrl.utils.strict_json import strict_loads

log = logging.getLogger(__name__)

LICENCE = "the licence of SOP-Bench (CC-BY-NC-4.0, “no steps to facilitate training”) allows evaluation only"
LONGEST = 300
"""Time limit of all calls of a folder together, in seconds."""
ANSWER_TAG = re.compile(r"<(final_\w+)>")


def load_sop_bench(path: str | Path) -> list[Row]:
    """Return the held-out rows of a folder with sop.txt, tools.py, toolspecs.json, metadata.json and the two CSV files.

    Raises:
        UserError: a file is missing or inconsistent with the others, or `tools.py` cannot be run.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"environment.config.sop_bench={path} is no folder; give the folder of one SOP-Bench domain")
    inputs, outputs = _columns(folder)
    cases = _cases(folder, inputs, outputs)
    procedure = _text(folder / "sop.txt")
    for problem in mismatches(procedure, outputs):
        log.warning("%s: %s; the prompt asks for <final_output> with exactly the output columns", folder, problem)
    specs = read_specs(folder / "toolspecs.json")
    lines = _record(folder, specs, cases)
    return [
        {
            "id": f"{folder.name}-{index}",
            "prompt": full_prompt(procedure, {name: case[name] for name in inputs}, dict.fromkeys(outputs, "…")),
            "ground_truth": {name: case[name] for name in outputs},
            "split": "test",
            "domain": f"sop_bench/{folder.name}",
            "tool_schemas": [_schema(spec) for spec in specs],
            "fixture": lines[index],
        }
        for index, case in enumerate(cases)
    ]


def mismatches(procedure: str, outputs: list[str]) -> list[str]:
    """Return descriptions of the differences between the answer that the procedure asks for and the answer that is
    scored."""
    others = sorted(set(ANSWER_TAG.findall(procedure)) - {"final_output"})
    found = [f"sop.txt asks for <{tag}>" for tag in others]
    return [*found, *(f"sop.txt never names the output {name}" for name in outputs if name not in procedure)]


def _columns(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the input and the output columns."""
    file = folder / "metadata.json"
    try:
        metadata = strict_loads(_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); it must hold input_columns and output_columns") from error
    lists = [metadata.get(key) if isinstance(metadata, dict) else None for key in ("input_columns", "output_columns")]
    if not all(isinstance(names, list) and names and all(isinstance(n, str) for n in names) for names in lists):
        raise UserError(f"{file} must hold input_columns and output_columns, each a list of names")
    inputs, outputs = (list(names or ()) for names in lists)
    if shared := sorted(set(inputs) & set(outputs)):
        raise UserError(f"{file} names {shared[0]} as input and as output, which would tell the answer; keep one")
    return inputs, outputs


def _cases(folder: Path, inputs: list[str], outputs: list[str]) -> list[dict[str, str]]:
    """Return the rows of the CSV file with outputs, whose inputs must equal those of the file without outputs."""
    with_outputs, without = (folder / f"test_set_with{name}_outputs.csv" for name in ("", "out"))
    for file in (with_outputs, without):
        if not file.is_file():
            raise UserError(f"{file} does not exist; give the whole folder of one SOP-Bench domain")
    cases, bare = read_file(with_outputs), read_file(without)
    if not cases:
        raise UserError(f"{with_outputs} has no rows")
    if missing := [name for name in (*inputs, *outputs) if name not in cases[0]]:
        raise UserError(f"{with_outputs} has no column {missing[0]}, which metadata.json names")
    if [[case.get(name) for name in inputs] for case in cases] != [[row.get(name) for name in inputs] for row in bare]:
        raise UserError(f"{without} has other rows than {with_outputs.name}; get the folder again")
    return cases


def _schema(spec: Spec) -> dict[str, Any]:
    function = {"name": spec["name"], "description": spec["description"], "parameters": spec["request"]}
    return {"type": "function", "function": function}


def _record(folder: Path, specs: list[Spec], cases: list[dict[str, str]]) -> list[list[dict[str, Any]]]:
    """Return the recordings of every row."""
    calls = [(index, call) for index, case in enumerate(cases) for spec in specs for call in _calls(spec, case)]
    results = _run(folder, [call for _, call in calls])
    lines: list[list[dict[str, Any]]] = [[] for _ in cases]
    answered, failed = set(), set()
    for (index, (tool, arguments)), result in zip(calls, results, strict=True):
        if "result" in result:
            lines[index].append(recording(tool, result["result"], **arguments))
            answered.add(tool)
        else:
            failed.add(f"{tool} ({result['error'][:100]})")
    if not answered:
        raise UserError(
            f"{folder / 'tools.py'} answered none of {len(calls)} calls with the rows' own values"
            + (f"; the first error: {min(failed)}" if failed else "")
        )
    for text in sorted(failed):
        log.warning("%s: a call with a row's own values failed, and has no result: %s", folder, text)
    for spec in specs:
        if spec["name"] not in answered:
            log.warning("%s: tool %s has no results at all, for it takes what is no column", folder, spec["name"])
    return lines


def _calls(spec: Spec, case: dict[str, str]) -> Iterator[Call]:
    """Yield the calls with the row's values: one with all arguments that are columns, and one with only the required
    arguments."""
    parameters = spec["request"].get("properties") or {}
    required = spec["request"].get("required") or []
    if any(name not in case for name in required):
        return
    known = {name: _typed(case[name], schema) for name, schema in parameters.items() if name in case}
    yield spec["name"], known
    if set(required) != set(known):
        yield spec["name"], {name: known[name] for name in required if name in known}


def _typed(cell: str, schema: Any) -> Any:
    """Convert a cell to the type of its schema; return it as text if that fails."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return cell
    if kind == "boolean":
        return {"true": True, "false": False}.get(cell.strip().lower(), cell)
    try:
        value = ast.literal_eval(cell)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return cell
    wanted = {"integer": int, "number": (int, float), "array": list, "object": dict}.get(kind, ())
    return value if isinstance(value, wanted) and not isinstance(value, bool) else cell  # type: ignore[arg-type]


def _run(folder: Path, calls: list[Call]) -> list[dict[str, Any]]:
    """Return the results of `tools.py`, run in a process that inherits no environment variables and hence no
    credentials."""
    if not (folder / "tools.py").is_file():
        raise UserError(f"{folder / 'tools.py'} does not exist; give the whole folder of one SOP-Bench domain")
    # Not -I, with which Python does not read the two variables of its own.
    command = [sys.executable, "-s", "-P", "-B", record_tools.__file__, str(folder)]
    with tempfile.TemporaryDirectory() as empty:
        variables = {"PATH": os.defpath, "HOME": empty, "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, input=json.dumps(calls), env=variables, cwd=empty, capture_output=True, text=True,
                timeout=LONGEST, check=True,
            )  # fmt: skip
            results = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            raise UserError(f"{folder / 'tools.py'} took longer than {LONGEST} s; fix its tools") from None
        except (subprocess.CalledProcessError, ValueError) as error:
            reported = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:] or ["no message"]
            raise UserError(
                f"{folder / 'tools.py'} cannot be run ({reported[0][:200]}); install what it imports, such as pandas"
            ) from error
    return results


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError:
        raise UserError(f"{file} does not exist; give the whole folder of one SOP-Bench domain") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error}); save it as UTF-8") from error
