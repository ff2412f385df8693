"""The page of a long run: few elements for many rows, and tokens whose elements are made when they are visible."""

import pytest
from playwright.sync_api import expect

from tests.view.made_runs import TOKEN, viewing
from tests.view.page_browser import opened
from tests.view.page_runs import long_run

pytestmark = pytest.mark.xdist_group("long")  # one worker writes the run
ROW = ".vl-row:not(.waiting)"
COUNT = 5000


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    run = long_run(tmp_path_factory.mktemp("long"), COUNT)
    with (
        viewing(run) as client,
        opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}#browse") as found,
    ):
        yield found


def test_a_list_of_thousands_holds_a_few_rows(page):
    expect(page.locator(".count")).to_have_text("5001 trajectories")
    box = page.locator(".vl")
    for place in (0.25, 0.5, 0.75):
        box.evaluate("(box, place) => { box.scrollTop = place * box.scrollHeight }", place)
        row = int(place * COUNT) + 8
        expect(page.locator(f'{ROW}[aria-rowindex="{row}"]')).to_be_in_viewport()
        assert page.locator(".vl-row").count() < 80
    page.keyboard.press("End")
    last = page.locator(f'{ROW}[aria-rowindex="{COUNT + 1}"]')
    expect(last).to_contain_text("task-999")
    page.keyboard.press("Enter")
    expect(page.locator(".position")).to_have_text(f"{COUNT + 1} of {COUNT + 1}")
    page.go_back()
    expect(page.locator(".vl-row.selected")).to_have_attribute("aria-rowindex", str(COUNT + 1))
    expect(page.locator(".vl-row.selected")).to_be_in_viewport()


def test_tokens_of_a_long_turn_are_made_when_they_are_near(page):
    page.evaluate("location.hash = '#trajectory?at=eval_greedy_step_000009/0&show=tokens'")
    expect(page.locator("#turn-1 .tok").first).to_be_visible()
    expect(page.get_by_text("The run stored no tokenizer")).to_be_visible()
    assert page.locator("#turn-2 .tok").count() == 0
    page.evaluate("location.hash = '#trajectory?at=eval_greedy_step_000009/0&show=tokens&turn=2&token=19000'")
    expect(page.locator(".tok.chosen")).to_be_in_viewport()
    expect(page.locator(".token-details")).to_contain_text("19000 in turn 2")
    assert page.locator("#turn-2 .block").count() > 10
    assert 0 < page.locator("#turn-2 .tok").count() < 10_000
