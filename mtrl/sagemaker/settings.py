"""Separation of a command's words into those of the job (`sagemaker.role=…`) and those of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config import keys, messages
from mtrl.config.overrides import CONF
from mtrl.errors import UserError

T = TypeVar("T")


def split(words: Sequence[str], section: str) -> tuple[list[str], list[str]]:
    """Return the words that set keys of `section`, and all others, in their order."""
    ours = [word for word in words if word.lstrip("+").startswith((f"{section}.", f"{section}="))]
    return ours, [word for word in words if word not in ours]


def read(words: Sequence[str], section: str, schema: type[T]) -> T:
    """Return the dataclass `schema` with the settings of `words` applied; `SECTION=NAME` loads conf/SECTION/NAME.yaml.

    Raises:
        UserError: a key is unknown, a value has the wrong type, or a file does not exist.
    """
    known = [entry.name for entry in fields(schema)]  # type: ignore[arg-type]
    settings = OmegaConf.structured(schema)
    try:
        for override in OverridesParser.create().parse_overrides([word.lstrip("+") for word in words]):
            path = override.key_or_group
            if override.is_sweep_override():
                raise UserError(f"{override.input_line} is several values, and a job takes one; put quotes around it")
            value = override.value()
            if path == section:
                settings.merge_with(OmegaConf.load(_file(section, str(value))))
                continue
            key, _, inner = path.removeprefix(f"{section}.").partition(".")
            if key not in known:
                near = keys.nearest(key, known)
                suggestion = messages.did_you_mean(near and f"{section}.{near}", f"{section} has", known)
                raise UserError(f"{path} is not a key; {suggestion}")
            settings.merge_with({key: {inner: value} if inner else value})
        return OmegaConf.to_object(settings)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{section}: {str(error).splitlines()[0]}; mtrl/sagemaker/schema.py has every key") from error


def _file(section: str, name: str) -> str:
    file = CONF / section / f"{name}.yaml"
    if not file.is_file():
        raise messages.unknown_option(section, name, sorted(path.stem for path in (CONF / section).glob("*.yaml")))
    return str(file)
