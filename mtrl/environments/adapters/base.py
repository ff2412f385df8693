"""Base class of the adapters, which makes and closes a foreign environment, and small conversions."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.errors import UserError
from mtrl.types import Message, Row


class EnvironmentAdapter(BaseEnvironment):
    """One episode of a foreign environment, whose class stays unchanged.

    `environment.config` holds the arguments of the foreign class; values that differ by row come from the row.
    """

    foreign: ClassVar[Callable[..., Any]]
    """The foreign class, or a function that makes its objects."""
    own_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of `environment.config` that are for the adapter and are not passed to the foreign class."""
    row_arguments: ClassVar[bool] = False
    """Whether arguments of the foreign class that `environment.config` lacks come from columns of the row."""

    def __init__(self, max_turns: int = 5, **config: Any):
        """
        Raises:
            UserError: a key of `environment.config` is not an argument of the foreign class, or one is missing.
        """
        super().__init__(max_turns)
        self.own = {key: config.pop(key) for key in self.own_keys if key in config}
        self.config = config
        self.env: Any = None
        self.check_config()

    def check_config(self) -> None:
        """Check that the keys of `environment.config` fit the foreign class."""
        signature = inspect.signature(self.foreign)
        name = f"{type(self).__name__}{signature}"
        if unknown := self.config.keys() - accepted(self.foreign, self.config).keys():
            raise UserError(
                f"environment.config.{min(unknown)} is not an argument of {name}; leave it out "
                "(experiment=null leaves out what the default experiment sets)"
            )
        try:
            (signature.bind_partial if self.row_arguments else signature.bind)(**self.config)
        except TypeError as error:
            raise UserError(f"environment.config={self.config} does not fit {name}: {error}; add it there") from error

    def make(self, **arguments: Any) -> Any:
        """Make the foreign environment; it is closed together with this one."""
        self.env = env = self.opened(type(self).foreign(**arguments))
        self.resources.callback(_close, env)
        return env

    def opened(self, env: Any) -> Any:
        """Return the object to call, if it is not the object that was made."""
        return env


def _close(env: Any) -> None:
    close = getattr(env, "close", None)
    closing = close() if callable(close) else None
    if inspect.iscoroutine(closing):
        asyncio.run(closing)


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names `function` takes as keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(values)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in values.items() if name in names}


def row_seed(row: Row) -> int:
    """Return the row's `seed`, or a hash of its `id`, so that episodes of the same row always start the same way."""
    if row.get("seed") is not None:
        return int(row["seed"])
    return int.from_bytes(hashlib.blake2b(str(row["id"]).encode(), digest_size=4).digest(), "little") >> 1


def seed_rows(data: Any, seed: int) -> Splits:
    """Return rows that hold only a seed, for environments that make their own tasks; no seed is in both splits."""
    train, test = data.synthetic_train_rows, data.synthetic_test_rows

    def rows(split: str, seeds: range) -> list[Row]:
        return [
            {"id": f"{split}-{n}", "prompt": [], "ground_truth": {}, "seed": seed * (train + test) + n, "split": split}
            for n in seeds
        ]

    return Splits(rows("train", range(train)), rows("test", range(train, train + test)))


def metrics_of(info: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping, including flags and numpy's scalars; texts and arrays are left out."""
    found = {}
    for name, value in info.items() if isinstance(info, Mapping) else ():
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(number, numbers.Real) and math.isfinite(number):
            found[str(name)] = float(number)
    return found


def with_text(messages: list[Message], text: str, separator: str = "\n\n") -> list[Message]:
    """Return the messages with `text` appended to the last one if it is a user's text, else as a new user message."""
    if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        last = {**messages[-1], "content": f"{messages[-1]['content']}{separator}{text}"}
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": text}]


def is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    )


def action_text(response: str) -> str:
    """Return the text in the last `<action>…</action>`, or the whole response if it has no such tag."""
    tagged = re.findall(r"<action>((?:(?!<action>).)*?)</action>", response, re.DOTALL)
    return (tagged[-1] if tagged else response).strip()


def plain_message(message: Any) -> Message:
    """Return a copy of a message as plain JSON values; frameworks use dicts or pydantic models."""
    dump = getattr(message, "model_dump", None)
    fields = dump(mode="json", exclude_none=True) if dump else message
    plain = {name: _plain(value) for name, value in fields.items()}
    return plain if "content" in plain else {**plain, "content": ""}


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
