"""Models whose weights stay in safetensors files, of which each rank reads its slices later.

This is possible if every tensor of the files becomes one parameter or buffer, or a part of one, unchanged but for its
dtype: the experts of a layer are tensors of their own in files, which Transformers stacks. Transformers itself decides
which tensors that are: it loads stand-ins that have the shapes of the files' tensors and no memory (`StandIns`), and a
parameter that holds a stand-in afterwards is read from the tensors that the stand-in represents. Buffers that hold one,
such as the router biases of DeepSeek V3, are small and are read at once. All other work of `from_pretrained`, such as
the computation of other buffers and the tying of parameters, is done as for real weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from mtrl.errors import UserError
from mtrl.models.stand_ins import StandIns
from mtrl.models.stored_tensors import FileTensor, StoredTensor
from mtrl.utils.hub import is_out_of_reach

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a model's only file, and of the index of several files. Transformers prefers the first."""
READ = ("config.json", "generation_config.json", "adapter_config.json", SINGLE, INDEX, "model-*-of-*.safetensors")
"""Patterns of the files that are downloaded for a name of the Hub."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of numbers, by their names in safetensors files, that are cast to the dtype of a parameter. Others are those of
quantised weights."""
SAMPLE = 4096
"""Number of bytes at each of three places of a tensor that a digest of a file covers."""
_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable with which Transformers casts tensors in the calling thread."""
_ATTRIBUTE = "mtrl_file_tensors"
"""Attribute of a module: the stored tensors of its own parameters by their names. Copies of the module and wrappers
around it keep it."""


def file_tensors(module: nn.Module) -> dict[str, StoredTensor]:
    """Return the stored tensors of a module's parameters by the names of `named_parameters()`. The result is empty for
    a module that has its weights in memory."""
    found = {}
    for name, _ in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        own: Mapping[str, StoredTensor] = getattr(module.get_submodule(owner), _ATTRIBUTE, {})
        if leaf in own:
            found[name] = own[leaf]
    return found


def model_in_files(structure: Any, path: str, dtype: torch.dtype) -> Any | None:
    """Return a causal LM like that of `from_pretrained`, in evaluation mode, whose parameters are on the meta device
    and stay in their files (`file_tensors`); None if `from_pretrained` must load the weights, see `is_plain`.

    Args:
        structure: the module without weights, on the meta device.
        path: folder or name of the Hub.
        dtype: dtype of the parameters.
    """
    from transformers import GenerationConfig

    folder = _local_folder(path)
    tensors = {} if folder is None else _tensors_of(folder)
    if folder is None or not tensors or not is_plain(structure, folder):
        return None
    # Equal stand-ins of tied weights are tied, so that one is left over, and the weights themselves decide.
    stand_ins = StandIns(tensors, dtype)
    try:
        with _without_messages(), _in_this_thread(), stand_ins:
            model, report = type(structure).from_pretrained(
                None,
                config=copy.deepcopy(structure.config),
                state_dict=dict(stand_ins.state),
                dtype=dtype,
                attn_implementation=structure.config._attn_implementation,
                output_loading_info=True,
            )
    except Exception:  # as for shapes that differ: loading of the weights reports it, or works
        return None
    places = {name: stand_ins.represented(value) for name, value in model.named_parameters()}
    buffers = {name: found for name, value in model.named_buffers() if (found := stand_ins.represented(value))}
    if any(report.values()) or not _uses_all([*places.values(), *buffers.values()], tensors.values()):
        return None
    try:
        _read_buffers(model, buffers)
    except UserError:  # a file that has changed since; loading of the weights reports it
        return None
    _leave_in_files(model, places)
    model.config.name_or_path = model.name_or_path = path
    with suppress(OSError):  # without this file the module has the settings that follow from its configuration
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


@contextmanager
def _without_messages() -> Iterator[None]:
    """Within this context Transformers reports nothing: where weights do not fit, `from_pretrained` reports it."""
    from transformers.utils import logging as messages

    before = messages.get_verbosity()
    messages.set_verbosity(messages.CRITICAL)
    try:
        yield
    finally:
        messages.set_verbosity(before)


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Within this context Transformers casts tensors in the calling thread, since `StandIns` intercepts casts of this
    thread only."""
    before = os.environ.get(_SYNCHRONOUS)
    os.environ[_SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SYNCHRONOUS)
        if before is not None:
            os.environ[_SYNCHRONOUS] = before


def is_plain(structure: Any, folder: Path) -> bool:
    """Return whether the tensors of a folder can be the parameters of a model as they are: the code is that of
    Transformers, which only renames, stacks and concatenates tensors for this architecture, the weights are not
    quantised, and no adapter or other file belongs to them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
    except ImportError:  # another version of Transformers, whose rules are unknown
        return False
    config, kind = structure.config, type(structure)

    def joins(rule: Any) -> bool:
        return isinstance(rule, WeightConverter) and {*map(type, rule.operations)} <= {MergeModulelist, Concatenate}

    return (
        kind.__module__.startswith("transformers.models.")
        and all(isinstance(rule, WeightRenaming) or joins(rule) for rule in get_model_conversion_mapping(structure))
        and getattr(config, "quantization_config", None) is None
        and getattr(config, "transformers_weights", None) is None
        and not getattr(type(config), "extra_files", ())
        and not (folder / "adapter_config.json").exists()
        and not (folder / ".metadata").exists()  # a checkpoint of torch.distributed, which Transformers prefers
    )


def digests(stored: Iterable[StoredTensor]) -> dict[str, str]:
    """Return a digest of each file: of its header, which has the names, shapes and positions of all tensors, and of
    some bytes at the beginning, in the middle and at the end of each tensor. Ranks on other machines compare it with
    that of rank 0. The digest of a file that cannot be read, or is another kind of file, is empty."""
    return {file: _digest(file) for file in sorted({piece.file for tensor in stored for piece, _ in tensor.pieces})}


def model_digest(path: str) -> str:
    """Return a digest of the weights of a model folder, or of the copy of a Hub name; see `digests`. It is empty if
    there are no safetensors files."""
    folder = _local_folder(path)
    try:
        found = [_digest(str(file)) for file in _files_of(folder)] if folder is not None else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is no index, or an invalid one
        return ""
    return hashlib.sha256("".join(found).encode()).hexdigest() if found and all(found) else ""


def _digest(file: str) -> str:
    """Return the digest of a safetensors file: 8 bytes with the length of the header, the header in JSON, and the
    numbers at the offsets that the header names."""
    try:
        with open(file, "rb") as opened:
            size, total = int.from_bytes(opened.read(8), "little"), os.fstat(opened.fileno()).st_size
            if size > total - 8:  # another kind of file, such as a placeholder of Git LFS
                return ""
            header = opened.read(size)
            found = hashlib.sha256(header)
            found.update(str(total).encode())
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    for start in (begin, (begin + end) // 2, max(begin, end - SAMPLE)):
                        opened.seek(8 + size + start)
                        found.update(opened.read(min(end - start, SAMPLE)))
            return found.hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def forget_files(module: nn.Module) -> None:
    """Forget where the parameters of a module are stored, since the module has its weights in memory now."""
    for part in module.modules():
        part.__dict__.pop(_ATTRIBUTE, None)


def _local_folder(path: str) -> Path | None:
    """Return the folder of a model; for a name of the Hub the folder of its copy, which is downloaded now. The result
    is None if there is no copy."""
    if Path(path).is_dir():
        return Path(path).absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(READ), local_files_only=is_out_of_reach(path)))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


def _tensors_of(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of a folder's safetensors files by their names. The result is empty if there are no such
    files, or if one is damaged or holds other numbers than `FLOATS`; `from_pretrained` then reports what is wrong."""
    found = {}
    try:
        for file in _files_of(folder):
            place = str(file)
            with safe_open(place, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                    part = opened.get_slice(name)
                    if part.get_dtype() not in FLOATS or name in found:
                        return {}
                    found[name] = FileTensor(place, name, tuple(part.get_shape()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError):
        return {}
    return found


def _files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder that Transformers reads.

    Raises:
        OSError, ValueError, KeyError, AttributeError, TypeError: the index is missing or invalid.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    names = sorted(set(index["weight_map"].values()))
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{INDEX} names files outside of its folder")
    return [folder / name for name in names]


def _uses_all(places: Iterable[StoredTensor | None], tensors: Iterable[FileTensor]) -> bool:
    """Return whether each place is known, and each tensor of the files belongs to one place."""
    found = [*places]
    pieces = Counter(piece for place in found if place is not None for piece, _ in place.pieces)
    return None not in found and pieces == Counter(tensors)


def _read_buffers(model: Any, places: Mapping[str, StoredTensor]) -> None:
    """Read buffers from their files, in the dtype that they have.

    Raises:
        UserError: a file cannot be read.
    """
    for name, stored in places.items():
        owner, _, leaf = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        buffers[leaf] = stored.read().to(buffers[leaf].dtype)


def _leave_in_files(model: Any, places: Mapping[str, StoredTensor | None]) -> None:
    """Move the parameters of a model to the meta device in place, and record where they are stored. Buffers stay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    empty = {old: nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad) for old in names}
    for module in model.modules():  # tied parameters stay one object
        for leaf, old in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, leaf, empty[old])
            module.__dict__.setdefault(_ATTRIBUTE, {})[leaf] = places[names[old]]
