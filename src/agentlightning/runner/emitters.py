"""Emitters, by which an agent records more than its model calls: `operation`, `emit_message`, `emit_object`,
`emit_exception`.

All of them are OpenTelemetry spans: where the agent runs under a worker, of its attempt; where it runs without us, of
whatever TracerProvider the process has, else nowhere. An agent that uses them so runs anywhere. (`emit_reward` needs an
attempt and stands in agent.py.) OpenTelemetry is imported when one is first used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import orjson

from agentlightning.errors import InputError
from agentlightning.tracing.frameworks import use_agent

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = Literal["chain", "tool", "agent"]

MESSAGE, OBJECT, EXCEPTION = "agl.message", "agl.object", "agl.exception"
"""Names of the spans that emit_message, emit_object and emit_exception leave."""

MAX_VALUE_CHARACTERS = 16 * 1024
"""Characters of what a decorated function was given, or gave, that its span keeps."""

_VALUES = (("input.value", "output.value"), ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"))
"""Attributes of what a function was given and gave: of any other kind, of a tool."""

_OPERATIONS = {"tool": "execute_tool", "agent": "invoke_agent"}
_PLAIN = (str, bool, int, float)


def emit_message(text: str, **attributes: Any) -> None:
    """Record a text at this point of the agent's run, with attributes of your own. InputError where it is no text."""
    if not isinstance(text, str):
        raise InputError(f"text: expected a text, got {type(text).__name__} {text!r:.80}")
    _emit(MESSAGE, {"agl.message": text, **_attributes(attributes)})


def emit_object(value: Any, name: str = "object", **attributes: Any) -> None:
    """Record any JSON value under a name. InputError where it is none."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError as cause:
        raise InputError(f"object {name!r}: expected what JSON can say, {cause}") from None
    _emit(OBJECT, {"agl.object": text, "agl.object.name": name, **_attributes(attributes)})


def emit_exception(error: BaseException, **attributes: Any) -> None:
    """Record an exception that the agent has dealt with; one that leaves an `operation` is recorded by itself.
    InputError where it is none."""
    if not isinstance(error, BaseException):
        raise InputError(f"error: expected an exception, got {type(error).__name__} {error!r:.80}")
    from opentelemetry.trace import Status, StatusCode

    with _tracer().start_as_current_span(EXCEPTION, attributes=_attributes(attributes)) as span:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


class Operation(AbstractContextManager["Span"]):
    """Result of `operation`: a context manager for one use, or a decorator for any number of calls."""

    def __init__(self, name: str | None, kind: Kind, agent: str | None, attributes: Mapping[str, Any]) -> None:
        self._name = name or "operation"
        self._named = name is not None
        self._kind = kind
        self._agent = agent
        self._given = attributes
        self._entered: AbstractContextManager[Span] | None = None

    def __enter__(self) -> Span:
        self._entered = self._span(self._attributes)
        return self._entered.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        assert self._entered is not None
        return self._entered.__exit__(*exception)

    def __call__(self, function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InputError(
                f"operation: {function.__qualname__} is a generator, which ends long after its call; write "
                "`with agentlightning.operation(…):` inside it"
            )
        name = self._name if self._named else function.__name__
        return Operation(name, self._kind, self._agent, self._given)._decorate(function)

    @cached_property
    def _tracer(self) -> Tracer:
        return _tracer()

    @cached_property
    def _attributes(self) -> dict[str, Any]:
        told = {"openinference.span.kind": self._kind.upper(), **self._given}
        if self._kind in _OPERATIONS:
            told["gen_ai.operation.name"] = _OPERATIONS[self._kind]
        if self._kind == "tool":
            told["gen_ai.tool.name"] = self._name
        if self._agent is not None:
            told["gen_ai.agent.name"] = self._agent
        return told

    @contextmanager
    def _span(self, attributes: Mapping[str, Any]) -> Iterator[Span]:
        agent = nullcontext() if self._agent is None else use_agent(self._agent)
        with agent, self._tracer.start_as_current_span(self._name, attributes=attributes) as span:
            yield span

    def _decorate(self, function: Function) -> Function:
        signature = inspect.signature(function)
        given, gave = _VALUES[self._kind == "tool"]

        @contextmanager
        def called(arguments: Any, options: Any) -> Iterator[Callable[[Any], Any]]:
            """A span of one call; yields what notes its result and returns it."""
            with self._span(self._attributes) as span:
                if span.is_recording():
                    with suppress(TypeError):  # of arguments that do not fit: the call itself says it better
                        bound = signature.bind(*arguments, **options).arguments
                        bound.pop("self", None)
                        span.set_attribute(given, _json(bound))

                def note(result: Any) -> Any:
                    if span.is_recording():
                        text = result[:MAX_VALUE_CHARACTERS] if isinstance(result, str) else _json(result)
                        span.set_attribute(gave, text)
                    return result

                yield note

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*arguments: Any, **options: Any) -> Any:
                with called(arguments, options) as note:
                    return note(await function(*arguments, **options))

            return asynchronous  # type: ignore[return-value]

        @functools.wraps(function)
        def synchronous(*arguments: Any, **options: Any) -> Any:
            with called(arguments, options) as note:
                return note(function(*arguments, **options))

        return synchronous  # type: ignore[return-value]


@overload
def operation(name: Function, /) -> Function: ...
@overload
def operation(
    name: str | None = None, /, *, kind: Kind = "chain", agent: str | None = None, **attributes: Any
) -> Operation: ...
def operation(
    name: str | Callable[..., Any] | None = None,
    /,
    *,
    kind: Kind = "chain",
    agent: str | None = None,
    **attributes: Any,
) -> Any:
    """A step of the agent's own as a span: around a block, or around every call of a function.

        with agl.operation("search", kind="tool", query=query) as span:
            span.set_attribute("hits", len(found))

        @agl.operation(agent="planner")       # model calls within are the planner's
        async def plan(question: str) -> str: ...

    kind: a tool's span counts as an execution of that tool wherever traces are read (AIR, adapters); an agent's names the
    agent, as `agent` does for any kind. A decorated function's arguments and result are recorded as JSON, cut to 16 Ki
    characters. An exception that leaves the block is recorded, marks the span as failed and goes on. InputError for another
    kind, and for a generator function.
    """
    if callable(name):
        return Operation(None, "chain", None, {})(name)
    if kind not in ("chain", "tool", "agent"):
        raise InputError(f"kind: expected chain, tool or agent, got {kind!r}")
    if kind == "agent" and agent is None:
        agent = name
    return Operation(name, kind, agent, _attributes(attributes))


def _emit(name: str, attributes: Mapping[str, Any]) -> None:
    _tracer().start_span(name, attributes=dict(attributes)).end()


def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("agentlightning")


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """OpenTelemetry knows plain values and lists of them; anything else becomes JSON text, None is left out."""
    return {
        key: value if isinstance(value, _PLAIN) else _json(value) for key, value in given.items() if value is not None
    }


def _json(value: Any) -> str:
    try:
        text = orjson.dumps(value, default=_shown, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a number of more than 64 bits, keys of no known kind
        text = _shown(value)
    return text[:MAX_VALUE_CHARACTERS]


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as cause:  # of the agent's own class: it must not fail for being looked at
        return f"<{type(value).__name__}, whose repr raises {type(cause).__name__}>"
