"""`run_benchmark` runs a script of benchmarks/ in a forked process, from a folder outside of the tree."""

import os
import sys
import textwrap
from pathlib import Path

from tests import forked

ROOT = Path(__file__).parent.parent


NOT_APART = """
import contextlib, io, json, runpy, sys

script, *words = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
import apart

def run_here(path, job, name, words=(), limit=None, **variables):
    before, sys.argv = sys.argv, [path, "--one", json.dumps(job), *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
    return json.loads(output.getvalue().splitlines()[-1])

apart.run_apart = run_here
sys.argv = [script, *words]
runpy.run_path(script, run_name="__main__")
"""
"""Code that runs a benchmark whose measurements take place in its own process, not in a new one each. The import of
torch takes seconds in a new process, and `tests/test_benchmarks.py` tests `run_apart` itself."""


def run_benchmark(folder, script, *words, timeout=None, is_apart=True, **variables):
    """Run the script in `folder`, on one thread, with further environment variables. Return the completed process.

    Args:
        is_apart: whether measurements that the script makes by `run_apart` take place in processes of their own.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    program = [] if is_apart else ["-c", textwrap.dedent(NOT_APART)]
    command = [sys.executable, *program, str(ROOT / "benchmarks" / script), *words]
    return forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
