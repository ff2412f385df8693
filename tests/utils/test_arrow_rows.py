"""Rows of parquet files and of the Hub: dates and times become text, and other values that are not JSON are refused."""

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pytest

from mtrl.config.schema import DataConfig
from mtrl.datasets import load_rows, load_splits, to_row
from mtrl.errors import UserError
from mtrl.utils.arrow_rows import check_json, read_parquet

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TIMES = {
    "at": datetime(2020, 1, 2, 3, 4, 5),
    "zoned": datetime(2020, 1, 2, tzinfo=UTC),
    "day": date(2020, 1, 2),
    "hour": time(3, 4),
    "seen": [{"on": date(2020, 1, 2), "by": "a"}],
    "never": None,
}
TEXTS = {
    "at": "2020-01-02T03:04:05",
    "zoned": "2020-01-02T00:00:00+00:00",
    "day": "2020-01-02",
    "hour": "03:04:00",
    "seen": [{"on": "2020-01-02", "by": "a"}],
    "never": None,
}
OTHERS = {
    "bytes": ({"image": b"x"}, "image of type bytes"),
    "image": ({"image": {"bytes": b"x", "path": None}}, "image.bytes of type bytes"),
    "Decimal": ({"price": Decimal("1.5")}, "price of type Decimal"),
    "duration": ({"took": timedelta(1)}, "took of type timedelta"),
    "nested": ({"parts": [{"n": 1}, {"raw": [b"x"]}]}, r"parts\[1\].raw\[0\] of type bytes"),
}


@pytest.fixture(params=["folder", "file", "hub"])
def source(request, tmp_path, monkeypatch):
    """Function `source(**columns)` that returns the path of a data set with these columns in each row."""
    datasets = pytest.importorskip("datasets")

    def source(**columns):
        rows = [{"prompt": f"Q {n}", "answer": "1", **columns} for n in range(16)]
        if request.param == "hub":
            splits = datasets.DatasetDict(
                {"train": datasets.Dataset.from_list(rows[:8]), "test": datasets.Dataset.from_list(rows[8:])}
            )
            monkeypatch.setattr(datasets, "load_dataset", lambda name, config: splits)
            return "owner/name"
        files = {"train": rows[:8], "test": rows[8:]} if request.param == "folder" else {"all": rows}
        for name, part in files.items():
            parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / f"{name}.parquet")
        return str(tmp_path if request.param == "folder" else tmp_path / "all.parquet")

    return source


def test_dates_and_times_become_text(source):
    splits = load_rows(DataConfig(path=source(**TIMES)))
    for row in (*splits.train, *splits.test):
        assert {name: row[name] for name in TIMES} == TEXTS
        assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("kind", OTHERS)
def test_other_values_that_are_not_json_are_refused(source, kind):
    columns, problem = OTHERS[kind]
    path = source(**TIMES, **columns)
    with pytest.raises(UserError, match=f"row train-0 of data.path={path} has {problem}, which is not JSON; convert"):
        load_rows(DataConfig(path=path))


def test_a_conversion_may_take_values_that_are_not_json(source):
    """An example is a column of images, from which `convert` makes the data URLs of a prompt."""

    def convert(raw, split, index):
        return to_row({**raw, "image": raw["image"].hex()}, split, index)

    splits = load_splits(DataConfig(path=source(image=b"\x01")), convert)
    assert {row["image"] for row in splits.train} == {"01"}


def test_infinite_numbers_stay(source):
    assert load_rows(DataConfig(path=source(**TIMES, n=float("inf")))).train[0]["n"] == float("inf")


def test_all_arrow_types_of_times_become_text(tmp_path):
    day, moment = date(1970, 1, 2), datetime(1970, 1, 2)
    types = [pyarrow.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "Europe/Zurich")]
    columns = {str(kind): pyarrow.array([moment, None], kind) for kind in types}
    columns |= {str(kind): pyarrow.array([day, None], kind) for kind in (pyarrow.date32(), pyarrow.date64())}
    columns["dictionary"] = pyarrow.array([day, None]).dictionary_encode()
    columns["map"] = pyarrow.array([[("k", day)], []], pyarrow.map_(pyarrow.string(), pyarrow.date32()))
    columns["hour"] = pyarrow.array([5, None], pyarrow.time64("ns"))
    parquet.write_table(pyarrow.table(columns), path := tmp_path / "x.parquet")
    first, second = read_parquet(path)
    check_json({"id": "0", **first, **second}, "x")
    assert all(str(value).startswith("1970-01-0") for name, value in first.items() if name not in ("map", "hour"))
    assert (first["map"], first["hour"]) == ([("k", "1970-01-02")], "00:00:00")
    assert set(map(str, second.values())) == {"None", "[]"}
