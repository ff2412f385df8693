"""Data sets: all supported files and columns are read, and errors name file and line."""

import csv
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.config.schema import DataConfig
from mtrl.datasets import load_rows, load_splits, read_file, to_row
from mtrl.errors import UserError

ROWS = [{"question": f'{n}+1? "é", a\nb', "answer": str(n + 1)} for n in range(20)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path, rows):
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


def write_splits(folder, train, test, suffix=".jsonl"):
    WRITERS[suffix](folder / f"train{suffix}", train)
    WRITERS[suffix](folder / f"test{suffix}", test)
    return DataConfig(path=str(folder))


def read_rows(path, split):
    """Return the rows of one split before their conversion."""
    rows = {"train": [], "test": []}

    def convert(raw, name, index):
        rows[name].append(raw)
        return {"id": index, "prompt": [name, index]}

    load_splits(DataConfig(path=path, train_split=split, test_split=split), convert)
    assert rows["train"] == rows["test"]
    return rows["train"]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_reads_back(tmp_path, suffix):
    write_splits(tmp_path, ROWS[:15], ROWS[15:], suffix)
    assert read_rows(str(tmp_path), "train") == ROWS[:15]
    assert read_rows(str(tmp_path), "test") == ROWS[15:]


def test_json_files_of_the_hub_hold_one_object_per_line(tmp_path):
    write_jsonl(tmp_path / "train.json", ROWS)
    assert read_rows(str(tmp_path), "train") == ROWS


def test_a_byte_order_mark_is_skipped(tmp_path):
    for suffix in (".jsonl", ".json", ".csv"):
        WRITERS[suffix](path := tmp_path / f"train{suffix}", ROWS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read_file(path) == ROWS


def test_parquet_shards_are_read_in_order(tmp_path):
    (tmp_path / "data").mkdir()
    for shard in (0, 1):
        write_parquet(tmp_path / "data" / f"train-0000{shard}-of-00002.parquet", ROWS[10 * shard : 10 * shard + 10])
    assert read_rows(str(tmp_path), "train") == ROWS


def test_a_second_file_of_a_split_is_named_in_a_warning(tmp_path, caplog):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_csv(tmp_path / "train.csv", others := [{"question": "other", "answer": "1"}])
    (tmp_path / "data").mkdir()
    write_csv(tmp_path / "data" / "train.csv", others)
    assert read_rows(str(tmp_path), "train") == ROWS
    assert "split 'train' are read from train.jsonl, and not from train.csv, data/train.csv; keep one" in caplog.text
    caplog.clear()
    write_csv(tmp_path / "test.csv", others)
    assert read_rows(str(tmp_path), "test") == others
    assert "read from" not in caplog.text


@pytest.mark.parametrize("name", ["test", "validation", "val", "dev"])
def test_the_held_out_split_has_several_names(tmp_path, name):
    write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    assert read_rows(str(tmp_path), "test") == ROWS
    with pytest.raises(UserError, match=f"no split 'train': looked for train.jsonl.*found {name}.jsonl"):
        read_rows(str(tmp_path), "train")


def test_one_file_keeps_every_eighth_row_held_out(tmp_path):
    write_jsonl(path := tmp_path / "all.jsonl", ROWS)
    train, test = (read_rows(str(path), split) for split in ("train", "test"))
    assert test == ROWS[::8]
    assert train == [row for row in ROWS if row not in test]


@pytest.mark.parametrize(("content", "count"), [("", 0), ('{"question": "a"}', 1), ('{"data": [{"a": 1}]}', 1)])
def test_one_file_needs_rows_to_train_on_and_to_hold_out(tmp_path, content, count):
    (path := tmp_path / "all.json").write_text(content)
    with pytest.raises(UserError, match=f"has {count} rows and no column split, .* give two rows or more, one object"):
        load_rows(DataConfig(path=str(path)))


def test_one_file_with_a_split_column(tmp_path):
    rows = [{**row, "split": "train" if index < 12 else "validation"} for index, row in enumerate(ROWS)]
    write_jsonl(path := tmp_path / "all.jsonl", rows)
    assert read_rows(str(path), "test") == rows[12:]
    others = f"12 rows of split 'train', {len(ROWS) - 12} rows of split 'validation'"
    with pytest.raises(UserError, match=f"no rows in split 'extra'; it has {others}: set data.train_split"):
        read_rows(str(path), "extra")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({"question": st.text(min_size=1), "n": st.integers(), "x": st.floats(allow_nan=False)}),
        min_size=1,
    )
)
def test_jsonl_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    write_jsonl(path, rows)
    assert read_file(path) == rows


BROKEN = [
    ("train.jsonl", b'{"question": "a"}\n\n{"question": \n', r"train\.jsonl, line 3: not JSON"),
    ("train.jsonl", b'{"question": "a"}\n["b"]\n', r"train\.jsonl, line 2: a list, not an object"),
    ("train.jsonl", b'{"question": "a"}\n{"question": "\xff"}\n', r"train\.jsonl, line 2: not JSON in UTF-8"),
    ("train.jsonl", b"[" * 100_000, r"train\.jsonl, line 1: not JSON"),
    ("train.jsonl", b"\n", "no rows in split 'train'"),
    ("train.csv", b"question, answer\n1+1, 2\n", r"line 1: the column ' answer' has spaces around its name"),
    (
        "train.jsonl",
        b'{"question": "a \\ud83d\\ude00"}\n{"question": "b \\ud800"}',
        r"line 2: .*\\ud800 is half of a surrogate",
    ),
    ("train.json", b'[{"question": "b \\ud800"}]', r"train\.json, line 1: .*\\ud800 is half of a surrogate pair"),
    ("train.csv", b"question,answer,answer\na,1,2\n", r"train\.csv, line 1: two columns are named answer"),
    ("train.json", b'[{"question": "a"},\n{"question": }]', r"train\.json, line 2: not JSON"),
    ("train.json", b'[{"question": "a"}, 3]', r"train\.json, element 1: a int, not an object"),
    ("train.json", b'{"question": "a"}\n{"quest', r"train\.json, line 2: not JSON"),
    ("train.csv", b"question,answer\na,1\nb,2,3\n", r"train\.csv, line 3: 3 columns, not 2 as"),
    ("train.csv", b"question,answer\na\n", r"train\.csv, line 2: 1 columns, not 2 as"),
    ("train.csv", b'question,answer\na,1\n"b"x,2\n', r"train\.csv, line 3: not CSV"),
    ("train.csv", b"question,answer\na,1\n\xff,2\n", r"train\.csv, line 3: not UTF-8"),
    ("train.parquet", b"PAR1 no", r"train\.parquet: not a readable parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_broken_files_are_user_errors_with_their_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_rows(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", r"data\.path=\./nowhere does not exist; give a folder with train\.jsonl"),
        ("/nowhere/train.jsonl", r"data\.path=/nowhere/train\.jsonl does not exist"),
        ("data/train.jsonl", r"data\.path=data/train\.jsonl does not exist"),
        ("word", r"data\.path=word does not exist"),
    ],
)
def test_a_missing_path_is_a_user_error(path, message):
    with pytest.raises(UserError, match=message):
        read_rows(path, "train")


def test_a_file_with_an_unknown_suffix_is_a_user_error(tmp_path):
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(UserError, match=r"rows\.txt ends in \.txt; it must be one of \.jsonl"):
        read_rows(str(tmp_path / "rows.txt"), "train")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub with one data set; the fixture is the list of its requests."""
    datasets = pytest.importorskip("datasets")
    requests = []

    def load_dataset(name, config):
        requests.append((name, config))
        if name != "owner/name":
            raise ConnectionError("Couldn't reach the Hub\nmore")
        return datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:2])}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return requests


def test_data_sets_of_the_hub_are_read(hub):
    assert read_rows("owner/name", "train") == ROWS
    assert read_rows("owner/name:main", "test") == ROWS[:2]
    assert hub == [("owner/name", None), ("owner/name", "main")]


def test_an_unreachable_hub_is_a_user_error(hub):
    with pytest.raises(
        UserError, match=r"data\.path=data/gsm8k is not a folder.*ConnectionError: Couldn't reach the Hub\)"
    ):
        read_rows("data/gsm8k", "train")
    with pytest.raises(UserError, match="no split 'extra'; it has train, validation"):
        read_rows("owner/name", "extra")


@pytest.mark.parametrize(
    ("raw", "prompt", "ground_truth"),
    [
        ({"prompt": "a?", "answer": 7}, "a?", {"answer": 7}),
        ({"question": "a?", "ground_truth": {"sql": "x"}, "answer": "7"}, "a?", {"sql": "x"}),
        ({"prompt": [{"role": "user", "content": "a?"}], "ground_truth": "7"}, "a?", {"answer": "7"}),
        ({"prompt": '[{"role": "user", "content": "a?"}]'}, "a?", {}),
        ({"prompt": '[\n  {"role": "user",\n   "content": "a?"}\n]'}, "a?", {}),
        ({"prompt": '[{"x": 1}]'}, '[{"x": 1}]', {}),
        ({"prompt": "a?", "reward_spec": {"ground_truth": "7"}}, "a?", {"answer": "7"}),
        ({"prompt": "a?", "reward_model": {"ground_truth": {"target": ["7"]}}}, "a?", {"target": ["7"]}),
        ({"prompt": [{"role": "user", "content": "a?", "tool_calls": None}]}, "a?", {}),
    ],
)
def test_columns_become_prompt_and_ground_truth(raw, prompt, ground_truth):
    row = to_row({**raw, "extra": 1}, "train", 3)
    assert row["prompt"] == [{"role": "user", "content": prompt}]
    assert row["ground_truth"] == ground_truth
    assert (row["id"], row["extra"], row["split"]) == ("train-3", 1, "train")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"id": 5, "text": "a", "label": 1}, "row 5 of data.path has no prompt; .* and has id, text, label"),
        ({"prompt": 3}, "row train-0 of data.path has prompt='3'; write text, or a list of messages"),
        ({"prompt": [{"content": "a"}]}, "write text, or a list of messages"),
        ({"prompt": [{"role": "user", "content": 3}]}, "with role and content, which is text or a list of parts"),
        ({"prompt": [{"role": "user", "content": {"text": "a"}}]}, "which is text or a list of parts"),
        ({"prompt": [{"role": "user", "content": None}]}, "which is text or a list of parts"),
        (
            {"id": 5, "prompt": [{"role": "assistant", "content": "", "tool_calls": [{"tool": "f"}]}]},
            r"row 5 of data.path has a message with tool_calls=\[{'tool': 'f'}\]; write a list of",
        ),
        (
            {"id": 5, "prompt": [{"role": "hacker", "content": "a"}]},
            "row 5 of data.path has a message with role='hacker' in prompt; write one of system, user, assistant, tool",
        ),
    ],
)
def test_rows_without_a_prompt_are_user_errors(raw, message):
    with pytest.raises(UserError, match=message):
        to_row(raw, "train", 0)


def test_keys_that_parquet_adds_to_messages_and_parts_are_left_out(tmp_path):
    call = {"type": "function", "function": {"name": "look", "arguments": "{oops"}}
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image", "image": "data:image/png;base64,"}]
    prompt = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [], "tool_calls": [call]},
    ]
    write_parquet(tmp_path / "train.parquet", [{"prompt": prompt}] * 2)
    raw = read_file(tmp_path / "train.parquet")[0]
    assert raw["prompt"][0]["content"][0] == {**parts[0], "image": None}
    assert to_row(raw, "train", 0)["prompt"] == prompt


@pytest.mark.parametrize("text", ['{"at": "x"}', "", None])
def test_arguments_of_calls_are_objects(text):
    """OpenAI's format has their JSON text, and Parquet can hold no objects of different keys."""
    plain = {"name": "look", "arguments": text}
    calls = [{"id": "a", "type": "function", "function": plain}, {"id": "a", **plain}]
    row = to_row({"prompt": [{"role": "assistant", "content": "", "tool_calls": calls}]}, "train", 0)
    function = {"name": "look", "arguments": json.loads(text or "{}")}
    assert row["prompt"][0]["tool_calls"] == [{"id": "a", "type": "function", "function": function}] * 2


def test_load_rows_with_caps(tmp_path):
    data = write_splits(tmp_path, ROWS[:15], ROWS[15:])
    data.max_train_rows, data.max_test_rows = 4, 2
    splits = load_rows(data, seed=0, anything="else")
    assert [row["id"] for row in splits.train] == ["train-0", "train-1", "train-2", "train-3"]
    assert [row["question"] for row in splits.test] == [row["question"] for row in ROWS[15:17]]
    data.max_train_rows = 0
    with pytest.raises(UserError, match=r"data\.max_train_rows=0 leaves no rows"):
        load_rows(data)


def test_held_out_prompts_leave_the_training_rows(tmp_path, caplog):
    data = write_splits(tmp_path, ROWS[:15], ROWS[10:])
    with caplog.at_level(logging.WARNING):
        splits = load_rows(data)
    assert [row["question"] for row in splits.train] == [row["question"] for row in ROWS[:10]]
    assert "dropped 5 training rows whose prompt is held out as well" in caplog.text


def test_equal_training_and_held_out_rows_are_a_user_error(tmp_path):
    with pytest.raises(UserError, match="every training row is a held-out row as well"):
        load_rows(write_splits(tmp_path, ROWS, ROWS))


def test_ids_that_repeat_across_splits_get_the_split_as_prefix(tmp_path):
    numbered = [{**row, "id": index % 10} for index, row in enumerate(ROWS)]
    splits = load_rows(write_splits(tmp_path, numbered[:10], numbered[10:]))
    assert (splits.train[3]["id"], splits.test[3]["id"]) == ("train-3", "test-3")


def test_duplicate_ids_in_a_split_are_a_user_error(tmp_path):
    twice = [{**row, "id": "same"} for row in ROWS]
    with pytest.raises(UserError, match="two training rows have id=same; make the ids unique"):
        load_rows(write_splits(tmp_path, twice[:10], ROWS[10:]))


def test_a_missing_path_setting_is_a_user_error():
    with pytest.raises(UserError, match=r"data\.path=null, and this environment has no synthetic data"):
        load_rows(DataConfig())


def test_rows_of_a_third_split_are_reported(tmp_path, caplog):
    names = ["train"] * 12 + ["dev"] * 3 + ["test"] * (len(ROWS) - 15)
    write_jsonl(path := tmp_path / "all.jsonl", [{**row, "split": n} for row, n in zip(ROWS, names, strict=True)])
    data = DataConfig(path=str(path))
    load_rows(data)
    assert "3 rows of split 'dev' are not read" in caplog.text
    caplog.clear()
    data.test_split = "dev"
    load_rows(data)
    assert f"{len(ROWS) - 15} rows of split 'test' are not read" in caplog.text


def test_rows_without_a_split_beside_rows_with_one_are_refused(tmp_path):
    """Otherwise rows that are marked `test` could be trained on."""
    names = ["train"] * 10 + ["test"] * 6
    rows = [{**row, "split": n} for row, n in zip(ROWS, names, strict=False)] + ROWS[16:]
    for suffix in (".jsonl", ".json", ".parquet"):
        WRITERS[suffix](path := tmp_path / f"all{suffix}", rows)
        with pytest.raises(UserError, match="4 of 20 rows have no split, the first of them is row 17; give every row"):
            load_rows(DataConfig(path=str(path)))
    write_csv(path := tmp_path / "all.csv", [{"split": "", **row} for row in rows])
    with pytest.raises(UserError, match="4 of 20 rows have no split"):
        load_rows(DataConfig(path=str(path)))


def test_a_split_column_without_a_name_is_none(tmp_path):
    write_parquet(path := tmp_path / "all.parquet", [{**row, "split": None} for row in ROWS])
    assert len(load_rows(DataConfig(path=str(path))).test) == len(ROWS[::8])


@pytest.mark.parametrize("test_split", ["test", "dev"])
def test_a_file_of_a_third_split_is_reported(tmp_path, caplog, test_split):
    data = write_splits(tmp_path, ROWS[:12], ROWS[12:16])
    load_rows(data)
    assert not caplog.records
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "dev.jsonl", ROWS[16:])
    data.test_split = test_split
    load_rows(data)
    assert (
        f"the rows of split {'dev' if test_split == 'test' else 'test'!r} are not read, for data.train_split"
        in caplog.text
    )


def test_a_third_split_of_the_hub_is_reported(hub, monkeypatch, caplog):
    load_rows(DataConfig(path="owner/name"))
    assert "not read" not in caplog.text and len(hub) == 1, "the data set is loaded once for both splits"
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:9], "validation": ROWS[9:12], "test": ROWS[12:15], "train_large": ROWS[15:]}
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: splits)
    load_rows(DataConfig(path="owner/name"))
    assert "data.path=owner/name: the rows of split 'validation' are not read, for" in caplog.text


SAME_PROMPT = {
    "seeds": lambda n: {"prompt": "play", "seed": n},
    "passages": lambda n: {"prompt": "what does it say?", "passage": f"text {n}", "answer": "yes"},
    "answers": lambda n: {"prompt": "find the code", "answer": f"code {n}"},
    "three prompts": lambda n: {"prompt": f"level {n % 3}", "seed": n},
    "two truths": lambda n: {"prompt": "play", "seed": n, "answer": ["yes", "no"][n % 2]},
}


@pytest.mark.parametrize("kind", SAME_PROMPT)
@pytest.mark.parametrize("is_folder", [False, True])
def test_rows_with_equal_prompts_are_distinguished_by_their_columns(tmp_path, kind, is_folder, caplog):
    rows = [SAME_PROMPT[kind](n) for n in range(40)]
    if is_folder:
        data = write_splits(tmp_path, [*rows[:32], rows[35]], rows[32:])
    else:
        write_jsonl(path := tmp_path / "all.jsonl", rows)
        data = DataConfig(path=str(path))
    splits = load_rows(data)
    assert (len(splits.train), len(splits.test)) == ((32, 8) if is_folder else (35, 5))
    assert ("dropped 1 training rows" in caplog.text) is is_folder
