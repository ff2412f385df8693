"""Checks of the engines' settings: `generator.{backend,local,vllm,sglang}`. No check contacts an engine."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mtrl.config import keys
from mtrl.config.derived import engine_python, overlaps, prefers_bfloat16, serves
from mtrl.config.messages import unknown_choice
from mtrl.errors import UserError
from mtrl.utils.http_address import http_address

PAUSE_MODES = {"vllm": ("keep", "wait", "abort"), "sglang": ("retract", "in_place", "abort", "wait")}
STARTED = ("python", "replicas", "tensor_parallel_size", "devices", "prefix_caching", "args", "env", "colocate")
"""Keys that only have an effect when mtrl starts a server."""
COLDEST = 0.01
"""Smallest temperature above 0 at which vLLM samples."""


def check_engines(cfg: DictConfig) -> list[str]:
    """Check the settings of the selected engine. Return warnings.

    Raises:
        UserError: the settings cannot work.
    """
    if not serves(cfg):
        return []
    name = cfg.generator.backend
    section, settings = f"generator.{name}", cfg.generator[name]
    if settings.pause_mode is not None and settings.pause_mode not in PAUSE_MODES[name]:
        raise unknown_choice(f"{section}.pause_mode", settings.pause_mode, PAUSE_MODES[name])
    idle = settings.lora == "adapter" and cfg.model.lora_rank == 0
    warnings = [f"{section}.lora=adapter has no effect with model.lora_rank=0"] if idle else []
    warnings += [*_check_delta(section, settings, cfg), *_idle_transports(section, settings, cfg)]
    if settings.colocate and overlaps(cfg):
        raise UserError(
            f"{section}.colocate=true lets the servers sleep while the policy learns, and async_config."
            f"max_steps_off_policy={cfg.async_config.max_steps_off_policy} lets them sample meanwhile; set one of them "
            "to false or 0"
        )
    if not settings.urls:
        _devices(section, settings)
        engine_python(name, settings.python)
        return warnings
    for url in settings.urls:
        _url(section, url)
    changed = [key for key in STARTED if settings[key] != keys.all_keys()[f"{section}.{key}"].default]
    idle_keys = [f"{section}.{key} has no effect with {section}.urls, whose servers run already" for key in changed]
    return [*warnings, *idle_keys]


def check_sampling_params(cfg: DictConfig) -> None:
    """Check settings of the sampling of turns that an engine would take in another sense, or refuse.

    Raises:
        UserError: a stop string is empty, or vLLM cannot sample at a temperature.
    """
    for section in ("sampling_params", "eval_sampling_params"):
        sampling = cfg.generator[section]
        if sampling is None:
            continue
        if "" in sampling.stop:
            raise UserError(
                f"generator.{section}.stop has the empty text '', which is in every text, so that a turn would end "
                "with its first token; leave it out"
            )
        if cfg.generator.backend == "vllm" and 0 < sampling.temperature < COLDEST:
            raise UserError(
                f"generator.{section}.temperature={sampling.temperature} is too low for vLLM, which samples at "
                f"{COLDEST} instead; set it to {COLDEST} or more, or use generator=sglang"
            )


def check_sampling(cfg: DictConfig) -> None:
    """Check that training samples from the whole distribution, since the trainer computes log-probs of the whole.

    Raises:
        UserError: top-p or top-k truncates the distribution.
    """
    if not cfg.trainer.max_steps:
        return
    sampling = cfg.generator.sampling_params
    for key, whole in (("top_p", 1.0), ("top_k", -1)):
        value = sampling[key]
        if value < 1 if key == "top_p" else value > 0:
            raise UserError(
                f"generator.sampling_params.{key}={value} samples from a part of the distribution, and the trainer's "
                f"log-probs are of the whole: the gradient would be biased; set it to {whole}, and for evaluations "
                f"alone generator.eval_sampling_params.{key}={value}"
            )


def _check_delta(section: str, settings: DictConfig, cfg: DictConfig) -> list[str]:
    """Return warnings about `sync_delta`.

    Raises:
        UserError: the engine cannot apply changes.
    """
    if not settings.sync_delta:
        return []
    if section == "generator.sglang":
        raise UserError(
            "generator.sglang.sync_delta=true has no counterpart in SGLang, which loads whole tensors only; set it to "
            "false, or use generator=vllm"
        )
    idle = f"{section}.sync_delta=true has no effect with {section}."
    if cfg.model.lora_rank and settings.lora == "adapter":
        return [f"{idle}lora=adapter, since adapters are sent whole"]
    if settings.weight_sync != "distributed":
        return [f"{idle}weight_sync={settings.weight_sync}; only weight_sync=distributed sends changes of weights"]
    dtype = "trainer.fsdp.param_dtype" if cfg.trainer.fsdp.param_dtype else "model.dtype"
    if OmegaConf.select(cfg, dtype) == "float32" and not prefers_bfloat16(cfg):
        return [
            f"{section}.sync_delta=true saves nothing with {dtype}=float32, where a step changes nearly all weights; "
            f"set trainer.fsdp.param_dtype=bfloat16, or {section}.sync_delta=false"
        ]
    return []


def _idle_transports(section: str, settings: DictConfig, cfg: DictConfig) -> list[str]:
    """Return warnings about settings of the transport of weights that the other settings leave without effect."""
    sends_adapters = settings.lora == "adapter" and cfg.model.lora_rank > 0
    idle = []
    if sends_adapters:
        reason = f"has no effect with {section}.lora=adapter"
        if settings.weight_sync != "disk":
            idle.append(f"{section}.weight_sync={settings.weight_sync} {reason}, since adapters are sent as files")
        if settings.pause_mode is not None:
            idle.append(f"{section}.pause_mode={settings.pause_mode} {reason}, since nothing is paused for adapters")
        if overlaps(cfg) and cfg.async_config.in_flight == "drain":
            idle.append(f"async_config.in_flight=drain {reason}, since turns go on with the adapter of their beginning")
    elif settings.sync_folder is not None and settings.weight_sync != "disk":
        idle.append(
            f"{section}.sync_folder={settings.sync_folder} has no effect with "
            f"{section}.weight_sync={settings.weight_sync}"
        )
    if not settings.urls and settings.api_key_env != keys.all_keys()[f"{section}.api_key_env"].default:
        idle.append(
            f"{section}.api_key_env={settings.api_key_env} has no effect without {section}.urls, since each server "
            "that mtrl starts gets a token of its own"
        )
    return idle


def _devices(section: str, settings: DictConfig) -> None:
    if settings.devices is None:
        return
    needed = settings.replicas * settings.tensor_parallel_size
    if len(settings.devices) != needed or len(set(settings.devices)) != needed or min(settings.devices) < 0:
        raise UserError(
            f"{section}.devices={keys.typed(list(settings.devices))} must name {needed} different GPUs, for "
            f"{section}.replicas={settings.replicas} x {section}.tensor_parallel_size={settings.tensor_parallel_size}"
        )


def _url(section: str, url: str) -> None:
    address = http_address(url)
    if address is None or address.path.strip("/") or address.query:
        raise UserError(f"{section}.urls has {url}, which is no address of a server; write http://HOST:PORT")
