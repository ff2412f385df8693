"""One process of a case: python -m mtrl.doctor.self_test.child MODULE:FUNCTION BENCH OUTCOME"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import FIX, CaseResult
from mtrl.errors import JobLost
from mtrl.preflight.result import failed
from mtrl.utils.process import is_follower


def main(function: str, bench: str, outcome: str) -> None:
    """Call the function, and write its outcome; an exception is an outcome too. A follower writes nothing.

    Raises:
        Exception: the function raised it on a follower; its process then ends with status 1.
    """
    faulthandler.enable()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before Transformers is imported
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)(Bench.from_json(bench))
    except (Exception, JobLost) as error:
        if is_follower():
            raise
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        found = CaseResult(failed(f"{type(error).__name__}: {first}", FIX))
    if found is not None and not is_follower():
        partial = Path(f"{outcome}.partial")
        partial.write_text(found.to_json(), encoding="utf-8")
        partial.rename(outcome)  # a process that is killed leaves no half of a file


if __name__ == "__main__":
    main(*sys.argv[1:])
