"""`run_benchmark` runs a script of benchmarks/ in a forked process, from a folder outside of the tree."""

import os
import sys
from pathlib import Path

from tests import forked

ROOT = Path(__file__).parent.parent


def run_benchmark(folder, script, *words, timeout=None, **variables):
    """Run the script in `folder`, on one thread, with further environment variables. Return the completed process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    return forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
