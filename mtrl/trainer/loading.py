"""Loading of causal LMs from a folder, from a GGUF file or from the Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mtrl.command.vision_checks import check_vision, reads_images
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.models.attention import OWN, products_are_faster, use_own_attention
from mtrl.models.gguf import as_folder
from mtrl.models.preparation import checkpoint_gradients, keeps_apart, prepare_packing, prepare_parts
from mtrl.models.vision import ImageProcessor, give_processor, has_vision, load_processor, prepare_vision
from mtrl.models.weight_files import file_tensors, model_in_files
from mtrl.record.checksums import changes
from mtrl.record.run_dir import RunDir
from mtrl.trainer.first_layers import first_layers
from mtrl.utils.files import in_home
from mtrl.utils.gpus import gpu_evidence
from mtrl.utils.hub import is_out_of_reach, model_options

UNREADABLE = (OSError, ValueError, ImportError, SafetensorError)
"""Exceptions of Transformers for a folder or Hub name without a model, or with one that this machine cannot run."""


def load_model(
    config: Config, path: str, key: str = "model.path", device: str | None = None, in_files: bool = False
) -> tuple[Any, Any]:
    """Load the module and the tokenizer of a folder, GGUF file or Hub name. The module is in evaluation mode, without
    dropout, since the log-probs of sampling and training must agree.

    Args:
        key: setting that names the model, for error messages.
        device: device in the form of `model.device`; None: `model.device`. `meta`: the module has no weights.
        in_files: leave the weights in their files, if each rank can read its slices of them there
            (`mtrl.models.weight_files`); otherwise the weights are loaded.

    Raises:
        UserError: the model cannot be loaded.
    """
    check_export(path, key)
    path = as_folder(path, key)
    target = pick_device(device or config.model.device)
    tokenizer = load_tokenizer(config, path, key)
    dtype = getattr(torch, config.model.dtype)
    if target.type == "meta":
        return make_structure(config, path, key, dtype), tokenizer
    model = _load_in_files(config, path, key, dtype) if in_files else None
    if model is not None:
        return model, tokenizer
    model = _load_module(config, path, key, dtype).to(target)
    if has_vision(model.config):
        give_processor(tokenizer, _image_processor(config, path, key, tokenizer))
    return model, tokenizer


def load_peer(config: Config, path: str, key: str, policy: Any, body_only: bool = False) -> Any:
    """Load a module that reads the policy's tokens, with the policy's dtype, device and attention: a reference, or a
    critic's body. See `load_beside`.

    Args:
        key: setting that names the model, for error messages.
        body_only: see `whole_model`.

    Raises:
        UserError: the model cannot be loaded, or its vocabulary has another size than the policy's.
    """
    otherwise = ", or null for the policy's own weights"
    model = load_beside(config, path, key, policy, policy.dtype, otherwise, body_only)
    own, wanted = vocabulary(model), vocabulary(policy)
    if own != wanted:
        raise UserError(
            f"{key}={path} has a vocabulary of {own} and the policy one of {wanted}, so their tokens "
            "differ; give a model with the policy's tokenizer, or null for the policy's own weights"
        )
    if has_vision(model.config) != has_vision(policy.config):
        one, other = ("images", "text only") if has_vision(policy.config) else ("text only", "images")
        raise UserError(
            f"{key}={path} reads {other} and the policy {one}; give a model of the same kind, or null for the policy's "
            "own weights"
        )
    return model


def load_beside(
    config: Config,
    path: str,
    key: str,
    policy: Any,
    dtype: torch.dtype,
    otherwise: str = "",
    body_only: bool = False,
) -> Any:
    """Load a module in `dtype`, with the policy's device and attention. It has no weights if the policy has none, on
    the meta device. If the policy's weights stay in files, so do those of the module, or they are on the CPU.

    Args:
        key: setting that names the model, for error messages.
        otherwise: other values of this setting, for error messages.
        body_only: see `whole_model`.

    Raises:
        UserError: the model cannot be loaded.
    """
    check_export(path, key)
    path = as_folder(path, key)
    in_files = bool(file_tensors(policy))
    if policy.device.type == "meta" and not in_files:
        model = make_structure(config, path, key, dtype, otherwise)
        set_attention(model, policy.config._attn_implementation)
        return model
    model = _load_in_files(config, path, key, dtype) if in_files else None
    if model is None:
        model = _load_module(config, path, key, dtype, otherwise, body_only)
        model = model.to("cpu" if in_files else policy.device)
    fit_to_ranks(model, config)
    return model


def vocabulary(model: Any) -> int:
    """Return the number of rows of a model's embedding, which may be more than its tokenizer has tokens."""
    return int(model.config.get_text_config().vocab_size)


def load_tokenizer(config: Config, path: str, key: str) -> Any:
    """Load the tokenizer of a folder, GGUF file or Hub name.

    Args:
        key: setting that names the model, for error messages.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    path = as_folder(path, key)
    try:
        return AutoTokenizer.from_pretrained(path, **_given(config, path))
    except UNREADABLE as error:
        raise _cannot_load(key, path, error) from error


def load_shape(config: Config, path: str, key: str = "model.path") -> tuple[Any, Any]:
    """Load the configuration and the tokenizer of a folder or Hub name, for a model whose weights another program
    loads.

    Args:
        key: setting that names the model, for error messages.

    Raises:
        UserError: they cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    check_export(path, key)
    path = as_folder(path, key)
    given = _given(config, path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **given)
        return AutoConfig.from_pretrained(path, **given), tokenizer
    except UNREADABLE as error:
        raise _cannot_load(key, path, error) from error


def check_export(path: str, key: str) -> None:
    """Check that the files of a run's export are unchanged, since a changed weight would otherwise not be noticed.

    Args:
        key: setting that names the export, for error messages.

    Raises:
        UserError: a file is missing or changed.
    """
    folder = in_home(path).absolute()
    if folder.name == RunDir(folder.parent).export.name and (changed := changes(folder.parent, f"{folder.name}/")):
        raise UserError(
            f"{key}={path} has changed since the end of its run ({changed}); give an intact copy or a checkpoint of "
            f"the run, or remove {RunDir(folder.parent).checksums} to trust the files as they are"
        )


REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Arguments of `from_pretrained` with which it returns the module and the report that `whole_model` checks."""


def whole_model(loaded: tuple[Any, Any], setting: str, body_only: bool = False) -> Any:
    """Return a module that was loaded, all of whose weights come from the model's files. Transformers gives random
    values to weights that the files lack, and only logs it.

    Args:
        loaded: result of `from_pretrained` with `REPORTED`.
        setting: key and value that name the model, for error messages.
        body_only: whether only the body of the model is used, so that the files may lack the weights of its head.

    Raises:
        UserError: the files lack weights, or have weights of other shapes.
    """
    model, report = loaded
    body = {id(value) for value in model.base_model.parameters()}
    unread = {name for name, value in model.named_parameters() if body_only and id(value) not in body}
    if absent := sorted({*report["missing_keys"]} - unread):
        raise UserError(
            f"{setting} lacks {len(absent)} weights of its model, such as {absent[0]}, which would get random values; "
            "give a folder with all weights that its config.json describes"
        )
    if other := sorted(report["mismatched_keys"]):
        name, found, wanted = other[0]
        raise UserError(
            f"{setting} has {len(other)} weights of another shape than its config.json says, such as {name} of "
            f"{tuple(found)} instead of {tuple(wanted)}; give a folder whose weights and config.json belong together"
        )
    return model


def _load_module(
    config: Config, path: str, key: str, dtype: torch.dtype, otherwise: str = "", body_only: bool = False
) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention = config.model.attn_implementation
    if sees := folder_reads_images(path, config.model.trust_remote_code):
        check_vision(config, f"{key}={path}")
    try:
        loaded = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.model.trust_remote_code,
            **REPORTED,
            **model_options(path),
        )
    except UNREADABLE as error:
        if "attn_implementation" in str(error):  # the message names Transformers' argument, not the key of mtrl
            raise UserError(
                f"{key}={path} has no attention by model.attn_implementation={attention}; set "
                "model.attn_implementation=eager"
            ) from error
        if isinstance(error, ImportError) and attention.startswith("flash"):
            raise UserError(
                f"model.attn_implementation={attention} cannot be used on this machine ({first_line(error)}); install "
                "its package, or set model.attn_implementation=sdpa"
            ) from error
        raise _cannot_load(key, path, error, otherwise) from error
    model = whole_model(loaded, f"{key}={path}", body_only)
    if sees:
        prepare_vision(model, config.model.freeze_vision)
    return model.eval()


def _load_in_files(config: Config, path: str, key: str, dtype: torch.dtype) -> Any | None:
    """Return a module whose weights stay in their files; None if `_load_module` must load it, or report why it cannot
    be loaded."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if folder_reads_images(path, config.model.trust_remote_code):
        return None
    try:
        structure = make_structure(config, path, key, dtype)
    except UserError:
        return None
    return model_in_files(structure, path, dtype)


def is_vision_model(config: Config) -> bool:
    """Return whether the model of a configuration reads images; False for a model that cannot be loaded."""
    known = reads_images(config)
    return folder_reads_images(str(config.model.path), config.model.trust_remote_code) if known is None else known


@cache  # a Hub name would be asked again by each caller
def folder_reads_images(path: str, trust_remote_code: bool) -> bool:
    """Return whether the model of a folder or Hub name reads images; False where there is no configuration of a model,
    as in a folder of adapters."""
    from transformers import AutoConfig

    try:
        return has_vision(
            AutoConfig.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=is_out_of_reach(path)
            )
        )
    except UNREADABLE:
        return False


def _image_processor(config: Config, path: str, key: str, tokenizer: Any) -> ImageProcessor:
    """Return the image processor of a model that reads images.

    Raises:
        UserError: it cannot be loaded.
    """
    try:
        return load_processor(path, tokenizer, **_given(config, path))
    except UNREADABLE as error:
        raise UserError(
            f"{key}={path} reads images, and its image processor cannot be loaded ({first_line(error)}); give a model "
            "with its preprocessor_config.json"
        ) from error


def make_structure(config: Config, path: str, key: str, dtype: torch.dtype, otherwise: str = "") -> Any:
    """Make the module of a folder or Hub name on the meta device, in evaluation mode and without weights, which other
    ranks receive from rank 0.

    Raises:
        UserError: its configuration cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = config.model.trust_remote_code
    try:
        shape = AutoConfig.from_pretrained(path, **_given(config, path))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape, dtype=dtype, attn_implementation=config.model.attn_implementation, trust_remote_code=trust
            )
    except UNREADABLE as error:
        raise _cannot_load(key, path, error, otherwise) from error
    return model.eval()


def _given(config: Config, path: str) -> dict[str, bool]:
    """Arguments of `from_pretrained` of a tokenizer or a configuration."""
    return {"trust_remote_code": config.model.trust_remote_code, "local_files_only": is_out_of_reach(path)}


def _cannot_load(key: str, path: str, error: Exception, otherwise: str = "") -> UserError:
    missing = path.count("/") > 1 and not Path(path).exists()  # a name of the Hub has one slash at most
    if missing:
        why = "there is no such folder"
    elif is_out_of_reach(path):
        why = "the Hub does not answer, and this machine has no copy"
    else:
        why = first_line(error)
    return UserError(f"{key}={path} cannot be loaded ({why}); give a folder or a Hub name of a causal LM{otherwise}")


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def fit_attention(model: Any, config: Config) -> None:
    """Prepare the model's attention for packed samples, or select the faster implementation for its device.

    Raises:
        UserError: `trainer.packing` is true, and the model cannot keep packed samples apart.
    """
    packing = config.trainer.packing
    if has_vision(model.config):
        return  # packed samples and mtrl's own attention were not tried with images
    if packing:
        prepare_packing(model)
    elif packing is None and config.model.name != "tiny":
        if use_own_attention(model) and not keeps_apart(model):
            model.set_attn_implementation("sdpa")
    elif products_are_faster(compute_dtype(config), pick_device(config.model.device)):
        use_own_attention(model)


def fit_to_ranks(model: Any, config: Config) -> None:
    """Prepare the attention of a model that is trained, or computes with the policy, on this and other ranks. If its
    weights stay in files, the checks run its first layers.

    Raises:
        UserError: as for `fit_attention`, or `trainer.sequence_parallel` is above 1, and the model cannot compute
            sequences in parts.
    """
    checked = first_layers(model) if file_tensors(model) else model
    fit_attention(checked, config)
    if config.trainer.sequence_parallel > 1:
        prepare_parts(checked, config.trainer.sequence_parallel)
    if checked is not model:
        set_attention(model, checked.config._attn_implementation)


def recompute(model: Any, config: Config) -> None:
    """Apply `trainer.gradient_checkpointing` and the settings that are read with it to a model that is trained.

    Raises:
        UserError: see `checkpoint_gradients`.
    """
    trainer = config.trainer
    if trainer.gradient_checkpointing:
        on_cpu = pick_device(config.model.device).type == "cpu"  # where the inputs of layers are anyway
        checkpoint_gradients(model, trainer.recomputed_layers, trainer.activation_offload and not on_cpu)


def set_attention(model: Any, name: str) -> None:
    """Select the attention that rank 0 has selected by `fit_to_ranks`, or that the checks of `fit_to_ranks` have."""
    if name == OWN:
        use_own_attention(model)
    else:
        model.set_attn_implementation(name)


def parameters_of(model_config: Any) -> int:
    """Return the number of parameters of a causal LM with this Hugging Face configuration. No memory is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters of a model in place, and return the model. Buffers keep their dtype, as in a sharded model
    with mixed precision: the frequencies of rotary positions in half precision would change the log-probs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of forward and backward passes."""
    return getattr(torch, config.trainer.fsdp.param_dtype or config.model.dtype)


def pick_device(name: str, key: str = "model.device") -> torch.device:
    """Return the device for the value of `model.device`.

    Args:
        key: setting that names the device, for error messages.

    Raises:
        UserError: a GPU is requested and there is none, or PyTorch cannot use the GPU that there is.
    """
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda")
    if name == "auto":
        if (evidence := gpu_evidence()) is not None:
            raise UserError(
                f"{evidence}, and torch {torch.__version__} cannot use it ({_why_no_cuda()}); set {key}=cpu to "
                "train without it"
            )
        return torch.device("cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"{key}={name} needs a GPU, and this machine has none; use {key}=cpu")
    return torch.device(name)


def _why_no_cuda() -> str:
    """Return why PyTorch finds no GPU, with the fix."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "it is a build for CPUs; install a build for CUDA, see pytorch.org"
    try:
        torch.cuda.init()
    except Exception as error:  # such as a driver that is too old for this build
        return f"{first_line(error).partition('. ')[0]}; update the driver, or install a build for its CUDA version"
    return "it finds no device; check the driver, and whether the container passes the GPU on"
