"""The answers: filters, orders and pages against a naive reading of the files; one trajectory; curves; broken input."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.record.trajectories import kind_and_step, write_groups
from mtrl.scoring.agreement import Thresholds
from mtrl.types import Group, StopReason, read_trajectories, to_json
from mtrl.utils.images import image_part
from mtrl.view.query import Query, QueryRefusal
from mtrl.view.select import SORT_NAMES
from mtrl.view.server import to_json as to_strict_json
from tests.view.made_runs import HOSTILE, make_run, make_trajectory, make_turn

CONFIG = {"evaluation": {"success_threshold": 0.5, "claim_threshold": 1.0}}
BADLY = {"env_error", "timeout", "parse_error", "aborted"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Function `answers(what, **words)` for a run with 72 trajectories, and its content, read without an index."""
    from mtrl.record.library import Library
    from mtrl.view.export import wait_for_indexes
    from mtrl.view.http_api import Api

    path = make_run(tmp_path_factory.mktemp("runs") / "one", steps=4, config=CONFIG)
    (path / "trajectories" / "broken.jsonl").write_text("no json\n" + to_json(make_trajectory("odd")) + "\n")
    api = Api(Library([path]))
    (run,) = api.library.runs
    wait_for_indexes(run)

    def ask(what, **words):
        pairs = [
            (name, str(v)) for name, value in words.items() for v in (value if isinstance(value, list) else [value])
        ]
        answer = getattr(api, what)(run, Query(pairs))
        return json.loads(to_strict_json(answer))

    ask.api, ask.run, ask.path = api, run, path
    ask.naive = list(naive_rows(path / "trajectories"))
    return ask


def naive_rows(folder):
    """Return (kind, step, file, line, trajectory or None) of all lines, newest first."""
    files = sorted(folder.glob("*.jsonl"), key=lambda p: p.name)
    files.sort(key=lambda p: kind_and_step(p)[0])
    files.sort(key=lambda p: -(kind_and_step(p)[1] or 0))
    for path in files:
        for number, line in enumerate(path.read_text().splitlines()):
            (path.parent / "one_line").write_text(line)
            try:
                (trajectory,) = read_trajectories(path.parent / "one_line")
            except ValueError:
                trajectory = None
            yield *kind_and_step(path), path.stem, number, trajectory
    (folder / "one_line").unlink()


def naive_match(row, words):
    kind, step, file, _, t = row
    success = t is not None and t.score is not None and t.score >= 0.5
    claim = t is not None and t.reward >= 1.0
    judged = t is not None and t.score is not None
    verdict = None if not judged else "agree" if success == claim else "lenient" if claim else "strict"
    failed = t is None or t.stop_reason in BADLY or t.error is not None
    cut = t is not None and (
        t.stop_reason in ("turn_token_limit", "context_limit") or any(turn.finish == "length" for turn in t.turns)
    )
    low, _, high = str(words.get("step", "")).partition("-")
    tests = {
        "file": lambda v: file == v,
        "kind": lambda v: kind in v.split(","),
        "step": lambda v: step is not None and int(low) <= step <= int(high or low),
        "task": lambda v: t is not None and t.task_id in v,
        "contains": lambda v: t is not None and v.lower() in t.task_id.lower(),
        "group": lambda v: t is not None and t.group_id == v,
        "stop": lambda v: t is not None and t.stop_reason in v.split(","),
        "verdict": lambda v: verdict in (("lenient", "strict") if v == "disagree" else (v,)),
        "success": lambda v: judged and success == bool(v),
        "failed": lambda v: failed == bool(v),
        "truncated": lambda v: cut == bool(v),
        "trainable": lambda v: (t is not None and t.trainable) == bool(v),
        "readable": lambda v: (t is not None) == bool(v),
        "reward_min": lambda v: t is not None and t.reward >= v,
        "reward_max": lambda v: t is not None and t.reward <= v,
        "turns_min": lambda v: len(t.turns if t else []) >= v,
        "turns_max": lambda v: len(t.turns if t else []) <= v,
    }
    return all(tests[name](value) for name, value in words.items())


def naive_key(row, name):
    t = row[4]
    if t is None:
        return {"turns": 0, "tokens": 0, "longest_turn": 0}.get(name)
    tokens = [len(turn.action_ids) for turn in t.turns]
    credited = [(turn.advantages[0], len(turn.action_ids)) for turn in t.turns if turn.advantages]
    drifts = [abs(a - b) for turn in t.turns for a, b in zip(turn.trainer_logprobs, turn.action_logprobs, strict=False)]
    return {
        "reward": t.reward,
        "score": t.score,
        "turns": len(t.turns),
        "tokens": sum(tokens),
        "longest_turn": max(tokens),
        "gap": None if t.score is None else abs(t.reward - t.score),
        "seconds": sum(turn.seconds_generate + turn.seconds_environment for turn in t.turns),
        "drift": max(drifts, default=None),
        "advantage": sum(a * n for a, n in credited) / sum(n for _, n in credited) if credited else None,
    }[name]


words = st.fixed_dictionaries(
    {},
    optional={
        "file": st.sampled_from(["train_step_000001", "broken", "nowhere"]),
        "kind": st.sampled_from(["train", "eval_greedy", "train,eval_greedy", "none"]),
        "step": st.sampled_from(["1", "2-3", "9"]),
        "task": st.lists(st.sampled_from(["task-a", "task-b", "Task, with a comma"]), min_size=1, max_size=2),
        "contains": st.sampled_from(["TASK", "comma", "b"]),
        "group": st.sampled_from(["train1/0", "train2/1"]),
        "stop": st.sampled_from(["done", "done,timeout", "max_turns"]),
        "verdict": st.sampled_from(["agree", "lenient", "strict", "disagree"]),
        **{name: st.sampled_from([0, 1]) for name in ("success", "failed", "truncated", "trainable", "readable")},
        **{name: st.sampled_from([0.5, 1.0, 2.0]) for name in ("reward_min", "reward_max")},
        **{name: st.sampled_from([1, 2, 3]) for name in ("turns_min", "turns_max")},
    },
)


@settings(max_examples=150, deadline=None)
@given(words=words, sort=st.sampled_from(SORT_NAMES), order=st.sampled_from(["asc", "desc"]), size=st.integers(1, 30))
def test_lists_are_those_of_a_naive_reading(answers, words, sort, order, size):
    rows = [row for row in answers.naive if naive_match(row, words)]
    if sort == "newest":
        if order == "asc":
            rows.sort(key=lambda row: math.inf if row[1] is None else row[1])
    else:
        keys = {row[2:4]: naive_key(row, sort) for row in rows}
        sign = 1 if order == "asc" else -1
        rows.sort(key=lambda row: (keys[row[2:4]] is None, sign * (keys[row[2:4]] or 0)))
    found = []
    while True:
        page = answers("trajectories", **words, sort=sort, order=order, offset=len(found), limit=size)
        assert page["total"] == len(rows)
        found += page["items"]
        if len(page["items"]) < size:
            break
    assert [(item["file"], item["line"]) for item in found] == [row[2:4] for row in rows]


@settings(max_examples=60, deadline=None)
@given(words=words)
def test_groups_and_counts_agree_with_the_list(answers, words):
    items = answers("trajectories", **words, limit=500)["items"]
    groups = answers("groups", **words, limit=500)["items"]
    of = {(g["file"], g["group"]): g for g in groups}
    assert len(of) == len(groups) and sum(g["size"] for g in groups) == len(items)
    for item in items:
        assert item in of[item["file"], item["group"]]["members"]
    for group in groups:
        members = group["members"]
        rewards = [m["reward"] for m in members if m["reward"] is not None]
        if rewards:
            mean = sum(rewards) / len(rewards)
            assert group["reward_mean"] == pytest.approx(mean)
            assert group["reward_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)))
        assert group["successes"] == sum(m["success"] is True for m in members)
        assert group["lenient"] == sum(m["verdict"] == "lenient" for m in members)
        assert group["failed"] == sum(m["failed"] for m in members)
        assert [m["index"] for m in members] == sorted(m["index"] for m in members)
    facets = answers("facets", **words)
    assert facets["total"] == len(items)
    assert sum(f["count"] for f in facets["stops"]) == len(items) == sum(f["count"] for f in facets["kinds"])
    assert {f["value"]: f["count"] for f in facets["verdicts"]} == {
        v: n for v in ("agree", "lenient", "strict") if (n := sum(i["verdict"] == v for i in items))
    }


@pytest.mark.parametrize("name", ["reward_mean", "reward_std", "successes", "disagreements", "size"])
def test_groups_are_sorted(answers, name):
    groups = answers("groups", sort=name, limit=500)["items"]
    values = [g["lenient"] + g["strict"] if name == "disagreements" else g[name] for g in groups]
    numbers = [value for value in values if value is not None]
    assert numbers == sorted(numbers, reverse=True) and values[: len(numbers)] == numbers
    ascending = [g[name] for g in answers("groups", sort=name, order="asc", limit=500)["items"] if name in g]
    assert name == "disagreements" or [v for v in ascending if v is not None] == sorted(numbers)


@pytest.mark.parametrize(
    ("what", "words", "sentence"),
    [
        ("trajectories", {"colour": "red"}, "'colour' is not known here; there is contains, failed"),
        ("trajectories", {"verdict": "maybe"}, "verdict=maybe must be one of agree, lenient, strict, disagree"),
        ("trajectories", {"sort": "luck"}, "sort=luck must be one of newest"),
        ("trajectories", {"limit": "0"}, "limit=0 must be from 1 to 500"),
        ("trajectories", {"limit": "9999"}, "limit=9999 must be from 1 to 500"),
        ("trajectories", {"offset": "-1"}, "offset=-1 must be from 0"),
        ("trajectories", {"offset": "x"}, "offset=x must be a whole number"),
        ("trajectories", {"offset": "9" * 30}, "must be a whole number"),
        ("trajectories", {"step": "1-x"}, "step=x must be a whole number"),
        ("trajectories", {"failed": "yes"}, "failed=yes must be 1 or 0"),
        ("trajectories", {"reward_min": "nan"}, "reward_min=nan must be a number"),
        ("groups", {"sort": "tokens"}, "sort=tokens must be one of newest, reward_mean"),
        ("search", {"q": " "}, "q must be text"),
        ("search", {"q": "a", "cursor": "x/y"}, "cursor is of another search"),
        ("search", {"q": "a", "cursor": f"broken/{'9' * 30}/1"}, "cursor is of another search"),
        ("metrics", {"since": "new"}, "since=new must be a whole number"),
        ("metrics", {"points": "5000"}, "points=5000 must be from 2 to 2000"),
        ("config", {"x": "1"}, "'x' is not known here"),
    ],
)
def test_invalid_parameters_are_refused(answers, what, words, sentence):
    with pytest.raises(QueryRefusal, match=sentence) as refusal:
        answers(what, **words)
    assert refusal.value.status == 400


# One trajectory


def one(api_of, tmp_path, *made, kind="train"):
    """Return the answer for the first of these trajectories."""
    path = tmp_path / "run"
    write_groups(make_run(path, steps=0) / "trajectories", kind, 1, [Group(t.group_id, {}, [t]) for t in made])
    api = api_of(path)
    answer = api.trajectory(api.library.runs[0], f"{kind}_step_000001", "0", Query())
    return json.loads(to_strict_json(answer))


def test_a_token_has_all_its_columns(api_of, tmp_path):
    turn = make_turn(
        tokens=2, advantages=[0.5], action_logprobs=[-1.0, -2.0], trainer_logprobs=[-1.5, -2.0],
        version_spans=[(3, 1), (4, 1)], reward=0.25, components={"form": 0.25}, metrics={"calls": 1.0},
    )  # fmt: skip
    (found,) = one(api_of, tmp_path, make_trajectory(turns=[turn]))["turns"]
    tokens = found["action"]["tokens"]
    assert tokens["ids"] == [0, 1] and tokens["texts"] is None  # no tokenizer
    assert (tokens["logprobs"], tokens["trainer_logprobs"]) == ([-1.0, -2.0], [-1.5, -2.0])
    assert (tokens["drift"], tokens["advantages"]) == ([-0.5, 0.0], [0.5, 0.5])
    assert tokens["by"] == [[2, "policy"]] and found["versions"] == [[3, 1], [4, 1]]
    assert (found["trained"], found["untrained"], found["advantage"]) == (True, None, 0.5)
    assert (found["reward"], found["components"], found["metrics"]) == (0.25, {"form": 0.25}, {"calls": 1.0})
    seen = found["observation"]["tokens"]
    assert (seen["logprobs"], seen["advantages"], seen["by"]) == (None, None, [[2, "context"]])


def test_summaries_and_folds(api_of, tmp_path):
    turns = [make_turn(), make_turn(is_summary=True), make_turn(break_reason="fold")]
    found = one(api_of, tmp_path, make_trajectory(turns=turns))["turns"]
    assert [(turn["summary"], turn["break"]) for turn in found] == [(False, None), (True, None), (False, "fold")]


def test_turns_that_extend_an_earlier_turn(api_of, tmp_path):
    turns = [make_turn(), make_turn(break_reason="fresh"), make_turn(parent=0)]
    found = one(api_of, tmp_path, make_trajectory(turns=turns))["turns"]
    assert [(turn["break"], turn["parent"]) for turn in found] == [(None, None), ("fresh", None), (None, 1)]
    assert [turn["observation"]["whole_context"] for turn in found] == [False, True, False]


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("train", {"trainable": False}, "left out"),
        ("train", {"turns": [make_turn()]}, "no advantage is recorded"),
        ("train", {"turns": [make_turn(tokens=0, advantages=[1.0])]}, "nothing was sampled"),
        ("eval_greedy", {"turns": [make_turn(advantages=[1.0])]}, "evaluations are not trained on"),
    ],
)
def test_why_a_turn_was_not_trained_on(api_of, tmp_path, kind, more, why):
    (turn, *_) = one(api_of, tmp_path, make_trajectory(**more), kind=kind)["turns"]
    assert turn["trained"] is False and turn["untrained"].startswith(why)


def test_messages_of_every_sort(api_of, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "u"}, "b"]},
        {"role": "tool", "content": {"rows": 3}, "name": "look"},
        "no message",
        {"content": 5, "tool_calls": [call, "odd", {"name": "old", "arguments": "{}"}], "reasoning_content": "hm"},
        {"tool_calls": "none", "content": HOSTILE},
    ]
    answer = one(
        api_of, tmp_path, make_trajectory(turns=[make_turn(observation=messages)], final_observation=messages[:1])
    )
    found = answer["turns"][0]["observation"]["messages"]
    assert [m["content"] for m in found] == [
        "", 'a\n{"type": "image_url", "image_url": "u"}\nb', '{"rows": 3}', "no message", "5", HOSTILE
    ]  # fmt: skip
    assert found[4]["tool_calls"] == [
        {"name": "look", "arguments": '{"at": "x"}'}, {"name": "?", "arguments": '"odd"'},
        {"name": "old", "arguments": "{}"},
    ]  # fmt: skip
    assert found[4]["reasoning"] == "hm" and found[2]["name"] == "look"
    assert [m["role"] for m in answer["final_observation"]] == ["user"]


def test_images_of_messages_are_shown_and_addresses_are_not(api_of, tmp_path):
    """The page loads nothing from elsewhere, so that only data URLs become images."""
    part = image_part(np.zeros((2, 2, 3), np.uint8))
    parts = [part, {"type": "text", "text": "a"}]
    odd = [{"type": "image", "image": "http://a/b.png"}, {"type": "image"}, {"type": "image", "image": [1]}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": odd}]
    answer = one(api_of, tmp_path, make_trajectory(turns=[make_turn(observation=messages)]))
    first, second = answer["turns"][0]["observation"]["messages"]
    assert first["content"] == "[image]\na" and first["images"] == [part["image"]]
    assert second["content"] == "[image]\n[image]\n[image]" and "images" not in second


def test_neighbours_are_those_of_the_group(api_of, tmp_path):
    path = make_run(tmp_path / "run", steps=0)
    groups = [Group(g, {}, [make_trajectory(group=g, index=n) for n in (2, 0, 1)]) for g in ("g", "h")]
    write_groups(path / "trajectories", "train", 1, groups)
    api = api_of(path)
    found = api.trajectory(api.library.runs[0], "train_step_000001", "5", Query())  # index 1 of h
    assert [s["line"] for s in found["group"]] == [4, 5, 3]
    assert (found["previous"]["line"], found["next"]["line"]) == (4, 3)
    ends = [api.trajectory(api.library.runs[0], "train_step_000001", n, Query()) for n in ("4", "3")]
    assert ends[0]["previous"] is None and ends[1]["next"] is None


@pytest.mark.parametrize(
    ("file", "line"),
    [("nowhere", "0"), ("../config", "0"), ("", "0"), *(("broken", n) for n in ("2", "-1", "9" * 40, "x", "²", ""))],
)
def test_trajectories_that_are_not_there(answers, file, line):
    with pytest.raises(QueryRefusal, match="no such trajectory") as refusal:
        answers.api.trajectory(answers.run, file, line, Query())
    assert refusal.value.status == 404


def test_a_line_that_cannot_be_read_is_shown_as_it_is(answers):
    found = answers.api.trajectory(answers.run, "broken", "0", Query())
    assert found["raw"] == "no json\n" and "cannot be read" in found["problem"]
    assert (found["turns"], found["summary"]["problem"][:8], found["group"]) == ([], "not JSON", [])


json_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers())
    | st.just({})
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_line_can_be_shown(data):
    """A line with any value in any place is shown or reported as unreadable, in strict JSON."""
    from mtrl.view.detail import UnreadableLine, parse, turns_of

    tree = json.loads(to_json(make_trajectory(turns=[make_turn(advantages=[1.0], trainer_logprobs=[-1.0] * 3)])))
    target = data.draw(st.sampled_from([tree, tree["turns"][0], tree["turns"][0]["message"]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(json_values)
    try:
        shown = turns_of(parse(json.dumps(tree).encode()), "train", None)
    except UnreadableLine:
        return
    assert len(json.loads(to_strict_json(shown))) == len(tree["turns"])
    for turn in shown:
        lists = turn["versions"], *(turn[part]["tokens"]["ids"] for part in ("observation", "action"))
        assert all(isinstance(each, list) for each in lists)


# The rest


def test_files_are_the_steps(answers):
    files = {f["file"]: f for f in answers("files")["files"]}
    assert [f["step"] for f in answers("files")["files"]] == [1, 1, 2, 3, 3, 4, None]
    for name, file in files.items():
        rows = [row for row in answers.naive if row[2] == name]
        read = [row[4] for row in rows if row[4] is not None]
        assert (file["count"], file["unreadable"]) == (len(rows), len(rows) - len(read))
        assert file["reward_mean"] == pytest.approx(sum(t.reward for t in read) / len(read))
        assert file["failed"] == sum(naive_match(row, {"failed": 1, "readable": 1}) for row in rows)
        assert file["lenient"] == sum(naive_match(row, {"verdict": "lenient"}) for row in rows)
        assert file["indexed"] and file["problem"] is None


def test_curves(api_of, tmp_path):
    path = make_run(tmp_path / "run")
    rows = [
        {"step": n, "a/x": n, "a/y": -n, "b": None if n == 2 else 1.5, "text": "no", "flag": True, "huge": 10**400}
        | {"c,d": 1}
        for n in range(5)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "a/x": NaN}\n')
    api = api_of(path)
    (run,) = api.library.runs
    found = json.loads(to_strict_json(api.metrics(run, Query([("keys", "a/*"), ("keys", "b")]))))
    assert (found["last_step"], found["rows"]) == (5, 6)
    assert found["columns"]["a/x"] == {"steps": [0, 1, 2, 3, 4, 5], "values": [0, 1, 2, 3, 4, None]}
    assert found["columns"]["b"]["values"] == [1.5, 1.5, None, 1.5, 1.5]
    assert api.metrics(run, Query([("keys", "huge")]))["columns"]["huge"]["values"] == [None] * 5
    assert set(api.metrics(run, Query([("keys", "c,d")]))["columns"]) == {"c,d"}
    assert set(found["columns"]) == {"a/x", "a/y", "b"} and "text" in found["keys"]
    later = api.metrics(run, Query([("since", "3"), ("keys", "a/y")]))
    assert later["columns"] == {"a/y": {"steps": [4], "values": [-4.0]}}
    few = api.metrics(run, Query([("points", "2")]))
    assert few["thinned"] == ["a/x", "a/y", "b", "c,d", "flag", "huge"] and len(few["columns"]["a/x"]["steps"]) == 2
    assert "text" not in few["columns"]


def test_timeline_and_alarms(api_of, tmp_path):
    path = make_run(tmp_path / "run")
    spans = [{"step": n, "name": "generate", "lane": "generator", "start": n, "end": n + 0.5} for n in range(4)]
    (path / "timeline.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans) + '{"step": 9}\n')
    (path / "alarms.jsonl").write_text(json.dumps({"rule": "hacked_reward", "title": HOSTILE}) + "\n")
    api = api_of(path)
    (run,) = api.library.runs
    found = api.timeline(run, Query([("from_step", "1"), ("to_step", "2")]))
    assert (found["spans"], found["total"]) == (spans[1:3], 2)
    assert found["problems"] == ["timeline.jsonl: 1 lines cannot be read (5)"]
    assert api.alarms(run, Query())["alarms"] == [{"rule": "hacked_reward", "title": HOSTILE}]


def test_runs_side_by_side(api_of, tmp_path):
    algorithm = {"algorithm": {"loss_fn": "cispo"}}
    one = make_run(tmp_path / "one", seed=0, config=CONFIG | {"algorithm": {"loss_fn": "ppo"}})
    two = make_run(tmp_path / "two", seed=1, config=CONFIG | {"algorithm": {"loss_fn": "ppo"}})
    three = make_run(tmp_path / "three", seed=0, config=CONFIG | algorithm, name=HOSTILE)
    found = api_of(one, two, three).runs(Query())
    assert found["differing"] == ["algorithm.loss_fn", "name", "seed"]
    first, second, third = found["runs"]
    assert first["family"] == second["family"] != third["family"]
    assert first["differences"] == {"algorithm.loss_fn": "ppo", "name": "made", "seed": 0}
    assert (third["name"], third["tokens"], third["step"], third["max_steps"]) == (HOSTILE, "ids", 3, 3)
    assert first["thresholds"] == {"success": 0.5, "claim": 1.0}
    assert first["trajectories"] == 60 and first["files"] == 5 and first["problems"] == []


def test_an_empty_run(api_of, tmp_path):
    """The run has only its folders and its configuration."""
    (tmp_path / "run" / "trajectories").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("name: begun")
    api = api_of(tmp_path / "run")
    (run,) = api.library.runs
    assert api.runs(Query())["runs"][0]["status"] == "running"
    for what in ("config", "metrics", "timeline", "alarms", "files", "trajectories", "groups", "facets"):
        assert to_strict_json(getattr(api, what)(run, Query()))
    assert api.search(run, Query([("q", "a")]))["cursor"] is None


def test_thresholds_without_a_config_are_one(api_of, tmp_path):
    path = make_run(tmp_path / "run", config={"evaluation": {"success_threshold": "high", "claim_threshold": None}})
    assert api_of(path).library.runs[0].thresholds == Thresholds(1.0, 1.0)


def test_changes_report_the_parts_to_request_again(api_of, tmp_path, monkeypatch):
    from mtrl.record import index as store
    from mtrl.view.export import wait_for_indexes

    monkeypatch.setattr(store, "PAUSE", 0.0)
    monkeypatch.setattr(store, "SHARE", 1e9)
    path = make_run(tmp_path / "run", steps=1)
    api = api_of(path)
    before = api.changes(Query())
    assert api.changes(Query([("since", before["state"])]))["state"] == before["state"]
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    after = api.changes(Query())
    assert after["state"] != before["state"]
    changed = {name for name, value in after["runs"][0].items() if before["runs"][0][name] != value}
    assert changed <= {"metrics", "step", "updated"} and "metrics" in changed
    write_groups(path / "trajectories", "train", 9, [Group("g", {}, [make_trajectory(stop_reason=StopReason.DONE)])])
    api.changes(Query())
    wait_for_indexes(api.library.runs[0])
    assert api.changes(Query())["runs"][0]["files"] != after["runs"][0]["files"]
