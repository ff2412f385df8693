"""Episodes of sop: results of tools, ends of episodes, isolation, and equality between processes."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from envs.sop import FAMILY
from envs.sop.data import final_output
from envs.sop.domains import DOMAINS, row_tools
from envs.sop.order_fulfilment import store
from mtrl.environments.base import Resources
from mtrl.environments.tool_calls import format_call, parse_calls
from mtrl.errors import UserError

ROOT = Path(__file__).parents[3]


def results_of(result):
    """The results of the tools in a turn."""
    return [message["content"] for message in result.observation]


# -- goldens, to the byte ----------------------------------------------------------------------------------------------


def episodes_of_the_readme():
    """The conversations in the README, as lists of (role, lines): every call and every result has its own line."""
    text = (ROOT / "envs/sop/README.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```\n(user .*?)```", text, re.DOTALL):
        messages = []
        for line in block.splitlines():
            role, words = line[:11].strip(), line[11:]
            if role:
                messages.append((role, [words]))
            else:
                messages[-1][1].append(words)
        found.append(messages)
    return found


def test_the_episodes_of_the_readme(splits, play, score):
    """Each conversation is about a held-out case of seed 0."""
    found = episodes_of_the_readme()
    assert len(found) == len(DOMAINS)
    for (_, prompt), *messages in found:
        (row,) = [row for row in splits.test if row["prompt"][0]["content"] == "\n".join(prompt)]
        responses = ["".join(words) for role, words in messages if role == "assistant"]
        results = play(row, responses)
        replies = [words for role, words in messages if role == "tool"]
        assert [results_of(result) for result in results[:-1]] == replies
        assert results[-1].reward == 1.0 == score(responses, row)


def test_fixtures_of_known_cases(splits):
    """The seed and the id determine a case."""
    rows = {row["id"]: row for row in splits.test}
    golden = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))
    assert len(golden) == 3
    for row_id, row in golden.items():
        assert {key: rows[row_id][key] for key in row} == row


# -- replayed tools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aircraft_inspection", "customer_service"])
def test_replay_gives_identical_bytes(name, by_domain, play):
    for row in by_domain[name][:10]:
        text = "".join(format_call(line["tool"], line["arguments"]) for line in row["fixture"])
        texts = [
            text[: text.index("</tool_call>", len(text) // 2) + 12],
            text[text.index("</tool_call>", len(text) // 2) + 12 :],
        ]
        once, again = (play(row, texts) for _ in range(2))
        assert once == again
        messages = [content for result in once for content in results_of(result)]
        assert messages == [json.dumps(line["result"]) for line in row["fixture"]]


@pytest.mark.parametrize("name", ["aircraft_inspection", "customer_service"])
def test_every_tool_of_every_case_answers_in_its_type(name, by_domain):
    """The result has the type that the specification of the tool names, which refuses other values."""
    for row in by_domain[name]:
        tools = row_tools(row, Resources())
        assert {line["tool"] for line in row["fixture"]} == tools.keys()
        for line in row["fixture"]:
            result = tools[line["tool"]].function(**line["arguments"])
            assert isinstance(result, BaseModel) and result.model_dump() == line["result"]


def test_calls_for_other_cases_reveal_nothing(by_domain, play):
    row, other = by_domain["customer_service"][:2]
    (result,) = play(row, [format_call("validateAccount", {"account_id": other["case"]})])
    assert results_of(result) == [
        "Error: validateAccount has no result for these arguments; the arguments that it knows are: account_id"
    ]


# -- the stateful procedure --------------------------------------------------------------------------------------------

ORDER = {"order_id": "B482", "sku": "K7", "quantity": 3, "service": "express", "shelf": 5, "overflow": 2}


def order_row(**changes):
    record = {**ORDER, **changes}
    domain = DOMAINS["order_fulfilment"]
    truth = domain.decide(record)
    return {
        "id": "order",
        "domain": domain.name,
        "case": "B482",
        "fixture": record,
        "ground_truth": truth,
        "prompt": [],
    }


def do(*calls):
    """A list of responses with one call each."""
    arguments = {
        "getStock": {"sku": "K7"},
        "moveOverflow": {"sku": "K7"},
        "shipOrder": {"order_id": "B482", "service": "express"},
    }
    return [format_call(call, arguments.get(call, {"order_id": "B482"})) for call in calls]


def test_the_store_changes_and_is_read_back(play):
    replies = [results_of(r)[0] for r in play(order_row(), do("getStock", "reserveStock", "getStock", "moveOverflow"))]
    assert replies == ['{"shelf": 5}', '{"reserved": "full"}', '{"shelf": 2}', '{"shelf": 4}']


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        (("reserveStock", "reserveStock"), "the order is reserved already"),
        (("shipOrder",), "nothing is reserved for the order"),
        (("releaseStock",), "nothing is reserved for the order"),
        (("reserveStock", "openBackorder"), "the order is reserved; release it first"),
        (("reserveStock", "shipOrder", "reserveStock"), "the order is done already"),
        (("reserveStock", "shipOrder", "shipOrder"), "the order is done already"),
        (("openBackorder", "shipOrder"), "the order is done already"),
    ],
)
def test_impossible_actions_change_nothing(calls, error, play):
    *_, last, stock = play(order_row(), do(*calls, "getStock"))
    assert results_of(last) == [f"Error: {error}"]
    without = play(order_row(), do(*calls[:-1], "getStock"))
    assert results_of(stock) == results_of(without[-1])


def test_releasing_undoes_reserving(play):
    replies = play(order_row(), do("reserveStock", "releaseStock", "getStock", "reserveStock"))
    assert results_of(replies[2]) == ['{"shelf": 5}'] and results_of(replies[3]) == ['{"reserved": "full"}']


@pytest.mark.parametrize(
    "detour", [("moveOverflow", "reserveStock", "shipOrder"), ("reserveStock", "moveOverflow", "shipOrder")]
)
def test_the_answer_depends_on_the_final_state(detour, play, score):
    """An answer after an unnecessary move of the overflow has another number and another stock than the label."""
    row = order_row()
    *_, shipped, stock = play(row, do(*detour, "getStock"))
    honest = {
        "order_status": "shipped",
        "stock_source": "shelf",
        "document_number": json.loads(results_of(shipped)[0])["document_number"],
        "shelf_stock": str(json.loads(results_of(stock)[0])["shelf"]),
    }
    for scheme, paid in (("default", 0.0), ("dense", 0.5)):
        *_, last = play(row, [*do(*detour), final_output(honest)], reward=scheme)
        assert honest != row["ground_truth"] and last.reward == paid and score([final_output(honest)], row) == 0.0


@pytest.mark.parametrize(
    ("changes", "truth"),
    [
        ({}, ("shipped", "shelf", "2")),
        ({"quantity": 5}, ("shipped", "shelf", "0")),
        ({"quantity": 6}, ("shipped", "overflow", "1")),
        ({"quantity": 7}, ("shipped", "overflow", "0")),
        ({"quantity": 8}, ("backordered", "missing", "7")),
    ],
)
def test_labels_of_orders(changes, truth, play, score):
    row = order_row(**changes)
    label = row["ground_truth"]
    assert (label["order_status"], label["stock_source"], label["shelf_stock"]) == truth
    responses = FAMILY.gold(row)
    assert play(row, responses)[-1].reward == 1.0 == score(responses, row)


def test_concurrent_episodes_do_not_share_a_store(by_domain, play_at_once):
    """32 concurrent episodes, each with its own thread and database, have the results of sequential ones."""
    rows = (by_domain["order_fulfilment"] * 2)[:31]
    rows.append(rows[0])  # twice the same order: still two stores
    spoil = do("moveOverflow", "reserveStock")  # of another order: must not change other stores

    async def all_at_once():
        played = [play_at_once(row, FAMILY.gold(row)) for row in rows]
        spoilers = [play_at_once(order_row(), spoil) for _ in range(8)]
        return (await asyncio.gather(*played, *spoilers))[: len(rows)]

    together = asyncio.run(all_at_once())
    alone = [asyncio.run(play_at_once(row, FAMILY.gold(row))) for row in rows]
    assert together == alone and all(results[-1].reward == 1.0 for results in together)


@pytest.mark.parametrize("how", ["solved", "given up", "never answered", "broken off"])
def test_the_store_is_torn_down_however_the_episode_ends(how, monkeypatch):
    opened = []
    connect = sqlite3.connect
    monkeypatch.setattr(store.sqlite3, "connect", lambda *a, **k: opened.append(connect(*a, **k)) or opened[-1])
    row = order_row()
    environment = FAMILY.environment(max_turns=2)
    environment.reset(row)
    texts = {"solved": [final_output(row["ground_truth"])], "given up": ["no"], "never answered": do("getOrder") * 2}
    for text in texts.get(how, do("reserveStock")):
        asyncio.run(environment.step(text, row["ground_truth"]))
    environment.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("select 1")


def test_reset_starts_a_new_episode():
    row = order_row()
    environment = FAMILY.environment()
    replies = []
    for _ in range(2):
        environment.reset(row)
        replies.append(
            [asyncio.run(environment.step(text, row["ground_truth"])) for text in do("reserveStock", "getStock")]
        )
    environment.close()
    assert replies[0] == replies[1]


# -- ends of episodes --------------------------------------------------------------------------------------------------


def test_a_turn_without_calls_is_the_answer(by_domain, play):
    (result,) = play(by_domain["aircraft_inspection"][0], ["I will look at it now."])
    assert result.done and not result.truncated and result.reward == -0.1


def test_an_episode_out_of_turns_is_rewarded_as_one_without_an_answer(by_domain, play):
    row = by_domain["aircraft_inspection"][0]
    call = FAMILY.gold(row)[0]
    results = play(row, [call] * 9, max_turns=3)
    assert [result.reward for result in results] == [0.0, 0.0, -0.1]
    assert results[-1].done and results[-1].truncated and results[-1].metrics["completion"] == 0.0
    assert "completion" not in results[0].metrics, "means over turns would count unfinished episodes"


def test_an_answer_beside_a_call_is_ignored(by_domain, play, score):
    row = by_domain["aircraft_inspection"][0]
    calls, *_, right = FAMILY.gold(row)
    for text in (calls + right, right + calls):
        (result,) = play(row, [text], max_turns=2)[:1]
        assert not result.done and result.reward == 0.0 == score([text], row)


def test_tool_calls_earn_no_reward(by_domain, play):
    """A reward per call would train an agent to make unnecessary calls."""
    row = by_domain["customer_service"][0]
    right = FAMILY.gold(row)[-1]
    assert play(row, [right])[-1].reward == sum(r.reward for r in play(row, [*FAMILY.gold(row)[:1] * 5, right])) == 1.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_turns": 1}, "generator.max_turns=1 leaves no turn to ask the tools"),
        ({"reward": "guide"}, "reward.scheme=guide is not known to sop; choose one of default, dense"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.environment(**settings)


def test_a_row_without_a_known_domain_is_refused():
    environment = FAMILY.environment()
    with pytest.raises(UserError, match="row x has domain=cooking; choose one of aircraft_inspection"):
        environment.reset({"id": "x", "domain": "cooking", "fixture": []})
    environment.close()


CALLS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *do(
                    "getOrder", "reserveStock", "releaseStock", "moveOverflow", "shipOrder", "openBackorder", "getStock"
                ),
                '<tool_call>{"name": "getStock", "arguments": {"sku": "x\' or 1=1 --"}}</tool_call>',
                '<tool_call>{"name": "getStock", "arguments": {"sku": 7}}</tool_call>',
                '<tool_call>{"name": "shipOrder", "arguments": {"order_id": "B482", "service": "rocket"}}</tool_call>',
                '<tool_call>{"name": "store", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "getOrder", "arguments": {"order_id": "\\ud800"}}</tool_call>',
                "<tool_call>{",
                "</tool_call>",
            ]
        ),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_any_calls_preserve_the_total_stock(calls, play):
    """No call raises an error or changes the total stock, and the same calls give the same bytes."""
    texts = [*calls, do("getStock")[0]]
    results = play(order_row(), texts, max_turns=9)
    assert results == play(order_row(), texts, max_turns=9)
    left = json.loads(results_of(results[-1])[0])["shelf"]
    assert left in (5, 7, 2, 4), "five on the shelf, two in the overflow, three for the order"
    assert not any(result.reward for result in results)


PROGRAM = """
import asyncio, json, sys
from envs.sop import FAMILY
from mtrl.config.schema import DataConfig

splits = FAMILY.load(DataConfig(synthetic_train_rows=12, synthetic_test_rows=12), seed=3)
messages = []
for row in splits.train + splits.test:
    environment = FAMILY.environment()
    environment.reset(row)
    messages.append(environment.tools)
    unknown = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    for text in [*FAMILY.gold(row)[:-1], unknown, *FAMILY.decoys(row)[:1]]:
        result = asyncio.run(environment.step(text, row["ground_truth"]))
        messages.append([result.observation, result.reward, result.done, result.components, result.metrics])
    environment.close()
print(json.dumps([splits.train, splits.test, messages, FAMILY.tokens]))
"""


def test_every_process_sees_the_same_bytes():
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed, zone in (("0", "UTC"), ("4242", "Asia/Tokyo"))
    }
    assert len(seen) == 1 and len(seen.pop()) > 20_000


def test_gold_calls_are_in_the_form_that_is_parsed(splits):
    for row in splits.test[:30]:
        *calls, last = FAMILY.gold(row)
        for text in calls:
            words, attempts = parse_calls(text)
            assert words == "" and all(attempt.status == "ok" for attempt in attempts)
        assert parse_calls(last) == (last, [])
