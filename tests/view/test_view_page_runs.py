"""Several runs in the page: seeds joined or separate, runs hidden and shown, and one run opened."""

import pytest
from playwright.sync_api import expect

from tests.view.made_runs import TOKEN, viewing
from tests.view.page_browser import opened
from tests.view.page_runs import finish_run, rich_run, write_config

ALL = 38


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, seed, loss in (("a", 0, "ppo"), ("b", 1, "ppo"), ("c", 0, "cispo")):
        (folder / name).mkdir()
        write_config(finish_run(rich_run(folder / name)), seed=seed, algorithm={"loss_fn": loss})
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
    keys.first.click()
    assert len(values_at_step_1(page)) == 4


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
