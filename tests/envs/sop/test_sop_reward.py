"""The reward of sop: the guide's numbers, a strict parser, and no reward for anything but fields."""

import asyncio
import itertools
import json
import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.sop import FAMILY
from envs.sop.data import final_output
from envs.sop.output import parse_final_output
from envs.sop.reward import SCHEMES, SOPBenchReward, Verdict, judge, sop_bench_reward
from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn

TRUTH = {
    "aircraft_ready": "no",
    "mechanical_inspection_result": "fail",
    "electrical_inspection_result": "pass",
    "component_incident_response": "repair",
    "component_mismatch_response": "unneeded",
    "cross_check_reporting_response": "filed",
}
FIRST, *REST = TRUTH
RIGHT = json.dumps(TRUTH)


def conversation_of(text):
    return [{"role": "user", "content": "inspect"}, {"role": "assistant", "content": text}]


def reward_of(text, truth=TRUTH, **settings):
    return asyncio.run(SOPBenchReward(**settings)(conversation_of(text), truth))


def tagged(body):
    return f"<final_output>{body}</final_output>"


# -- numbers worked by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        (TRUTH, 1.0),
        ({**TRUTH, FIRST: "yes"}, 5 / 6),
        ({**TRUTH, FIRST: "yes", REST[0]: "pass"}, 4 / 6),
        ({name: TRUTH[name] for name in REST}, 5 / 6),
        ({FIRST: "no"}, 1 / 6),
        ({FIRST: "yes"}, 0.0),
        ({}, 0.0),
        ({name: f" {value.upper()}\n" for name, value in TRUTH.items()}, 1.0),
        ({**TRUTH, FIRST: None}, 5 / 6),
        ({**TRUTH, FIRST: ["no"]}, 5 / 6),
        ({**TRUTH, FIRST: {"no": "no"}}, 5 / 6),
        ({**TRUTH, FIRST: "no, or yes"}, 5 / 6),
        ({**TRUTH, FIRST: "'no'"}, 5 / 6),
    ],
)
def test_an_answer_is_rewarded_by_its_fields(fields, reward):
    assert reward_of(tagged(json.dumps(fields))) == (pytest.approx(reward), {"completion": 1.0, "field_acc": reward})


@pytest.mark.parametrize("coefficient", [0.0, 0.1, 0.25, 1.0])
def test_no_answer_costs_the_format_coefficient(coefficient):
    assert reward_of("no idea", format_coef=coefficient) == (-coefficient, {"completion": 0.0, "field_acc": 0.0})
    assert reward_of(tagged(RIGHT), format_coef=coefficient)[0] == 1.0


def test_the_default_coefficient_is_a_tenth():
    assert reward_of("no idea")[0] == -0.1


@pytest.mark.parametrize(
    ("wanted", "value", "right"),
    [
        ("True", True, True),
        ("true", "TRUE", True),
        (True, "true", True),
        ("5", 5, True),
        (5, "5", True),
        ("5", 5.0, False),
        ("None", None, False),
        ("none", "None", True),
        ("", "  ", True),
        ("", None, False),
        ("1", True, False),
        ("[]", [], False),
        ("ok", "o k", False),
    ],
)
def test_both_sides_are_text_stripped_and_lower(wanted, value, right):
    assert reward_of(tagged(json.dumps({"field": value})), {"field": wanted})[0] == float(right)


def test_a_missing_field_never_matches_even_where_nothing_is_right():
    """`str(fields.get(name))` would give "None" for a missing field."""
    assert reward_of(tagged("{}"), {"field": "none"}) == (0.0, {"completion": 1.0, "field_acc": 0.0})


def test_a_truth_without_fields_is_a_broken_row():
    with pytest.raises(UserError, match="ground_truth={} has no fields"):
        reward_of(tagged("{}"), {})


@pytest.mark.parametrize("coefficient", [-0.1, 1.1, float("nan"), "0.1", True])
def test_invalid_coefficients_are_refused(coefficient):
    with pytest.raises(UserError, match="format_coef=.* must be a number from 0 to 1"):
        SOPBenchReward(coefficient)
    with pytest.raises(UserError, match="format_coef=.* must be a number from 0 to 1"):
        FAMILY.environment(format_coef=coefficient)


# -- hostile answers ---------------------------------------------------------------------------------------------------

OTHER_TAGS = ("final_response", "final_decision", "final_answer", "answer", "output", "FINAL_OUTPUT", "final-output")
BODIES = {
    "a fence": f"```json\n{RIGHT}\n```",
    "a fence without a name": f"```\n{RIGHT}\n```",
    "two objects": f"{RIGHT}{RIGHT}",
    "two lines": f"{RIGHT}\n{RIGHT}",
    "a list": f"[{RIGHT}]",
    "text of JSON": json.dumps(RIGHT),
    "nested": f'{{"answer": {RIGHT}}}',
    "a key twice": f'{RIGHT[:-1]}, "{FIRST}": "no"}}',
    "a key twice, wrong first": f'{{"{FIRST}": "yes", {RIGHT[1:]}',
    "a field too many": f'{RIGHT[:-1]}, "note": "x"}}',
    "every value in further fields": json.dumps({**TRUTH, **{f"{k}_{v}": v for k in TRUTH for v in "yn"}}),
    "NaN": f'{RIGHT[:-1]}, "x": NaN}}',
    "Infinity": f'{RIGHT[:-1]}, "x": Infinity}}',
    "a comma too many": f"{RIGHT[:-1]},}}",
    "single quotes": str(TRUTH),
    "no quotes": RIGHT.replace('"', ""),
    "a comment": f"{RIGHT} // done",
    "words before": f"Here: {RIGHT}",
    "words after": f"{RIGHT} done",
    "a byte order mark": f"\ufeff{RIGHT}",
    "cut": RIGHT[:-1],
    "fields": "\n".join(f"{k}: {v}" for k, v in TRUTH.items()),
    "XML": "".join(f"<{k}>{v}</{k}>" for k, v in TRUTH.items()),
    "nothing": "",
    "null": "null",
    "a number": "1",
    "true": "true",
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "a long number": f'{{"{FIRST}": {"9" * 10_000}}}',
    "NUL": RIGHT.replace("no", "n\0o", 1),
    "a megabyte": " " * 1_000_000 + "x",
    "keys in upper case": json.dumps({k.upper(): v for k, v in TRUTH.items()}),
    "keys with spaces": json.dumps({f"{k} ": v for k, v in TRUTH.items()}),
    "an escape that is none": RIGHT.replace("no", "n\\o", 1),
}
AROUND = {
    "other tag": [f"<{tag}>{RIGHT}</{tag}>" for tag in OTHER_TAGS],
    "tag in tag": [f"<final_output>{tagged(RIGHT)}</final_output>"],
    "two": [tagged(RIGHT) * 2, tagged(RIGHT) + tagged("{}"), tagged("{}") + tagged(RIGHT)],
    "open": [f"<final_output>{RIGHT}", f"{RIGHT}</final_output>", f"</final_output>{RIGHT}<final_output>"],
    "an opening too many": [f"the tag is <final_output>. {tagged(RIGHT)}", f"{tagged(RIGHT)}</final_output>"],
    "spaces in the tag": [f"<final_output >{RIGHT}</final_output>", f"< final_output>{RIGHT}</final_output>"],
    "attributes": [f"<final_output x=1>{RIGHT}</final_output>", f"<final_output/>{RIGHT}"],
    "brackets": [f"[final_output]{RIGHT}[/final_output]", f"&lt;final_output&gt;{RIGHT}&lt;/final_output&gt;"],
    "bare": [RIGHT, f"```json\n{RIGHT}\n```", f"final_output: {RIGHT}"],
    "thought": [f"<think>{tagged(RIGHT)}</think>", f"<think>{tagged(RIGHT)}", f"{tagged(RIGHT)}</think>"],
    "called": [
        f"<tool_call>{tagged(RIGHT)}</tool_call>",
        f"{tagged(RIGHT)}<tool_call>",
        f"</tool_call>{tagged(RIGHT)}",
    ],
}
WRAPS = {
    "alone": "{}",
    "after words": "I am sure.\n{}",
    "after a thought": "<think>hm</think>{}",
    "before words": "{} Bye",
    "in quotes": '"{}"',
    "in bold": "**{}**",
}
HOSTILE = {
    f"{name}, {wrap}": form.replace("{}", text)
    for name, texts in {**{name: [tagged(body)] for name, body in BODIES.items()}, **AROUND}.items()
    for number, text in enumerate(texts)
    for wrap, form in WRAPS.items()
    for name in [f"{name} {number}"]
}


def test_the_hostile_answers_are_many():
    assert len(HOSTILE) > 300


@pytest.mark.parametrize("domain", ["aircraft_inspection"])
def test_hostile_answers_are_never_rewarded_nor_scored(domain, by_domain, play, score):
    row = {**by_domain[domain][0], "ground_truth": TRUTH}
    for name, text in HOSTILE.items():
        reward, metrics = reward_of(text)
        assert reward <= 0.0, name
        assert score([text], row) == 0.0, name
        assert metrics["field_acc"] == 0.0, name


MEGABYTES = [
    piece * (1_000_000 // len(piece)) for piece in ("<final_output>", "</final_output>", "</think>", "<think>", "{")
]


@pytest.mark.parametrize(
    "text", [*MEGABYTES, *(f"<final_output>{text}" for text in MEGABYTES)], ids=lambda text: text[:20]
)
def test_long_answers_take_linear_time(text, by_domain, play, score):
    row = by_domain["order_fulfilment"][0]
    start = time.process_time()
    (result,) = play(row, [text])
    assert result.reward == -0.1 and score([text], row) == 0.0
    assert time.process_time() - start < 5


def test_hostile_answers_end_no_episode_with_an_error(by_domain, play):
    rows = itertools.cycle([rows[0] for rows in by_domain.values()])
    for (name, text), row in zip(HOSTILE.items(), rows, strict=False):
        results = play(row, [text] * 3, max_turns=3)
        assert results[-1].done and sum(result.reward for result in results) <= 0.0, name


def test_a_single_field_has_a_small_reward(by_domain, score):
    """A field with all possible values at once counts as wrong."""
    row = {"ground_truth": TRUTH}
    for glue in (" ", ",", "/", " or ", "\n", "|"):
        stuffed = {name: glue.join(sorted(set(TRUTH.values()))) for name in TRUTH}
        assert reward_of(tagged(json.dumps(stuffed)))[0] == 0.0 == score([tagged(json.dumps(stuffed))], row)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.floats(),
    st.sampled_from([*TRUTH.values(), "NO", " no ", "ÑO", "", "ſ", "\ud800", "none"]),
    st.lists(st.sampled_from(["no", "yes"]), max_size=2),
)
OBJECTS = st.dictionaries(st.sampled_from([*TRUTH, "extra", ""]), VALUES, max_size=8)
PIECES = st.lists(
    st.sampled_from(
        [
            *("<final_output>", "</final_output>", "<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}", " "),
            *("\n", "```", RIGHT, RIGHT[1:-1], '"x": 1', ",", "NaN", "[", "]", "null", tagged(RIGHT), "\u2028", "\x85"),
        ]
    ),
    max_size=7,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=st.one_of(PIECES, OBJECTS.map(lambda fields: tagged(json.dumps(fields)))))
@example(text=tagged(RIGHT))
@example(text=f"so:\n{tagged(RIGHT)}\nfine")
def test_full_reward_and_a_score_of_one_coincide(text, score):
    full = reward_of(text)[0] == 1.0
    assert full == (score([text], {"ground_truth": TRUTH}) == 1.0)


def test_reward_and_scorer_agree_on_labels_of_every_kind(score):
    rng = random.Random(0)
    kinds = ["None", "none", "", "true", "5", "5.0", "ß", "İ", "K", "inf", " x "]
    values = [None, True, False, 5, 5.0, "", "none", "TRUE", "SS", "i̇", "K", "inf", 1e999, "x", [], {}]
    for wanted, value in itertools.product(kinds, values):
        text = tagged(json.dumps({"a": value, "b": "y"}).replace("Infinity", "1e999"))
        truth = {"a": wanted, "b": rng.choice(["y", "Y "])}
        assert (reward_of(text, truth)[0] == 1.0) == (score([text], {"ground_truth": truth}) == 1.0), (wanted, value)


# -- where it is read --------------------------------------------------------------------------------------------------


def test_only_the_last_assistant_message_counts():
    right, wrong = ({"role": "assistant", "content": text} for text in (tagged(RIGHT), "hm"))
    user = {"role": "user", "content": tagged(RIGHT)}
    call = {"type": "function", "id": "1", "function": {"name": "x", "arguments": {}}}
    reward = SOPBenchReward()
    assert asyncio.run(reward([right, wrong], TRUTH))[0] == -0.1
    assert asyncio.run(reward([wrong, right, user], TRUTH))[0] == 1.0
    assert asyncio.run(reward([user], TRUTH))[0] == asyncio.run(reward([], TRUTH))[0] == -0.1
    assert asyncio.run(reward([{**right, "tool_calls": [call]}], TRUTH))[0] == -0.1
    assert asyncio.run(reward([{"role": "assistant", "content": None}], TRUTH))[0] == -0.1


def test_text_around_the_tags_and_thinking_have_no_effect():
    assert parse_final_output(f"<think>or {tagged('{}')}?</think> I end with {tagged(RIGHT)}.") == TRUTH


def test_decoys_are_rewarded_for_their_right_fields(splits, score):
    for row in splits.test[:30]:
        decoys = FAMILY.decoys(row)
        assert len(decoys) > len(row["ground_truth"])
        for decoy in decoys:
            right = 1 - 1 / len(row["ground_truth"])
            assert judge(decoy, row["ground_truth"]).field_acc == pytest.approx(right)
            assert score([decoy], row) == 0.0


# -- in a run ----------------------------------------------------------------------------------------------------------


def test_the_components_add_up_and_the_metrics_name_every_field(by_domain, play):
    row = by_domain["aircraft_inspection"][0]
    wrong = {**row["ground_truth"], "aircraft_ready": "maybe"}
    for scheme, reward in (("default", 0.0), ("dense", 5 / 6)):
        (result,) = play(row, [final_output(wrong)], reward=scheme)
        assert result.components == {"fields": reward, "format": 0.0} and result.reward == reward
        assert result.metrics["field/aircraft_ready"] == 0.0, "they are measured under any scheme"
        assert sum(value for name, value in result.metrics.items() if name.startswith("field/")) == 5
        (result,) = play(row, ["hm"], reward=scheme)
        assert result.components == {"fields": 0.0, "format": -0.1} and result.reward == -0.1


def test_by_default_only_a_fully_right_answer_is_rewarded(by_domain, play):
    row = by_domain["order_fulfilment"][0]
    almost = {**row["ground_truth"], "shelf_stock": "x"}
    for fields, default, dense in ((row["ground_truth"], 1.0, 1.0), (almost, 0.0, 0.75), ({}, 0.0, 0.0)):
        assert play(row, [final_output(fields)])[0].reward == default
        assert play(row, [final_output(fields)], reward="dense")[0].reward == dense


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.booleans(), st.floats(0, 1))
def test_schemes_give_their_documented_rewards(right, emitted, coefficient):
    """The dense scheme is the guide's function; the default scheme never gives a partial answer more than it."""
    verdict = Verdict(emitted, {f"field{n}": emitted and value for n, value in enumerate(right)})
    default, dense = (sum(verdict.components(scheme, coefficient).values()) for scheme in SCHEMES)
    assert dense == pytest.approx(verdict.dense(coefficient))
    assert default == pytest.approx(float(emitted and all(right)) - coefficient * (not emitted))
    assert default <= dense + 1e-12 and (default > 0) == (emitted and all(right))


def test_as_a_reward_component_it_also_rewards_truncated_episodes():
    """The environment does not process the last turn of an episode whose context is full."""
    turn = Turn([], [], [], [], FinishReason.STOP, "hm", {"role": "assistant", "content": "hm"})
    trajectory = Trajectory("row", "group", 0, [turn], StopReason.CONTEXT_LIMIT)
    name = f"{sop_bench_reward.__module__}.sop_bench_reward"
    components = {"environment": 0.0, name: {"weight": 1.0, "format_coef": 0.2}}
    RewardComposer(RewardConfig(components=components)).apply(Group("group", {"ground_truth": TRUTH}, [trajectory]))
    assert trajectory.reward == -0.2 and trajectory.metrics == {"completion": 0.0, "field_acc": 0.0}
