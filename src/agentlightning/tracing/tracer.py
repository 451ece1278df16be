"""Tracer: OpenTelemetry spans that agents of this process make find their attempt, and know whose agent's they are.

A worker makes one and installs it once the agent's code is loaded. A span belongs to the attempt in whose context it starts,
else to that of the span around it, so that threads which were only given an OpenTelemetry context are covered, too. Imported
once OpenTelemetry's SDK is there; knows neither stores nor frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from agentlightning.tracing.buffer import SpanBuffer
from agentlightning.tracing.frameworks import INHERITED, agent_named_by, inherited_agent

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span as LiveSpan

BUFFER = "_agl_buffer"
"""Attribute of a live span: the buffer of its attempt."""


class Tracer(SpanProcessor):
    """Routes every span of the process; the worker delivers them. current: the buffer of this context's attempt."""

    def __init__(self, current: Callable[[], SpanBuffer | None]) -> None:
        self._current = current
        self._buffers: WeakValueDictionary[int, SpanBuffer] = WeakValueDictionary()
        """Of live spans, by span id. A live span keeps its own; one that never ends leaves nothing behind."""

    def on_start(self, span: LiveSpan, parent_context: Context | None = None) -> None:
        parent = trace.get_current_span(parent_context)
        own = agent_named_by(parent.attributes or {}) if isinstance(parent, ReadableSpan) else None
        if (agent := own or inherited_agent(parent)) is not None:
            setattr(span, INHERITED, agent)
        buffer = self._current() or getattr(parent, BUFFER, None)
        if buffer is not None:
            setattr(span, BUFFER, buffer)
            span_id = span.get_span_context().span_id
            self._buffers[span_id] = buffer
            buffer.start(span, span_id)

    def on_end(self, span: ReadableSpan) -> None:
        span_id = span.context.span_id if span.context is not None else 0
        buffer = self._buffers.pop(span_id, None)
        if buffer is not None:
            buffer.end(span, span_id)


def install(tracer: Tracer) -> TracerProvider:
    """Let every span of this process come to `tracer`: through the provider that the agent's code has set up, whose own
    exporters go on as before, else through one of ours, the process's from now on."""
    found = trace.get_tracer_provider()
    if isinstance(found, TracerProvider):
        found.add_span_processor(tracer)
        return found
    provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
    provider.add_span_processor(tracer)
    trace.set_tracer_provider(provider)
    return provider
