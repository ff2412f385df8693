"""Parsing of the models that a user names into their sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtrl.errors import UserError
from mtrl.evaluation.rollouts import Source
from mtrl.record.checkpoints import CHECKPOINT, STATE, checkpoint_step
from mtrl.record.run import Run, run_of
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import in_home
from mtrl.utils.text import one_line

BASE = "base"
MODELS = "models.json"
"""Name of the file with the models, which every folder of an evaluation has."""
ENDPOINT = re.compile(r"(?P<model>.+?)@(?P<url>https?://.+)", re.DOTALL)
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FORMS = "write base, a run, RUN/export, RUN/checkpoints/best, a model folder, a Hub name, or MODEL@http://HOST:PORT/v1"


def sources_of(texts: Sequence[str]) -> list[Source]:
    """Return the models that the texts name, in order, each with a unique label. The first text is `evaluation.model`,
    the others are `evaluation.compare`.

    Raises:
        UserError: A text names no model, or two texts name the same model.
    """
    found: list[Source] = []
    for place, text in enumerate(texts):
        source = source_of(text, "evaluation.compare" if place else "evaluation.model")
        if twin := next((other for other in found if _same(other, source)), None):
            raise UserError(f"evaluation.compare: {text} and {twin.text} are the same model; leave one of them out")
        taken = {other.label for other in found}
        label = source.label
        number = 2
        while source.label in taken:
            source = replace(source, label=f"{label}-{number}")
            number += 1
        found.append(source)
    return found


def source_of(text: str, key: str = "evaluation.model") -> Source:
    """Return the model that a text names.

    Raises:
        UserError: The text names no model.
    """
    text = text.strip()
    if not text:
        raise UserError(f"{key} is empty; {FORMS}")
    if text == BASE:
        return Source("base", BASE, text)
    if re.match(r"https?://", text):
        raise UserError(f"{key}={text} does not name the model of the endpoint; write MODEL@{text}")
    if (endpoint := ENDPOINT.fullmatch(text)) is not None:
        return _endpoint(text, endpoint["model"], endpoint["url"], key)
    path = in_home(text)
    if path.parent.name == "checkpoints" and not (path / STATE).is_file():
        return _of_checkpoints(text, path, key)
    if path.is_dir():
        return _folder(text, path, key)
    if path.is_file() and path.suffix == ".gguf":
        return Source("folder", slug(path.stem), text, path=str(path))
    if path.is_file():
        raise UserError(f"{key}={text} is a file; {FORMS}")
    if HUB_NAME.fullmatch(text):
        return Source("hub", slug(text), text, path=text)
    raise UserError(f"{key}={text} does not exist; {FORMS}")


def slug(text: str) -> str:
    """Convert `text` to a part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:80] or "model"


def _endpoint(text: str, model: str, url: str, key: str) -> Source:
    import httpx

    example = "MODEL@http://HOST:PORT/v1"
    try:
        address = httpx.URL(url)
        if address.port is not None and not 0 < address.port < 65536:
            raise ValueError(f"there is no port {address.port}")
    except (httpx.InvalidURL, ValueError) as error:
        raise UserError(f"{key}={one_line(text)} is no address ({error}); write {example}") from None
    if address.userinfo:
        raise UserError(f"{key} holds a password; write it without, and name evaluation.endpoint.api_key_env")
    if address.query:
        raise UserError(f"{key}={one_line(text)} has a query behind its path; write {example}")
    url = url.rstrip("/").removesuffix("/chat/completions")
    if not address.host or address.path in ("", "/"):
        raise UserError(f"{key}={one_line(text)} has no host or no path; write {example}")
    # Local servers name their models by their folders.
    label = slug(Path(model).name if model.startswith("/") else model)
    return Source("endpoint", label, text, url=url, model=model)


def _folder(text: str, path: Path, key: str) -> Source:
    run = run_of(path)
    if (path / STATE).is_file():
        return _checkpoint(text, path, key)
    if (path / "config.json").is_file():
        if run is not None and path == RunDir(run).export:
            return _export(text, run)
        return Source("folder", slug(_name(path)), text, path=str(path))
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{key}={text} holds a LoRA adapter and no model; merge it into its base and give that folder")
    if run == path:
        return _run(text, path, key)
    if path.name == "checkpoints":
        raise UserError(f"{key}={text} is a folder of checkpoints; {_choose(path)}")
    raise UserError(f"{key}={text} holds neither a model (config.json) nor a run (config.yaml); {FORMS}")


def _run(text: str, run: Path, key: str) -> Source:
    """Return the final weights of a run, or those of its newest checkpoint if the run is not over.

    The best checkpoint is used only on request, because an evaluation chose it, perhaps on the same rows.
    """
    if (RunDir(run).export / "config.json").is_file():
        return _export(text, run)
    steps = Run(run).checkpoints
    if not steps:
        if (run / MODELS).is_file():
            raise UserError(
                f"{key}={text} is an evaluation and has no weights; continue it with evaluation.output={text}"
            )
        raise UserError(
            f"{key}={text} has no weights yet: neither export/ nor a checkpoint; continue its training with resume"
        )
    return _checkpoint(text, steps[-1], key)


def _export(text: str, run: Path) -> Source:
    step = Run(run).summary.get("steps")
    step = step if isinstance(step, int) else 0
    label = slug(f"{_name(run)}-step_{step}" if step else _name(run))
    return Source("export", label, text, path=str(RunDir(run).export), run=run, step=step)


def _of_checkpoints(text: str, path: Path, key: str) -> Source:
    """Return the source of `RUN/checkpoints/best` or `RUN/checkpoints/latest`; refuse a step that does not exist."""
    folder = path.parent
    run = Run(folder.parent)
    steps = run.checkpoints
    if path.name == "latest" and steps:
        return _checkpoint(text, steps[-1], key)
    if path.name == "best" and steps:
        best = run.best_checkpoint
        if best is None:
            raise UserError(f"{key}={text}: no checkpoint was evaluated, so none is the best; {_choose(folder)}")
        return _checkpoint(text, best, key)
    raise UserError(f"{key}={text} does not exist; {_choose(folder)}")


def _checkpoint(text: str, path: Path, key: str) -> Source:
    run = run_of(path)
    if run is None or not CHECKPOINT.fullmatch(path.name):
        raise UserError(
            f"{key}={text} is a checkpoint outside of its run, whose config.yaml describes the model; give "
            "RUN/checkpoints/step_N"
        )
    step = checkpoint_step(path)
    return Source("checkpoint", slug(f"{_name(run)}-step_{step}"), text, path=str(path), run=run, step=step)


def _choose(folder: Path) -> str:
    names = [path.name for path in Run(folder.parent).checkpoints]
    return f"{folder} has {', '.join(['best', 'latest', *names]) if names else 'no checkpoint'}"


def _same(one: Source, other: Source) -> bool:
    return (one.kind, one.path, one.url, one.model) == (other.kind, other.path, other.url, other.model)


def _name(path: Path) -> str:
    return path.resolve().name
