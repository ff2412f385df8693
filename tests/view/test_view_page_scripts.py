"""Functions of the page's scripts, without a server: hidden characters, cuts, numbers, names, filters and search."""

import pytest

from mtrl.view.server import STATIC

TYPES = {".js": "text/javascript", ".html": "text/html"}


@pytest.fixture(scope="module")
def page(browser):
    def answer(route):
        name = route.request.url.rpartition("/")[2]
        script = STATIC / name
        route.fulfill(body=script.read_text() if name else "", content_type=TYPES[script.suffix if name else ".html"])

    found = browser.new_page()
    found.route("**/*", answer)
    found.goto("http://page/")
    return found


def test_characters_without_ink_have_marks_and_no_cut_splits_a_character(page):
    hidden = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180f\u2800\u3164\ufe00\ufe0d\uffa0\U000e0100\U000e01ef"
    plain, emoji, several, alone, cut, line = page.evaluate(
        """async hidden => {
            const visible = await import("/visible.js");
            const texts = [hidden, "❤\\ufe0f ✔\\ufe0e 日", "a\\ufe0f\\ufe0f\\ufe0e", "\\ufe0fa \\ufe0f"];
            return [...texts.map(visible.plain), visible.start("ab🤖", 3), visible.line("a b🤖cdef", 5)];
        }""",
        hidden,
    )
    assert plain == "".join(f"U+{ord(char):04X}" for char in hidden)
    assert emoji == "❤\ufe0f ✔\ufe0e 日"
    assert several == "a\ufe0fU+FE0FU+FE0E"
    assert alone == "U+FE0Fa U+FE0F"
    assert (cut, line) == ("ab", "a b…")


def test_whole_numbers_and_names_with_commas_are_kept(page):
    seeds, names, address = page.evaluate(
        """async () => {
            const [format, route] = [await import("/format.js"), await import("/route.js")];
            const several = ["a=[0.1, 2]", "50%2C", "plain/name"];
            const address = route.link("overview", { hide: route.joined(several) });
            return [[20261129, 20261130, -3, 0.00012345].map(format.value),
                route.names(route.read(address).values.hide), address];
        }"""
    )
    assert seeds == ["20261129", "20261130", "−3", "1.23e−4"]
    assert names == ["a=[0.1, 2]", "50%2C", "plain/name"]
    assert address.endswith(",plain/name")


def test_an_exported_file_is_filtered_and_searched_by_the_rules_of_the_server(page):
    message = {"role": "assistant", "content": "Needle and needle", "reasoning": "a NEEDLE (x)", "tool_calls": []}
    call = {"role": "tool", "content": "", "reasoning": "", "tool_calls": [{"name": "needle", "arguments": "{K: 1}"}]}
    filtered, gaps, taught, hits = page.evaluate(
        """async ([message, call]) => {
            const { chosen, sorted, grouped, search } = await import("/selection.js");
            const items = [{ reward: null, score: 0 }, { reward: 0.5, score: 0 }];
            const whole = { turns: [{ number: 1, observation: { messages: [call] }, action: { message } }],
                final_observation: [call] };
            const found = (q) => search([{}], { q }, () => whole).items.map(({ hits, hit_count }) => [hit_count,
                ...hits.map((hit) => [hit.turn, hit.before, hit.match, hit.after])]);
            return [chosen(items, { reward_min: "-5" }).length, sorted(items, { sort: "gap", order: "asc" })[0].reward,
                grouped([{ advantage: 0, informative: true }], {})[0].informative,
                ["needle", "(x)", "needle {k:", "\\u212a"].map(found)];
        }""",
        [message, call],
    )
    assert (filtered, gaps, taught) == (1, 0.5, True)
    every, literal, of_call, kelvin = hits
    assert every == [[5, [1, "", "needle", " {K: 1}"], [1, "a ", "NEEDLE", " (x)"], [1, "", "Needle", " and needle"]]]
    assert literal == [[1, [1, "a NEEDLE ", "(x)", ""]]]
    assert of_call == [[2, [1, "", "needle {K:", " 1}"], [0, "", "needle {K:", " 1}"]]]
    assert len(kelvin) == 1  # KELVIN SIGN matches k, but ASCII text matches only ASCII
