"""Episodes of text_to_sql: exact observations, rewards of each scheme, malformed turns, isolation."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.text_to_sql import FAMILY
from envs.text_to_sql.environment import TextToSqlEnv, parse_action
from mtrl.errors import UserError

ROOT = Path(__file__).parents[3]
LOOK = "<sql>select * from goods limit 1</sql>"
RIGHT = "<solution>select max(fee) from goods where hue = 'RED'</solution>"
WRONG = "<solution>select max(fee) from goods</solution>"
THINK = "<think>hm</think>"
RESPONSES = st.text(alphabet="<>/sqlotin th`k", max_size=40) | st.sampled_from([LOOK, RIGHT, WRONG])


def test_a_short_episode_to_the_byte(make_row, play):
    results = play(make_row(), ["<sql>select * from goods</sql>", "<sql>select price from goods</sql>", "hm", RIGHT])
    assert [result.observation for result in results] == [
        "<observation> fee hue label qty ; 12 RED CUP 3 ; 40 BLUE HAT 1 ; 25 RED BAG 7 ; more ; 4 left</observation>",
        "<observation> error: no such column: price ; 3 left</observation>",
        "<observation> write one <sql> or one <solution> ; 2 left</observation>",
        None,
    ]
    assert [result.done for result in results] == [False, False, False, True]
    assert [result.reward for result in results] == [0.0, 0.0, -0.1, 1.0]
    assert results[0].metrics == {"queries": 1.0, "query_errors": 0.0, "executed": 0.0, "malformed": 0.0}
    assert results[1].metrics == {"queries": 1.0, "query_errors": 1.0, "executed": 0.0, "malformed": 0.0}
    assert results[2].components == {"correct": 0.0, "malformed": -0.1}
    assert results[3].components == {"correct": 1.0, "malformed": 0.0}
    assert results[3].metrics == {"queries": 0.0, "query_errors": 0.0, "executed": 1.0, "malformed": 0.0}


def test_a_full_episode_to_the_byte(make_row, play):
    queries = [
        "<sql>select label, fee, null from goods where fee > 20 order by fee</sql>",
        "<sql>values (1)</sql>",
        "hm",
    ]
    results = play(make_row(style="full"), queries)
    assert [result.observation for result in results] == [
        "<observation>label | fee | null\nBAG | 25 | NULL\nBAG | 25 | NULL\nHAT | 40 | NULL\n"
        "<reminder>You have 4 turns left to complete the task.</reminder></observation>",
        "<observation>column1\n1\n<reminder>You have 3 turns left to complete the task.</reminder></observation>",
        "<observation>Your action is invalid. "
        "Reason, then write one <sql>query</sql> or one <solution>query</solution>.\n"
        "<reminder>You have 2 turns left to complete the task.</reminder></observation>",
    ]
    last = play(make_row(style="full"), [LOOK], max_turns=2)[0]
    assert "You have 1 turn left" in last.observation


def test_observations_are_limited_and_marked_as_cut(make_row, play):
    many = "with recursive c(n) as (select 1 union all select n + 1 from c) select n from c"
    text = play(make_row(style="full"), [f"<sql>{many}</sql>"])[0].observation
    assert text.startswith("<observation>n\n1\n2\n") and "\n50\n(more rows are not shown)\n" in text
    text = play(make_row(), [f"<sql>{many}</sql>"], observation_rows=2)[0].observation
    assert text == "<observation> n ; 1 ; 2 ; more ; 4 left</observation>"
    wide = (
        "<sql>select hex(zeroblob(40000)) as a, hex(zeroblob(40000)) as b, x'00ff', 'two' || char(10) || 'lines'</sql>"
    )
    text = play(make_row(style="full"), [wide])[0].observation
    assert len(text) < 700 and "000... | 000" in text and "x'00ff' | two\\nlines" in text
    assert len(play(make_row(), [wide], observation_characters=50)[0].observation) < 120
    columns = ", ".join(f"hex(zeroblob(100)) as c{i}" for i in range(100))
    assert len(play(make_row(style="full"), [f"<sql>select {columns}</sql>"])[0].observation) < 6200


def test_an_empty_result_is_marked(make_row, play):
    empty = play(make_row(), ["<sql>select fee from goods where 0</sql>"])[0].observation
    assert empty == "<observation> fee ; no rows ; 4 left</observation>"


def test_the_last_turn_ends_the_episode(make_row, play):
    results = play(make_row(), [LOOK, LOOK], max_turns=2)
    assert [(result.reward, result.done) for result in results] == [(0.0, False), (0.0, True)]
    assert results[1].observation is None
    assert play(make_row(), ["hm"], max_turns=1)[0].reward == -0.1


@pytest.mark.parametrize(("last", "truncated"), [(LOOK, True), ("hm", True), (RIGHT, False), (WRONG, False)])
def test_completion_is_a_solution_right_or_wrong(make_row, play, last, truncated):
    result = play(make_row(), [LOOK, LOOK, LOOK, LOOK, last])[-1]
    assert result.done and result.truncated is truncated


def test_malformed_turns_cost_at_most_half(make_row, reward_of):
    assert reward_of(make_row(), ["hm"] * 12, max_turns=12) == pytest.approx(-0.5)
    assert reward_of(make_row(), ["hm", RIGHT]) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<sql>select 1</sql>", ("sql", "select 1")),
        ("I look.\n<sql>\nselect 1\n</sql> ", ("sql", "select 1")),
        ("<think>not <sql>this</sql></think><solution>select 2</solution>", ("solution", "select 2")),
        ("no opening tag </think><solution>select 2</solution>", ("solution", "select 2")),
        ("<solution>```sql\nselect 2\n```</solution>", ("solution", "select 2")),
        ("<solution>```\nselect 2\n```</solution>", ("solution", "select 2")),
        ("<solution>```select 2```</solution>", ("solution", "select 2")),
        ("<sql>select 1</sql><sql>select 2</sql>", None),
        ("<sql>select 1</sql><solution>select 2</solution>", None),
        ("<sql>select 1", None),
        ("select 1</sql>", None),
        ("<sql>select 1</solution>", None),
        ("<sql>select 1</sql></sql>", None),
        ("<solution><solution>select 1</solution></solution>", None),
        ("<sql> </sql>", None),
        ("<sql>``````</sql>", None),
        ("<solution>select 2</solution></think>", None),
        ("select 1", None),
        ("", None),
    ],
)
def test_one_action_or_none(response, action):
    assert parse_action(response) == action


@pytest.mark.parametrize(
    ("responses", "reward"),
    [
        ([THINK + RIGHT], 1.0),
        ([THINK + WRONG], 0.0),
        ([THINK + "<solution>nonsense</solution>"], 0.0),
        ([RIGHT], -1.0),
        ([THINK + LOOK, THINK + RIGHT], 1.0),
        ([THINK + LOOK, "\n " + THINK + RIGHT], 1.0),
        ([THINK + LOOK, RIGHT], -1.0),
        ([THINK + LOOK, "well " + THINK + RIGHT], -1.0),
        ([THINK + "hm", RIGHT], 1.0),  # SkyRL's reply to a malformed turn holds no observation tag
        (["<think><solution></think>" + RIGHT], -1.0),
        ([THINK + "<solution>select '<think>'</solution>"], -1.0),
        ([THINK + LOOK] * 5, -1.0),
    ],
)
def test_skyrl_values(responses, reward, make_row, play):
    results = play(make_row(), responses, reward="skyrl")
    assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [reward]
    assert all(r.reward == sum(r.components.values()) for r in results)


def test_gold_earns_one_under_every_scheme(splits, reward_of):
    for row in splits.train[:200]:
        for scheme in TextToSqlEnv.reward_schemes:
            assert reward_of(row, FAMILY.gold(row), reward=scheme) == 1.0


def test_a_constant_is_never_right(splits, make_row, reward_of):
    row = make_row()
    assert reward_of(row, ["<solution>select 25</solution>"]) == 0.0
    assert reward_of(row, ["<solution>select fee from sqlite_master, (select 25 fee)</solution>"]) == 0.0
    assert reward_of(row, ["<solution>select value from json_each('[25]')</solution>"]) == 0.0


def test_episodes_share_nothing(make_row):
    row = make_row()
    environment = TextToSqlEnv()
    for _ in range(2):
        environment.reset(row)
        assert environment.step("hm", row["ground_truth"]).observation.endswith("4 left</observation>")
        assert environment.step("<sql>drop table goods</sql>", row["ground_truth"]).metrics["query_errors"] == 1.0
        assert environment.step(RIGHT, row["ground_truth"]).reward == 1.0
    environment.close()
    environment.close()


def test_a_row_with_a_failing_gold_query_is_an_error(make_row, play):
    with pytest.raises(UserError, match="ground_truth.sql='select nope from goods' cannot be run"):
        play(make_row("select nope from goods"), [RIGHT])
    with pytest.raises(UserError, match="ground_truth.sql=None"):
        play(make_row(None), [RIGHT])
    with pytest.raises(UserError, match="needs db"):
        environment = TextToSqlEnv()
        environment.step(RIGHT, {"sql": "select 1"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_turns": 0}, "generator.max_turns=0"),
        ({"reward": "dense"}, "reward.scheme=dense .* default, skyrl"),
        ({"query_seconds": 0}, "environment.config.query_seconds=0"),
        ({"query_seconds": float("nan")}, "environment.config.query_seconds=nan"),
        ({"query_operations": "many"}, "environment.config.query_operations='many'"),
        ({"observation_rows": 2.5}, "environment.config.observation_rows=2.5"),
        ({"observation_characters": True}, "environment.config.observation_characters=True"),
    ],
)
def test_bad_configuration(config, message):
    with pytest.raises(UserError, match=message):
        TextToSqlEnv(**config)


def test_config_keys_are_accepted():
    TextToSqlEnv(db_path="/x")
    assert {"db_path", "query_seconds"} <= set(FAMILY.config_keys)


def test_same_bytes_in_every_process():
    code = (
        "from envs.text_to_sql import FAMILY\n"
        "from mtrl.config.schema import DataConfig\n"
        "env = FAMILY.environment()\n"
        "for row in FAMILY.load(DataConfig(synthetic_train_rows=30, synthetic_test_rows=4), seed=3).train:\n"
        "    env.reset(row)\n"
        "    print(row, [env.step(response, row['ground_truth']) for response in FAMILY.gold(row)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


@settings(max_examples=200, deadline=None)
@given(responses=st.lists(RESPONSES, max_size=6))
def test_any_episode_ends_within_the_turn_limit_and_the_reward_range(responses, make_row, play):
    for scheme in TextToSqlEnv.reward_schemes:
        results = play(make_row(), responses, reward=scheme, max_turns=4)
        assert len(results) <= 4
        assert -1.0 <= sum(result.reward for result in results) <= 1.0
        assert all((result.observation is None) == result.done for result in results)
        assert len(results) < 4 or results[-1].done
