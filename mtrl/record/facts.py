"""The facts of the banner: task, model, algorithm, steps and folder of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrl.config.schema import Config


def run_facts(config: Config) -> dict[str, str]:
    """Return the sentence for each name, as `Console.banner` takes them."""
    algorithm, trainer, evaluation = config.algorithm, config.trainer, config.evaluation
    held_out = f"evaluation every {evaluation.every_steps} on {evaluation.rows} held-out rows"
    return {
        "task": f"{config.environment.target or config.environment.name}, {config.data.path or 'synthetic rows'}, "
        f"at most {config.generator.max_turns} turns",
        "model": f"{config.model.path or config.model.name} on {config.model.device}, {config.model.dtype}"
        + (f", LoRA rank {config.model.lora_rank}" if config.model.lora_rank else ""),
        "algorithm": f"{algorithm.advantage_method} + {algorithm.loss_fn}, {trainer.prompts_per_step} prompts × "
        f"{algorithm.group_size} trajectories, lr {trainer.optimizer.lr:g}, seed {config.seed}",
        "steps": f"{trainer.max_steps}" + (f", {held_out}" if evaluation.every_steps else ""),
        "run": str(config.run_dir),
    }
