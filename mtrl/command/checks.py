"""Checks of the whole configuration, which report errors across keys before the first token is generated.

Nothing here imports torch, so that an error is reported within a second.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from mtrl.algorithms.registry import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, LOSSES, REDUCTIONS, Registry
from mtrl.command.agent_checks import check_agent
from mtrl.command.algorithm_checks import check_algorithm, check_router_replay
from mtrl.command.context_checks import check_context
from mtrl.command.distillation_checks import check_distillation
from mtrl.command.engine_checks import check_engines, check_sampling, check_sampling_params
from mtrl.command.hints import hints, mixture_hints, training_hints
from mtrl.command.mixture_checks import check_mixture
from mtrl.command.rollout_checks import check_local_replicas, check_resources, check_rollouts
from mtrl.command.runs import holds_run, settle
from mtrl.command.scale_checks import check_scale
from mtrl.command.secret_checks import check_secrets
from mtrl.command.self_play_checks import check_self_play
from mtrl.command.vision_checks import check_images
from mtrl.config import keys
from mtrl.config.derived import runs_agent
from mtrl.config.messages import check_values, did_you_mean, unknown_choice
from mtrl.config.mixture import in_source, source_configs
from mtrl.config.outputs import check_local
from mtrl.config.overrides import CONF, key_of
from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.engines.endpoints.budget import check_spending
from mtrl.errors import UserError, missing_extra
from mtrl.utils.files import in_home
from mtrl.utils.user_code import load_function, reason

REGISTRIES = (ESTIMATORS, LOSSES, REDUCTIONS, CORRECTIONS, KL_ESTIMATORS)


def ready(cfg: DictConfig, overrides: Sequence[str] = ()) -> list[str]:
    """Choose the folder of a training run (`run_dir`) and check its configuration. Return warnings.

    Args:
        overrides: the overrides of the command, for warnings about those without an effect.

    Raises:
        UserError: the configuration cannot run.
        NotImplementedError: the backend does not support a setting.
    """
    warnings = [*settle(cfg), *check(cfg), *training_hints(cfg), *ignored(cfg, overrides)]
    check_training(cfg)
    return warnings


def check(cfg: DictConfig) -> list[str]:
    """Raise an error for a configuration that cannot run; return warnings about settings that have another effect than
    they seem to.

    Keys of `environment.config` that belong to another task (see `_replaced`) are removed from `cfg`.

    Raises:
        UserError: one sentence with the key, the value and the fix.
        NotImplementedError: SGLang without `use_conversation_multi_turn`.
    """
    _backend(cfg)  # first, since the guide documents this error
    values = keys.plain(cfg)  # converted once, since this takes as long as all other checks
    _no_missing(cfg, values)
    check_secrets(values)
    _local_folders(cfg)
    import_plugins(cfg.plugins)
    check_values(values)
    warnings = [warning for part in _PARTS for warning in part(cfg) or ()]
    return [*warnings, *hints(cfg, values)]


def check_training(cfg: DictConfig) -> None:
    """Check the settings that only training reads.

    Raises:
        UserError: training samples from a part of the distribution, the engine cannot replay routers, the folder of the
            model does not exist, or a package that training needs is not installed.
    """
    path = cfg.model.path or ""
    if path.startswith(("/", ".", "~")) and not in_home(path).exists():  # not the form of a Hub name
        raise UserError(f"model.path={path} does not exist; name an existing folder, or a Hub name owner/name")
    check_sampling(cfg)
    check_router_replay(cfg)
    if cfg.model.lora_rank and find_spec("peft") is None:  # checked here, so that it fails before the model loads
        raise missing_extra("peft", "lora")


def _backend(cfg: DictConfig) -> None:
    if cfg.generator.backend == "sglang" and not cfg.generator.use_conversation_multi_turn:
        # The Multi-Turn Training Guide documents exactly this message.
        raise NotImplementedError("`use_conversation_multi_turn=False` is not supported for SGLang backend")


def _no_missing(cfg: DictConfig, values: dict[str, Any]) -> None:
    if MISSING not in repr(values):  # the search for the keys is slow
        return
    for path in sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(f"{path} has no value, and {cfg.name} needs one; write {path}=...")


def _local_folders(cfg: DictConfig) -> None:
    for path in ("run_dir", "evaluation.output", "preflight.json"):
        value = OmegaConf.select(cfg, path)
        check_local(f"{path}={value}", value)


def import_plugins(modules: Sequence[str]) -> None:
    """Import the modules, in order; a module that is already imported is not imported again.

    Raises:
        UserError: a module cannot be imported, for any reason.
    """
    if not modules:
        return
    from mtrl.utils.process_guard import import_guarded  # imports asyncio, which --help does not need

    _register_built_in()
    for module in modules:
        try:
            import_guarded(module)
        except Exception as error:
            is_absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            fix = "write package.module, from the current folder or installed" if is_absent else "correct the module"
            raise UserError(f"plugins=[{module}] cannot be imported ({reason(error)}); {fix}") from error


def _register_built_in() -> None:
    """Register the built-in functions first, so that a plugin that uses one of their names gets an error."""
    from mtrl.rewards.shaping import SHAPINGS

    for registry in (*REGISTRIES, SHAPINGS):
        registry.names()


def _registered(cfg: DictConfig) -> None:
    for registry in REGISTRIES:
        _function(registry, OmegaConf.select(cfg, registry.key))


def _function(registry: Registry, value: str) -> None:
    """Check the name of a registered function, or the path of a function. The names in the schema are accepted without
    an import of torch."""
    if value in keys.words(registry.key):
        return
    if "." in value:
        load_function(value, registry.key)
    elif value not in registry:
        raise unknown_choice(registry.key, value, registry.names(), ", or package.module.function")


def _parent(cfg: DictConfig) -> None:
    if cfg.parent is not None and not holds_run(Path(cfg.parent)):
        raise UserError(f"parent={cfg.parent} is no run; name the folder of the run that this run changes")


def _model(cfg: DictConfig) -> None:
    if cfg.model.name == "hf" and not cfg.model.path:
        raise UserError(
            "model=hf needs model.path; write model.path=FOLDER or a Hub name such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", cfg.model.device):
        raise UserError(f"model.device={cfg.model.device} is not known; choose auto, cpu, cuda or cuda:N")

    tiny = cfg.model.tiny
    if cfg.model.name == "tiny" and (tiny.hidden_size // tiny.heads < 2 or tiny.hidden_size // tiny.heads % 2):
        raise UserError(
            f"model.tiny.hidden_size={tiny.hidden_size} and model.tiny.heads={tiny.heads} give each head a size of "
            f"{tiny.hidden_size // tiny.heads}, and rotary positions need an even size; set model.tiny.hidden_size="
            f"{2 * tiny.heads * max(1, tiny.hidden_size // (2 * tiny.heads))}"
        )


def _warm_start(cfg: DictConfig) -> None:
    band = cfg.model.warm_start.success_band
    if len(band) != 2 or not 0 <= band[0] <= band[1] <= 1:
        raise UserError(
            f"model.warm_start.success_band={keys.typed(list(band))} must be two numbers from 0 to 1, the lower limit "
            "first; write [0.3,0.5]"
        )


def _data(cfg: DictConfig) -> None:
    path = cfg.data.path
    if path and not in_home(path).exists() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", path):
        raise UserError(f"data.path={path} does not exist; write an existing folder or file, or a Hub name owner/name")


def _batches(cfg: DictConfig) -> None:
    prompts, parts = cfg.trainer.prompts_per_step, cfg.trainer.mini_batches
    if prompts % parts:
        near = min((n for n in range(1, prompts + 1) if prompts % n == 0), key=lambda n: abs(n - parts))
        raise UserError(
            f"trainer.mini_batches={parts} does not divide trainer.prompts_per_step={prompts}, and the trajectories of "
            f"a prompt stay together; set it to {near}"
        )


def _optimizers(cfg: DictConfig) -> None:
    for optimizer in (key.path for key in keys.all_keys().values() if key.type is OptimizerConfig):
        betas = OmegaConf.select(cfg, optimizer).betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(
                f"{optimizer}.betas={keys.typed(list(betas))} must be two numbers from 0 to below 1; write [0.9,0.95]"
            )


def _lengths(cfg: DictConfig) -> None:
    context = cfg.generator.max_context_length
    for name in ("sampling_params", "eval_sampling_params"):
        sampling = cfg.generator[name]
        if sampling is not None and context is not None and sampling.max_generate_length >= context:
            raise UserError(
                f"generator.{name}.max_generate_length={sampling.max_generate_length} leaves no room for a prompt in "
                f"generator.max_context_length={context}; lower the first or raise the second"
            )


def _evaluation(cfg: DictConfig) -> None:
    endpoint: Any = OmegaConf.to_object(cfg.evaluation.endpoint)
    check_spending("evaluation.endpoint", endpoint.price, endpoint.budget)
    samples, values = cfg.evaluation.samples_per_row, list(cfg.evaluation.pass_k_values)
    for k in values:
        if not 1 <= k <= samples:
            reason = (
                f"evaluation.pass_k_values={keys.typed(values)} must lie from 1 to evaluation.samples_per_row={samples}"
            )
            raise UserError(f"{reason}; leave {k} out" + (f", or set evaluation.samples_per_row={k}" if k > 1 else ""))


def _trackers(cfg: DictConfig) -> list[str]:
    from mtrl.trackers import check_trackers

    return check_trackers(cfg)


def _replaced(cfg: DictConfig) -> list[str]:
    """With `environment.target`, remove the keys of the replaced task that the target does not take. Return a warning.

    These keys come from the default experiment, or from the chosen one, which is written for its own task.
    """
    from mtrl.environments.family import get_family

    environment = cfg.environment
    if not environment.target or OmegaConf.is_missing(environment, "name"):
        return []
    try:
        replaced = get_family(environment.name)
    except (UserError, ImportError):  # a user's own name, or a task whose extra is not installed
        return []
    theirs = {key: value for key, value in environment.config.items() if key in replaced.config_keys}
    if not theirs or _fits(cfg, dict(environment.config)) or _fits(cfg, theirs):
        return []
    with open_dict(environment.config):
        for key in theirs:
            del environment.config[key]
    removed = ", ".join(f"environment.config.{key}" for key in theirs)
    return [f"{removed} is left out: {environment.target} does not take what environment.name={environment.name} does"]


def _fits(cfg: DictConfig, keys_of_config: dict[Any, Any]) -> bool:
    """Return whether the task takes these keys of `environment.config`, by creating and closing one environment."""
    from mtrl.environments.factory import check_loader, environment_factory, try_out
    from mtrl.environments.family import get_family

    config: Any = OmegaConf.to_object(cfg)
    config.environment.config = keys_of_config
    family = get_family(config.environment.name, config.environment.target)
    foreign = getattr(family.environment, "foreign", None)
    if foreign is not None and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(foreign).parameters.values()):
        return False  # `gymnasium.make(id, **kwargs)` passes unknown keys on, and fails only in an episode
    try:
        check_loader(config, family)
        try_out(environment_factory(config, family), config, family)
    except Exception:  # a later check reports it
        return False
    return True


def _environment(cfg: DictConfig) -> list[str]:
    from mtrl.environments.factory import writes_prompts
    from mtrl.environments.family import get_family

    environment = cfg.environment
    family = get_family(environment.name, environment.target)
    for name in environment.config:
        if family.config_keys and name not in family.config_keys:
            raise _unknown_config_key(str(name), family.name, family.config_keys)
    schemes = getattr(family.environment, "reward_schemes", None)
    if schemes is not None and cfg.reward.scheme not in schemes:
        raise unknown_choice("reward.scheme", cfg.reward.scheme, schemes)
    warnings = []
    if not family.has_scorer and dict(cfg.reward.components) != {"environment": 1.0} and not runs_agent(cfg):
        warnings.append(
            f"{family.name} has no scorer of its own, so an episode succeeds if its reward is at least 1, and this sum "
            "has all of reward.components; define score(trajectory, row), so that they change the reward alone"
        )
    if environment.prompt != "auto" and not writes_prompts(family):
        warnings.append(
            f"environment.prompt={environment.prompt} changes nothing: the loader of {family.name} has no parameter "
            "prompt"
        )
    return warnings


def ignored(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return warnings about overrides of the command that have no effect."""
    return [
        *mixture_hints(cfg, overrides),
        *_ignored_keys(cfg.environment, overrides),
        *_warm_start_keys(cfg.model, overrides),
        *_empty(cfg, overrides),
    ]


def _warm_start_keys(model: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return a warning about overrides of the warm start of a policy that has none. Only overrides are examined,
    because experiments and `debug=fast` set its keys for every model."""
    if model.name == "tiny" or model.warm_start.enabled:
        return []
    return [
        f"{override.lstrip('+')} has no effect with model.warm_start.enabled=false; set it to true, or leave this out"
        for override in overrides
        if key_of(override).startswith("model.warm_start.") and key_of(override) != "model.warm_start.enabled"
    ]


def _empty(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return warnings about empty mappings, such as `reward.components={}`, that empty nothing."""
    return [
        f"{override.lstrip('+')} has no effect: a mapping changes the keys that it names and keeps the others; set "
        "these one by one"
        for override in overrides
        if override.partition("=")[2].strip() == "{}" and OmegaConf.select(cfg, key_of(override))
        if (key := keys.find(key_of(override))) is None or key.default is not None  # else it creates the section
    ]


def _ignored_keys(environment: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return a warning about overrides of `environment.config` that an environment class without a constructor of its
    own ignores. Only overrides are examined, because an experiment sets keys of the task that the class replaces."""
    from mtrl.datasets import load_rows
    from mtrl.environments.family import get_family

    section = "environment.config."
    if not environment.target or not any(f"{key_of(override)}.".startswith(section) for override in overrides):
        return []
    family = get_family(environment.name, environment.target)
    constructor: Any = getattr(family.environment, "__init__", None)
    is_inherited = getattr(constructor, "__module__", None) in ("mtrl.environments.base", "mtrl.environments.tools")
    if not is_inherited or family.load is not load_rows:
        return []
    taken = [section + name for name in inspect.signature(constructor).parameters]
    return [
        f"{override.lstrip('+')} has no effect: {family.name} has neither an __init__ nor a load that takes it; write "
        "one, or leave the key out"
        for override in overrides
        if f"{key_of(override)}.".startswith(section) and key_of(override) not in taken
    ]


def _unknown_config_key(name: str, family: str, known: Sequence[str]) -> UserError:
    near = keys.nearest(name, known)
    start = f"environment.config.{name} is not a key of {family}"
    if name == "full_prompt":  # a key of earlier versions
        return UserError(f"{start}; write environment.prompt=full")
    if near is None and (CONF / "experiment" / f"{family}.yaml").exists():
        return UserError(f"{start}, which has {', '.join(known)}; to change the whole task write experiment={family}")
    return UserError(f"{start}; {did_you_mean(near and f'environment.config.{near}', 'it has', known)}")


def _reward(cfg: DictConfig) -> None:
    from mtrl.rewards.compose import RewardComposer

    RewardComposer(cfg.reward)  # raises if a component cannot be resolved


def _mixture(cfg: DictConfig) -> list[str]:
    """Check the sources of a mixture, each as the task of a run of its own. Return warnings."""
    if not cfg.environments:
        return []
    config: Any = OmegaConf.to_object(cfg)
    check_mixture(config)
    warnings: list[str] = []
    for name, own in source_configs(config).items():
        tree = OmegaConf.structured(own)
        with in_source(name):
            check_values(keys.plain(tree))
            for part in (_data, _environment, _reward, _lengths, check_algorithm):
                warnings += (f"environments.{name}: {warning}" for warning in part(tree) or ())
    return warnings


_PARTS: tuple[Callable[[DictConfig], Sequence[str] | None], ...] = (
    _registered,
    _parent,
    _model,
    _warm_start,
    _data,
    _batches,
    _optimizers,
    _lengths,
    check_sampling_params,
    _evaluation,
    _trackers,
    _replaced,
    _environment,
    _reward,
    check_algorithm,
    _mixture,
    check_distillation,
    check_scale,
    check_engines,
    check_agent,
    check_context,
    check_self_play,
    check_resources,
    check_rollouts,
    check_local_replicas,
    check_images,
)
"""The checks across keys, in order: first those that later ones depend on."""
