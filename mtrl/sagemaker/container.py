"""The entry inside the container of a job: `mtrl train` with the job's overrides, in SageMaker's folders.

| Variable of SageMaker | Use |
|---|---|
| SM_CHANNEL_DATA, SM_CHANNEL_MODEL | data.path, model.path |
| SM_CHANNEL_SHARED | the file system that all instances share; it holds the folder of the run |
| SM_CHECKPOINT_DIR | folder of the run without a file system: copied to S3 in training, restored on a restart |
| SM_OUTPUT_DATA_DIR | folder of the run if neither exists: copied to S3 at the end |
| SM_MODEL_DIR | folder for the trained model |
| SM_HOSTS, SM_CURRENT_HOST, SM_NUM_GPUS | number and place of the ranks, if torchrun has not started them yet |
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TextIO

from mtrl.config.overrides import quoted
from mtrl.sagemaker.source import OVERRIDES

CHANNELS = {"SM_CHANNEL_DATA": "data.path", "SM_CHANNEL_MODEL": "model.path"}
PORT = "7777"
"""Port of the first rank, as in the SDK's driver."""
WRONG_SETTING = 2
"""Exit status of `mtrl train` for an error of the user, which is one printed sentence."""
SHOWN_CHARACTERS = 1000
"""Number of characters of a failure that SageMaker shows."""


def main(code: Path, entry: Path) -> None:
    """Train. `code` is the folder of the archive, `entry` the script that torchrun starts for every rank.

    Raises:
        SystemExit: with the exit status of mtrl.main; the status is 75 after SIGTERM, with a checkpoint.
    """
    environment = os.environ
    if command := torchrun(environment, entry):
        os.execv(command[0], command)  # so that signals reach torchrun, which forwards them
    from mtrl.main import cli

    run = run_dir(environment)
    leads = environment.get("RANK", "0") == "0"
    if leads:
        for torn in set_torn_aside(run / "checkpoints"):
            print(f"{torn} was cut off while it was copied, and is left out", flush=True)
    overrides = json.loads((code / OVERRIDES).read_text(encoding="utf-8"))
    printed = KeepsEnd(sys.stderr)
    try:
        with redirect_stderr(printed):
            cli([*overrides, *placed(environment), quoted("run_dir", str(run)), "resume=latest"])
    except BaseException as ended:
        if leads and not (isinstance(ended, SystemExit) and not ended.code):
            tell_failure(reason(ended, printed.end, run), environment)
        raise
    if leads:
        shutil.copytree(run / "export", environment.get("SM_MODEL_DIR", "/opt/ml/model"), dirs_exist_ok=True)


def torchrun(environment: Mapping[str, str], entry: Path) -> list[str] | None:
    """Return the command that starts the ranks of this instance; None if they are started, or if one process
    suffices."""
    if "RANK" in environment:
        return None
    hosts = sorted(json.loads(environment.get("SM_HOSTS", '["localhost"]')))
    ranks = max(1, int(environment.get("SM_NUM_GPUS", "0")))
    if len(hosts) == 1 and ranks == 1:
        return None
    here = hosts.index(environment.get("SM_CURRENT_HOST", hosts[0]))
    return [
        sys.executable,
        *("-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks}", f"--node-rank={here}"),
        f"--master-addr={environment.get('SM_MASTER_ADDR', hosts[0])}",
        f"--master-port={environment.get('SM_MASTER_PORT', PORT)}",
        str(entry),
    ]


def run_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder of the run, which is the same when SageMaker starts the job again."""
    if shared := environment.get("SM_CHANNEL_SHARED"):
        return Path(shared, environment.get("TRAINING_JOB_NAME", "job"), "run")
    folder = environment.get("SM_CHECKPOINT_DIR") or environment.get("SM_OUTPUT_DATA_DIR", "/opt/ml/output/data")
    return Path(folder, "run")


def placed(environment: Mapping[str, str]) -> list[str]:
    """Return an override for each input channel: the channel's folder, or the only file in it."""
    found = [(key, Path(environment[name])) for name, key in CHANNELS.items() if environment.get(name)]
    return [quoted(key, str(_only_file(path) or path)) for key, path in found]


def _only_file(folder: Path) -> Path | None:
    inside = list(folder.iterdir()) if folder.is_dir() else []
    return inside[0] if len(inside) == 1 and inside[0].is_file() else None


def set_torn_aside(checkpoints: Path) -> list[Path]:
    """Rename incomplete checkpoints, and return their new paths. A run renames only complete checkpoints into place,
    but they are copied to S3 file by file, and an instance may be reclaimed during the copy."""
    from mtrl.trainer.checkpoint.checkpoint import Checkpoints

    torn = [path for path in checkpoints.glob("step_*") if not _is_whole(path)]
    return list(map(Checkpoints(checkpoints).set_aside, torn))


def _is_whole(checkpoint: Path) -> bool:
    from mtrl.errors import UserError
    from mtrl.trainer.checkpoint.checkpoint import read_checkpoint

    try:
        read_checkpoint(checkpoint)
    except UserError:
        return False
    return True


class KeepsEnd:
    """A text stream that also keeps the end of what is written to it."""

    def __init__(self, stream: TextIO):
        self.stream, self.end = stream, ""

    def write(self, text: str) -> int:
        self.end = (self.end + text)[-SHOWN_CHARACTERS:]
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def reason(ended: BaseException, printed: str, run: Path) -> str:
    """Return why the run ended: the traceback of an error, what was printed for a wrong setting, else the end of the
    run's log, which an earlier start of the job may have written."""
    if not isinstance(ended, SystemExit):
        return "".join(traceback.format_exception(ended))
    log = run / "run.log"
    if ended.code == WRONG_SETTING or not log.is_file():
        return printed
    return log.read_text(encoding="utf-8", errors="replace")


def tell_failure(text: str, environment: Mapping[str, str]) -> None:
    """Write the end of a text to the file in which SageMaker looks for the reason of a failure."""
    place = Path(environment.get("SM_OUTPUT_FAILURE", "/opt/ml/output/failure"))
    if text and place.parent.is_dir():
        place.write_text(text[-SHOWN_CHARACTERS:], encoding="utf-8")
