"""What a loader of rows returns is checked before any work: one sentence names the row, the key and the fix."""

import pytest

from mtrl.datasets import Splits
from mtrl.environments.loaded_rows import checked_splits
from mtrl.errors import UserError

ROW = {"id": "a", "prompt": [{"role": "user", "content": "hi"}], "ground_truth": {"answer": 1}}


async def load():
    return Splits([ROW], [ROW])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([ROW], r"load of shop returned a list; return Splits\(train=rows, test=other_rows\)"),
        (([ROW], [ROW]), "returned a tuple; return Splits"),
        (None, "returned a NoneType; return Splits"),
        (Splits(iter([ROW]), []), "returned train as a list_iterator; make it a list of rows"),
    ],
    ids=["list", "tuple", "none", "iterator"],
)
def test_something_other_than_splits(found, message):
    with pytest.raises(UserError, match=message):
        checked_splits(found, "shop")


@pytest.mark.filterwarnings("error")
def test_an_async_loader_is_refused_and_its_coroutine_closed():
    with pytest.raises(UserError, match="load of shop is async.*; write def load"):
        checked_splits(load(), "shop")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ...}, "row 1 of test without id, and with prompt, ground_truth; add it"),
        ({"prompt": ...}, "without prompt, and with id, ground_truth; add it"),
        ({"ground_truth": ...}, "without ground_truth, and with id, prompt; add it"),
        ({"id": None}, "with id=None; write a text that no other row has"),
        ({"prompt": "hi"}, "with prompt='hi'; write a list of messages with role and content"),
        ({"prompt": ["hi"]}, r"with prompt=\['hi'\]; write a list of messages"),
        ({"prompt": [{"role": "human", "content": "hi"}]}, "with a message of role='human'; write one of system, user"),
        ({"ground_truth": "7"}, "with ground_truth='7'; write a dict such as"),
    ],
    ids=str,
)
def test_a_row_of_another_form(changes, message):
    row = {key: value for key, value in {**ROW, **changes}.items() if value is not ...}
    with pytest.raises(UserError, match=f"load of shop returned .*{message}"):
        checked_splits(Splits([ROW], [ROW, row]), "shop")


def test_a_row_that_is_no_mapping():
    with pytest.raises(
        UserError, match="row 0 of validation as a str; make it a dict with id, prompt and ground_truth"
    ):
        checked_splits(Splits([ROW], [ROW], ["a"]), "shop")


def test_rows_with_more_columns_and_no_opening_pass():
    splits = Splits([ROW | {"level": 3}], [ROW | {"prompt": [], "id": 7, "ground_truth": {}}])
    assert checked_splits(splits, "shop") is splits


def test_two_rows_of_one_split_with_one_id():
    with pytest.raises(UserError, match="returned 2 rows of test with id='7'; give each row an id of its own"):
        checked_splits(Splits([ROW], [ROW, ROW | {"id": 7}, ROW | {"id": "7"}]), "shop")
