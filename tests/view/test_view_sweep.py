"""The page of sweeps: the table with the best job first, the picture, hostile settings, and the same in an export."""

import json
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from mtrl.sweep.outcome import JobResult
from mtrl.view.query import Query
from tests.view.made_runs import HOSTILE, TOKEN, make_run, viewing
from tests.view.page_browser import fits, opened

BOXES = "[...document.querySelectorAll('svg.parallel .name')].map(one => one.getBoundingClientRect().toJSON())"
NARROW = "document.querySelector('svg.parallel').getBoundingClientRect().width <= innerWidth"


def add_job(run, number, words, value, status="finished", reason=""):
    outcome = JobResult.begin(number, words, "success_after", "maximize")
    outcome.end(status, reason, value)
    outcome.write(run)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Five jobs over rate, method and seed, of which one is pruned and one failed; and another run."""
    folder = tmp_path_factory.mktemp("runs")
    tried = [
        (1e-5, "grpo", 0.25),
        (1e-4, "rloo", 0.75),
        (1e-2, HOSTILE, 0.5),
        (1e-3, "grpo", 0.6),
        (1e-3, "rloo", None),
    ]
    statuses = ["finished", "finished", "finished", "pruned", "failed"]
    for number, ((rate, method, value), status) in enumerate(zip(tried, statuses, strict=True)):
        run = make_run(folder / "sweep" / str(number), steps=1, groups=1, size=1, seed=number)
        words = [f"trainer.optimizer.lr={rate}", f"algorithm={method}", "debug=fast"]
        words += [f"reward.components.environment.{name}_of_a_component={number % 2}" for name in ("limit", "weight")]
        add_job(run, number, words, value, status, HOSTILE if status == "failed" else "")
    make_run(folder / "alone", steps=1, groups=1, size=1)
    return folder


def look(page):
    page.locator("#tab-sweep").click()
    expect(page.locator("svg.parallel .job")).to_have_count(5)
    rows = page.get_by_role("region", name="Table of the jobs").locator("tbody tr")
    expect(rows).to_have_count(5)
    return rows


def test_the_page_shows_the_jobs(browser, swept):
    with (
        viewing(swept) as client,
        opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page,
    ):
        rows = look(page)
        assert [text.split()[1] for text in rows.locator("th").all_inner_texts()] == ["1", "2", "0", "3", "4"]
        expect(page.locator(".best code")).to_have_text(
            "mtrl train trainer.optimizer.lr=0.0001 algorithm=rloo debug=fast "
            "reward.components.environment.limit_of_a_component=1 reward.components.environment.weight_of_a_component=1"
        )
        names = page.locator("svg.parallel .name")
        assert [name for name in names.all_text_contents() if "…" not in name] == [
            "optimizer.lr", "algorithm", "success_after"
        ]  # fmt: skip
        rates = page.locator("svg.parallel .ruler").first.locator("text:not(.name)")
        heights = [float(y) for y in rates.evaluate_all("all => all.map(one => one.getAttribute('y'))")]
        gaps = [b - a for a, b in pairwise(heights)]
        assert len(gaps) == 3 and max(gaps) - min(gaps) < 1  # four powers of ten: a logarithmic axis
        rows.nth(1).hover()
        expect(page.locator("svg.parallel .pointed title")).to_contain_text("job 2:")
        page.set_viewport_size({"width": 420, "height": 800})
        page.wait_for_function(NARROW)
        assert fits(page)
        boxes = page.evaluate(BOXES)  # at once: the page draws again, and names that it has replaced have no size
        ends = [(box["left"], box["right"]) for box in boxes]
        assert len(ends) == 5 and all(right < left for (_, right), (left, _) in pairwise(sorted(ends)))
        rows.first.locator("a").click()
        expect(page.locator("#run")).to_have_value("1")


def test_the_end_of_a_job_is_shown(browser, tmp_path):
    """A job writes its outcome last, after all metrics."""
    for number in (0, 1):
        run = make_run(tmp_path / "sweep" / str(number), steps=1, groups=1, size=1, seed=number)
        outcome = JobResult.begin(number, [f"seed={number}"], "success_after", "maximize")
        outcome.write(run)
    with (
        viewing(tmp_path) as client,
        opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page,
    ):
        page.locator("#tab-sweep").click()
        statuses = page.locator(".sweep .badge")
        expect(statuses).to_have_text(["running", "running"])
        outcome.end("finished", value=0.5)
        outcome.write(run)
        expect(statuses).to_have_text(["finished", "running"])


def test_the_exported_page_shows_them_too(browser, swept, tmp_path, api_of):
    from mtrl.view.export import export

    export(api_of(swept), tmp_path / "runs.html", 5)
    with opened(browser, (tmp_path / "runs.html").as_uri()) as page:
        look(page)


def test_the_answer(swept, api_of):
    api = api_of(swept)
    (sweep,) = api.sweeps(Query())["sweeps"]
    assert api.runs(Query())["sweeps"] == 1
    assert [job["run"] for job in sweep["jobs"]] == ["1", "2", "0", "3", "4"]
    assert sweep["jobs"][-1]["said"] == HOSTILE and sweep["best"]["number"] == 1
    assert json.dumps(sweep)


def test_the_page_of_sweeps_exists_only_with_a_sweep(browser, made_run):
    with viewing(made_run) as client:
        assert client.get("/api/sweeps").json() == {"sweeps": []}
        with opened(browser, f"{str(client.base_url).rstrip('/')}/?token={TOKEN}") as page:
            expect(page.locator("#tab-browse")).to_have_count(1)
            expect(page.locator("#tab-sweep")).to_have_count(0)
