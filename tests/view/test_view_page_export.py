"""The exported file: the same page from one file without further requests."""

import json

import pytest
from playwright.sync_api import expect

from mtrl.view.__main__ import main
from mtrl.view.query import Query
from mtrl.view.server import to_json
from tests.view.page_browser import opened
from tests.view.page_runs import SIZE, TASKS, finish_run, rich_run

ALL = 3 * SIZE * len(TASKS) + 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    (folder / "run").mkdir()
    run = finish_run(rich_run(folder / "run"))
    assert main([str(run), "--export", str(folder / "run.html"), "--max-trajectories", str(ALL)]) == 0
    assert main([str(run), "--export", str(folder / "part.html"), "--max-trajectories", "10"]) == 0
    return folder


@pytest.fixture
def page(browser, exported):
    with opened(browser, f"file://{exported}/run.html", offline=True) as found:
        asked = []
        found.on("request", lambda request: asked.append(request.url))
        found.reload()
        found.locator("main:not([aria-busy])").wait_for()
        yield found
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def at(page, words):
    page.evaluate("words => { location.hash = words }", words)


def test_it_opens_from_disk_with_curves_and_alarms(page):
    expect(page.locator(".badge", has_text="exported")).to_be_visible()
    expect(page.get_by_text("Held-out success")).to_be_visible()
    expect(page.get_by_label("Alarms")).to_contain_text("The reward rises")
    expect(page.locator(".gantt .span")).to_have_count(9)


def test_filters_groups_and_search_work_without_a_server(page):
    page.get_by_role("link", name="Browse").click()
    expect(page.locator(".count")).to_have_text(f"{ALL} trajectories")
    page.get_by_role("button", name="Lenient").click()
    expect(page.locator(".count")).to_have_text("3 trajectories")
    page.locator(".vl-row").first.click()
    expect(page.locator(".position")).to_have_text("1 of 3")
    page.keyboard.press("j")
    expect(page.locator(".position")).to_have_text("2 of 3")
    at(page, "#browse?level=groups&kind=train")
    expect(page.locator(".count")).to_have_text(f"{3 * len(TASKS)} groups")
    at(page, "#browse?q=HACKED")
    expect(page.locator(".count")).to_contain_text("found in 3 trajectories")
    at(page, "#browse?q=look_up")  # the name of a tool, which no text holds
    expect(page.locator(".count")).to_contain_text("found in 1 trajectory")
    at(page, "#browse?sort=reward&order=asc")
    expect(page.locator(".vl-row").first).to_contain_text("0.00")


def test_hostile_text_stays_text_in_the_file(page):
    at(page, "#trajectory?at=eval_greedy_step_000003/0")
    expect(page.locator("#turn-2 .message.assistant .text")).to_contain_text(
        "<script>window.pwned='script'</script> </script>"
    )
    at(page, "#trajectory?at=eval_greedy_step_000003/0&show=tokens&turn=2&token=12")
    expect(page.locator(".tok.chosen")).to_be_visible()


def test_left_out_trajectories_are_counted_and_their_groups_are_whole(browser, exported, api_of):
    (run_path,) = (path for path in exported.iterdir() if path.is_dir())
    api = api_of(run_path)
    (run,) = api.library.runs
    groups = {(each["file"], each["group"]): each for each in api.groups(run, Query())["items"]}
    with opened(browser, f"file://{exported}/part.html#browse") as page:
        expect(page.locator(".count")).to_have_text(f"10 trajectories; {ALL - 10} trajectories left out of this file")
        items = page.evaluate(
            "async run => (await (await import('mtrl/data.js')).source.groups(run, { limit: 50 })).items", run.id
        )
    assert sum(len(each["members"]) for each in items) > 10
    for item in items:
        whole = json.loads(to_json(groups[item["file"], item["group"]]))
        assert {key: item[key] for key in whole} == pytest.approx(whole)
