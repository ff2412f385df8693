"""The page in Chromium: from the overview to a single token, by mouse and by keyboard, and back by a link."""

import re

import pytest
from playwright.sync_api import expect

from tests.view.made_runs import TOKEN, viewing
from tests.view.page_browser import fits, opened, until
from tests.view.page_runs import SIZE, TASKS, finish_run, rich_run

ROW = ".vl-row:not(.waiting)"
TRAIN = 3 * SIZE * len(TASKS)
LENIENT, STRICT = 3, 9


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    run = finish_run(rich_run(tmp_path_factory.mktemp("page")))
    with viewing(run) as client:
        yield f"{client.base_url}".rstrip("/") + f"/?token={TOKEN}"


@pytest.fixture
def page(browser, address):
    with opened(browser, address) as found:
        yield found


def at(page, words):
    """Return the address of the same page with another fragment."""
    page.evaluate("words => { location.hash = words }", words)


def test_the_overview_shows_the_run(page):
    table = page.get_by_role("region", name="Table of the runs")
    expect(table).to_contain_text("finished")
    expect(table).to_contain_text("0\u2009% → 60\u2009%")
    expect(page.get_by_text("Held-out success")).to_be_visible()
    expect(page.get_by_label("Alarms")).to_contain_text("The reward rises <b>while</b> success does not")
    expect(page.get_by_label("Alarms")).to_contain_text("reward.strict=true")
    expect(page.locator(".gantt .span")).to_have_count(9)
    expect(page.locator("#badge")).to_have_text("finished")


def test_a_chart_shows_its_values_zooms_and_opens_the_step(page):
    chart = page.locator("figure", has_text="Training reward and success")
    plot = chart.locator("svg.plot")
    plot.scroll_into_view_if_needed()
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(chart.locator(".tip")).to_contain_text("step 1")
    expect(chart.locator(".tip")).to_contain_text("0.3")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.locator("#whole")).to_be_visible()
    assert "zoom=" in page.url
    page.locator("#whole").click()
    expect(page.locator("#whole")).to_have_count(0)
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#step-from")).to_have_value(re.compile(r"\d"))


def test_any_metric_is_found_by_typing(page):
    page.keyboard.press("/")
    page.keyboard.type("odd cust")
    expect(page.locator("figure.chart")).to_have_count(1)
    expect(page.locator("figcaption")).to_contain_text("custom/odd_one")
    page.keyboard.press("Escape")  # leaves the field
    expect(page.locator("input.search")).to_have_value("odd cust")
    page.get_by_role("button", name="pin").click()
    expect(page.locator("figure", has_text="custom/odd_one")).to_be_visible()
    expect(page.get_by_text("Held-out success")).to_be_visible()
    page.get_by_role("button", name="unpin").click()
    expect(page.locator("figure", has_text="custom/odd_one")).to_have_count(0)


def test_a_metric_is_found_while_the_curves_are_still_on_their_way(browser, address):
    """A search that was typed before the curves arrived is repeated when they arrive."""
    with opened(browser, address) as page:
        page.route("**/metrics?*", lambda route: (page.wait_for_timeout(700), route.continue_()))
        page.reload(wait_until="commit")
        page.wait_for_selector("input.search")
        page.keyboard.press("/")
        page.keyboard.type("odd cust", delay=20)
        expect(page.locator("figcaption")).to_contain_text("custom/odd_one", timeout=15_000)


def test_an_alarm_leads_to_its_witness(page):
    page.get_by_role("link", name="train_step_000002:2").click()
    expect(page.locator(".verdict-card")).to_contain_text("Solved by the reward, not by the scorer.")
    expect(page.locator("#turn-2")).to_contain_text("hacked")


def test_from_the_list_through_a_filter_down_to_a_token(page):
    page.get_by_role("link", name="Browse").click()
    expect(page.locator(".count")).to_have_text(f"{TRAIN + 2} trajectories")
    page.get_by_role("button", name="Reward ≠ score").click()
    expect(page.locator(".count")).to_have_text(f"{LENIENT + STRICT} trajectories")
    page.get_by_role("button", name="Lenient").click()
    expect(page.locator(ROW)).to_have_count(LENIENT)
    page.get_by_role("group", name="Kind").get_by_text("train").click()
    expect(page.locator(".count")).to_have_text(f"{LENIENT} trajectories")
    page.locator(ROW).first.click()
    expect(page.locator(".position")).to_have_text(f"1 of {LENIENT}")
    page.locator("#show-tokens").click()
    token = page.locator("#turn-2 .block.action .tok").nth(3)
    token.hover()
    card = page.locator(".token-details")
    expect(card).to_contain_text("policy, version 2")
    token.click()
    expect(card).to_contain_text("Selected token")
    for text in ("k", "−1.51", "0.75", "trained", "1e−3"):
        expect(card).to_contain_text(text)
    assert "token=" in page.url


def test_colours_and_their_legends(page):
    at(page, "#trajectory?at=train_step_000002/1&show=tokens")
    tokens = page.locator("#turn-2 .tok")
    expect(page.locator("#colour-advantage")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#turn-2 .tok.up").first).to_be_visible()
    page.keyboard.press("2")
    expect(page.locator("#turn-2 .tok.rare").first).to_be_visible()
    shares = page.locator("#turn-2 .tok.rare").evaluate_all(
        "found => found.map(e => e.style.getPropertyValue('--share'))"
    )
    assert len(set(shares)) > 3
    page.keyboard.press("3")
    expect(page.locator("#turn-2 .tok.drift").first).to_be_visible()
    page.keyboard.press("4")
    expect(page.locator(".legend")).to_contain_text("policy v2")
    expect(page.locator(".legend")).to_contain_text("chat template")
    page.keyboard.press("5")
    expect(page.locator(".legend")).to_contain_text("masked: not sampled by the policy")
    assert tokens.count() == page.locator("#turn-2 .tok.trained, #turn-2 .tok.masked").count()
    at(page, "#trajectory?at=eval_greedy_step_000003/1&show=tokens&colour=advantage")
    expect(page.locator(".legend")).to_contain_text("No advantage was recorded")


def test_white_space_special_tokens_and_bytes_are_shown(page):
    at(page, "#trajectory?at=train_step_000002/1&show=tokens")
    expect(page.locator("#turn-1 .tok.special").first).to_have_text("<|user|>")
    text = page.locator("#turn-1 .block.action").inner_text()
    assert "I·look·at·the·apples↵\nand·think" in text
    at(page, "#trajectory?at=eval_greedy_step_000003/0&show=tokens")
    expect(page.locator("#turn-2 .block.action .tok", has_text="🤖")).to_have_count(1)
    expect(page.locator("#turn-2 .block.action .tok.continued").first).to_have_text("⋯")
    expect(page.locator("#turn-2 .block.action .hidden-char", has_text="RLO")).to_have_count(1)


def test_a_tool_call_is_formatted(page):
    at(page, "#trajectory?at=eval_greedy_step_000003/1")
    expect(page.locator(".call-name")).to_have_text("look_up")
    assert page.locator(".call pre").inner_text().splitlines()[1].strip() == '"what": ['
    expect(page.locator(".message.tool")).to_contain_text('"figs": 7')


def test_a_link_opens_the_same_in_another_page(browser, address, page):
    at(page, "#trajectory?at=train_step_000002/2&verdict=strict&sort=tokens&show=tokens&colour=drift&turn=2&token=20")
    expect(page.locator(".tok.chosen")).to_be_visible()
    expect(page.locator(".position")).to_contain_text(f"of {STRICT}")
    token, count = page.locator(".token-details").inner_text(), page.locator(".position").inner_text()
    with opened(browser, address + page.url[page.url.index("#") :]) as other:
        expect(other.locator(".tok.chosen")).to_be_in_viewport()
        expect(other.locator(".position")).to_have_text(count)
        assert other.locator(".token-details").inner_text() == token
        expect(other.locator("#colour-drift")).to_have_attribute("aria-pressed", "true")


def test_back_and_forward(page):
    page.get_by_role("link", name="Browse").click()
    page.get_by_role("button", name="Strict").click()
    expect(page.locator(".count")).to_have_text(f"{STRICT} trajectories")
    page.locator(ROW).nth(2).click()
    expect(page.locator(".position")).to_have_text(f"3 of {STRICT}")
    page.go_back()
    expect(page.locator(".vl-row.selected")).to_have_attribute("aria-rowindex", "3")
    page.go_back()
    expect(page.locator(".count")).to_have_text(f"{TRAIN + 2} trajectories")
    page.go_forward()
    page.go_forward()
    expect(page.locator(".position")).to_have_text(f"3 of {STRICT}")


def slowly(page, pattern, milliseconds):
    """Delay each answer, in the page, so that keys come before it."""
    page.evaluate(
        """([part, delay]) => {
          const plain = window.fetch;
          window.fetch = async (...words) => {
            if (String(words[0]).includes(part)) await new Promise((done) => setTimeout(done, delay));
            return plain(...words);
          };
        }""",
        [pattern, milliseconds],
    )


@pytest.mark.parametrize("answers", ["/trajectory/", "/trajectories?"])
def test_each_key_counts_although_answers_are_late(page, answers):
    """The next trajectory is still being read, or its position in the list is not known yet."""
    at(page, "browse?")
    page.locator(ROW).nth(1).click()
    expect(page.locator(".position")).to_have_text(f"2 of {TRAIN + 2}")
    slowly(page, answers, 30)
    for key in "jjjjkn":
        page.keyboard.press(key)
    expect(page.locator(".position")).to_have_text(f"5 of {TRAIN + 2}")
    expect(page.locator(".turn.current h2")).to_have_text("Turn 1")


def test_by_keyboard_alone(page):
    page.get_by_role("link", name="Browse").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".vl-row.selected")).to_have_attribute("aria-rowindex", "1")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator(".vl-row.selected")).to_have_attribute("aria-rowindex", "2")
    page.keyboard.press("Enter")
    expect(page.locator(".position")).to_have_text(f"2 of {TRAIN + 2}")
    page.keyboard.press("j")
    expect(page.locator(".position")).to_have_text(f"3 of {TRAIN + 2}")
    page.keyboard.press("n")
    page.keyboard.press("n")
    expect(page.locator(".turn.current h2")).to_have_text("Turn 2")
    page.keyboard.press("p")
    expect(page.locator(".turn.current h2")).to_have_text("Turn 1")
    page.keyboard.press("4")
    expect(page.locator("#colour-by")).to_have_attribute("aria-pressed", "true")
    page.locator("#turn-1 .tok").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-details")).to_contain_text("2 in turn 1")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("colour tokens")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("b")
    expect(page.locator(".vl-row.selected")).to_have_attribute("aria-rowindex", "3")
    page.keyboard.press("/")
    page.keyboard.type("hacked")
    page.keyboard.press("Enter")
    expect(page.locator(".count")).to_have_text(re.compile(f"found in {LENIENT} trajectories"))
    expect(page.locator("mark").first).to_have_text("hacked")
    page.keyboard.press("Escape")
    expect(page.locator("input.search")).not_to_be_focused()
    expect(page.locator("input.search")).to_have_value("hacked")
    assert "q=hacked" in page.url


def test_everything_is_reached_by_tab(page):
    at(page, "#trajectory?at=train_step_000002/1&show=tokens")
    page.locator("#turn-2 .tok").first.wait_for()
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    for name in ("skip", "copy-link", "theme", "show-conversation", "colour-trained"):
        assert name in reached
    assert any("tok" in name.split() for name in reached)


def test_groups_side_by_side(page):
    at(page, "#browse?level=groups&sort=tokens&order=asc")  # of the list of trajectories
    expect(page.locator(ROW).first.locator(".c-step")).to_have_text("3")
    expect(page.locator("#preset-all")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#preset-longest")).to_have_count(0)
    at(page, "#browse?level=steps")
    page.locator(ROW, has_text="train").nth(1).click()
    expect(page.locator(".count")).to_have_text(f"{len(TASKS)} groups")
    expect(page.locator(f"{ROW} .member")).to_have_count(SIZE * len(TASKS))
    page.locator(ROW, has_text=TASKS[0]).locator(".c-task").click()
    columns = page.locator(".member-column")
    expect(columns).to_have_count(SIZE)
    expect(columns.nth(1)).to_contain_text("hacked")
    expect(columns.nth(1)).to_contain_text("lenient")
    expect(columns.nth(3)).to_contain_text("−0.75")


def test_hostile_text_is_shown_and_never_run(page):
    at(page, "#trajectory?at=eval_greedy_step_000003/0")
    text = page.locator("#turn-2 .message.assistant .text")
    expect(text).to_contain_text(
        "<img src=x onerror=\"window.pwned='img'\"> <script>window.pwned='script'</script> </script>"
    )
    expect(text.locator(".hidden-char")).to_have_text(["RLO", "␛", "ZWSP"])
    expect(page.locator("main img, main script, main svg[onload], main a[href^=javascript]")).to_have_count(0)
    for place in ("&show=tokens", "&show=tokens&colour=by"):
        at(page, f"#trajectory?at=eval_greedy_step_000003/0{place}")
        expect(page.locator("#turn-2 .tok").first).to_be_visible()
    at(page, "#group?of=eval_greedy_step_000003/eval3/0")
    expect(page.locator(".member-column")).to_contain_text("<img src=x")
    at(page, "#browse?q=pwned")
    expect(page.locator("mark").first).to_have_text("pwned")
    at(page, "#browse?contains=evil")
    expect(page.locator(ROW)).to_contain_text("<img src=x")
    assert page.evaluate("document.images.length") == 0


@pytest.mark.parametrize("place", [
    "#overview", "#browse", "#browse?level=groups", "#browse?level=steps", "#browse?q=seven+look",
    "#trajectory?at=eval_greedy_step_000003/0", "#trajectory?at=train_step_000002/1&show=tokens&turn=1&token=2",
    "#group?of=train_step_000002/step1/0",
])  # fmt: skip
def test_a_narrow_window_never_scrolls_sideways(browser, address, place):
    with opened(browser, address + place, width=400, height=700, color_scheme="dark") as page:
        page.wait_for_load_state("networkidle")
        until(
            page, "() => !document.querySelector('main .loading') && document.querySelector('main').childElementCount"
        )
        assert fits(page)


def test_missing_content_is_reported_in_a_sentence(browser, address):
    with opened(browser, address + "#browse?task=nobody") as page:
        expect(page.get_by_text("No trajectory passes these filters.")).to_be_visible()
        page.get_by_role("button", name="Clear all filters").click()
        expect(page.locator(".count")).to_have_text(f"{TRAIN + 2} trajectories")
        at(page, "#overview?find=no_such_metric")
        expect(page.get_by_text("No metric has this name.")).to_be_visible()


def test_light_and_dark(page):
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    until(page, "before => getComputedStyle(document.body).backgroundColor !== before", before)
    page.reload()
    until(page, "before => getComputedStyle(document.body).backgroundColor !== before", before)
