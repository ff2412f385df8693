"""One job of a sweep, as Hydra calls it. The failure of a job is recorded, and the other jobs continue."""

from __future__ import annotations

import math
import sys
import traceback
from contextlib import chdir, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mtrl.config.config_dir import config_dir_flags
from mtrl.errors import Interrupted, PrunedError, UserError
from mtrl.sweep.outcome import JobResult, own, read_outcome
from mtrl.sweep.workers import WORKER, is_worker


def job(cfg: DictConfig) -> float:
    """Run the job in the folder that Hydra sets.

    Return the objective, or NaN if the job has none: sweepers count NaN as a failure, whereas an exception would end
    the sweep.
    """
    cfg.run_dir = HydraConfig.get().runtime.output_dir
    if not is_worker():
        return run_job(cfg)
    value = math.nan
    with WORKER.working() as may_begin:
        if may_begin:
            value = run_job(cfg)
    return value


def run_job(cfg: DictConfig) -> float:
    """Run one job of a sweep, and write its outcome to its folder. A finished or pruned job of the same settings is not
    run again.

    Raises:
        Interrupted: a signal ended the job, and with it the sweep.
    """
    from mtrl.sweep.pruning import pruner_of
    from mtrl.training import start

    hydra, folder = HydraConfig.get(), Path(cfg.run_dir)
    before = read_outcome(folder)
    if before is not None and before.status in ("running", "interrupted") and cfg.resume == "none":
        cfg.resume = "latest"  # restarted by its scheduler; otherwise `check_jobs` would have rejected the folder
    overrides = [*config_dir_flags(), *map(str, OmegaConf.to_container(hydra.overrides.task))]
    if before is not None and before.is_done and cfg.resume == "latest" and before.overrides == own(overrides):
        return math.nan if before.value is None else before.value
    direction = hydra.sweeper.get("direction") or "maximize"
    taken = 0.0 if before is None else before.seconds or 0.0
    outcome = JobResult.begin(hydra.job.num, overrides, cfg.objective, str(direction), taken)
    try:
        outcome.write(folder)
        # An environment may change the working directory, to which the folders of the next jobs are relative.
        with chdir(Path.cwd()):
            value = start(cfg, pruner_of(cfg), overrides)
        outcome.end("finished", value=value)
    except PrunedError as pruned:
        outcome.end("pruned", str(pruned), pruned.score)
    except UserError as error:
        outcome.end("failed", str(error))
    except Exception as error:
        traceback.print_exc()
        outcome.end("failed", f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    except (SystemExit, KeyboardInterrupt) as end:
        outcome.end("interrupted", end.signal if isinstance(end, Interrupted) else type(end).__name__)
        raise
    finally:
        with suppress(OSError):  # a full disk; the job has failed by the same error already
            outcome.write(folder)
    if outcome.said:
        print(f"job {outcome.number} {outcome.status}: {outcome.said}", file=sys.stderr, flush=True)
    return math.nan if outcome.value is None else outcome.value
