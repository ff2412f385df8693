"""The interface that authors of environments implement: an environment is one episode of one task."""

from __future__ import annotations

import dis
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import CodeType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from mtrl.environments.results import StepResult
from mtrl.types import Message, Row

T = TypeVar("T")


class Resources(ExitStack):
    """The resources of an episode. `close` releases all of them in reverse order, even if one release fails.

    After `close` no resource can be added. A `reset` that exceeded its time limit and continues on its thread gets a
    `RuntimeError`, and the resources that it acquired meanwhile are released at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._closed = False
        self._closing = threading.RLock()

    def enter_context(self, cm: AbstractContextManager[T]) -> T:
        """Enter a context manager, and exit it at the end of the episode."""
        value = super().enter_context(cm)
        self._check()
        return value

    def callback(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Call a function at the end of the episode."""
        super().callback(callback, *args, **kwargs)
        self._check()
        return callback

    def push(self, exit: Any) -> Any:
        """Call the `__exit__` of an object at the end of the episode."""
        super().push(exit)
        self._check()
        return exit

    def close(self) -> None:
        """Release all resources, and then raise the last error, if any. Further calls do nothing."""
        self._closed = True
        with self._closing:
            super().close()

    def _check(self) -> None:
        if self._closed:
            self.close()  # releases a resource that was added during or after `close`
            raise RuntimeError("the episode is over: it can take no more resources")


@runtime_checkable
class TakesMessages(Protocol):
    """Interface of an environment that receives the parsed message instead of the text for `step`."""

    tools: Any
    """Schemas of the tools, in OpenAI's form, read after `reset`. The chat template shows them to the model."""

    def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> Any:
        """Like `step`; `message` is the parsed response with its `tool_calls` (see mtrl/environments/tool_calls.py)."""


def _counts_turns(cls: type) -> bool:
    """Whether a method of the class, or of a base below `BaseEnvironment`, sets `current_turn` after the start.

    An overridden method counts only if another method calls it by `super()` or by the name of its class. A helper that
    only uncalled overridden methods call does not count either.
    """
    own = [base for base in cls.__mro__ if base not in (BaseEnvironment, object)]
    methods = {
        (name, place): list(_codes(method))
        for place, base in enumerate(own)
        for name, method in vars(base).items()
        if inspect.isfunction(method) and name not in ("__init__", "reset")
    }
    resolved = [(name, place) for name, place in methods if not any(name in vars(base) for base in own[:place])]
    alive = _called(resolved, methods, {base.__name__ for base in own})
    lost = _used(methods.keys() - alive, methods) - _used(alive, methods) - {*vars(BaseEnvironment), "respond"}
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == "current_turn"
        for name, place in alive
        if name not in lost
        for code in methods[name, place]
        for instruction in dis.get_instructions(code)
    )


_Methods = dict[tuple[str, int], list[CodeType]]
"""Code objects of each method, by its name and the place of its class in the method resolution order."""


def _called(resolved: list[tuple[str, int]], methods: _Methods, classes: set[str]) -> set[tuple[str, int]]:
    """Return the resolved methods, and the overridden methods that these call, directly or not."""
    found, left = set(resolved), list(resolved)
    while left:
        used = _used([key := left.pop()], methods)
        if not used.isdisjoint({"super", *classes}):
            above = {(name, place) for name, place in methods if name in used and place > key[1]} - found
            found |= above
            left += above
    return found


def _used(keys: Iterable[tuple[str, int]], methods: _Methods) -> set[str]:
    return {name for key in keys for code in methods[key] for name in code.co_names}


def _codes(method: Any) -> Iterator[CodeType]:
    """Yield the code of a function, of the functions within it, and of the functions that it wraps."""
    while method is not None:
        left = [method.__code__]
        while left:
            yield (code := left.pop())
            left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        method = getattr(method, "__wrapped__", None)


def _counting(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step` so that it first adds 1 to `current_turn`. If a subclass calls it by `super()`, only the subclass's
    `step` counts."""

    def count(self: BaseEnvironment) -> None:
        if type(self).step in (counted, counted_async):
            self.current_turn = getattr(self, "current_turn", 0) + 1

    @functools.wraps(step)
    def counted(self: BaseEnvironment, *args: Any, **keywords: Any) -> Any:
        count(self)
        return step(self, *args, **keywords)

    @functools.wraps(step)
    async def counted_async(self: BaseEnvironment, *args: Any, **keywords: Any) -> Any:
        count(self)
        return await step(self, *args, **keywords)

    return counted_async if inspect.iscoroutinefunction(step) else counted


class BaseEnvironment:
    """One episode. Every trajectory gets a new object, and `close` is always called.

    `mtrl.environments.tools.ToolEnvironment` is a subclass with tools.

    Example::

        class Guess(BaseEnvironment):
            def __init__(self, max_turns: int = 5):
                super().__init__(max_turns)

            def step(self, response, ground_truth):
                self.current_turn += 1
                if response.strip() == ground_truth["answer"]:
                    return 1.0, None, True
                return 0.0, "Wrong, try again.", self.current_turn >= self.max_turns
    """

    reward_schemes: ClassVar[tuple[str, ...]] = ("default",)
    """Valid values of `reward.scheme`. If there are several, `__init__` gets the chosen one as `reward`."""

    def __init_subclass__(cls, **keywords: Any):
        """Adapt classes written as in the Multi-Turn Training Guide: `reset` may lack the row, and `step` may read
        `current_turn` without counting it."""
        super().__init_subclass__(**keywords)
        own = vars(cls).get("reset")
        if inspect.isfunction(own) and len(inspect.signature(own).parameters) == 1:
            cls.reset = functools.wraps(own)(lambda self, row=None: own(self))  # type: ignore[method-assign]
        step = vars(cls).get("step")
        if inspect.isfunction(step) and not _counts_turns(cls):
            cls.step = _counting(step)  # type: ignore[method-assign]

    def __init__(self, max_turns: int = 5, **config: Any):
        self.max_turns = max_turns
        self.current_turn = 0

    @property
    def resources(self) -> Resources:
        """The resources that the episode acquires and that are always released::

        self.folder = self.resources.enter_context(TemporaryDirectory())
        self.process = self.resources.enter_context(Popen(command, cwd=self.folder))
        self.resources.callback(self.process.kill)  # before the wait for it: reverse order
        """
        return self.__dict__.setdefault("_resources", Resources())  # an atomic operation, because threads may race

    def reset(self, row: Row | None = None) -> list[Message] | None:
        """Start the episode of `row`. It may return opening messages, which then replace the row's `prompt`."""
        self.current_turn = 0
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, Any, bool] | StepResult:
        """Process the model's `response` (text of one turn); return `(reward, observation, done)` or a `StepResult`.

        The observation is text (a user message), a message, a list of messages, or None. The method may be `async`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define step(response, ground_truth)")

    def truncate(self, ground_truth: dict[str, Any]) -> dict[str, float] | StepResult:
        """Return reward components to add when a limit of the run, on turns or context, cuts the episode.

        It is called after a step that did not end the episode. The components are added to the reward of the last turn;
        by default there are none. An environment that grants rewards in advance takes back here the part that the end
        of the episode would have taken back. From a `StepResult`, its reward, components and metrics are added.
        """
        return {}

    def close(self) -> None:
        """Release the resources of the episode. It is called once, also after errors and time-outs.

        An override must call `super().close()`, which releases `resources`.
        """
        self.resources.close()
