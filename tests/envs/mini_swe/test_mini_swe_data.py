"""Rows of mini_swe: solvable, with mutations that hidden calls detect, and disjoint splits."""

import ast
import json
from collections import Counter

import pytest

from envs.mini_swe import FAMILY
from envs.mini_swe.bugs import Bug, edit, is_held_out, pairs
from envs.mini_swe.data import located
from envs.mini_swe.functions import EXPRESSIONS, arguments, parameters, results
from envs.mini_swe.mutations import mutants
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError


def test_there_are_many_functions_of_several_kinds_and_several_bugs_of_each():
    assert len(EXPRESSIONS) >= 100 and len({expression for expression in EXPRESSIONS.values()}) >= 80
    bugs = Counter(name for name, _ in pairs())
    assert bugs.keys() == EXPRESSIONS.keys() and len(pairs()) > 600
    assert sum(count >= 3 for count in bugs.values()) > 0.8 * len(bugs)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a - b", {"a + b", "a * b", "a // b", "a % b", "b - a"}),
        ("a < b", {"a <= b", "a > b", "a >= b", "a == b", "a != b"}),
        ("p and q", {"p or q", "not (p and q)", "not p and q", "p and (not q)"}),
        ("max(xs)", {"min(xs)", "sum(xs)", "len(xs)"}),
        ("xs[1:]", {"xs[2:]", "xs[0:]", "xs[:1]"}),
        ("-a", {"a"}),
        ("t in s", {"t not in s", "s in t"}),
        ("[x for x in xs if x > 0]", {"[x for x in xs]", "[x for x in xs if x > 1]", "[x for x in xs if x >= 0]"}),
    ],
)
def test_mutations_by_hand(expression, expected):
    found = set(mutants(expression))
    assert expected <= found and ast.unparse(ast.parse(expression)) not in found
    if not expression.startswith("["):
        assert found == expected


def test_every_mutation_is_noticed_by_the_hidden_calls():
    for name, wrong in pairs():
        environment = {}
        exec(f"def {name}({', '.join(parameters(EXPRESSIONS[name]))}): return {wrong}", environment)
        noticed = 0
        for values, right in results(name):
            try:
                noticed += environment[name](*values) != right or type(environment[name](*values)) is not type(right)
            except Exception:
                noticed += 1
        assert noticed, (name, wrong)


def test_every_row_has_hidden_calls_in_json():
    for name in EXPRESSIONS:
        calls = [[list(values), value] for values, value in results(name)]
        assert json.loads(json.dumps(calls)) == calls and len(calls) >= 2
        assert len(arguments(name)) == len({repr(values) for values in arguments(name)})


def test_rows_are_complete_and_json(splits):
    assert (len(splits.train), len(splits.test)) == (1024, 128)
    assert json.loads(json.dumps(splits.train)) == splits.train
    ids = [row["id"] for row in splits.train + splits.test]
    assert len(set(ids)) == len(ids)
    kinds = {len(row["ground_truth"]["files"]) for row in splits.train}
    assert kinds == {1}, "one file of one line"
    for rows in (splits.train, splits.test):
        assert len({(row["prompt"][0]["content"], *row["ground_truth"]["files"].values()) for row in rows}) == len(rows)


def test_splits_share_no_pair_of_function_and_mutation_whatever_the_seed(splits):
    others = [FAMILY.load(DataConfig(synthetic_train_rows=1024), seed=seed) for seed in (1, 2)]
    train = {row["key"] for each in (splits, *others) for row in each.train}
    test = {row["key"] for each in (splits, *others) for row in each.test}
    assert not train & test and len(train) > 500 and len(test) > 80
    assert all(map(is_held_out, test)) and not any(map(is_held_out, train))


def test_generation_is_a_function_of_the_seed(splits):
    data = DataConfig(synthetic_train_rows=1024, synthetic_test_rows=128)
    assert FAMILY.load(data, seed=0) == splits
    assert FAMILY.load(data, seed=1).train != splits.train


def test_issues_describe_the_actual_results(splits):
    """The described result is that of the broken function, and the expected result is that of a hidden call."""
    for row in splits.train:
        issue = row["prompt"][0]["content"]
        _, _, what = issue.partition(" : ")
        call, wrong, right = what.replace(" gives ", "\n").replace(" not ", "\n", 1).split("\n")
        name, _, shown = call.partition(" ")
        environment = {}
        exec(row["ground_truth"]["files"]["f.py"], environment)
        hidden = [(values, value) for _, values, value in row["ground_truth"]["calls"]]
        values = next(v for v, value in hidden if " ".join(map(repr, v)) == shown and repr(value) == right)
        try:
            assert repr(environment[name](*values)) == wrong != right
        except Exception as error:
            assert type(error).__name__ == wrong


@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_is_rewarded_and_scored_one(splits, split, judged):
    for row in getattr(splits, split)[::70]:
        responses = FAMILY.gold(row)
        assert len(responses) == 2 and judged(row, responses) == (1.0, 1.0)


def test_gold_edits_make_the_right_line_of_every_bug():
    for name, wrong in pairs():
        for naming in (0, 3):
            bug = Bug(name, wrong, naming)
            lines = [f"{f.signature} return {f.expression}" for f in (bug.broken, bug.fixed)]
            old, new = edit(*lines)
            assert lines[0].replace(old, new, 1) == lines[1]


def test_decoys_are_well_formed_and_wrong(splits, judged):
    for row in splits.test[::32]:
        *before, last = FAMILY.gold(row)
        decoys = FAMILY.decoys(row)
        assert len(decoys) >= 3 and last not in decoys
        for decoy in decoys[:1] + decoys[-2:]:
            assert judged(row, [*before, decoy]) == (0.0, 0.0)


def test_no_fixed_edit_repairs_many_held_out_rows(splits):
    """The most successful edit of all gold edits, applied without reading the file, repairs few rows."""
    lines = []
    for row in splits.test:
        bug = Bug(**row["bug"])
        lines.append(tuple(f"{f.signature} return {f.expression}" for f in (bug.broken, bug.fixed)))
    edits = {edit(broken, fixed) for broken, fixed in lines}
    best = max(sum(broken.replace(*change, 1) == fixed for broken, fixed in lines) for change in edits)
    assert best <= 0.08 * len(lines)


def test_the_function_name_does_not_determine_the_edit(splits):
    """The name determines the right expression, not the broken one, so the file must be read."""
    edits = {}
    for row in splits.train:
        bug = Bug(**row["bug"])
        edits.setdefault(bug.name, set()).add(edit(bug.broken.expression, bug.fixed.expression))
    assert sum(map(len, edits.values())) > 3 * len(edits)


def test_a_package_of_functions_for_language_models(judged):
    data = DataConfig(synthetic_train_rows=3, synthetic_test_rows=1)
    row, *_ = FAMILY.load(data, 0, functions=10, prompt="full").train
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "```bash\n" in row["prompt"][0]["content"] and "<issue>" in row["prompt"][1]["content"]
    files = row["ground_truth"]["files"]
    assert "toolbox/__init__.py" in files and len(files) >= 3
    for text in files.values():
        ast.parse(text)
    path, number = located(files, Bug(**row["bug"]))
    assert Bug(**row["bug"]).broken.expression in files[path].splitlines()[number - 1]
    assert len({path for path, _, _ in row["ground_truth"]["calls"]}) == 10
    assert judged(row, FAMILY.gold(row), max_turns=5) == (1.0, 1.0)
    broken = FAMILY.gold(row)[-1].replace("&&", "&& echo 'def zero(a): return 7' >> toolbox/numbers.py &&")
    whole = [name for _, name in (path.rsplit(".", 1) for path, _, _ in row["ground_truth"]["calls"])]
    assert judged(row, [broken], max_turns=5) == ((0.0, 0.0) if "zero" in whole else (1.0, 1.0))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"functions": 0}, "environment.config.functions=0 must be a number from 1 to"),
        ({"functions": True}, "environment.config.functions=True must be a number from 1 to"),
        ({"backend": "docker"}, "environment.config.backend=docker needs rows with images, and generated ones have"),
        ({"grading_seconds": "no"}, "environment.config.grading_seconds='no' must be a number above 0"),
        ({"command_seconds": None}, "environment.config.command_seconds=None must be a number above 0"),
    ],
)
def test_invalid_settings_are_refused(config, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.load(DataConfig(), 0, **config)


# Rows of a file

GOOD = {
    "id": "one",
    "issue": "inc is wrong",
    "files": {"pkg/__init__.py": "", "pkg/m.py": "def inc(x):\n    return x - 1\n"},
    "calls": [["pkg.m.inc", [1], 2], ["pkg.m.inc", [-1], 0]],
}


def write(folder, *rows):
    for split in ("train", "test"):
        named = [{**row, "id": f"{split}{n}", "issue": f"{row.get('issue')} {split}"} for n, row in enumerate(rows)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    return DataConfig(path=str(folder))


def test_an_experiment_for_generated_rows_takes_rows_of_a_file(tmp_path):
    """`experiment=mini_swe_hf` sets the number of functions."""
    assert FAMILY.load(write(tmp_path, GOOD), 0, functions=12) == FAMILY.load(write(tmp_path, GOOD), 0)


def test_settings_without_effect_are_refused():
    with pytest.raises(UserError, match="environment.config.container_memory is for containers"):
        FAMILY.load(DataConfig(), 0, container_memory="1g")


def test_rows_of_a_file(tmp_path, judged, say, submit):
    text = {**GOOD, "files": json.dumps(GOOD["files"]), "calls": json.dumps(GOOD["calls"])}
    for raw in (GOOD, text, {**GOOD, "prompt": ""}):  # CSV gives each row the prompt that others have
        row = FAMILY.load(write(tmp_path, raw), 0, command_seconds=7).train[0]
        assert row["ground_truth"] == {"files": GOOD["files"], "calls": GOOD["calls"], "seconds": [7, 30]}
        assert "inc is wrong" in row["prompt"][1]["content"]
        assert judged(row, [say(f"sed -i 's/-/+/' pkg/m.py && {submit}")]) == (1.0, 1.0)
        assert judged(row, [say(submit)]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"files": None}, "row train0 has no repository; it needs a column files"),
        ({"files": {"/etc/x": ""}}, r"has files\['/etc/x'\]; write paths inside the repository"),
        ({"files": {"a/../../x": ""}}, "write paths inside the repository"),
        ({"files": {"a.py": 5}}, "has no repository"),
        ({"files": {"a\0.py": ""}}, "write paths inside the repository"),
        ({"files": {"a": "", "a/b/c.py": ""}}, r"has files\['a'\].*none is a folder of another"),
        ({"calls": [["m.f", [1], float("nan")]]}, "row train0, call m.f: NaN and infinite numbers cannot be compared"),
        ({"calls": [["m.f", [float("inf")], 1]]}, "NaN and infinite numbers"),
        ({"calls": None}, "row train0 has no hidden calls; add a column calls"),
        ({"calls": [["f", [1], 2]]}, "has the call"),
        ({"calls": [["m.f", 1, 2]]}, "has the call"),
    ],
)
def test_rows_that_lack_something(change, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        FAMILY.load(write(tmp_path, {**GOOD, **change}), 0)
    with pytest.raises(UserError, match="has no instance_id, and environment.config.backend=podman"):
        FAMILY.load(write(tmp_path, GOOD), 0, backend="podman")
    with pytest.raises(UserError, match="environment.config.backend=swerex runs tasks of environment=terminal"):
        FAMILY.load(write(tmp_path, GOOD), 0, backend="swerex")
