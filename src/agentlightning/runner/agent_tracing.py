"""Tracing of agents: what a worker process sees of the agents it runs, set up once before the first of them.

Model calls say which agent makes them, OpenTelemetry spans find their attempt, and instrumentations that the run asks for
are switched on. An agent that makes no spans loads nothing of OpenTelemetry.
"""

from __future__ import annotations

from types import ModuleType

from agentlightning.config.agent import AgentConfig
from agentlightning.runner.attempt import CURRENT
from agentlightning.tracing.buffer import SpanBuffer
from agentlightning.tracing.frameworks import (
    enable_instrumentations,
    find_instrumentations,
    load_installed_adapters,
)
from agentlightning.tracing.propagation import ContextPropagator, ImportHook


def trace_agents(agent: AgentConfig, server_url: str) -> None:
    """Observe the function agents of this process. Comes after the agent's module, whose own TracerProvider is kept.

    ConfigError where an instrumentation or an installed framework adapter is missing or does not fit.
    """
    load_installed_adapters()
    ContextPropagator(server_url).install()
    if agent.instrumentations:
        from agentlightning.tracing.tracer import Tracer, install

        found = find_instrumentations(agent.instrumentations)
        enable_instrumentations(found, install(Tracer(current_spans)))
    else:
        ImportHook({"opentelemetry.trace": _trace}).start()


def current_spans() -> SpanBuffer | None:
    """Returns where spans of this context go."""
    attempt = CURRENT.get(None)
    return attempt.spans if attempt is not None else None


def _trace(_: ModuleType) -> None:
    from agentlightning.tracing.tracer import Tracer, install

    install(Tracer(current_spans))
