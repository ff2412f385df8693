"""Tools from a user's file: schemas in the prompt, checked calls, and an error for every mistake."""

import json

import pytest

from envs.triviaqa import FAMILY
from envs.triviaqa.retriever import best_passage
from envs.triviaqa.tools import call_tool, load_tools
from mtrl.config.schema import DataConfig
from mtrl.environments.tools import ToolError
from mtrl.errors import BackendError, UserError

OWN = '''
from typing import Literal
from mtrl.environments.tools import ToolError

def convert(value: float, unit: Literal["km", "mile"] = "km") -> dict:
    """Convert a distance to metres."""
    if value < 0:
        raise ToolError("distances are positive")
    return {"metres": value * {"km": 1000, "mile": 1609.344}[unit]}

def broken(path: str) -> str:
    """Fail."""
    raise ValueError(f"/home/user/{path}")

def silent() -> str:
    """Return nothing."""
    return "  "

def shapeless() -> object:
    """Return a value that is not JSON."""
    return {1, 2}

TOOL_FUNCTIONS = [convert, broken, silent, shapeless]
'''


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "tools.py"
        path.write_text(text)
        return str(path)

    return to_file


@pytest.fixture
def call(write):
    tools = load_tools(write(OWN))
    return lambda name, **args: call_tool(tools, json.dumps({"name": name, "args": args}))


def test_functions_of_a_file_are_called_with_checked_arguments(call):
    assert call("convert", value=2) == '{"metres": 2000.0}'
    assert call("convert", value=1, unit="mile") == '{"metres": 1609.344}'
    assert call("convert", value=1, unit="inch").startswith("Error: wrong arguments for convert: unit: Input should be")
    assert call("convert").startswith("Error: wrong arguments for convert: value: Field required")
    assert call("wiki_search", query="x") == (
        "Error: there is no tool wiki_search; the tools are: convert, broken, silent, shapeless"
    )


def test_errors_of_tools_are_reported_without_paths(call):
    assert call("convert", value=-1) == "Error: distances are positive"
    assert call("broken", path="x") == "Error: broken failed: ValueError"
    assert call("silent") == "Error: silent returned nothing"


def test_the_error_of_a_lost_backend_is_no_observation(write):
    raises = "from mtrl.sandbox.process import SandboxError\ndef f() -> str:\n    'F.'\n    raise SandboxError('lost')"
    with pytest.raises(BackendError, match="lost"):
        call_tool(load_tools(write(f"{raises}\nTOOL_FUNCTIONS = [f]")), '{"name": "f", "args": {}}')


def test_a_tool_that_returns_no_json_is_a_broken_task(call):
    with pytest.raises(UserError, match="shapeless returned set, which is not JSON"):
        call("shapeless")


def test_an_episode_with_custom_tools(write, play, make_row):
    response = '<reasoning>r</reasoning><tool>{"name": "convert", "args": {"value": 3}}</tool>'
    (result,) = play(make_row(["3000"]), [response], tools_file=write(OWN), reward="original")
    assert result.observation == '<result>\n{"metres": 3000.0}\n</result>'
    assert result.components["tool_execution"] == 0.2 and result.components["search_hit"] == 0.5


def test_the_prompt_shows_the_schema_of_every_tool(write):
    data = DataConfig(synthetic_train_rows=1, synthetic_test_rows=1)
    (row,) = FAMILY.load(data, 0, prompt="full", tools_file=write(OWN)).train
    shown = [json.loads(line) for line in row["prompt"][0]["content"].splitlines() if line.startswith('{"name"')]
    assert [tool["name"] for tool in shown] == ["convert", "broken", "silent", "shapeless"]
    assert shown[0]["description"] == "Convert a distance to metres."
    assert shown[0]["args"]["properties"]["unit"] == {"default": "km", "enum": ["km", "mile"], "type": "string"}
    assert shown[0]["args"]["required"] == ["value"]


def test_the_default_file_has_wiki_search():
    tools = load_tools()
    assert list(tools) == ["wiki_search"]
    assert tools["wiki_search"].schema["function"]["parameters"]["properties"] == {"query": {"type": "string"}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", r"does not define TOOL_FUNCTIONS; add TOOL_FUNCTIONS = \[your_function\]"),
        ("TOOL_FUNCTIONS = []", "TOOL_FUNCTIONS is empty; list at least one function"),
        ("TOOL_FUNCTIONS = {}", "TOOL_FUNCTIONS is a dict; it must be a list of functions"),
        ("TOOL_FUNCTIONS = ['wiki_search']", r"TOOL_FUNCTIONS\[0\] is a str; it must be a function"),
        ("TOOL_FUNCTIONS = [len]", r"TOOL_FUNCTIONS\[0\] is a builtin_function_or_method; it must be a function"),
        ("def f(x: str):\n    return x\nTOOL_FUNCTIONS = [f]", "tool f has no docstring; write one"),
        ("def f(x):\n    'F.'\nTOOL_FUNCTIONS = [f]", "tool f has no type for x; write one, such as x: str"),
        ("def f(*x: str):\n    'F.'\nTOOL_FUNCTIONS = [f]", "tool f takes .x: .*; a tool's parameters must be named"),
        ("def f(x: 'Nope'):\n    'F.'\nTOOL_FUNCTIONS = [f]", "tool f has a type that cannot be found"),
        ("def f():\n    'F.'\nTOOL_FUNCTIONS = [f, f]", "there are two tools named f; rename one"),
        (
            "async def f():\n    'F.'\nTOOL_FUNCTIONS = [f]",
            r"TOOL_FUNCTIONS\[0\], f, is async; write it with def alone",
        ),
        ("1 / 0", r"cannot be run \(ZeroDivisionError: division by zero\); correct the file"),
        ("def (", r"cannot be run \(SyntaxError"),
    ],
)
def test_every_mistake_is_reported_in_one_sentence(write, text, sentence):
    path = write(text)
    with pytest.raises(UserError, match=sentence) as error:
        FAMILY.environment(tools_file=path)
    assert str(error.value).startswith(f"environment.config.tools_file={path}")


def test_missing_and_invalid_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tools_file=.*no.py does not exist; give a Python file"):
        FAMILY.environment(tools_file=str(tmp_path / "no.py"))
    with pytest.raises(UserError, match="does not exist; give a Python file"):
        FAMILY.environment(tools_file=str(tmp_path))
    (tmp_path / "tools.txt").write_text(OWN)
    with pytest.raises(UserError, match=r"tools.txt is no Python file; give one that ends in .py"):
        FAMILY.environment(tools_file=str(tmp_path / "tools.txt"))


def test_searching_is_for_episodes():
    with pytest.raises(UserError, match="best_passage is for tools while an episode calls them"):
        best_passage("France")
    assert issubclass(ToolError, Exception)


def test_two_episodes_at_once_search_their_own_corpora(corpus, make_row, splits):
    """The retriever belongs to the episode, and not to the module."""
    theirs, ours = FAMILY.environment(corpus=corpus), FAMILY.environment()
    response = '<tool>{"name": "wiki_search", "args": {"query": "France"}}</tool>'
    for environment, found in ((theirs, "capital of France"), (ours, "No relevant"), (theirs, "capital of France")):
        environment.reset(make_row(["x"]))
        assert found in environment.step(response, {"answers": ["x"]}).observation
