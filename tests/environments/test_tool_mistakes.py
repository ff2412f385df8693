"""Classes of environments with tools that are written in an unusual way, or with a mistake."""

import pytest

from mtrl.environments.results import as_tools
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.errors import UserError


def test_static_and_class_methods_are_tools_in_either_order():
    class Sums(ToolEnvironment):
        @staticmethod
        @tool
        def inner(a: int) -> int:
            """One."""
            return a + 1

        @tool(name="outer")
        @staticmethod
        def outside(a: int) -> int:
            """Two."""
            return a + 2

        @classmethod
        @tool
        def own(cls, a: int) -> str:
            """Name."""
            return f"{cls.__name__} {a}"

        @tool
        @classmethod
        def own_too(cls, a: int) -> str:
            """Name."""
            return f"{cls.__name__} {a}"

    tools = Sums().toolbox
    assert [each.function(**each.check({"a": 1})) for each in tools.values()] == [2, 3, "Sums 1", "Sums 1"]
    assert list(tools) == ["inner", "outer", "own", "own_too"]
    assert all(list(each.schema["function"]["parameters"]["properties"]) == ["a"] for each in tools.values())


@pytest.mark.parametrize("marked", ["lookup", property(lambda self: 1), object()])
def test_only_functions_are_marked(marked):
    with pytest.raises(UserError, match=r"is no function; write @tool or @tool\(name='…'\) above a method"):
        tool(marked)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tool_calls": None}, "environment.config.max_tool_calls=None must be a whole number of at least 1"),
        ({"max_tool_calls": "8"}, "environment.config.max_tool_calls='8' must be a whole number"),
        ({"tool_timeout": "10"}, "environment.config.tool_timeout='10' must be a number above 0"),
        ({"tool_timeout": 0}, "environment.config.tool_timeout=0 must be a number above 0"),
    ],
)
def test_limits_are_numbers(settings, sentence):
    """Otherwise every call would be answered with an error about them."""
    with pytest.raises(UserError, match=sentence):
        ToolEnvironment(**settings)
    assert ToolEnvironment(tool_timeout=float("inf")).tools == []


def test_an_own_init_calls_that_of_the_base():
    class Own(ToolEnvironment):
        def __init__(self, max_turns=5):
            self.max_turns = max_turns

    with pytest.raises(UserError, match=r"Own.__init__ does not call super\(\).__init__\(max_turns\); add it"):
        Own().close()


@pytest.mark.parametrize("tools", [None, "look", {"look": {"type": "function"}}, ["look"]])
def test_tools_are_a_list_of_schemas(tools):
    with pytest.raises(TypeError, match="ToolEnvironment.tools is .*; it must be a list of schemas such as"):
        as_tools(tools, ToolEnvironment())
    assert as_tools(({"type": "function"},), None) == [{"type": "function"}]
