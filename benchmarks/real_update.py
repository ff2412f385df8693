"""CPU seconds and peak memory of one update of SmolLM2-135M-Instruct (`model=smollm2_135m`), with one thread.

    python benchmarks/real_update.py                                                one group of 8 trajectories
    python benchmarks/real_update.py trainer.gradient_checkpointing=true            any setting of a run
    python benchmarks/real_update.py --own 400 --rounds 2 trainer.compile=true

The samples have random tokens: a prompt that the group shares, and the trajectory's own tokens, of which 7 in 10 are
trained. Memory is the resident memory of the process, with Python and PyTorch. The aim is 4 times the float32 weights
plus the moments of AdamW.

The plan is the estimate of `mtrl doctor --plan model.device=cpu`, with the keys and values of one
conversation. No engine runs here. Give generator.max_context_length the length of a trajectory.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from bounds import check_sizes
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.doctor.architecture import find
from mtrl.doctor.memory import Memory, main_memory
from mtrl.models.gguf import as_folder
from mtrl.trainer.setup.machine import with_machine_settings
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.update.learner import alone
from mtrl.trainer.update.update import Updater
from mtrl.types import Sample

GROUP = 8
TOKENS = 49_000
"""Number of different tokens; the vocabulary has a few more."""


def memory(field: str) -> float:
    """Return a field of /proc/self/status in GB: `VmRSS` is the resident memory, `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e9


def plan(config: Config) -> float:
    """Return the planned peak of an update in GB."""
    moments = Memory(config, find(str(config.model.path)), main_memory(2**40)).moments()
    return max(moment.needed for moment in moments) / 1e9


def make_samples(groups: int, prompt: int, own: int) -> list[Sample]:
    draw, samples = random.Random(0), []
    for group in range(groups):
        shared = [draw.randrange(TOKENS) for _ in range(prompt)]
        for index in range(GROUP):
            mask = [False] * prompt + [place % 40 < 28 for place in range(own)]
            samples.append(
                Sample(
                    group_id=str(group),
                    trajectory=index,
                    token_ids=shared + [draw.randrange(TOKENS) for _ in range(own)],
                    loss_mask=mask,
                    logprobs=[-10.0 if trained else 0.0 for trained in mask],
                    advantages=[1.0 if index % 2 else -1.0] * len(mask),
                    versions=[0] * len(mask),
                    turns=[0] * len(mask),
                )
            )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=300, help="tokens that a group shares")
    parser.add_argument("--own", type=int, default=120, help="further tokens of a trajectory")
    parser.add_argument("--rounds", type=int, default=1, help="number of updates")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    args = parser.parse_args()
    check_sizes(parser, args)
    cfg = compose(
        ["experiment=gsm8k", "model=smollm2_135m", "trainer.threads=1", "generator.max_num_seqs=1", *args.overrides]
    )
    config = with_machine_settings(OmegaConf.to_object(cfg))  # type: ignore[arg-type]
    planned = plan(config)
    learner = make_learner(config, World(), as_folder(str(config.model.path), "model.path"))
    weights = 4e-9 * learner.policy.parameters
    print(f"weights {weights:.2f} GB, aim {6 * weights:.2f} GB, after loading {memory('VmRSS'):.2f} GB", flush=True)
    samples = make_samples(args.groups, args.prompt, args.own)
    with tempfile.TemporaryDirectory() as folder:
        updater = Updater(config, alone(learner), Path(folder) / "nonfinite_batch.jsonl")
        for number in range(args.rounds):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            start = time.process_time()
            updater.run(samples, number)
            seconds = time.process_time() - start
            peak, after = memory("VmHWM"), memory("VmRSS")
            print(
                f"update {number + 1}: {seconds:.1f} CPU seconds, peak {peak:.2f} GB ({peak / planned:.2f} of the "
                f"planned {planned:.2f} GB), then {after:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
