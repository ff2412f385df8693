"""The page of a run whose files are JSON of wrong types shows everything that can be shown."""

import json

import pytest
from playwright.sync_api import expect

from mtrl.types import to_json
from tests.view.made_runs import TOKEN, make_trajectory, make_turn, viewing
from tests.view.page_browser import fits, opened
from tests.view.page_runs import ALARM, HOSTILE, rich_run

PROTO = ("__proto__", "constructor")
DEEP = 5_000
ROWS = [
    {"step": 1, f"rollout/stop/{HOSTILE}": 0.5, "rollout/stop/constructor": 0.5, "train/loss": 1.0, "__proto__": 2.0},
    {
        "step": 2,
        "train/loss": float("nan"),
        "rollout/reward/mean": 10**300,
        "val/success/mean": 0.5,
        "constructor": 1.0,
    },
    {"step": 10**18, "train/loss": 1.0},
    {"step": 10**400, "train/loss": 1.0},
]
ALARMS = [{"title": {}}, {"proposals": [None]}, {"witnesses": [{"where": 3}]}, {"steps": "x"}, {"evidence": [{}]}]
SPANS = [
    {"step": 1, "name": HOSTILE, "lane": HOSTILE, "start": 0.0, "end": 1.0},
    {"step": 1, "name": {}, "lane": None, "start": 1.0, "end": 2.0},
    {"step": 1, "name": "generate", "lane": "generator", "start": 0.0, "end": 1e308},
    {"step": 1, "name": "generate", "lane": "generator", "start": 10**400, "end": 1.0},
]


def odd_line(name):
    """Return a line in which every name is a property of all JavaScript objects."""
    nested = "[" * DEEP + "]" * DEEP
    message = {"role": name, "content": name, "tool_calls": [{"name": name, "arguments": nested}]}
    messages = [{"role": name, "content": name, "name": name}, {"role": "tool", "content": nested}]
    turn = make_turn(name, message=message, observation=messages, components={name: 1.0}, metrics={name: 1.0})
    return to_json(make_trajectory(name, name, turns=[turn], metrics={name: 1.0}, error=name))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    run = rich_run(tmp_path_factory.mktemp("odd"))
    for name, rows in (("metrics", ROWS), ("alarms", [*ALARMS, ALARM]), ("timeline", SPANS)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = "".join(odd_line(name) + "\n" for name in PROTO)
    (run / "trajectories" / "odd_step_000009.jsonl").write_text(lines + "not JSON\n")
    (run / "config.yaml").write_text(json.dumps({"name": "odd", "__proto__": {"a": 1}, "seed": 2**60}))
    with viewing(run) as client:
        yield f"{client.base_url}".rstrip("/") + f"/?token={TOKEN}"


@pytest.fixture
def page(browser, address):
    with opened(browser, address) as found:
        yield found


def test_unreadable_parts_are_reported_and_the_rest_is_shown(page):
    table = page.get_by_role("region", name="Runs", exact=True)
    expect(table).to_contain_text("metrics.jsonl: 2 lines cannot be read (3, 4)")
    expect(table).to_contain_text("alarms.jsonl: 5 lines cannot be read (1, 2, 3, 4, 5)")
    expect(table).to_contain_text("timeline.jsonl: 2 lines cannot be read (3, 4)")
    expect(table).to_contain_text(str(2**60))
    expect(page.locator(".before-after")).to_have_text("50\u2009%")  # one evaluation only
    expect(page.get_by_text(ALARM["title"])).to_be_visible()
    expect(page.locator(".chart-legend", has_text="RLO")).to_be_visible()
    assert fits(page)
    page.set_viewport_size({"width": 400, "height": 800})
    assert fits(page)


def test_a_line_that_cannot_be_read_has_no_stop_reason_and_no_reward(page):
    page.evaluate("location.hash = 'browse?step=9'")
    expect(page.locator(".count")).to_have_text("3 trajectories")
    expect(page.get_by_role("group", name="Why it ended").locator(".tick-name")).to_have_text(["done"])


@pytest.mark.parametrize("words", ["#__proto__", "#constructor", "#overview?keep=__proto__,constructor"])
def test_addresses_name_nothing_that_every_object_has(page, words):
    page.evaluate("words => { location.hash = words }", words)
    expect(page.get_by_role("heading", name="Curves")).to_be_visible()


@pytest.mark.parametrize("line", range(len(PROTO)))
def test_names_that_every_object_has_are_names(page, line):
    page.evaluate("words => { location.hash = words }", "browse?level=__proto__")
    expect(page.locator(".count")).to_be_visible()
    page.evaluate("words => { location.hash = words }", f"trajectory?at=odd_step_000009/{line}")
    expect(page.locator(".role").first).to_contain_text(PROTO[line])
    expect(page.locator(".side")).to_contain_text(PROTO[line])
    page.keyboard.press("4")
    expect(page.locator(".tok").first).to_be_visible()
    assert "native code" not in page.locator("main").inner_text()
