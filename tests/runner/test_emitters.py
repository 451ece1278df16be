"""What an agent may say is an OpenTelemetry span of whatever provider the process has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import copy_context

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import agentlightning as agl
from agentlightning.errors import InputError
from agentlightning.runner.emitters import MAX_VALUE_CHARACTERS
from agentlightning.tracing.frameworks import current_agent


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The process can have one provider, so the module's tests share it."""
    made = InMemorySpanExporter()
    found = trace.get_tracer_provider()
    if not isinstance(found, TracerProvider):
        found = TracerProvider(shutdown_on_exit=False)
        trace.set_tracer_provider(found)
    found.add_span_processor(SimpleSpanProcessor(made))
    return made


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def test_a_decorated_function_says_what_it_was_given_and_gave(spans: InMemorySpanExporter) -> None:
    @agl.operation
    def add(a: int, b: int = 2) -> dict[str, int]:
        """Adds."""
        return {"sum": a + b}

    assert add(1) == {"sum": 3}
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    [span] = spans.get_finished_spans()
    assert span.name == "add"
    assert dict(span.attributes or {}) == {
        "openinference.span.kind": "CHAIN",
        "input.value": '{"a":1}',
        "output.value": '{"sum":3}',
    }


async def test_a_decorated_coroutine_is_a_span_of_its_own_for_every_call(spans: InMemorySpanExporter) -> None:
    @agl.operation("look up", kind="tool")
    async def search(query: str) -> str:
        await asyncio.sleep(0)
        return query.upper()

    assert await asyncio.gather(search("a"), search("b")) == ["A", "B"]
    told = [dict(span.attributes or {}) for span in spans.get_finished_spans()]
    assert {one["gen_ai.tool.name"] for one in told} == {"look up"}
    assert {one["gen_ai.tool.call.result"] for one in told} == {"A", "B"}
    assert {one["gen_ai.operation.name"] for one in told} == {"execute_tool"}


def test_an_operation_names_the_agent_within_it(spans: InMemorySpanExporter) -> None:
    with agl.operation("plan", agent="planner"):
        inside = current_agent()
        with agl.operation("critic", kind="agent"):
            nested = current_agent()
    assert (inside, nested, current_agent()) == ("planner", "critic", None)
    inner, outer = spans.get_finished_spans()
    assert (inner.attributes or {})["gen_ai.agent.name"] == "critic"
    assert (inner.attributes or {})["gen_ai.operation.name"] == "invoke_agent"
    assert (outer.attributes or {})["gen_ai.agent.name"] == "planner"


def test_an_exception_marks_the_operation_as_failed_and_goes_on(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ZeroDivisionError), agl.operation("divide"):
        _ = 1 / 0
    [span] = spans.get_finished_spans()
    assert (span.status.is_ok, len(span.events)) == (False, 1)


def test_values_that_json_does_not_know_are_told_by_their_repr_and_long_ones_are_cut(
    spans: InMemorySpanExporter,
) -> None:
    for value in (2**80, {1, 2}, "x" * (MAX_VALUE_CHARACTERS + 1), Shy()):
        assert keep(value) is value
    *told, last = [(span.attributes or {})["output.value"] for span in spans.get_finished_spans()]
    assert told == [repr(2**80), '"{1, 2}"', "x" * MAX_VALUE_CHARACTERS]
    assert "Shy, whose repr raises RuntimeError" in str(last)


def test_messages_objects_and_exceptions_are_spans(spans: InMemorySpanExporter) -> None:
    agl.emit_message("two hits", hits=2, sources=["a", "b"], nothing=None)
    agl.emit_object([1, {"a": None}], "facts")
    agl.emit_exception(ValueError("no such table"))
    message, thing, failure = spans.get_finished_spans()
    assert dict(message.attributes or {}) == {"agl.message": "two hits", "hits": 2, "sources": '["a","b"]'}
    assert dict(thing.attributes or {}) == {"agl.object": '[1,{"a":null}]', "agl.object.name": "facts"}
    assert failure.status.description == "ValueError: no such table"


def many() -> Iterator[int]:
    yield 1


@agl.operation
def keep(value: object) -> object:
    return value


@pytest.mark.parametrize(
    ("say", "sentence"),
    [
        (lambda: agl.operation(many), r"many is a generator.*with agentlightning.operation"),
        (lambda: agl.operation("x", kind="llm"), "kind: expected chain, tool or agent, got 'llm'"),  # type: ignore[call-overload]
        (lambda: agl.emit_message(3), "text: expected a text, got int 3"),  # type: ignore[arg-type]
        (lambda: agl.emit_object(object(), "facts"), "object 'facts': expected what JSON can say"),
        (lambda: agl.emit_exception("no"), "error: expected an exception, got str 'no'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_said_is_refused(say: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        say()  # type: ignore[operator]
    with pytest.raises(TypeError, match="unexpected keyword"):  # as without the decorator
        keep(b=1)  # type: ignore[call-arg]


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("detached")


def test_an_operation_that_is_left_in_another_context_than_it_was_entered_in_fails_nothing(
    spans: InMemorySpanExporter,
) -> None:
    operation = agl.operation("stream", agent="writer")
    copy_context().run(operation.__enter__)
    assert not operation.__exit__(None, None, None)
    assert [span.name for span in spans.get_finished_spans()] == ["stream"]
