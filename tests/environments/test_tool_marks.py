"""What `@tool` marks: functions, also those that a `staticmethod` or a `classmethod` wraps."""

import pytest

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
