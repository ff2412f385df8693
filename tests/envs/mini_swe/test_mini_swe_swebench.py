"""Rows of SWE-bench, SWE-Gym and other data sets in their format."""

import json

import pytest

from envs.mini_swe import FAMILY
from envs.mini_swe.swebench import image_name
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError

ROW = {
    "instance_id": "astropy__astropy-12907",
    "repo": "astropy/astropy",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "problem_statement": "separability_matrix is wrong",
    "patch": "diff --git a/x.py b/x.py\n",
    "test_patch": "diff --git a/test_x.py b/test_x.py\n",
    "FAIL_TO_PASS": '["t.py::a"]',
    "PASS_TO_PASS": ["t.py::b"],
    "version": "4.3",
}


def load(folder, row, form="jsonl", backend="docker", **config):
    """The training row of a folder with this row in both splits; ids and issues differ, so that no row is in both."""
    for split in ("train", "test"):
        named = {key: f"{row[key]}_{split}" for key in ("instance_id", "problem_statement") if row.get(key)}
        if form == "jsonl":
            (folder / f"{split}.jsonl").write_text(json.dumps({**row, **named}) + "\n")
        else:
            table = pytest.importorskip("pyarrow").Table.from_pylist([{**row, **named}])
            pytest.importorskip("pyarrow.parquet").write_table(table, folder / f"{split}.parquet")
    return FAMILY.load(DataConfig(path=str(folder)), 0, backend=backend, **config).train[0]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_row_of_swe_bench(form, tmp_path):
    row = load(tmp_path, ROW, form, command_seconds=180, grading_seconds=3600)
    assert row["id"] == "astropy__astropy-12907_train" and row["patch"] == ROW["patch"]
    assert "separability_matrix is wrong" in row["prompt"][1]["content"]
    assert row["ground_truth"] == {
        "image": "docker.io/swebench/sweb.eval.x86_64.astropy_1776_astropy-12907_train:latest",
        "cwd": "/testbed",
        "base_commit": ROW["base_commit"],
        "eval_script": "",
        "test_patch": ROW["test_patch"],
        "fail_to_pass": ["t.py::a"],
        "pass_to_pass": ["t.py::b"],
        "seconds": [180, 3600],
    }
    assert "t.py" not in json.dumps(row["prompt"]), "the prompt does not tell of the tests"


@pytest.mark.parametrize(
    ("change", "path", "name"),
    [
        ({}, "", "docker.io/swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"),
        ({}, "SWE-Gym/SWE-Gym", "docker.io/xingyaoww/sweb.eval.x86_64.astropy_s_astropy-12907:latest"),
        (
            {"data_source": "SumanthRH/SWE-Gym-Subset", "instance_id": "A__B-1"},
            "",
            "docker.io/xingyaoww/sweb.eval.x86_64.a_s_b-1:latest",
        ),
        ({"image_name": "mine:1"}, "SWE-Gym/SWE-Gym", "mine:1"),
        ({"docker_image": "other"}, "", "other"),
    ],
)
def test_names_of_images(change, path, name):
    assert image_name({**ROW, **change}, path) == name


def test_rows_in_skyrls_form(tmp_path):
    """The row has all columns in a mapping, a script, and no lists."""
    instance = {**ROW, "instance_id": "a__b-1", "eval_script": "exit 0", "FAIL_TO_PASS": "", "PASS_TO_PASS": None}
    for held in (instance, json.dumps(instance)):
        for split in ("train", "test"):
            row = {"prompt": [{"role": "user", "content": split}], "data_source": "SWE-Gym", "instance": held}
            text = json.dumps(row).replace("a__b-1", f"a__b-1{split}").replace("is wrong", f"is wrong {split}")
            (tmp_path / f"{split}.jsonl").write_text(text)
        row = FAMILY.load(DataConfig(path=str(tmp_path)), 0, backend="podman").train[0]
        assert row["id"] == "a__b-1train" and row["ground_truth"]["eval_script"] == "exit 0"
        assert row["ground_truth"]["image"].startswith("docker.io/xingyaoww/")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"problem_statement": ""}, "row astropy__astropy-12907_train has no problem_statement; add the column"),
        ({"FAIL_TO_PASS": []}, "has neither eval_script nor FAIL_TO_PASS, so nothing tests it"),
        ({"FAIL_TO_PASS": "not json"}, "has FAIL_TO_PASS='not json'; write a list of tests"),
        ({"PASS_TO_PASS": [1]}, r"has PASS_TO_PASS='\[1\]'; write a list of tests"),
        ({"FAIL_TO_PASS": ["test_x (m.C)"]}, "has tests that pytest cannot be given by name and no eval_script"),
        ({"base_commit": "HEAD; rm -rf /"}, "has base_commit='HEAD; rm -rf /'; write a commit's hash"),
    ],
)
def test_rows_that_lack_something(change, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        load(tmp_path, {**ROW, **change})


def test_without_an_instance_id(tmp_path):
    with pytest.raises(UserError, match="row 0 of train has no instance_id; add the column"):
        load(tmp_path, {"instance": {"repo": "x"}})


def test_the_sandbox_refuses_swe_bench_rows_in_one_sentence(tmp_path):
    with pytest.raises(
        UserError, match="row astropy__astropy-12907_train is SWE-bench's and needs its own image"
    ) as raised:
        load(tmp_path, ROW, backend="sandbox")
    assert "\n" not in str(raised.value)


def test_gold_needs_a_patch(tmp_path):
    row = load(tmp_path, ROW)
    assert FAMILY.gold(row)[0].startswith("```bash\ngit apply <<'END_OF_PATCH'\ndiff --git a/x.py")
    with pytest.raises(UserError, match="has no column patch"):
        FAMILY.gold({**row, "patch": ""})
    with pytest.raises(UserError, match="is not a generated one with a single function"):
        FAMILY.demonstrate(row, None)
