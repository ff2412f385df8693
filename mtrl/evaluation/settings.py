"""The configuration of an evaluation: from a run or composed, checked, with warnings about settings without effect."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from mtrl.command.checks import check, ignored
from mtrl.command.compose import merge
from mtrl.command.stored import THEIRS, of_run
from mtrl.config.derived import runs_agent, serves
from mtrl.config.mixture import source_of
from mtrl.config.overrides import key_of, normalise
from mtrl.config.schema import Config
from mtrl.datasets import Splits
from mtrl.errors import UserError
from mtrl.evaluation.rollouts import Source
from mtrl.evaluation.sources import BASE
from mtrl.record.run import run_of
from mtrl.record.run_dir import RunDir, such_as
from mtrl.types import Row
from mtrl.utils.files import in_home

READ = (
    "data",
    "environment",
    "environments",
    "evaluation",
    "generator",
    "model",
    "plugins",
    "reward",
    "seed",
    "name",
    "trainer.fsdp.param_dtype",
    "trainer.threads",
    "tracker.report_to",
    "tracker.project",
    "tracker.trajectories",
    "tracker.mlflow",
    "tracker.wandb",
)
"""Keys and sections that an evaluation reads."""
OF_A_RUN = ("evaluation.every_steps", "evaluation.before_train", "evaluation.keep_disagreements")
"""Keys within these sections that only a training run reads."""
OF_WEIGHTS = (
    "model",
    "trainer.fsdp.param_dtype",
    "trainer.threads",
    "generator.max_num_seqs",
    "generator.local",
    "generator.vllm",
    "generator.sglang",
    "generator.gpu_memory_utilization",
)
"""Keys and sections that only a local model reads."""
CHOSEN_HERE = (
    "evaluation.model", "evaluation.compare", "evaluation.output", "evaluation.split", "evaluation.source",
    "evaluation.endpoint",
)  # fmt: skip
"""Keys and sections that are not taken from the configuration of a run."""


@dataclass(frozen=True)
class Words:
    """The parsed words of the command line."""

    run: Path | None
    """Folder of the run whose configuration is used; None without a run."""
    model: str | None
    """Path on the command line: the run, or a path within it."""
    overrides: list[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Words:
        """Sort the words into a run and overrides.

        Raises:
            UserError: More than one word is not a setting, or that word is not a run.
        """
        paths = [word for word in words if ("=" not in word and not word.startswith("~")) or Path(word).exists()]
        overrides = [word for word in words if word not in paths]
        if len(paths) > 1:
            raise UserError(
                f"{paths[1]} is a second run; name further models in evaluation.compare=[{','.join(paths[1:])}]"
            )
        if not paths:
            return cls(None, None, overrides)
        run = run_of(in_home(paths[0]))
        if run is None:
            if example := such_as(Path(paths[0])):
                raise UserError(f"{paths[0]} is no run, but holds some; give the folder of one{example}")
            raise UserError(
                f"{paths[0]} is no run, for it has no config.yaml; to evaluate another model, name its task and the "
                f"model, for example experiment=gsm8k evaluation.model={paths[0]}"
            )
        if any(key_of(override) == "experiment" for override in overrides):
            raise UserError(
                f"{paths[0]} has its own configuration, which cannot be combined with an experiment; to "
                f"evaluate it with the experiment, write evaluation.model={paths[0]}"
            )
        return cls(run, paths[0], overrides)


def configuration(words: Words, config_dir: str | None = None) -> tuple[DictConfig, list[str]]:
    """Return the checked configuration, with `evaluation.model` filled in, and warnings.

    Raises:
        UserError: The configuration is invalid.
    """
    if words.run is None:
        cfg = merge(normalise(words.overrides, config_dir), config_dir)
    else:
        cfg = of_run(words.run, words.overrides, (*THEIRS, *CHOSEN_HERE))
    if cfg.evaluation.model is None:
        cfg.evaluation.model = words.model or BASE
    return cfg, [*check(cfg), *ignored(cfg, words.overrides), *idle(words.overrides)]


def check_servers(config: Config, sources: Sequence[Source]) -> None:
    """Refuse running servers as the backend of local models.

    Raises:
        UserError: The configured servers already have weights, which are not those of the models.
    """
    name = config.generator.backend
    if not serves(config) or not getattr(config.generator, name).urls:
        return
    if any(source.kind != "endpoint" for source in sources):
        raise UserError(
            f"generator.{name}.urls names running servers, and an evaluation starts servers with the weights of its "
            f"models; set generator.{name}.urls=[], or evaluate the running model with "
            "evaluation.model=MODEL@http://HOST:PORT/v1"
        )


def check_agent_models(config: Config, sources: Sequence[Source]) -> None:
    """Refuse an endpoint as the model of an agent program.

    Raises:
        UserError: An endpoint would answer the program of `generator.agent`, but its tokens are not known.
    """
    if runs_agent(config) and (remote := [source for source in sources if source.kind == "endpoint"]):
        raise UserError(
            f"{remote[0].text} is an endpoint, and the program of generator.agent needs a model with local weights; "
            "set generator.agent.target, command and url to null, so that mtrl runs the environment"
        )


def chosen_prompt(config: Config, sources: Sequence[Source]) -> str:
    """Return the value of `environment.prompt` for these models, which all get the same prompts: auto is short if one
    of them is a tiny policy, else full."""
    if config.environment.prompt != "auto":
        return config.environment.prompt
    return "short" if any(is_tiny(source, config) for source in sources) else "full"


def is_tiny(source: Source, config: Config) -> bool:
    """Return whether the weights of a source are those of a tiny policy. A model behind an endpoint counts as none."""
    from omegaconf import OmegaConf

    from mtrl.config.plain_yaml import load_config
    from mtrl.models.renderer import TINY_TEMPLATE
    from mtrl.record.run_dir import RunDir

    if source.kind == "base":
        return config.model.name == "tiny"
    if source.run is not None:
        return OmegaConf.select(load_config(RunDir(source.run).config), "model.name") == "tiny"
    template = Path(source.path or "") / "chat_template.jinja"
    return source.kind == "folder" and template.is_file() and template.read_text(encoding="utf-8") == TINY_TEMPLATE


def idle(overrides: Sequence[str]) -> list[str]:
    """Return warnings about overrides that only training reads. An override of a whole section, such as
    `tracker=mlflow`, has an effect if the evaluation reads any key of the section."""
    groups = ("experiment", "debug", "hydra")
    read = [*READ, *groups]
    unread = [
        override
        for override in overrides
        if not any(_within(key_of(override), key) or _within(key, key_of(override)) for key in read)
        or any(_within(key_of(override), key) for key in OF_A_RUN)
    ]
    return [f"{', '.join(unread)} changes nothing here: an evaluation does not train"] if unread else []


def rows_of(config: Config, splits: Splits) -> tuple[list[Row], list[str]]:
    """Return the first rows of `evaluation.split`, as many as the evaluation needs, and warnings.

    Raises:
        UserError: The split has no rows.
    """
    evaluation = config.evaluation
    rows = rows_of_source(config, getattr(splits, evaluation.split))
    if not rows:
        fix = "set data.validation_rows" if evaluation.split == "validation" else "check data.path and its splits"
        raise UserError(f"evaluation.split={evaluation.split} has no rows; {fix}, or take another split")
    warnings = []
    if evaluation.split == "train":
        warnings.append(
            "evaluation.split=train: these are rows to train on, so success on them does not show success on new rows"
        )
    requested = max(evaluation.rows, evaluation.sampled_rows)
    is_reported = evaluation.split == "test" and len(rows) == config.data.max_test_rows  # the checks warned already
    if len(rows) < requested and not is_reported:
        limit = " (data.validation_rows)" if evaluation.split == "validation" else ""
        warnings.append(
            f"{requested} rows were requested, and {evaluation.split} has {len(rows)}{limit}: all of them are used"
        )
    return rows[:requested], warnings


def rows_of_source(config: Config, rows: list[Row]) -> list[Row]:
    """Return the rows of `evaluation.source`, all rows if it is null.

    Raises:
        UserError: the configuration has no source of this name.
    """
    name = config.evaluation.source
    if name is not None and name not in config.environments:
        known = ", ".join(config.environments) or "no sources"
        raise UserError(f"evaluation.source={name} is no source of environments, which has {known}; correct the name")
    return [row for row in rows if name in (None, source_of(str(row["id"])))]


def without_effect(config: Config, sources: Sequence[Source], overrides: Sequence[str]) -> list[str]:
    """Return warnings about settings that have no effect with these models."""
    evaluation, keys = config.evaluation, [key_of(override) for override in overrides]
    warnings = []
    sampling = config.generator.eval_sampling_params
    if evaluation.sampled_rows and sampling is not None and sampling.temperature == 0:
        warnings.append(
            "generator.eval_sampling_params.temperature=0: the sampled episodes of a row are all its greedy one; set "
            "it above 0, or evaluation.sampled_rows=0"
        )
    remote = [source for source in sources if source.kind == "endpoint"]
    if not remote and (unused := [key for key in keys if _within(key, "evaluation.endpoint")]):
        warnings.append(f"{', '.join(unused)} changes nothing, for no model is an endpoint")
    if len(remote) == len(sources):
        unused = [key for key in keys if any(_within(key, weights) for weights in OF_WEIGHTS)]
        warnings += [f"{', '.join(unused)} changes nothing, for every model is an endpoint"] if unused else []
    if remote and not config.generator.use_conversation_multi_turn:
        warnings.append(
            "generator.use_conversation_multi_turn=False changes nothing for endpoints: to them every turn is a message"
        )
    if remote and config.generator.context.fold != "none":
        warnings.append(
            f"generator.context.fold={config.generator.context.fold} changes nothing for endpoints: their "
            "conversations are not folded"
        )
    if len(remote) > 1 and config.evaluation.endpoint.price.input is not None:
        warnings.append(
            f"evaluation.endpoint.price is taken for all {len(remote)} endpoints; where theirs differ, evaluate them "
            "one by one"
        )
    large = [source.label for source in sources if not is_tiny(source, config)]
    if config.environment.prompt == "short" and large and "environment.prompt" not in keys:
        warnings.append(
            f"environment.prompt=short: {', '.join(large)} gets the prompts of the tiny policy, without instructions; "
            "for a language model set environment.prompt=full"
        )
    return [*warnings, *unencrypted_keys(config, remote), *trained_elsewhere(config, sources)]


def unencrypted_keys(config: Config, remote: Sequence[Source]) -> list[str]:
    """Return warnings about API keys that are sent unencrypted."""
    import httpx

    variable = config.evaluation.endpoint.api_key_env
    addresses = [httpx.URL(str(source.url)) for source in remote]
    local = ("localhost", "127.0.0.1", "::1")
    open_to_all = [str(url.host) for url in addresses if url.scheme == "http" and url.host not in local]
    if not open_to_all or not os.environ.get(variable):
        return []
    return [f"the key in {variable} goes unencrypted to {', '.join(open_to_all)}; use https, or unset it"]


def trained_elsewhere(config: Config, sources: Sequence[Source]) -> list[str]:
    """Return warnings about models from runs of another task."""
    from omegaconf import OmegaConf

    from mtrl.config.plain_yaml import load_config

    warnings = []
    here = config.environment.target or config.environment.name
    for source in sources:
        if source.run is not None:
            cfg = load_config(RunDir(source.run).config)
            there = OmegaConf.select(cfg, "environment.target") or OmegaConf.select(cfg, "environment.name")
            if there != here:
                warnings.append(
                    f"{source.text} was trained on {there}, and this is {here}; is experiment=... as meant?"
                )
    return warnings


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
