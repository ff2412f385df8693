"""The page of rows: statistics by worked numbers, hostile names, links to trajectories, and the same in an export."""

import json

from playwright.sync_api import expect

from mtrl.record.records import Records, is_row_results
from mtrl.record.row_results import RowResults
from mtrl.record.run_dir import RunDir
from mtrl.trainer.data.sampler import DifficultySampler
from mtrl.view.export import export
from mtrl.view.query import Query
from mtrl.view.row_statistics import row_statistics
from tests.view.made_runs import HOSTILE, TOKEN, make_run, viewing
from tests.view.page_browser import fits, opened

BAND = {"sampler": "DifficultySampler", "rows": 4, "band": [0.25, 0.75], "forgetting": 0.5}


def written(path, sources, *steps):
    results = RowResults(RunDir(path).rows)
    results.start(0, sources)
    for step, pairs in enumerate(steps, 1):
        for row_id, success in pairs:
            results.note(row_id, success)
        results.write(step)
    results.close()


def test_statistics_of_each_source_by_worked_numbers(tmp_path, api_of):
    """Row a/1 has 1 and then 0: a running success of (0.5 + 0) / 1.5."""
    run = make_run(tmp_path / "run", steps=1, groups=1, size=1)
    other = {"sampler": "RowStream", "rows": 3}
    written(run, {"a": BAND, "b": other}, [("a/1", 1.0), ("a/2", 1.0)], [("a/1", 0.0), ("b/1", 0.0), ("gone/1", 1.0)])
    with RunDir(run).rows.open("a") as file:
        file.write('{"step": 3, "results": [["a/1", 2]]}\n')
    api = api_of(run)
    answer = api.rows(api.library.runs[0], Query())
    a, b = answer["sources"]
    assert [a[key] for key in ("rows", "tried", "below", "inside", "above")] == [4, 2, 0, 1, 1]
    assert a["bins"] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert [(at["step"], at["tried"], at["above"]) for at in a["over_time"]] == [(1, 2, 2), (2, 2, 1)]
    assert a["hardest"][0] == {"id": "a/1", "success": 0.5 / 1.5, "groups": 2, "step": 2}
    assert [row["id"] for row in a["easiest"]] == ["a/2", "a/1"]
    assert [b[key] for key in ("band", "tried", "inside")] == [None, 1, None]
    assert answer["problems"] == ["rows.jsonl: 1 lines cannot be read (4)"] and json.dumps(answer)


def test_two_lines_of_a_step_are_one_point(tmp_path):
    """With overlap a checkpoint writes the results of the groups that it stores as a further line of its step."""
    path = tmp_path / "rows.jsonl"
    results = RowResults(path)
    results.start(0, {"": BAND})
    for step in (1, 1, 2):
        results.note("x/1", 1.0)
        results.write(step)
    (one,) = row_statistics(Records(path, is_row_results).refresh())
    assert [(at["step"], at["tried"]) for at in one["over_time"]] == [(1, 1), (2, 1)]
    assert one["hardest"][0]["groups"] == 3


def test_the_record_has_the_running_success_and_the_band_of_the_sampler(tmp_path, api_of):
    run = make_run(tmp_path / "run", steps=1, groups=1, size=1)
    rows = [{"id": f"row-{n}"} for n in range(6)]
    sampler = DifficultySampler(rows, 0, forgetting=0.3)
    steps = [[(f"row-{n % 4}", (n * step) % 5 / 4) for n in range(7)] for step in range(1, 30)]
    written(run, sampler.described(), *steps)
    for row_id, success in (pair for step in steps for pair in step):
        sampler.note({"id": row_id}, success)
    api = api_of(run)
    (one,) = api.rows(api.library.runs[0], Query())["sources"]
    metrics = sampler.metrics()
    assert {row["id"]: row["success"] for row in one["hardest"]} == {
        row_id: total / weight for row_id, (total, weight) in sampler.results.items()
    }
    assert one["tried"] / one["rows"] == metrics["data/tried_frac"]
    assert one["below"] / one["tried"] == metrics["data/too_hard_frac"]
    assert len(one["over_time"]) == 12 and one["over_time"][-1]["step"] == 29


def look(page):
    page.locator("#tab-rows").click()
    hostile = page.get_by_role("region", name="Hardest rows").locator("tbody tr").first
    expect(hostile.locator("th")).to_contain_text("</script>")
    return hostile


def test_the_page_leads_to_the_trajectories_of_a_row(browser, tmp_path, api_of):
    run = make_run(tmp_path / "run")
    written(run, {"": {**BAND, "sampler": HOSTILE}}, [("task-a", 0.5), (HOSTILE, 0.0)], [("task-a", 1.0)])
    with viewing(run) as client, opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
        look(page)
        expect(page.locator(".rows p").first).to_contain_text("4 training rows: 2 with a result, 2 without one.")
        expect(page.locator(".spread tbody tr")).to_have_count(2)
        page.set_viewport_size({"width": 420, "height": 800})
        assert fits(page)
        page.get_by_role("region", name="Easiest rows").get_by_role("link", name="task-a").click()
        expect(page.locator(".results")).to_contain_text("task-a")
        expect(page.locator(".results")).not_to_contain_text("task-b")
    export(api_of(run), tmp_path / "run.html", 5)
    with opened(browser, (tmp_path / "run.html").as_uri()) as page:
        look(page)
