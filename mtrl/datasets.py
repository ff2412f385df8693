"""Loading of data sets: from a folder, a file or the Hub to the rows that environments take."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mtrl.errors import UserError, missing_extra
from mtrl.types import Row
from mtrl.utils.arrow_rows import check_json, columns_to_check, is_json_file, write_times
from mtrl.utils.files import in_home
from mtrl.utils.hub import is_out_of_reach
from mtrl.utils.prompt_column import prompt_messages
from mtrl.utils.row_files import SUFFIXES, read_file

log = logging.getLogger(__name__)

HELD_OUT_NAMES = ("test", "validation", "val", "dev")
"""Names of a held-out split. If the requested split has one of these names and is missing, the other names are tried
as well."""
HELD_OUT = 8
"""Interval, in rows, of held-out rows: in a single file without a `split` column, one row of each 8 is held out."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?")


@dataclass
class Splits:
    """Rows of a data set. No row of `test` occurs in the other splits or in a demonstration."""

    train: list[Row]
    test: list[Row]
    validation: list[Row] = field(default_factory=list)
    """Rows cut from `train` by `data.validation_rows`, for the evaluations of a run; they occur in no demonstration."""

    @property
    def held_out(self) -> list[Row]:
        """Rows that a run evaluates on. The choice of the best checkpoint uses `test` only if there are no validation
        rows."""
        return self.validation or self.test


def load_rows(data: Any, seed: int = 0, **config: Any) -> Splits:
    """Load the rows of `data.path` for any environment, from the columns that `to_row` knows."""
    if data.path is None:
        raise UserError(
            "data.path=null, and this environment has no synthetic data; set data.path to a folder, file or Hub name"
        )
    return load_splits(data, to_row)


def load_splits(
    data: Any, convert: Callable[[dict, str, int], Row], hub_config: dict[str, str] | None = None
) -> Splits:
    """Read both splits of `data.path` and convert them to rows with `convert(raw, split, index)`.

    `data.path` is a folder with `{split}.jsonl`, `.json`, `.parquet`, `.csv` or `{split}-*.parquet` (in it or in its
    `data/`); one file, split by its column `split` or, without one, with every eighth row held out; or a Hub name
    `owner/name` or `owner/name:config`. If a held-out split (test, validation, val, dev) is missing, the other names
    are tried in this order.

    A training row whose task (see `contents_of`) also occurs in the held-out rows is dropped. `hub_config` maps the
    name of a Hub data set with several configurations to the configuration to load.

    Dates and times in parquet files and on the Hub are ISO 8601 text in `raw`. Other values that JSON does not have,
    such as bytes, are for `convert` to convert or leave out.

    Raises:
        UserError: the path, a split or its rows do not exist, the data is not readable, or a converted row is not JSON.
    """
    path = str(data.path)
    if path in (hub_config or {}) and not Path(path).exists():
        path = f"{path}:{hub_config[path]}"
    source = _source(path, data.train_split)
    train, test = (
        [convert(raw, split, index) for index, raw in enumerate(_read(source, path, name))]
        for split, name in (("train", data.train_split), ("test", data.test_split))
    )
    if not source.is_json:
        for row in (*train, *test):
            check_json(row, f"data.path={path}")
    if unread := source.unread((data.train_split, data.test_split)):
        log.warning(
            "data.path=%s: %s are not read, for data.train_split=%s and data.test_split=%s; name another split there, "
            "or leave these rows out",
            path,
            ", ".join(unread),
            data.train_split,
            data.test_split,
        )
    return cap(_disjoint(Splits(train, test), path), data)


def cap(splits: Splits, data: Any) -> Splits:
    """Limit the splits to their first `data.max_train_rows` and `data.max_test_rows` rows."""
    for key in ("max_train_rows", "max_test_rows"):
        if (rows := getattr(data, key)) is not None and rows < 1:
            raise UserError(f"data.{key}={rows} leaves no rows; set it to 1 or more, or to null for all")
    return replace(splits, train=splits.train[: data.max_train_rows], test=splits.test[: data.max_test_rows])


def cut_validation(splits: Splits, count: int) -> Splits:
    """Move `count` rows from the training split to the validation split; with 0 nothing changes.

    The rows with the lowest hashes of their content are moved, so the choice depends on neither order nor seed, and a
    row that is added to the data displaces at most one other row. Training rows with the same content as a chosen row
    are dropped, and rows with the content of a held-out row are never chosen. The rows of each split keep their order.

    Raises:
        UserError: the training split has `count` different rows or fewer.
    """
    if not count:
        return splits
    contents = contents_of(splits.train, splits.test)
    held_out = set(contents[len(splits.train) :])
    own = contents[: len(splits.train)]
    different = sorted({content for content in own if content not in held_out}, key=_rank)
    if count >= len(different):
        raise UserError(
            f"data.validation_rows={count} leaves nothing to train on, for the training split has {len(different)} "
            "different rows; lower it, or give more rows"
        )
    chosen = set(different[:count])
    pairs = list(zip(own, splits.train, strict=True))
    first = {content: row for content, row in reversed(pairs) if content in chosen}
    validation = [row for content, row in pairs if first.get(content) is row]
    train = [row for content, row in pairs if content not in chosen]
    if (twins := len(pairs) - len(train) - count) > 0:
        log.warning("data.validation_rows=%d: dropped %d training rows that are twins of these", count, twins)
    return replace(splits, train=train, validation=validation)


def contents_of(
    train: Sequence[Row], others: Sequence[Row], prompt: Callable[[Row], Any] = lambda row: row["prompt"]
) -> list[str]:
    """Return the text that identifies the task of each row, for `train`, then `others`: the prompt; or, where most
    training prompts are the same because the task is given later or never (a secret code), the row without `id` and
    `split`.

    Args:
        prompt: function that returns the part of a row's prompt to compare.
    """
    rows = [*train, *others]
    prompts = [_text(prompt(row)) for row in rows]
    if 2 * len(set(prompts[: len(train)])) > len(train):
        return prompts
    named = ({key: value for key, value in row.items() if key not in ("id", "split")} for row in rows)
    return [_text({**content, "prompt": prompt(row)}) for content, row in zip(named, rows, strict=True)]


def _text(content: Any) -> str:
    return json.dumps(content, sort_keys=True, default=str)


def _rank(content: str) -> bytes:
    return hashlib.blake2b(b"validation/" + content.encode(errors="backslashreplace"), digest_size=16).digest()


def _disjoint(splits: Splits, path: str) -> Splits:
    contents = contents_of(splits.train, splits.test)
    held_out = set(contents[len(splits.train) :])
    train = [row for row, content in zip(splits.train, contents, strict=False) if content not in held_out]
    if not train:
        raise UserError(
            f"data.path={path}: every training row is a held-out row as well; set data.train_split and data.test_split"
        )
    if len(train) < len(splits.train):
        log.warning(
            "data.path=%s: dropped %d training rows whose prompt is held out as well",
            path,
            len(splits.train) - len(train),
        )
    ids = [row["id"] for row in (*train, *splits.test)]
    if len(set(ids)) < len(ids):
        # Ids that number the rows of each split from 0 occur in both splits; the prefix makes them unique.
        for split, kind, rows in (("train", "training", train), ("test", "held-out", splits.test)):
            _check_ids(rows, kind, path)
            for row in rows:
                row["id"] = f"{split}-{row['id']}"
    return Splits(train, splits.test)


def _check_ids(rows: list[Row], kind: str, path: str) -> None:
    seen: set[str] = set()
    for row in rows:
        if row["id"] in seen:
            raise UserError(
                f"data.path={path}: two {kind} rows have id={row['id']}; make the ids unique, or leave the column out"
            )
        seen.add(row["id"])


# Rows


def to_row(raw: dict[str, Any], split: str, index: int) -> Row:
    """Return `raw` with `id`, `prompt` (messages), `ground_truth` (dict) and `split`; all other columns stay."""
    row_id = raw.get("id")
    row_id = f"{split}-{index}" if row_id is None else str(row_id)
    return {
        **raw,
        "id": row_id,
        "prompt": prompt_messages(raw, row_id),
        "ground_truth": _ground_truth(raw),
        "split": split,
    }


def _ground_truth(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the ground truth from `ground_truth`, `reward_spec` (SkyRL), `reward_model` (verl) or `answer`; {} if the
    row has none of these."""
    specs = (raw.get(name) for name in ("reward_spec", "reward_model"))
    truths = [
        raw.get("ground_truth"),
        *(spec.get("ground_truth") for spec in specs if isinstance(spec, dict)),
        raw.get("answer"),
    ]
    truth = next((truth for truth in truths if truth is not None), None)
    if truth is None:
        return {}
    return truth if isinstance(truth, dict) else {"answer": truth}


# Reading


def _read(source: _Source, path: str, split: str) -> list[dict[str, Any]]:
    rows = source.read(split)
    if not rows:
        others = ", ".join(source.unread([])) or "no other split"
        raise UserError(
            f"data.path={path} has no rows in split {split!r}; it has {others}: "
            "set data.train_split and data.test_split"
        )
    return rows


class _Source(Protocol):
    """The data at a path: a folder, a file or a data set of the Hub."""

    is_json: bool
    """Whether all columns that were read have types of JSON."""

    def read(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of the split, or of the first alternative of `split_names` that exists."""

    def unread(self, asked: Sequence[str]) -> list[str]:
        """Return descriptions of the splits that exist and are not read for the splits `asked`."""


def _source(path: str, split: str) -> _Source:
    local = in_home(path)
    if local.is_dir():
        return _Folder(local)
    if local.is_file():
        return _File(local)
    if _HUB_NAME.fullmatch(path) and not path.endswith(SUFFIXES):
        return _Hub(path)
    raise UserError(
        f"data.path={path} does not exist; give a folder with {split}.jsonl, one file, or a Hub name owner/name"
    )


def split_names(split: str) -> list[str]:
    """Return `split`, followed by the alternative names of a held-out split."""
    return [split, *(name for name in HELD_OUT_NAMES if name != split)] if split in HELD_OUT_NAMES else [split]


def _found(split: str, known: Collection[str]) -> str | None:
    """Return the first name of the split that is in `known`, or None."""
    return next((name for name in split_names(split) if name in known), None)


def _others(asked: Sequence[str], known: Iterable[str]) -> list[str]:
    known = list(known)
    read = {_found(split, known) for split in asked}
    return [name for name in known if name not in read]


class _Folder:
    """A folder with one file, or several Parquet shards, for each split."""

    def __init__(self, path: Path):
        self.path, self.is_json = path, True

    def read(self, split: str) -> list[dict[str, Any]]:
        for name in split_names(split):
            if files := self._files(name):
                self._warn_of_others(name)
                rows = [row for file in files for row in read_file(file)]
                self.is_json &= all(map(is_json_file, files))
                return rows
        looked_for = ", ".join(f"{split}{suffix}" for suffix in SUFFIXES)
        found = ", ".join(sorted(file.name for file in self.path.iterdir())[:8]) or "nothing"
        raise UserError(
            f"data.path={self.path} has no split {split!r}: looked for {looked_for} and {split}-*.parquet, found "
            f"{found}; add the file, or set data.train_split and data.test_split"
        )

    def unread(self, asked: Sequence[str]) -> list[str]:
        there = [name for name in dict.fromkeys((*asked, "train", *HELD_OUT_NAMES)) if self._files(name)]
        return [f"the rows of split {name!r}" for name in _others(asked, there)]

    def _files(self, name: str) -> list[Path]:
        return next(self._candidates(name), [])

    def _warn_of_others(self, name: str) -> None:
        read, *others = ([str(file.relative_to(self.path)) for file in files] for files in self._candidates(name))
        if others:
            log.warning(
                "data.path=%s: the rows of split %r are read from %s, and not from %s; keep one of them",
                self.path,
                name,
                read[0],
                ", ".join(files[0] for files in others),
            )

    def _candidates(self, name: str) -> Iterator[list[Path]]:
        """Yield the files of the split in each format and place in which it exists, the preferred one first."""
        for place in (self.path, self.path / "data"):
            yield from ([file] for suffix in SUFFIXES if (file := place / f"{name}{suffix}").is_file())
            if shards := sorted(place.glob(f"{name}-*.parquet")):
                yield shards


class _File:
    """One file, split by its column `split` or, without one, with every eighth row held out."""

    def __init__(self, path: Path):
        self.rows, self.is_json = read_file(path), is_json_file(path)
        bare = [number for number, row in enumerate(self.rows, 1) if row.get("split") in (None, "")]
        self.counts = Counter(str(row["split"]) for row in self.rows) if not bare else Counter()
        if 0 < len(bare) < len(self.rows):
            raise UserError(
                f"data.path={path}: {len(bare)} of {len(self.rows)} rows have no split, the first of them is row "
                f"{bare[0]}; give every row one, or leave the column split out of all"
            )
        if not self.counts and len(self.rows) < 2:
            raise UserError(
                f"data.path={path} has {len(self.rows)} rows and no column split, so the first of each {HELD_OUT} rows "
                "is held out and none is left to train on; give two rows or more, one object per row"
            )

    def read(self, split: str) -> list[dict[str, Any]]:
        if self.counts:
            return [row for row in self.rows if str(row["split"]) == _found(split, self.counts)]
        held_out = split in HELD_OUT_NAMES
        return [row for index, row in enumerate(self.rows) if (index % HELD_OUT == 0) == held_out]

    def unread(self, asked: Sequence[str]) -> list[str]:
        return [f"{self.counts[name]} rows of split {name!r}" for name in _others(asked, sorted(self.counts))]


class _Hub:
    """A data set of the Hub, `owner/name` or `owner/name:config`."""

    def __init__(self, path: str):
        self.path, self.is_json = path, True
        try:
            import datasets
        except ImportError as error:
            raise missing_extra("datasets", "data") from error
        name, _, config = path.partition(":")
        try:
            if is_out_of_reach(name):
                datasets.config.HF_HUB_OFFLINE = True  # there is no argument for this; then only the cache is used
            self.splits = datasets.load_dataset(name, config or None)
        except Exception as error:  # the library raises many types, from OSError to its own, offline or not
            reason = (str(error).strip() or "no message").splitlines()[0][:200]
            raise UserError(
                f"data.path={path} is not a folder or file here, and the Hub did not give it "
                f"({type(error).__name__}: {reason}); "
                "check the path, the name (owner/name or owner/name:config) and the connection"
            ) from error

    def read(self, split: str) -> list[dict[str, Any]]:
        found = _found(split, self.splits)
        if found is None:
            raise UserError(
                f"data.path={self.path} has no split {split!r}; it has {', '.join(self.splits)}: "
                "set data.train_split and data.test_split"
            )
        rows, columns = self.splits[found].to_list(), columns_to_check(self.splits[found].features.arrow_schema)
        write_times(rows, columns)
        self.is_json &= not columns
        return rows

    def unread(self, asked: Sequence[str]) -> list[str]:
        known = [name for name in self.splits if name in (*asked, "train", *HELD_OUT_NAMES)]
        return [f"the rows of split {name!r}" for name in _others(asked, known)]
