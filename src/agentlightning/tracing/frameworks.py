"""Frameworks: which agent of a system is at work, asked of the framework that runs it, and what its own spans mean.

Frameworks keep the agent, node or role whose code runs in context variables of their own. Reading them at the moment of a
model call costs about a microsecond, where an instrumentation builds spans for every step. Driven by `propagation.py`, for
each request to the gateway, and by `buffer.py`, for each span. One class per framework: those below, and any subclass of
`FrameworkAdapter` that an agent's code defines or a package announces. Imports no framework: one that is not loaded runs no
agent.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from agentlightning.adapters.semantics import first_text, graph_node
from agentlightning.errors import ConfigError

_NAMED: ContextVar[str] = ContextVar("agentlightning_agent")


NAME_ATTRIBUTES = ("gen_ai.agent.name", "agent.name", "graph.node.name", "agl.agent")
"""Attributes by which spans name their agent: GenAI conventions, OpenInference (agents, nodes of graphs), ours."""


@contextmanager
def use_agent(agent: str) -> Iterator[None]:
    """Model calls within are this agent's, whatever a framework would say."""
    token = _NAMED.set(agent)
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in, where there is nothing to restore
            _NAMED.reset(token)


def current_agent() -> str | None:
    """The agent at work in this context; None where nobody says."""
    named = _NAMED.get(None)
    if named is not None:
        return named
    for adapter, module in _at_work():
        if name := adapter.current_agent(module):
            return name
    return None


def current_span() -> Any:
    """The OpenTelemetry span that a call made in this context belongs to; None where there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    for adapter, module in _at_work():
        if (span := adapter.current_span(module)) is not None:
            return span
    return trace.get_current_span()


class FrameworkAdapter:
    """A framework that agents run in, asked which of its agents is at work. Keeps no state."""

    module: str
    """Must be loaded for the framework to run an agent at all."""

    def current_agent(self, module: ModuleType) -> str | None:
        """The agent at work in this context, None where none is; `module` is the loaded one, of whatever release."""
        return None

    def current_span(self, module: ModuleType) -> Any:
        """The OpenTelemetry span that it keeps for this context beside OpenTelemetry's own; None where there is none."""
        return None


def _at_work() -> Iterator[tuple[FrameworkAdapter, ModuleType]]:
    """The adapters whose frameworks are loaded."""
    for adapter in FRAMEWORKS:
        module = sys.modules.get(adapter.module)
        if module is not None:
            yield adapter, module


class OpenAIAgents(FrameworkAdapter):
    """The agent of the OpenAI Agents SDK whose turn it is, whether its tracing is on or not."""

    module = "agents.tracing.scope"

    def current_agent(self, module: ModuleType) -> str | None:
        current = getattr(getattr(module, "Scope", None), "get_current_span", None)
        span = current() if current is not None else None
        while span is not None:
            data = getattr(span, "span_data", None)
            if getattr(data, "type", None) == "agent":
                return _text(getattr(data, "name", None))
            # The SDK tells a span's parent by its id alone; what was current before it is what its token would restore.
            span = getattr(getattr(span, "_prev_span_token", None), "old_value", None)
        return None


class LangChain(FrameworkAdapter):
    """The node of a LangGraph graph, or the name of a LangChain agent. In the graph of a prebuilt agent, whose nodes have
    the same names in all of them, the node that the agent stands in is meant."""

    module = "langchain_core.runnables.config"

    def current_agent(self, module: ModuleType) -> str | None:
        metadata = self._config(module).get("metadata")
        if not isinstance(metadata, Mapping):
            return None
        node = graph_node(metadata.get("langgraph_checkpoint_ns"), metadata.get("langgraph_node"))
        return _text(metadata.get("lc_agent_name")) or node

    def current_span(self, module: ModuleType) -> Any:
        """Instrumentations are callback handlers here, which never make their span OpenTelemetry's current one."""
        callbacks = self._config(module).get("callbacks")
        run_id = getattr(callbacks, "parent_run_id", None)
        for handler in getattr(callbacks, "handlers", ()) if run_id is not None else ():
            span_of = getattr(handler, "get_span", None)
            if span_of is not None and type(handler).__module__.startswith("openinference."):
                return span_of(run_id)
        return None

    def _config(self, module: ModuleType) -> Mapping[str, Any]:
        variable = getattr(module, "var_child_runnable_config", None)
        config = variable.get(None) if variable is not None else None
        return config if isinstance(config, Mapping) else {}


class AutoGen(FrameworkAdapter):
    """The agent that handles a message of AutoGen's runtime: a member of a team, an agent of autogen-core. For an agent that
    runs alone AutoGen opens a span, which `SpanConventions` reads."""

    module = "autogen_core._message_handler_context"

    def current_agent(self, module: ModuleType) -> str | None:
        variable = getattr(getattr(module, "MessageHandlerContext", None), "_MESSAGE_HANDLER_CONTEXT", None)
        agent = variable.get(None) if variable is not None else None
        name = _text(getattr(agent, "type", None))
        # Members of a team are registered as {name}_{team id}, and so are their topics: {name}_{team id}/{team id}.
        return name and name.removesuffix(f"_{getattr(agent, 'key', '')}")


class SpanConventions(FrameworkAdapter):
    """The agent that the current OpenTelemetry span, or one around it, was opened for."""

    module = "opentelemetry.trace"

    def current_agent(self, module: ModuleType) -> str | None:
        span = module.get_current_span()
        attributes = getattr(span, "attributes", None)
        return (agent_named_by(attributes) if attributes else None) or inherited_agent(span)


FRAMEWORKS: tuple[FrameworkAdapter, ...] = (OpenAIAgents(), AutoGen(), LangChain(), SpanConventions())
"""In the order in which they are asked. Where one framework's agent runs within another's, the first that knows wins."""


def agent_named_by(attributes: Mapping[str, Any]) -> str | None:
    """The agent that a span's own attributes name."""
    return first_text(attributes, NAME_ATTRIBUTES)


INHERITED = "_agl_agent"
"""Attribute of a live span: the agent of the spans around it. The tracer sets it when the span starts."""


def inherited_agent(span: object) -> str | None:
    """The agent of the spans around a live span, where the tracer knows them."""
    return getattr(span, INHERITED, None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# --- instrumentations of the OpenTelemetry and OpenInference ecosystems, found by their entry points ------------------


INSTRUMENTORS = ("openinference_instrumentor", "opentelemetry_instrumentor")
"""In this order: of two packages for one framework, OpenInference's says more about agents."""


def find_instrumentations(names: Iterable[str]) -> list[EntryPoint]:
    """The instrumentations of these names: of an entry point (langchain), or of the package that has it, where two packages
    instrument the same framework (opentelemetry-instrumentation-langchain). Imports none of them.

    ConfigError names the one that is not installed, with the packages that would have it.
    """
    installed = [entry for group in INSTRUMENTORS for entry in entry_points(group=group)]
    return [_one(name, installed) for name in names]


def enable_instrumentations(found: Iterable[EntryPoint], provider: Any) -> None:
    """Let each write spans to this OpenTelemetry TracerProvider. ConfigError where one does not fit what is installed."""
    for entry in found:
        try:
            instrumentor = entry.load()()
            instrumentor.instrument(tracer_provider=provider, raise_exception_on_conflict=True)
        except Exception as cause:  # of somebody else's package: whatever it raises, it does not run
            raise ConfigError(
                f"agent.trace: {_package(entry)} cannot instrument {entry.name!r} here: {cause}"
            ) from cause


def _one(name: str, installed: list[EntryPoint]) -> EntryPoint:
    wanted = _underscored(name)
    for entry in installed:
        if wanted in (_underscored(entry.name), _underscored(_package(entry))):
            return entry
    known = ", ".join(sorted({entry.name for entry in installed})) or "none"
    raise ConfigError(
        f"agent.trace: no instrumentation named {name!r} is installed; install it with: pip install "
        f"openinference-instrumentation-{_dashed(name)} (or opentelemetry-instrumentation-{_dashed(name)}); "
        f"installed are {known}"
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


def _underscored(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _dashed(name: str) -> str:
    return _underscored(name).replace("_", "-")
