"""Typed tools: schemas, checked calls, and observations for every mistake of the model."""

import asyncio
import json
import threading
import time
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from mtrl.environments.base import BaseEnvironment, StepResult, TakesMessages
from mtrl.environments.tools import ToolEnvironment, ToolError, tool, toolbox
from mtrl.errors import BackendError, UserError
from mtrl.retrieval import RetrieverError
from mtrl.sandbox.process import SandboxError


class Address(BaseModel):
    city: str
    code: Annotated[str, Field(pattern=r"^\d{5}$")]


class Shop(ToolEnvironment):
    """Every kind of tool and parameter."""

    def __init__(self, max_turns=5, **config):
        super().__init__(max_turns, **config)
        self.calls_run = []
        self.release = threading.Event()
        self.resources.callback(self.release.set)

    @tool
    def price(self, item: str, count: int = 1, unit: Literal["EUR", "USD"] = "EUR") -> dict:
        """The price of an item.

        In cents.
        """
        self.calls_run.append(("price", item, count, unit))
        return {"total": 250 * count, "unit": unit, "Ä": [1.5, True, None]}

    @tool(name="shipTo")
    def ship_to(self, address: Address, notes: list[str], extra: dict[str, float], gift: Optional[bool] = None) -> str:  # noqa: UP045
        """Ship it."""
        self.calls_run.append(("shipTo", type(address).__name__, address.city, notes, extra, gift))
        return f"to {address.city}"

    @tool
    async def stock(self, item: Annotated[str, Field(description="What it is called.")]) -> int:
        """How many there are."""
        await asyncio.sleep(0)
        self.calls_run.append(("stock", item))
        return 7

    @tool
    def fails(self) -> str:
        """Always fails."""
        raise KeyError("secret\nsecond line")

    @tool
    def refuses(self) -> str:
        """Always refuses."""
        raise ToolError("the shop is closed")

    @tool
    def hangs(self) -> str:
        """Returns only after `release`."""
        self.release.wait(30)
        return "late"

    @tool
    async def sleeps(self) -> str:
        """Sleeps longer than its time limit."""
        await asyncio.sleep(30)
        return "late"

    @tool
    def broken(self) -> str:
        """The task is broken."""
        raise UserError("row 3 has no shop")

    @tool
    def pay(self, amount: int) -> StepResult:
        """Ends the episode."""
        return StepResult(0.75, "done", done=True, components={"bonus": 1.0}, metrics={"amount": amount})

    def answer(self, response, ground_truth):
        return float(response == ground_truth["answer"]), None, True


def call(name, _id="c1", **arguments):
    return {"type": "function", "id": _id, "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def make_shop():
    shops = []

    def make(cls=Shop, **config):
        shops.append(cls(**config))
        return shops[-1]

    yield make
    for shop in shops:
        shop.close()


def respond(environment, *calls, response="text"):
    message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    return asyncio.run(asyncio.wait_for(environment.respond(message, response, {"answer": "7"}), 20))


def contents(result):
    return [message["content"] for message in result.observation]


# -- schemas ----------------------------------------------------------------------------------------------------------


def test_schemas_in_openais_form(make_shop):
    schemas = {schema["function"]["name"]: schema for schema in make_shop().tools}
    assert list(schemas) == ["price", "shipTo", "stock", "fails", "refuses", "hangs", "sleeps", "broken", "pay"]
    assert schemas["price"] == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "The price of an item.\n\nIn cents.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer", "default": 1},
                    "unit": {"type": "string", "enum": ["EUR", "USD"], "default": "EUR"},
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }
    ship = schemas["shipTo"]["function"]["parameters"]
    assert ship["required"] == ["address", "notes", "extra"]
    assert ship["properties"]["gift"]["anyOf"] == [{"type": "boolean"}, {"type": "null"}]
    assert ship["properties"]["notes"] == {"type": "array", "items": {"type": "string"}}
    assert ship["$defs"]["Address"]["properties"]["code"]["pattern"] == r"^\d{5}$"
    assert schemas["stock"]["function"]["parameters"]["properties"]["item"]["description"] == "What it is called."
    assert schemas["fails"]["function"]["parameters"]["properties"] == {}
    json.dumps(list(schemas.values()))


def test_parameters_may_have_names_that_pydantic_reserves():
    @tool
    def odd(schema: str, model_config: int, _x: int, copy: bool = False):
        """Odd names."""
        return [schema, model_config, _x, copy]

    (made,) = toolbox(odd).values()
    assert list(made.schema["function"]["parameters"]["properties"]) == ["schema", "model_config", "_x", "copy"]
    assert made.function(**made.check({"schema": "s", "model_config": 1, "_x": 2})) == ["s", 1, 2, False]


def no_docstring(a: int): ...


def no_type(a):
    """Doc."""


def many(*names: str):
    """Doc."""


def no_schema(a: threading.Lock):
    """Doc."""


def not_found(a: "Nowhere"):  # noqa: F821
    """Doc."""


def no_expression(a: "city name"):  # noqa: F722
    """Doc."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "tool no_docstring has no docstring; write one"),
        (no_type, "tool no_type has no type for a; write one, such as a: str"),
        (many, r"tool many takes \*names"),
        (no_schema, "tool no_schema has a type without a JSON schema"),
        (not_found, "tool not_found has a type that cannot be found .*Nowhere.*define it in the module"),
        (no_expression, "tool no_expression has a type that cannot be found .*city name"),
        (tool(name="a b")(lambda: None), "has the name 'a b'; write 1 to 64 letters"),
    ],
)
def test_invalid_tools_are_user_errors(function, message):
    with pytest.raises(UserError, match=message):
        toolbox(function if hasattr(function, "__mtrl_tool__") else tool(function))


class Manager:
    """Provides the tools of one domain for one row; it is no environment."""

    def __init__(self, row):
        self.row = row

    @tool
    def name(self) -> str:
        """The name."""
        return self.row["name"]

    @property
    def explodes(self):
        raise AssertionError("the search for tools must not read properties")


def test_objects_provide_tools_for_the_toolbox(make_shop):
    shop = make_shop()
    shop.toolbox |= toolbox(Manager({"name": "Ann"}))
    assert contents(respond(shop, call("name"))) == ["Ann"]
    assert shop.tools[-1]["function"]["name"] == "name"
    with pytest.raises(UserError, match="two tools named name"):
        toolbox(Manager({}), Manager({}))
    with pytest.raises(UserError, match="dict has no tools|object has no tools"):
        toolbox(object())


def test_an_override_without_a_mark_is_no_tool(make_shop):
    class Quiet(Shop):
        def fails(self):
            """No tool."""

        @tool
        def stock(self) -> int:
            """Another."""
            return 8

    shop = make_shop(Quiet)
    assert "fails" not in shop.toolbox and contents(respond(shop, call("stock"))) == ["8"]


# -- calls that work --------------------------------------------------------------------------------------------------


def test_calls_run_in_order_and_each_is_answered(make_shop):
    shop = make_shop()
    result = respond(
        shop,
        call("stock", "a", item="pen"),
        call("price", "b", item="pen", count=2),
        call("shipTo", "c", address={"city": "Ulm", "code": "89073"}, notes=["x"], extra={"kg": 1}),
        call("stock", "d", item="ink"),
    )
    assert result.observation == [
        {"role": "tool", "tool_call_id": "a", "name": "stock", "content": "7"},
        {
            "role": "tool",
            "tool_call_id": "b",
            "name": "price",
            "content": '{"total": 500, "unit": "EUR", "Ä": [1.5, true, null]}',
        },
        {"role": "tool", "tool_call_id": "c", "name": "shipTo", "content": "to Ulm"},
        {"role": "tool", "tool_call_id": "d", "name": "stock", "content": "7"},
    ]
    assert shop.calls_run == [
        ("stock", "pen"),
        ("price", "pen", 2, "EUR"),
        ("shipTo", "Address", "Ulm", ["x"], {"kg": 1.0}, None),
        ("stock", "ink"),
    ]
    assert (result.reward, result.done, result.truncated) == (0.0, False, False)
    metrics = {key: value for key, value in result.metrics.items() if value}
    assert metrics == {"tool_calls": 4, "tool/stock/calls": 2, "tool/price/calls": 1, "tool/shipTo/calls": 1}
    assert result.metrics["tool_errors"] == result.metrics["tool/fails/calls"] == 0


def test_a_turn_without_calls_is_the_answer(make_shop):
    shop = make_shop()
    result = respond(shop, response="7")
    assert (result.reward, result.observation, result.done) == (1.0, None, True)
    assert result.metrics["tool_calls"] == 0 and shop.current_turn == 1


def test_an_answer_may_be_async_and_have_metrics(make_shop):
    class Async(Shop):
        async def answer(self, response, ground_truth):
            await asyncio.sleep(0)
            return StepResult(0.5, "more", metrics={"mine": 1.0})

    result = respond(make_shop(Async))
    assert result.reward == 0.5 and result.metrics["mine"] == 1.0 and result.metrics["tool_calls"] == 0


def test_an_invalid_answer_is_returned_unchanged(make_shop):
    class Wrong(Shop):
        def answer(self, response, ground_truth):
            return "done"

    assert respond(make_shop(Wrong)) == "done"


def test_the_last_turn_truncates_the_episode(make_shop):
    shop = make_shop(max_turns=2)
    assert not respond(shop, call("stock", item="pen")).done
    result = respond(shop, call("stock", item="pen"))
    assert result.done and result.truncated and result.reward == 0.0


def test_a_tool_may_end_the_episode_and_nothing_runs_after_it(make_shop):
    shop = make_shop()
    result = respond(shop, call("pay", amount=3), call("stock", item="pen"))
    assert (result.reward, result.done, result.components) == (0.75, True, {"bonus": 1.0})
    assert contents(result) == ["done", "Error: not run: the episode is over"]
    assert result.metrics["amount"] == 3 and result.metrics["tool_calls"] == 2 and shop.calls_run == []


def test_a_call_that_does_not_end_the_episode_earns_no_reward(make_shop):
    class Bribed(ToolEnvironment):
        @tool
        def bribe(self) -> StepResult:
            """Returns a reward."""
            return StepResult(1.0, "reward")

    with pytest.raises(UserError, match="bribe returned a StepResult with done=False; only the end of an episode"):
        respond(make_shop(Bribed), call("bribe"))


def test_step_takes_the_text_form(make_shop):
    """Demonstrators, gold solutions and the pre-flight use text instead of messages."""
    shop = make_shop()
    text = 'Hm. <tool_call>{"name": "stock", "arguments": {"item": "pen"}}</tool_call><tool_call>{}</tool_call>'
    result = asyncio.run(shop.step(text, {}))
    assert contents(result) == ["7", "Error: the tool call does not have the expected form"]
    assert [message["tool_call_id"] for message in result.observation] == ["call_0_0", "call_0_1"]
    assert asyncio.run(shop.step("7", {"answer": "7"})).reward == 1.0


# -- calls that are errors --------------------------------------------------------------------------------------------


def raw(name, arguments, **more):
    return {"type": "function", "id": "c1", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("wrong", "content"),
    [
        (call("stok", item="x"), "there is no tool stok; did you mean stock? The tools are: price, shipTo, stock, "),
        (call("a<|im_end|>\n" * 40), "there is no tool a?im_end?a?im_end?"),
        (call("zzzzzz"), "there is no tool zzzzzz; The tools are"),
        (call("stock"), "wrong arguments for stock: item: Field required"),
        (call("stock", item=["x"]), "wrong arguments for stock: item: Input should be a valid string"),
        (call("stock", item="x", colour="red"), "wrong arguments for stock: colour: Extra inputs are not permitted"),
        (call("price", item="x", count=1.5), "wrong arguments for price: count: Input should be a valid integer"),
        (call("price", item="x", unit="GBP"), "wrong arguments for price: unit: Input should be 'EUR' or 'USD'"),
        (
            call("shipTo", address={"city": "Ulm", "code": "x"}, notes=[1], extra={"a": float("nan")}),
            "wrong arguments for shipTo: address.code: String should match pattern '^\\d{5}$'; notes.0: Input should "
            "be a valid string; extra.a: Input should be a finite number",
        ),
        (call("fails"), "fails failed: KeyError: 'secret\\nsecond line'"),
        (call("refuses"), "the shop is closed"),
        (raw("stock", '{"item": '), "the arguments of stock are not valid JSON"),
        (raw("stock", '{"item": "a", "item": "b"}'), "the arguments of stock are not valid JSON"),
        (raw("stock", "[1]"), "the arguments of stock must be a JSON object"),
        (raw("stock", [1]), "the arguments of stock must be a JSON object"),
        (raw("stock", None), "the arguments of stock must be a JSON object"),
        (raw("", "{oops", malformed="invalid_json"), "the tool call is not valid JSON"),
        (raw("stock", "{", malformed="unclosed_block"), "the tool call is not closed"),
        (raw("", "{}", malformed="missing_name"), "the tool call names no tool"),
        (raw("", "{}", malformed="news"), "malformed tool call (news)"),
        ({}, "there is no tool ; "),
    ],
)
def test_every_failed_call_is_an_observation(make_shop, wrong, content):
    shop = make_shop()
    result = respond(shop, wrong, call("stock", item="pen"))
    (failure, success), ran = contents(result), shop.calls_run
    assert failure.startswith(f"Error: {content}") and "\n" not in failure and len(failure) <= 310
    assert success == "7" and ran == [("stock", "pen")], "the next call runs"
    assert result.metrics["tool_calls"] == 2 and result.metrics["tool_errors"] == 1
    assert set(result.metrics) == {"tool_calls", "tool_errors", *(f"tool/{name}/calls" for name in shop.toolbox)}
    assert result.observation[0]["name"] in {*shop.toolbox, "unknown"}


@pytest.mark.parametrize("name", ["hangs", "sleeps"])
def test_a_tool_that_exceeds_its_time_limit_is_an_error_observation(make_shop, name):
    shop = make_shop(tool_timeout=2)  # on a busy machine, the other call takes a part of a second
    result = respond(shop, call(name), call("price", item="pen"))
    assert contents(result)[0] == f"Error: {name} took longer than 2 s" and len(shop.calls_run) == 1


def test_calls_beyond_the_limit_are_not_run(make_shop):
    shop = make_shop(max_tool_calls=2)
    result = respond(shop, *(call("stock", str(i), item="pen") for i in range(50)))
    assert contents(result) == ["7", "7"] + ["Error: not run: a turn may make 2 tool calls"] * 48
    assert [message["tool_call_id"] for message in result.observation] == [str(i) for i in range(50)]
    assert len(shop.calls_run) == 2 and result.metrics["tool_calls"] == 50 and result.metrics["tool_errors"] == 48


def test_a_user_error_of_a_tool_ends_the_episode(make_shop):
    with pytest.raises(UserError, match="row 3 has no shop"):
        respond(make_shop(), call("broken"))

    class Unordered(ToolEnvironment):
        @tool
        def names(self) -> set:
            """Returns a set, whose order differs between processes."""
            return {"a", "b"}

    with pytest.raises(UserError, match="tool names returned set, which is not JSON"):
        respond(make_shop(Unordered), call("names"))


@pytest.mark.parametrize("error", [RetrieverError, SandboxError])
def test_a_lost_retriever_or_sandbox_ends_the_episode(make_shop, error):
    """Its text is no observation, because a policy must not learn from a server that is down."""

    class Lost(ToolEnvironment):
        @tool
        def look(self) -> str:
            """Fails."""
            raise error("it is down")

    with pytest.raises(BackendError, match="it is down"):
        respond(make_shop(Lost), call("look"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["price", "shipTo", "stock", "refuses", "pric", ""]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES) | st.text(), json_values | st.fixed_dictionaries({"item": json_values})))
)
def test_no_call_raises_or_is_dropped(calls):
    shop = Shop()
    try:
        result = respond(shop, *(raw(name, arguments) for name, arguments in calls))
    finally:
        shop.close()
    if calls:
        assert len(result.observation) == len(calls) == result.metrics["tool_calls"]
        assert result.metrics["tool_errors"] == sum(text.startswith("Error: ") for text in contents(result))
        assert sum(v for k, v in result.metrics.items() if k.startswith("tool/")) >= len(shop.calls_run)


# -- other environments -----------------------------------------------------------------------------------------------


def test_only_environments_with_tools_take_messages():
    assert isinstance(Shop(), TakesMessages) and not isinstance(BaseEnvironment(), TakesMessages)

    class Own(BaseEnvironment):
        tools: Any = ("a hammer",)

    assert not isinstance(Own(), TakesMessages)


def test_close_ends_the_thread_of_the_episode():
    before = set(threading.enumerate())
    shop = Shop()
    respond(shop, call("price", item="pen"))
    assert set(threading.enumerate()) - before
    shop.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
