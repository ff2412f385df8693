"""python -m mtrl.preflight.replay JOB OUT: repeat recorded responses in a fresh process, and write the transcripts.

The rows are loaded again as well, so that data that change between processes are detected like observations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.command.checks import import_plugins
from mtrl.config.schema import Config
from mtrl.environments.factory import load_task
from mtrl.preflight.context import CheckContext
from mtrl.preflight.stage import Script, scripted


def main(job_path: str, out_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    config: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), job["config"]))  # type: ignore[assignment]
    import_plugins(config.plugins)
    task = load_task(config)
    splits = task.splits
    context = CheckContext(config, task.family, splits, task.make_environment, 0, job["seconds"], job["patience"])
    scripts = [
        Script(getattr(splits, split)[index], scripted(responses), str(number))
        for number, (split, index, responses) in enumerate(job["actions"])
    ]
    episodes = context.stage.run(scripts)
    Path(out_path).write_text(json.dumps([[episode.label, episode.transcript()] for episode in episodes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
