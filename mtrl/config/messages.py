"""Errors of a wrong configuration, one sentence each: its keys, its values, and errors of Hydra and OmegaConf."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from yaml import YAMLError

from mtrl.config import foreign, keys
from mtrl.config.dialects import SECTIONS
from mtrl.config.field import FINITE, Bound
from mtrl.errors import UserError, missing_extra

ELSEWHERE = {"sagemaker": "scripts/launch_sagemaker.py", "managed": "scripts/launch_managed_rl.py"}
"""Sections of a job that starts a run elsewhere -> the program that takes them, besides the settings of the run."""


def check_values(values: Mapping[str, Any]) -> None:
    """Check each of the plain values of a configuration (`keys.plain`) against the bound or the words that the schema
    declares for its key. A number must be finite, also without a bound, unless its bound allows infinity.

    Raises:
        UserError: a value does not fit; the message names the key, the value, and what the key takes.
    """
    for path, key in keys.all_keys().items():
        value = keys.value_at(values, path)
        if value is None:
            continue
        bound = key.bound or (Bound() if isinstance(value, float) else None)
        if not bound and not key.choices:
            continue
        if value in key.refused:
            raise UserError(f"{path}={value} {key.refused[value]}")
        if key.choices and value not in key.choices:
            raise unknown_choice(path, value, key.choices)
        if bound and (broken := bound.broken_by(value)):
            why = f" ({bound.why})" if bound.why and broken != FINITE else ""
            raise UserError(f"{path}={value} must be {broken}{why}")


def unknown_key(path: str, value: str | None = None, where: str = "") -> UserError:
    """Return the error for an unknown key. It names our key for a key of another framework, else the nearest key, else
    the keys of the section."""
    setting = path if value is None else f"{path}={value}"
    start = f"{where}{setting} is not a key of mtrl"
    if path == "hydra" or path.startswith("hydra."):
        return UserError(f"{where}{setting} is not a key of Hydra; --cfg hydra shows what there is")
    if program := ELSEWHERE.get(path.partition(".")[0]):
        return UserError(
            f"{where}{setting} is a setting of a job on SageMaker; start that with python {program}, which takes the "
            "settings of the run as well"
        )
    if found := foreign.find_exact(path):
        return UserError(f"{where}{setting} is {found.framework}'s spelling; {found.advice(value)}")
    if path in SECTIONS:
        return UserError(f"{where}{path} is not a section of mtrl; its keys are in {SECTIONS[path]}")
    near = keys.same_leaf(path)
    is_vague = near is not None and keys.is_vague(near, path)
    if (near is None or is_vague) and (found := foreign.find_ending(path, least=2 if is_vague else 1)):
        return UserError(f"{start}; it looks like {found.framework}'s {found.key}: {found.advice(value)}")
    if near := near or keys.nearest_key(path):
        return UserError(f"{start}; {foreign.meant(near, path, value)}")
    section = path.rpartition(".")[0]
    if section and (known := keys.children(section)):
        return UserError(f"{start}; {section} has {', '.join(known)}")
    return UserError(f"{start}; its top level has {', '.join(keys.children(''))}")


def wrong_type(path: str, value: Any, where: str = "") -> UserError:
    """Return the error for a value of the wrong type."""
    path = path.partition("[")[0]  # for an item of a list, the key of the list
    key = keys.find(path)
    setting = f"{where}{path}={keys.typed(value)}"
    if key is None:
        return UserError(f"{setting} does not fit; see mtrl/config/schema.py")
    if key.is_section:
        return _no_section(path, key.path, value, where)
    return UserError(f"{setting} must be {key.expected()}; write for example {key.path}={key.example()}")


def _no_section(path: str, section: str, value: Any, where: str) -> UserError:
    known = ", ".join(keys.children(section))
    return UserError(f"{where}{path}={keys.typed(value)} must be a section with keys of its own: {known}")


def unknown_option(group: str, option: str, options: Sequence[str], where: str = "") -> UserError:
    """Return the error for an option that a config group does not have."""
    near = keys.nearest(option, options, cutoff=0.5)
    if group in ("hydra/sweeper", "hydra/launcher") and not near:
        if option in ("joblib", "submitit_local", "submitit_slurm"):
            return missing_extra(f"{where}{group}={option}", "sweep")
        plugin = f"hydra-{option.partition('_')[0]}-{group.rpartition('/')[2]}"
        return UserError(f"{where}{group}={option} is not installed; pip install {plugin}, or leave it out")
    return UserError(
        f"{where}{group}={option} does not exist; {did_you_mean(near and f'{group}={near}', 'there is', options)}"
    )


def unknown_choice(path: str, value: str, known: Sequence[str], or_else: str = "") -> UserError:
    """Return the error for a value that is not one of the words that the key takes."""
    ours = foreign.translate(path, value)
    if ours.split()[0] in known:
        return UserError(f"{path}={value} is another framework's spelling; write {path}={ours}")
    near = keys.nearest(value, known, cutoff=0.5)
    return UserError(f"{path}={value} is not known; {did_you_mean(near, 'choose one of', known)}{or_else}")


def did_you_mean(near: str | None, before: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known word, then all known words."""
    everything = f"{before} {', '.join(known)}"
    return f"did you mean {near}? {everything[0].upper()}{everything[1:]}" if near else everything


def explain(error: BaseException) -> UserError:
    """Convert an error of Hydra or OmegaConf to a `UserError` of one sentence."""
    chain = list(_chain(error))
    where = _where(chain)
    for link in chain:
        if isinstance(link, UserError):
            return link
        if isinstance(link, MissingConfigException) and link.missing_cfg_file and link.options:
            group, _, option = link.missing_cfg_file.rpartition("/")
            return unknown_option(group, option, link.options, where)
        if isinstance(link, YAMLError):
            return UserError(f"{_yaml_place(link)} is not valid YAML; put quotes around special characters")
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _of_omegaconf(link, chain, where)
        if found := re.match(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.*)", str(link)):
            sections = [k.path for k in keys.all_keys().values() if getattr(k.type, "__name__", "") == found[1]]
            return _no_section(" or ".join(sections), sections[0], found[2], where)
    return UserError(where + _of_hydra(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _where(chain: list[BaseException]) -> str:
    """Return `in experiment/mine.yaml: ` if Hydra names the file, else an empty text."""
    found = next((m for link in chain if (m := re.match(r"In '([^']+)': \w+ raised", str(link)))), None)
    return f"in {found[1]}.yaml: " if found else ""


def _overridden(chain: list[BaseException], path: str) -> str | None:
    """Return the value of the override that failed, as typed; None if the override was not for this key."""
    found = (re.match(r"Error merging override \+*([^=]+)=(.*)", str(link)) for link in chain)
    return next((match[2] for match in found if match and match[1] == path.partition("[")[0]), None)


def _of_omegaconf(error: OmegaConfBaseException, chain: list[BaseException], where: str) -> UserError:
    path = str(error.full_key)
    if isinstance(error, InterpolationResolutionError | UnsupportedInterpolationType):
        return UserError(f"{where}{path} cannot be resolved: {_first_line(error)}")
    value = _overridden(chain, path)
    if isinstance(error, ConfigKeyError | AttributeError) and keys.find(path) is None:
        return unknown_key(path, value, where)
    if value is None:
        value = error.value if error.value is not None else _quoted_value(error)
    return wrong_type(path, value, where)


def _quoted_value(error: OmegaConfBaseException) -> Any:
    """Return the value that OmegaConf's message names, since its error does not always have it as an attribute."""
    found = re.search(r"Value '(.*?)' of type|Invalid value assigned: (\w+)|'(.*?)' to \w+", str(error), re.DOTALL)
    return next((group for group in found.groups() if group is not None), None) if found else None


def _yaml_place(error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{mark.name}, line {mark.line + 1}," if mark else "a configuration file"


def _of_hydra(error: BaseException) -> str:
    text = _first_line(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}; write key=value, and quotes around special characters: 'key=\"a=b, c\"'"
    if text.startswith("Ambiguous value for argument"):
        setting = text.split("'")[1].lstrip("+")
        key, _, value = setting.partition("=")
        known = keys.find(key)
        takes_list = known is not None and (known.is_open or typing.get_origin(known.type) is list)
        as_list = f", or write {key}=[{value}] for a list" if takes_list else ""
        return f"{setting} is several values; write one of them{as_list}; mtrl train -m makes a run of each"
    if "Could not load 'hydra/launcher/submitit" in text:
        return str(missing_extra("hydra/launcher=slurm", "sweep"))
    if missing := re.search(r"Could not load '(.+)/(.+)'", text):  # one of a list, for which Hydra names no options
        return f"{missing[1]}={missing[2]} does not exist"
    if "does not support sweep type" in text:
        return f"{text}; write a list of values, or use a sweeper that samples: sweep=optuna"
    return text


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
