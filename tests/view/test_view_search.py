"""Search: its matches, their order, and the short time of each request."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.record.trajectories import write_groups
from mtrl.types import Group, read_trajectories, to_json
from mtrl.view.query import Query, QueryRefusal
from mtrl.view.search import SECONDS, Needle, resume, search, texts_of
from tests.view.made_runs import HOSTILE, make_run, make_trajectory, make_turn


def all_of(api, run, **words):
    """Return all matches, and the number of requests."""
    found, cursor = [], None
    for requests in itertools.count(1):
        pairs = [(k, str(v)) for k, v in {**words, **({"cursor": cursor} if cursor else {})}.items()]
        answer = api.search(run, Query(pairs))
        found += answer["items"]
        cursor = answer["cursor"]
        if cursor is None:
            assert answer["searched"] == answer["total"]
            return found, requests


def written(api_of, tmp_path, *made):
    path = make_run(tmp_path / "run", steps=0)
    write_groups(path / "trajectories", "train", 1, [Group("g", {}, list(made))])
    api = api_of(path)
    return api, api.library.runs[0]


def test_every_place_where_words_are(api_of, tmp_path):
    call = {"function": {"name": "lookup", "arguments": {"city": "Altona"}}}
    made = make_trajectory(
        turns=[
            make_turn(observed="where is the NEEDLE?", text="needle, needle"),
            make_turn(message={"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}),
        ],
        final_observation=[{"role": "tool", "content": "a needle at the end"}],
    )
    api, run = written(api_of, tmp_path, make_trajectory(), made)
    ((found,), _) = all_of(api, run, q="needle")
    assert found["summary"]["line"] == 1 and found["hit_count"] == 4
    assert [(h["turn"], h["role"], h["match"]) for h in found["hits"]] == [
        (1, "user", "NEEDLE"), (1, "assistant", "needle"), (1, "assistant", "needle")
    ]  # fmt: skip
    assert found["hits"][0] | {"turn": 0} == {
        "turn": 0, "role": "user", "before": "where is the ", "match": "NEEDLE", "after": "?"
    }  # fmt: skip
    for words in ("at the end", "altona", "lookup", "hm"):
        assert len(all_of(api, run, q=words)[0]) == 1, words
    assert all_of(api, run, q="t")[0][0]["summary"]["line"] in (0, 1)
    assert all_of(api, run, q="action_ids")[0] == []  # a name of the file format, which is in no message


@pytest.mark.parametrize(
    "text",
    [HOSTILE, "ÉCOLE", "école", "中文", "🤖", 'a "b"', "a\\b", "line\nbreak", "\x1b[31m", "<script>", "a.*b", "'%20"],
)
def test_text_of_every_sort_is_found_as_it_is(api_of, tmp_path, text):
    content = f"before {text.lower() if text.isalpha() else text} after"
    api, run = written(api_of, tmp_path, make_trajectory(turns=[make_turn(observed=content)]), make_trajectory())
    ((found,), _) = all_of(api, run, q=text)
    assert found["hits"][0]["before"] == "before "


def test_escaped_letters_are_letters(api_of, tmp_path):
    """Another program may write every letter as an escape."""
    path = make_run(tmp_path / "run", steps=0)
    line = to_json(make_trajectory(turns=[make_turn(observed="needle")]))
    escaped = "".join(f"\\u{ord(char):04x}" for char in "needle")
    (path / "trajectories" / "other.jsonl").write_text(line.replace('"needle"', f'"{escaped}"') + "\n")
    api = api_of(path)
    assert len(all_of(api, api.library.runs[0], q="Needle")[0]) == 1


def test_search_follows_filters_and_order(api_of, made_run):
    api = api_of(made_run)
    (run,) = api.library.runs
    words = {"kind": "train", "sort": "reward", "order": "asc"}
    listed = api.trajectories(run, Query([*words.items(), ("limit", "500")]))["items"]
    having = []
    for item in listed:
        (t,) = [
            t
            for n, t in enumerate(read_trajectories(made_run / "trajectories" / f"{item['file']}.jsonl"))
            if n == item["line"]
        ]
        if any("apple" in text.lower() for _, _, text in texts_of(t)):
            having.append(item)
    assert 0 < len(having) < len(listed)
    for limit in (1, 3, 500):
        found, requests = all_of(api, run, q="apple", **words, limit=limit)
        assert [f["summary"] for f in found] == having
        assert requests >= len(having) / limit


def test_a_request_ends_in_time_with_a_cursor(api_of, made_run):
    api = api_of(made_run)
    (run,) = api.library.runs
    rows = run.index.rows()
    seconds = itertools.count(0, SECONDS / 4)
    found = search(rows, Needle("nowhere"), None, 50, clock=lambda: next(seconds))
    assert found.rows == [] and found.searched == 5
    rest = search(rows, Needle("nowhere"), found.cursor, 50)
    assert rest.searched == len(rows) and rest.cursor is None


def test_a_cursor_survives_new_trajectories(api_of, made_run):
    api = api_of(made_run)
    rows = api.library.runs[0].index.rows()
    row = rows[7]
    cursor = f"{row.file.name}/{row.number}/7/8"
    assert resume(rows, cursor) == (8, 8)
    assert resume(rows[5:], cursor) == (3, 8)
    assert resume([*rows[20:30], *rows], cursor) == (18, 8)
    with pytest.raises(QueryRefusal, match="search again"):
        resume(rows[8:], cursor)


def test_trajectories_added_behind_the_cursor_are_counted(api_of, made_run):
    rows = api_of(made_run).library.runs[0].index.rows()
    some, late = rows[10:], rows
    first = search(some, Needle("p"), None, 2)
    rest = search(late, Needle("p"), first.cursor, 500)
    assert (first.missed, rest.missed, rest.cursor) == (0, 10, None)
    assert rest.searched + rest.missed == len(late)
    whole = search(late, Needle("p"), None, 500)
    seen = [row for row, _, _ in (*first.rows, *rest.rows)]
    assert seen == [row for row, _, _ in whole.rows if row not in rows[:10]]


def test_removed_files_have_no_hits(api_of, tmp_path):
    _, run = written(api_of, tmp_path, make_trajectory(turns=[make_turn(observed="needle")]))
    rows = run.index.rows()
    rows[0].file.path.write_text("x")
    assert search(rows, Needle("needle"), None, 5).rows == []
    rows[0].file.path.unlink()
    assert search(rows, Needle("needle"), None, 5).rows == []


letters = st.text(st.sampled_from('aAbé"\\ \n<K中'), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from('aAbé"\\ \n<K中'), max_size=12), wanted=letters, escaped=st.booleans())
def test_the_fast_check_never_hides_a_hit(text, wanted, escaped):
    if not wanted.strip():
        return
    made = make_trajectory(turns=[make_turn(observed=text)])
    needle = Needle(wanted)
    line = json.dumps(json.loads(to_json(made)), ensure_ascii=escaped).encode()
    if any(needle.hits(made)):
        assert needle.may_be_in(line)
    elif wanted.lower() in text.lower() and wanted.isascii() == text.isascii():
        pytest.fail("it is there")
