"""Typed tools: a method marked `@tool` provides a JSON schema for the model and checked calls for the environment."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import TIMEOUT_MAX
from typing import Any, overload
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.config_values import check_count, check_positive
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.environments.tool_calls import PROBLEMS, message_calls, parse_calls
from mtrl.errors import BackendError, UserError
from mtrl.types import Message
from mtrl.utils.strict_json import strict_loads

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MARK = "__mtrl_tool__"
_LONGEST_ERROR = 300
"""Maximum length of an error, in characters: parts of it may be the model's own text."""
_LONGEST_RESULT = 200_000
"""Maximum length of a result, in characters: much more than a context holds, and fast to encode."""


class ToolError(Exception):
    """Error that a tool raises. The model sees its text after "Error: ", and nothing else of it."""


@dataclass(frozen=True)
class Tool:
    """One tool: the schema for the model, and the function that is called."""

    name: str
    schema: dict[str, Any]
    """`{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`"""
    function: Callable[..., Any]
    check: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Converts the model's arguments to those of `function`. It raises `ToolError` or pydantic's `ValidationError`."""


F = typing.TypeVar("F", bound=Callable[..., Any])


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str) -> Callable[[F], F]: ...
def tool(function: Any = None, *, name: str | None = None) -> Any:
    """Mark a method as a tool, under its own name or another.

    Its docstring is the description. Its parameters need types, from which pydantic makes the schema and the check of
    calls: str, int, float, bool, Literal, Optional, list, dict, pydantic models and
    `Annotated[str, Field(description=…)]`. It may be async. The model sees the returned value: text unchanged, every
    other value as JSON.

    Example::

        @tool
        def weather(self, city: str, unit: Literal["C", "F"] = "C") -> dict:
            '''The weather of today.'''
    """
    if function is None:
        return partial(_mark, name=name)
    return _mark(function, None)


def toolbox(*providers: Any) -> dict[str, Tool]:
    """Return the tools of all providers, by name: `Tool`s, functions marked `@tool`, or objects with such methods.

    Raises:
        UserError: two tools have the same name, a name is invalid, a parameter has no type, or a docstring is missing.
    """
    tools: dict[str, Tool] = {}
    for found in (each for provider in providers for each in _tools_of(provider)):
        if found.name in tools:
            raise UserError(f"there are two tools named {found.name}; rename one with @tool(name=...)")
        tools[found.name] = found
    return tools


class ToolEnvironment(BaseEnvironment):
    """An environment whose methods marked `@tool` the model can call; a turn without calls is its answer.

    The calls of one turn run in order, and each is answered by a message of role `tool`. A mistake of the model, and a
    tool that raises or takes too long, give an observation that begins with "Error: ". Only `UserError`, which means
    that the task itself is broken, ends the episode. Calls get no reward, because an agent that is rewarded per call
    makes needless calls. A tool that ends the episode returns a `StepResult` with `done=True`.

    Example::

        class Shop(ToolEnvironment):
            @tool
            def price(self, item: str) -> int:
                '''The price of an item, in cents.'''
                return PRICES[item]

            def answer(self, response, ground_truth):
                return float(response.strip() == ground_truth["total"]), None, True
    """

    def __init__(self, max_turns: int = 5, max_tool_calls: int = 8, tool_timeout: float = 10.0, **config: Any):
        """
        Args:
            max_tool_calls: maximum number of calls that run in one turn; the others are answered with an error.
            tool_timeout: time limit of one call, in seconds. The limit of the turn is `environment.step_timeout`.

        Raises:
            UserError: a limit is out of its range. Otherwise every call would be answered with an error about it.
        """
        super().__init__(max_turns, **config)
        check_count("max_tool_calls", max_tool_calls)
        if tool_timeout != math.inf:
            check_positive("tool_timeout", tool_timeout)
        self.max_tool_calls, self.tool_timeout = max_tool_calls, tool_timeout
        self.toolbox = toolbox(self)
        """Tools by name; `reset` may add others: `self.toolbox |= toolbox(Shop(row))`."""
        self._threads: EnvironmentPool | None = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of all tools."""
        return [each.schema for each in self.toolbox.values()]

    def answer(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, Any, bool] | StepResult:
        """Process a turn without tool calls; return a result like that of `step`. The method may be `async`."""
        raise NotImplementedError(f"{type(self).__name__} does not define answer(response, ground_truth)")

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> Any:
        """Run the calls of `message`; without calls, process the `response` as the answer."""
        self.current_turn += 1
        calls = message.get("tool_calls") or []
        if not calls:
            # The answer has no time limit of its own; `environment.step_timeout` limits it.
            answer = await self._call(partial(self.answer, response, ground_truth), TIMEOUT_MAX)
            return _with_metrics(answer, self._metrics([], Counter()))
        return await self._run(calls)

    async def step(self, response: str, ground_truth: dict[str, Any]) -> Any:  # type: ignore[override]
        """Like `respond`, for a response with calls in the text form."""
        content, attempts = parse_calls(response)
        message = {"role": "assistant", "content": content, "tool_calls": message_calls(attempts, self.current_turn)}
        return await self.respond(message, response, ground_truth)

    def close(self) -> None:
        if not hasattr(self, "_threads"):
            raise UserError(f"{type(self).__name__}.__init__ does not call super().__init__(max_turns); add it")
        try:
            super().close()
        finally:
            if self._threads is not None:
                self._threads.close()

    async def _run(self, calls: list[dict[str, Any]]) -> StepResult:
        observation: list[Message] = []
        run: Counter[str] = Counter()
        final: StepResult | None = None
        for place, call in enumerate(calls):
            name = _name(call)
            try:
                if final is not None:
                    raise ToolError("not run: the episode is over")
                if place >= self.max_tool_calls:
                    raise ToolError(f"not run: a turn may make {self.max_tool_calls} tool calls")
                found, arguments = self._find(call)
                run[name] += 1
                result = await self._call(partial(found.function, **found.check(arguments)), self.tool_timeout)
                final = _final(name, result)
                content = _text(name, (final.observation or "") if final else result)
            except (UserError, BackendError):
                raise
            except Exception as error:
                content = f"Error: {self._explain(name, error)}"
            known = name if name in self.toolbox else "unknown"
            observation.append({"role": "tool", "tool_call_id": call.get("id"), "name": known, "content": content})
        metrics = self._metrics(observation, run)
        if final is not None:
            return _with_metrics(replace(final, observation=observation), metrics)
        over = self.current_turn >= self.max_turns
        return StepResult(0.0, observation, done=over, truncated=over, metrics=metrics)

    def _find(self, call: dict[str, Any]) -> tuple[Tool, dict[str, Any]]:
        """Return the tool of a call, and the arguments as the model gave them."""
        if problem := call.get("malformed"):
            raise ToolError(PROBLEMS.get(problem, f"malformed tool call ({problem})"))
        name, arguments = _name(call), (call.get("function") or {}).get("arguments")
        if name not in self.toolbox:
            near = difflib.get_close_matches(name[:64], self.toolbox, n=1, cutoff=0.5)
            guess = f"did you mean {near[0]}? " if near else ""
            raise ToolError(f"there is no tool {_harmless(name)}; {guess}The tools are: {', '.join(self.toolbox)}")
        if isinstance(arguments, str):
            try:
                arguments = strict_loads(arguments)
            except ValueError:
                raise ToolError(f"the arguments of {name} are not valid JSON") from None
        if not isinstance(arguments, dict):
            raise ToolError(f"the arguments of {name} must be a JSON object")
        return self.toolbox[name], arguments

    async def _call(self, call: Callable[[], Any], timeout: float) -> Any:
        """Await an async call, or run any other on this episode's thread, which is replaced if it hangs."""
        if self._threads is None:
            self._threads = EnvironmentPool(1)
        return await self._threads.call(call, timeout=timeout)

    def _explain(self, name: str, error: Exception) -> str:
        if isinstance(error, ValidationError):
            return _one_line(f"wrong arguments for {name}: {_problems(error)}")
        if isinstance(error, ToolError):
            return _one_line(str(error))
        if isinstance(error, CallTimeoutError):
            return f"{name} took longer than {self.tool_timeout:g} s"
        return _one_line(f"{name} failed: {type(error).__name__}: {error}")

    def _metrics(self, observation: list[Message], run: Counter[str]) -> dict[str, float]:
        """Return the counts of all tools for every turn, so that means are over all turns. Names that the model made up
        have no count."""
        errors = sum(message["content"].startswith("Error: ") for message in observation)
        counts = {f"tool/{name}/calls": float(run[name]) for name in self.toolbox}
        return {"tool_calls": float(len(observation)), "tool_errors": float(errors), **counts}


# -- from a function to a tool ----------------------------------------------------------------------------------------


class _Untitled(GenerateJsonSchema):
    """Pydantic's schemas without the titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> Any:
        out = super().model_schema(schema)
        out.pop("title", None)
        return out


_models: WeakKeyDictionary[Any, tuple[type[BaseModel], dict[str, Any]]] = WeakKeyDictionary()
"""Pydantic model and schema of each function, so that they are made once and not in every episode."""


def _mark(function: Any, name: str | None) -> Any:
    """Mark a function, also one that a `staticmethod` or a `classmethod` wraps.

    Raises:
        UserError: something else was marked, such as the text of `@tool("name")`.
    """
    plain = getattr(function, "__func__", function)
    if not inspect.isroutine(plain):
        raise UserError(
            f"@tool marks {plain!r:.80}, which is no function; write @tool or @tool(name='…') above a method"
        )
    setattr(plain, _MARK, name or plain.__name__)
    return function


def _is_marked(member: Any) -> bool:
    return hasattr(getattr(member, "__func__", member), _MARK)


def _tools_of(provider: Any) -> list[Tool]:
    if isinstance(provider, Tool):
        return [provider]
    if isinstance(provider, Mapping):
        return list(provider.values())
    if inspect.isfunction(provider) and hasattr(provider, _MARK):
        return [_make_tool(provider)]
    # Tools are in definition order, base classes first; an override is the definition that counts.
    names = dict.fromkeys(name for cls in reversed(type(provider).__mro__) for name in vars(cls))
    found = [_make_tool(getattr(provider, n)) for n in names if _is_marked(inspect.getattr_static(provider, n, None))]
    if not found and not isinstance(provider, ToolEnvironment):
        raise UserError(f"{type(provider).__name__} has no tools; mark its methods with @tool")
    return found


def _make_tool(function: Callable[..., Any]) -> Tool:
    name = getattr(function, _MARK)
    where = f"tool {getattr(function, '__qualname__', name)}"
    if not NAME.fullmatch(name):
        raise UserError(f"{where} has the name {name!r}; write 1 to 64 letters, digits, _ or -")
    description = inspect.getdoc(function)
    if not description:
        raise UserError(f"{where} has no docstring; write one, it is what the model reads of the tool")
    plain = getattr(function, "__func__", function)
    if plain not in _models:
        _models[plain] = _model_of(function, where)
    model, parameters = _models[plain]
    schema = {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
    return Tool(name, schema, function, partial(_checked, model))


def _model_of(function: Callable[..., Any], where: str) -> tuple[type[BaseModel], dict[str, Any]]:
    """Return the pydantic model of a function's parameters, and its JSON schema."""
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except (NameError, SyntaxError) as error:
        raise UserError(f"{where} has a type that cannot be found ({error}); define it in the module") from error
    fields: dict[str, Any] = {}
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where} takes {parameter}; a tool's parameters must be named one by one")
        if parameter.name not in types:
            raise UserError(f"{where} has no type for {parameter.name}; write one, such as {parameter.name}: str")
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias, because pydantic reserves some names (schema, model_config, _x).
        fields[f"field_{place}"] = (types[parameter.name], Field(default, alias=parameter.name))
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
        return model, model.model_json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        raise UserError(f"{where} has a type without a JSON schema ({_one_line(str(error))})") from error


def _checked(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    values = model.model_validate(arguments)
    # Arguments that the model left out stay out, so that the function's own defaults apply.
    return {
        str(field.alias): getattr(values, name)
        for name, field in model.model_fields.items()
        if name in values.model_fields_set
    }


# -- results and errors for the model ---------------------------------------------------------------------------------


def _name(call: dict[str, Any]) -> str:
    return str((call.get("function") or {}).get("name") or "")


def _harmless(name: str) -> str:
    """Return a name that the model invented, with characters of control tokens and markup replaced."""
    return re.sub(r"[^\w.-]+", "?", name)[:64]


def _final(name: str, result: Any) -> StepResult | None:
    if not isinstance(result, StepResult):
        return None
    if not result.done:
        raise UserError(f"tool {name} returned a StepResult with done=False; only the end of an episode has a reward")
    return result


def _text(name: str, result: Any) -> str:
    """Convert a result to text that is the same in every process; sets are therefore refused.

    Raises:
        ToolError: the result is too long, nested too deep, or holds a number with thousands of digits; the model's
            arguments can cause that.
        UserError: the result cannot be converted to JSON, independently of the arguments.
    """
    text = result if isinstance(result, str) else _json(name, result)
    if len(text) > _LONGEST_RESULT:
        raise ToolError(f"the result of {name} is longer than {_LONGEST_RESULT} characters")
    return text


def _json(name: str, result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False, default=_dump)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RecursionError) or "digits" in str(error):
            raise ToolError(f"the result of {name} is nested too deep or too large") from error
        raise UserError(f"tool {name} returned {type(result).__name__}, which is not JSON ({error})") from error


def _dump(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON; return text, numbers, lists, dicts or pydantic models")


def _problems(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{_harmless('.'.join(map(str, each['loc'])))}: {each['msg']}" for each in details[:5])


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ERROR else line[: _LONGEST_ERROR - 1] + "…"


def _with_metrics(outcome: Any, metrics: dict[str, float]) -> Any:
    """Return the outcome with `metrics` added. An invalid outcome is returned unchanged; the episode refuses it."""
    if isinstance(outcome, tuple) and len(outcome) == 3:
        outcome = StepResult(*outcome)
    if not isinstance(outcome, StepResult):
        return outcome
    return replace(outcome, metrics={**metrics, **(outcome.metrics or {})})
