"""The report of an evaluation: complete, strict JSON, readable Markdown, and HTML with escaped text of models."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.endpoint_schema import PriceConfig
from mtrl.engines.endpoints.budget import Spending
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import family_of_class
from mtrl.errors import UserError
from mtrl.evaluation.disagreements import Disagreement
from mtrl.evaluation.report import build_report
from mtrl.evaluation.report_conversation import TURNS, conversation
from mtrl.evaluation.report_files import write_report
from mtrl.evaluation.report_html import CONVERSATIONS, to_html
from mtrl.evaluation.report_json import to_dict, to_json
from mtrl.evaluation.report_markdown import escape, markdown_table, to_markdown
from mtrl.evaluation.report_tables import Table
from mtrl.scoring.agreement import TrajectoryAgreement
from mtrl.scoring.measures import ScoredEpisode
from mtrl.types import StopReason
from tests.evaluation.made import config_of, family_of, made_episode, rollouts_of, scored

HOSTILE = [
    "<script>alert(1)</script>",
    "</details></div></main><img src=x onerror=alert(1)>",
    "</pre></style><style>*{display:none}</style>",
    "<!-- -->]]><svg onload=alert(1)>",
    "\x1b[2J\x07\x00 red",
    "\u202e evil \u2066 bidi \u200b",
    "\ud800 half \udfff",
    "`| a | b |` **bold** _x_ [link](javascript:alert(1)) # head",
    "&lt;script&gt; &#60;b&#62;",
    "$\\frac{1}{2}$ $$",
]


def report_of(models=None, family=None, **evaluation):
    models = models or [
        rollouts_of("tuned", scored([1, 1, 1, 0]), scored([[1, 0], [1, 1], [0, 0], [1, 0]])),
        rollouts_of("base", scored([0, 1, 0, 0]), scored([[0, 0], [1, 0], [0, 0], [0, 0]])),
    ]
    config = config_of(**{"pass_k_values": [1, 2], "samples_per_row": 2, **evaluation})
    return build_report(models, config, family or family_of())


class Page(HTMLParser):
    """Tags that are open at the end, all tags with their attributes, and the text of the page."""

    VOID = ("meta", "br", "img", "path", "use")

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


def assert_harmless(html):
    page = Page(html)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "link", "base", "form"}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "xlink:href"):
            assert re.match(r"#|$", attributes.get(name) or ""), (tag, attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", html)
    return page


def test_the_report_has_every_section():
    found = to_dict(report_of())
    assert (found["format"], found["version"]) == ("mtrl.evaluation", 1)
    assert [model["label"] for model in found["models"]] == ["tuned", "base"]
    greedy, sampled = found["models"][0]["greedy"], found["models"][0]["sampled"]
    assert greedy["success"]["value"] == 0.75 and 0.29 < greedy["success"]["low"] < 0.31
    assert [(each["k"], each["rate"]["value"]) for each in sampled["pass_at_k"]] == [(1, 0.5), (2, 0.75)]
    assert greedy["pass_at_k"] == []
    by_kind = {c["kind"]: c for c in found["comparisons"]}
    assert by_kind["greedy"]["difference"]["value"] == 0.5 and by_kind["greedy"]["paired"]["wins"] == 2
    assert [change["row"] for change in by_kind["greedy"]["fixed"]] == ["row0", "row2"]
    assert by_kind["sampled"]["pass_at_k"][1]["difference"]["value"] == 0.5
    assert found["method"]["split"] == "test" and found["method"]["rows"] == {"greedy": 4, "sampled": 4}
    assert {"python", "mtrl"} <= found["method"]["versions"].keys()


def test_the_schema_does_not_change_unnoticed():
    """Keys may be added; a removed key or a key with another meaning needs a new version."""
    found = to_dict(report_of())
    assert found.keys() == {
        "format", "version", "name", "created", "method", "models", "comparisons", "remarks", "generalisation",
        "independence", "disagreements", "judges",
    }  # fmt: skip
    assert found["models"][0].keys() == {
        *("label", "source", "usage", "greedy", "sampled", "failed_kinds", "by_source"),
    }
    assert found["models"][0]["greedy"].keys() == {
        "rows", "episodes", "failures", "success", "success_with_failures", "pass_at_k",
        "reward_pass_at_k", "reward", "completion",
        "stops", "budgets", "lengths", "tools", "agreement", "components", "measures",
    }  # fmt: skip
    assert found["models"][0]["greedy"]["success"].keys() == {"value", "low", "high", "effective_samples"}
    assert found["comparisons"][0].keys() == {
        "model", "other", "kind", "rows", "left_out", "value", "other_value", "difference", "paired", "test",
        "p_adjusted", "pass_at_k", "fixed", "broken",
    }  # fmt: skip
    assert found["remarks"][0].keys() == {"level", "topic", "model", "text", "change", "kind"}


@pytest.fixture
def undrawn(monkeypatch):
    """Plots take most of the time of a report."""
    monkeypatch.setattr("mtrl.evaluation.report_plots.draw_svg", lambda *arguments: "")


@pytest.fixture(scope="module")
def drawn():
    """A report, and its page with all plots."""
    report = report_of()
    return report, to_html(report)


def test_every_disagreement_is_in_the_report(undrawn):
    odd = [made_episode("#### 9", score=0.0, reward=1.0) for _ in range(CONVERSATIONS + 5)]
    strict = made_episode("x" * 9000, score=1.0, reward=0.0)
    report = report_of([rollouts_of("m", [*scored([1] * 50), strict, *odd])])
    disagreements = to_dict(report)["disagreements"]
    assert len(disagreements) == len(odd) + 1
    assert disagreements[0] == {
        "model": "m", "kind": "greedy", "id": "eval/greedy/51/0", "row": "row51", "verdict": "lenient", "reward": 1.0,
        "score": 0.0, "last_response": "#### 9",
    }  # fmt: skip
    assert disagreements[-1]["verdict"] == "strict" and len(disagreements[-1]["last_response"]) < 5000
    html = to_html(report)
    assert html.count('class="tag lenient"') == CONVERSATIONS
    assert "6 more disagreements are in report.json" in html
    assert "16 more are in report.json" in to_markdown(report)


@pytest.mark.parametrize("text", [HOSTILE[2], HOSTILE[6], HOSTILE[9], " ".join(HOSTILE)], ids=["2", "6", "9", "all"])
def test_text_of_a_model_is_escaped(text, tmp_path):
    episode = made_episode([text, text], score=0.0, reward=1.0, final=[{"role": text, "content": text}])
    for turn in episode.turns:
        turn.observation = [{"role": "user", "content": text}, {"role": "tool", "content": [{"text": text}]}]
        turn.components, turn.metrics = {text: 1.0}, {text: 1.0}
        turn.message["tool_calls"] = [{"id": text, "function": {"name": text, "arguments": text}}]
    failure = made_episode(text, stop=StopReason.ENV_ERROR, error=text)
    rollouts = rollouts_of(text[:60], [episode, made_episode(score=1.0), failure])
    for group in rollouts.groups["greedy"]:
        group.row["id"] = text
    name = text[:150]  # a longer one is refused
    family = family_of(lambda trajectory, row: {f"field/{name}": 1.0, name: 0.5})
    report = report_of([rollouts, rollouts_of("other", scored([0, 0, 1]))], family)
    paths = write_report(report, tmp_path / "out")
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    assert_harmless(paths[2].read_text(encoding="utf-8"))
    data = json.loads(paths[0].read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert data["disagreements"][0]["last_response"] == text
    markdown = paths[1].read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066]", markdown)
    assert "<script" not in markdown.replace("\\<script", "")


@given(text=st.text(st.characters() | st.sampled_from("<>&\"'`|\\\n\r\x1b\u202e\ud800"), max_size=40))
def test_any_text_is_harmless(text):
    assert_shown_as_text(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_harmless(text):
    assert_shown_as_text(text)


def assert_shown_as_text(text):
    """In the conversation of a disagreement, and in a cell of Markdown."""
    episode = made_episode(text, score=0.0, reward=1.0, final=[{"role": "user", "content": text}])
    disagreement = Disagreement(
        "m",
        text,
        text,
        text,
        TrajectoryAgreement.LENIENT,
        1.0,
        0.0,
        text,
        ScoredEpisode(episode, {"id": text, "ground_truth": text}),
    )
    page = assert_harmless(conversation(disagreement))
    assert page.text.count("turn 1 · reward") == 1
    assert [tag for tag, _ in page.tags].count("div") == 4  # the body, and a block for the truth and for each text
    head, rule, row = markdown_table(Table([text, "b"], [["a", text]])).splitlines()
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in (head, rule, row)} == {3}


def test_long_responses_are_cut_and_written_at_once(tmp_path, undrawn):
    long = "<b>&amp;\u202e" * 130_000  # more than 1 MB
    episodes = [made_episode([long] * (TURNS + 2), score=0.0, reward=1.0) for _ in range(4)]
    paths = write_report(report_of([rollouts_of("m", episodes)]), tmp_path)
    html = paths[2].read_text(encoding="utf-8")
    page = assert_harmless(html)
    assert len(html) < 1_000_000 and paths[0].stat().st_size < 1_000_000
    assert page.text.count("… 2 turns are left out …") == len(episodes)


def test_the_page_needs_nothing_else(drawn):
    _, html = drawn
    assert "http" not in html.replace("http://www.w3.org/", "").replace('http-equiv="Content-Security-Policy"', "")
    assert "default-src 'none'" in html and "prefers-color-scheme:dark" in html
    page = assert_harmless(html)
    anchors = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert anchors == {f"#{attributes['id']}" for tag, attributes in page.tags if tag == "h2"}
    assert len([1 for tag, _ in page.tags if tag == "svg"]) == 8
    assert not re.search("#0[1-9]0[1-9]0[1-9]", html)  # colours that stand for the page's


def test_ids_of_plots_do_not_meet(drawn):
    """A clip path of another plot with the same id would cut this one."""
    page = Page(drawn[1])
    ids = [
        attributes["id"]
        for tag, attributes in page.tags
        if tag in ("clippath", "lineargradient") and "id" in attributes
    ]
    assert ids and len(ids) == len(set(ids))


def test_one_model_greedy_only():
    report = report_of([rollouts_of("m", scored([1, 0]))], family_of(None))
    html, markdown = to_html(report), to_markdown(report)
    assert_harmless(html)
    for title in ("Comparison", "pass@k", "Fields and format"):
        assert f"## {title}" not in markdown and f">{title}</h2>" not in html
    assert "## How episodes ended" in markdown


def test_a_difference_on_fewer_rows_has_their_number():
    some = scored([[1, 0], [1, 1], [0, 1]])
    some[0][0].stop_reason = StopReason.TIMEOUT
    one, two = scored([1] * 3), scored([0] * 3)
    report = report_of([rollouts_of("m", one, some), rollouts_of("old", two, scored([[0, 0]] * 3))])
    (line,) = [line for line in to_markdown(report).splitlines() if line.startswith("| old, k = 2")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3].endswith(", 2 rows)") and cells[5] == "3"
    (line,) = [line for line in to_markdown(report).splitlines() if line.startswith("| old, k = 1")]
    assert "rows" not in line


def test_a_model_without_a_finished_episode_is_reported():
    lost = [made_episode(stop=StopReason.TIMEOUT, error="TimeoutError: no answer\ntrace") for _ in range(3)]
    report = report_of([rollouts_of("m", scored([1, 0, 1])), rollouts_of("gone", lost)])
    assert to_dict(report)["models"][1]["failed_kinds"] == {"greedy": {"timeout": 3}}
    assert to_dict(report)["models"][1]["greedy"] is None
    (row,) = [line for line in to_markdown(report).splitlines() if line.startswith("| gone, greedy")]
    assert row.split("|")[-2].strip() == "3"
    assert_harmless(to_html(report))
    with pytest.raises(UserError, match="all 3 episodes failed; the first: TimeoutError: no answer"):
        report_of([rollouts_of("gone", lost)])


def test_a_model_that_succeeds_by_chance_has_a_foothold():
    def topics(sampled):
        return [remark.topic for remark in report_of([rollouts_of("m", scored([0] * 4), scored(sampled))]).remarks]

    assert "foothold" in topics([[0, 0]] * 4) and "foothold" not in topics([[0, 0]] * 3 + [[0, 1]])


def test_tokens_of_an_endpoint_are_those_of_its_usage(undrawn):
    """An endpoint gives no ids, and a missing usage is not shown as 0 tokens."""

    def far(count):
        rollouts = rollouts_of("far", [made_episode(score=0.0, reward=1.0, turns=2, tokens=0) for _ in range(3)])
        for turn in (turn for group in rollouts.groups["greedy"] for t in group.trajectories for turn in t.turns):
            turn.metrics = {"completion_tokens": count}
        return replace(rollouts, usage=Spending(requests=6).metrics(PriceConfig()))

    report = report_of([far(30.0), rollouts_of("near", scored([1, 0, 1]))])
    lengths = report.main.results["greedy"].lengths
    assert (lengths.response_tokens.mean, lengths.episode_tokens.max) == (30.0, 60.0)
    assert "those that its provider counted" in to_markdown(report)
    assert "30 tokens" in to_html(report) and "0 tokens" not in to_html(report).replace("30 tokens", "")
    report = report_of([far(0.0)])
    lengths = report.main.results["greedy"].lengths
    assert lengths.response_tokens is None and lengths.episode_tokens is None
    page = to_html(report)
    assert_harmless(page)
    assert "0 tokens" not in page and "Tokens of an episode" not in page and "Turns of an episode" in page


def test_markdown_tables_line_up():
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", to_markdown(report_of()), re.MULTILINE)
    assert len(blocks) >= 9
    for block in blocks:
        assert len({len(line) for line in block.splitlines()}) == 1


def test_escaping_leaves_names_readable():
    assert escape("field_name of 5 < 7 & a_b") == "field_name of 5 < 7 & a_b"
    assert escape("_x_ *y* <z> a|b [c](d)") == r"\_x\_ \*y\* \<z> a\|b \[c\](d)"


def test_the_end_of_the_first_episode_is_named_if_it_has_no_error():
    lost = [made_episode(stop=StopReason.ABORTED), made_episode(stop=StopReason.TIMEOUT, error="late")]
    with pytest.raises(UserError, match="all 2 episodes failed; the first: it ended with aborted$"):
        build_report([rollouts_of("new", lost)], config_of(), family_of())


def test_the_same_rollouts_give_the_same_page(drawn):
    (first, page), second = drawn, report_of()
    assert page.replace(first.created, "") == to_html(second).replace(second.created, "")
    assert to_json(first).replace(first.created, "") == to_json(second).replace(second.created, "")


def test_a_task_without_a_scorer_is_reported():
    class Bare(BaseEnvironment):
        def step(self, response, ground_truth):
            return 1.0, None, True

    assert report_of(family=family_of_class(Bare)).independence.startswith("No. This task has no scorer of its own")
    Bare.score = staticmethod(lambda trajectory, row: 1.0)
    assert "shares no code" in report_of(family=family_of_class(Bare)).independence
