"""The page of a running run: new content appears, and the scroll position stays."""

import shutil
import threading
import time

import pytest
from playwright.sync_api import expect

from tests.view.made_runs import TOKEN, viewing
from tests.view.page_browser import opened, until
from tests.view.page_runs import SIZE, TASKS, add_step, finish_run, rich_run, write_config

ROW = ".vl-row:not(.waiting)"
ALL = 3 * SIZE * len(TASKS) + 2
NEW = 2 * SIZE
TOP = "document.querySelector('.vl-row.selected')?.getBoundingClientRect().top"
SLOW = """() => {
    const plain = window.fetch;
    window.fetch = async (...words) => {
        const answer = await plain(...words);
        if (String(words[0]).includes("/trajectories?")) await new Promise((done) => setTimeout(done, 1500));
        return answer;
    };
}"""
"""Delays the rows of lists by more than the time between two looks for changes."""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    return rich_run(folder)


def test_new_steps_and_files_appear_and_nothing_moves(browser, run):
    with viewing(run) as client, opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
        expect(page.locator("#badge")).to_have_text("live")
        expect(page.get_by_role("region", name="Table of the runs")).to_contain_text("3 / 3")
        add_step(run, 4)
        expect(page.get_by_role("region", name="Table of the runs")).to_contain_text("4 / 3")
        page.get_by_role("link", name="Browse").click()
        expect(page.locator(".count")).to_have_text(f"{ALL + NEW} trajectories")
        expect(page.locator(ROW).first).to_contain_text("late")
        for _ in range(NEW + 3):
            page.keyboard.press("j")
        chosen = page.locator(f"{ROW}.selected")
        expect(chosen).to_have_attribute("aria-rowindex", str(NEW + 4))
        place = chosen.get_attribute("data-place")
        above = page.evaluate(TOP)
        add_step(run, 5)
        expect(page.locator(".count")).to_have_text(f"{ALL + 2 * NEW} trajectories")
        expect(chosen).to_have_attribute("data-place", place)
        expect(chosen).to_have_attribute("aria-rowindex", str(2 * NEW + 4))
        until(page, f"above => Math.abs(({TOP}) - above) < 2", above)
        page.keyboard.press("Home")
        expect(page.locator(ROW).first).to_contain_text("late")
        finish_run(run)
        expect(page.locator("#badge")).to_have_text("finished")


def test_a_step_that_is_written_between_a_change_and_its_request_moves_no_row(browser, run):
    with viewing(run) as client, opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
        page.get_by_role("link", name="Browse").click()
        expect(page.locator(".count")).to_have_text(f"{ALL} trajectories")
        expect(page.locator(ROW).first).to_be_visible()
        for _ in range(5):
            page.keyboard.press("j")
        chosen = page.locator(f"{ROW}.selected")
        expect(chosen).to_have_attribute("aria-rowindex", "6")
        place = chosen.get_attribute("data-place")
        further = iter([5])
        run_id = client.get("/api/runs").json()["runs"][0]["id"]

        def write_before_the_rows_are_read(route):
            if "limit=100" in route.request.url and (step := next(further, None)):
                add_step(run, step)
                deadline = time.monotonic() + 60
                while client.get(f"/api/runs/{run_id}/trajectories?limit=1").json()["total"] < ALL + 2 * NEW:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            route.continue_()

        page.route("**/trajectories?**", write_before_the_rows_are_read)
        add_step(run, 4)
        expect(page.locator(".count")).to_have_text(f"{ALL + 2 * NEW} trajectories")
        expect(chosen).to_have_attribute("data-place", place)
        expect(chosen).to_have_attribute("aria-rowindex", str(2 * NEW + 6))


def test_rows_appear_although_files_change_faster_than_requests_are_answered(browser, run):
    ended = threading.Event()

    def write():
        for step in range(4, 60):
            add_step(run, step)
            if ended.wait(0.7):
                break

    writer = threading.Thread(target=write, daemon=True)
    with viewing(run) as client, opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
        page.evaluate(SLOW)
        writer.start()
        page.get_by_role("link", name="Browse").click()
        expect(page.locator(ROW).first).to_be_visible()
        assert writer.is_alive()
        ended.set()


def test_a_trajectory_keeps_its_neighbours_when_a_step_arrives(browser, run):
    with viewing(run) as client, opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
        page.get_by_role("link", name="Browse").click()
        expect(page.locator(".count")).to_have_text(f"{ALL} trajectories")
        before, after = (page.locator(f"{ROW}[aria-rowindex='{row}']").get_attribute("data-place") for row in (5, 7))
        for _ in range(5):
            page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page.get_by_text(f"6 of {ALL}")).to_be_visible()
        add_step(run, 4)
        expect(page.get_by_text(f"{6 + NEW} of {ALL + NEW}")).to_be_visible()
        for key, place, position in (("j", after, 7), ("k", None, 6), ("k", before, 5)):
            page.keyboard.press(key)
            expect(page.get_by_text(f"{position + NEW} of {ALL + NEW}")).to_be_visible()
            assert place is None or f"at={place}" in page.url


def test_a_new_run_has_curves_and_results_and_all_runs_may_go(browser, run, tmp_path):
    with viewing(tmp_path) as client, opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
        chart = page.locator("figure", has_text="Training reward and success").locator("path.line")
        expect(chart).to_have_count(2)
        write_config(shutil.copytree(run, tmp_path / ".second"), name="second")
        (tmp_path / ".second").rename(tmp_path / "second")
        expect(page.locator(".before-after")).to_have_count(2)
        expect(chart).to_have_count(4)
        for name in ("second", "page"):
            (tmp_path / name).rename(tmp_path / f".{name}")
        expect(page.locator("main")).to_have_text("There is no run here.")
        (tmp_path / ".page").rename(run)
        expect(chart).to_have_count(2)


def test_a_stopped_server_is_reported(browser, run):
    with viewing(run) as client:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{str(client.base_url).rstrip('/')}/?token={TOKEN}")
        expect(page.locator("#badge")).to_have_text("live")
    expect(page.locator("#badge")).to_have_text("stalled")
    page.get_by_role("link", name="Browse").click()
    expect(page.get_by_role("alert").first).to_contain_text("The server does not answer")
    context.close()
