"""Several runs in the page: seeds joined or separate, runs hidden and shown, their timelines, and one run opened."""

import json

import pytest
from playwright.sync_api import expect

from tests.view.made_runs import TOKEN, viewing
from tests.view.page_browser import opened
from tests.view.page_runs import ALARM, finish_run, rich_run, write_config

ALL = 38
SEEDS = (20261129, 20261130)


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, seed, loss, band in (("a", SEEDS[0], "ppo", 0.1), ("b", SEEDS[1], "ppo", 0.1), ("c", 0, "cispo", 0.3)):
        (folder / name).mkdir()
        model = {"warm_start": {"success_band": [band, 0.5]}}
        write_config(finish_run(rich_run(folder / name)), seed=seed, algorithm={"loss_fn": loss}, model=model)
    (folder / "b" / "timeline.jsonl").write_text("")
    (folder / "c" / "alarms.jsonl").write_text(2 * (json.dumps(ALARM) + "\n"))
    (folder / "c" / "summary.json").write_text(json.dumps({"success_before": 0.1, "success_after": 0.2, "steps": 2}))
    (folder / "c" / "status.txt").write_text("running\n")  # it was resumed
    with (
        viewing(folder) as client,
        opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as found,
    ):
        yield found


def values_at_step_1(page):
    chart = page.locator("figure", has_text="Training reward and success")
    chart.locator("svg.plot").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(chart.locator(".tip b")).to_have_text("step 1")
    return chart.locator(".tip-row").all_inner_texts()


def test_runs_are_compared_with_what_differs(page):
    table = page.get_by_role("region", name="Table of the runs")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table).to_contain_text("algorithm.loss_fn")
    expect(table).to_contain_text("cispo")
    for row, seed in enumerate(SEEDS):
        expect(table.locator("tbody tr").nth(row)).to_contain_text(str(seed))
    resumed = table.locator("tbody tr").nth(2)
    expect(resumed.locator(".before-after")).to_contain_text("0\u2009% → 60\u2009%")
    expect(resumed.locator(".alarm-count")).to_have_text("1")  # one rule, which found it twice


def test_a_setting_is_found_in_the_configuration_as_it_is_written_there(page):
    page.locator("#config-a").click()
    field = page.get_by_label("Find a key or value")
    field.fill(str(SEEDS[0]))
    expect(page.locator("dialog pre")).to_have_text(f"seed = {SEEDS[0]}")
    page.keyboard.press("Escape")  # leaves the field
    expect(field).not_to_be_focused()
    expect(field).to_have_value(str(SEEDS[0]))
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)


def test_the_timeline_is_that_of_the_chosen_run(page):
    first = page.locator(".gantt .tick:not(.lane)").first
    expect(first).to_have_text("0\u2009s")
    page.locator("#timeline-last").click()
    expect(first).to_have_text("3\u2009s")
    page.locator("#timeline-run").select_option(index=2)
    expect(first).to_have_text("0\u2009s")
    box = page.locator("svg.gantt").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] - 20)  # pressed outside and released inside
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 20)
    page.mouse.up()
    page.locator(".gantt .span").first.click(button="right")
    expect(first).to_have_text("0\u2009s")
    expect(page.get_by_label("Timeline", exact=True)).to_be_visible()
    page.locator("#timeline-run").select_option(index=1)
    expect(page.locator(".shares")).to_have_text("No span has been recorded yet.")
    expect(page.locator(".gantt .span")).to_have_count(0)


def test_seeds_are_joined_with_their_spread_or_shown_separately(page):
    joined = values_at_step_1(page)
    assert len(joined) == 4  # two lines of two families
    assert any("2 seeds" in row and "0.3 (0.3 to 0.3)" in row for row in joined)
    page.locator("#group-seeds").uncheck()
    expect(page.locator(".run-key")).to_have_count(3)
    assert len(values_at_step_1(page)) == 6
    page.locator("#group-seeds").check()


def test_the_legend_hides_and_shows_runs(page):
    keys = page.locator(".run-key")
    expect(keys).to_have_count(2)
    keys.first.click()
    expect(keys.first).to_have_attribute("aria-pressed", "false")
    assert len(values_at_step_1(page)) == 2
    assert "hide=" in page.url
    expect(page.locator(".chart-title", has_text="Why episodes ended")).to_have_text("Why episodes ended")
    keys.first.click()
    assert len(values_at_step_1(page)) == 4


def test_a_chart_of_one_run_opens_that_run(page):
    chart = page.locator("figure", has_text="Why episodes ended: page (loss_fn=cispo")
    chart.locator("svg.plot").focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.locator("#run")).to_have_value("c")
    page.go_back()


def test_another_run_is_browsed(page):
    page.get_by_role("link", name="Browse").click()
    expect(page.locator(".count")).to_have_text(f"{ALL} trajectories")
    page.locator("#run").select_option(index=2)
    expect(page.locator(".count")).to_have_text(f"{ALL} trajectories")
    chosen = page.locator("#run").input_value()
    assert f"run={chosen}" in page.url
    page.locator(".vl-row").first.click()
    expect(page.locator(".position")).to_have_text(f"1 of {ALL}")
    assert f"run={chosen}" in page.url
