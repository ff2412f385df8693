"""Cases of a self-test that pass, raise, hang, are killed or end early."""

import os
import signal
import time
from pathlib import Path

from mtrl.doctor.self_test.outcome import CaseResult
from mtrl.preflight.result import passed


def passes(bench):
    return CaseResult(passed("fine"), {"tokens_per_second": 5.0})


def raises(bench):
    print("some output")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore about it")


def hangs(bench):
    time.sleep(600)


def is_killed(bench):
    print("about to be killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def exits(bench):
    print("the driver is too old", flush=True)
    os._exit(3)


def follower_raises(bench):
    """Raise an error on rank 1, while rank 0 waits."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has no memory")
    time.sleep(600)


def server_fails(bench):
    """Write the log of a server, and raise an error."""
    folder = Path(bench.scratch) / "engine"
    folder.mkdir()
    (folder / "vllm-0.log").write_text("starting\nNCCL error: unhandled system error\n")
    raise RuntimeError("the server did not start")
