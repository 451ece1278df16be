"""Semantics: the role of a span under each known convention. A model call, a tool, an agent, or none of these.

Read are the GenAI semantic conventions of OpenTelemetry (and any-agent's, which came before them), OpenInference and our own
names. Adapters, AIR and whoever names the agent of a call drive it. A span is somebody else's data: an attribute of another
type than its convention says counts as absent, and nothing here raises. Pure; knows nothing of messages
(`traces/genai_spans.py`) or of a span's relations (`span_tree.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import orjson

from agentlightning.records import JSON, Span

SpanRole = Literal["model", "tool", "agent", "chain", "other"]
"""chain: a step of a framework's own, such as a node or a retriever; other: nothing that a convention names."""

AGENT = "agl.agent"
"""Ours: the name of the agent, on any span; everything within the span is that agent's."""

OPERATIONS: Mapping[str, SpanRole] = MappingProxyType({
    "chat": "model", "text_completion": "model", "generate_content": "model", "call_llm": "model", "execute_tool": "tool",
    "invoke_agent": "agent", "invoke_workflow": "chain",
})  # fmt: skip
"""By gen_ai.operation.name; call_llm is any-agent's. create_agent and embeddings are other."""

OPENINFERENCE: Mapping[str, SpanRole] = MappingProxyType(
    {"LLM": "model", "TOOL": "tool", "AGENT": "agent", "CHAIN": "chain", "RETRIEVER": "chain"}
)
"""By openinference.span.kind; EMBEDDING, RERANKER, GUARDRAIL and EVALUATOR are other."""

AGENT_NAMES = (AGENT, "gen_ai.agent.name", "agent.name", "agent_name")
"""Attributes that name the agent on any span, the surest first."""
TOOL_ARGUMENTS = ("gen_ai.tool.call.arguments", "gen_ai.tool.args", "tool_arguments", "input.value")
TOOL_RESULTS = ("gen_ai.tool.call.result", "gen_ai.output", "genai.output", "tool_response", "output.value")
TOOL_CALL_IDS = ("gen_ai.tool.call.id", "tool_call.id", "tool.id")
TOOL_NAMES = ("gen_ai.tool.name", "tool.name")
PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
SAMPLED_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")

PREBUILT_NODES = frozenset({"agent", "model", "call_model", "tools"})
"""Nodes within LangGraph's prebuilt agents."""

RUN_OF = (".run", "._execute_core", ".kickoff", ".run_stream")
"""Suffix that OpenInference gives the name of an agent's span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One execution of a tool."""

    span_id: str
    name: str
    arguments: str | None
    """As the framework wrote them, JSON where it did; None where it did not."""
    result: str | None
    """Result of the tool as text; None where the span does not say."""
    call_id: str | None
    """The id that the model's completion gave the tool call."""
    error: str | None
    """Reason why it failed; None where it did not."""
    started_ns: int
    finished_ns: int


def role_of(span: Span) -> SpanRole:
    """The role of the span.

    >>> role_of(Span(id="1", run_id="", rollout_id="", attempt=1, name="x", attributes={"gen_ai.operation.name":
    "chat"})) 'model'
    """
    own = span.attributes
    if (said := text_of(own, "gen_ai.operation.name")) is not None:
        return OPERATIONS.get(said.lower(), "other")
    if (said := text_of(own, "openinference.span.kind")) is not None:
        return OPENINFERENCE.get(said.upper(), "other")
    return "tool" if first_text(own, TOOL_NAMES) is not None else "other"


def agent_of(span: Span) -> str | None:
    """The agent that the span itself names; None where it names none. What is around it: see `span_tree`."""
    own = span.attributes
    named = first_text(own, AGENT_NAMES) or langgraph_node(span)
    if named is not None:
        return named
    if role_of(span) != "agent":
        return None
    name = text_of(own, "graph.node.id") or span.name
    for ending in RUN_OF:
        name = name.removesuffix(ending)
    return name.removeprefix("invoke_agent ").strip() or None


def langgraph_node(span: Span) -> str | None:
    """The node of a LangGraph graph that a LangChain span ran in; see `graph_node`."""
    table = json_of(span.attributes, "metadata")
    found = table if isinstance(table, dict) else {}
    return graph_node(found.get("langgraph_checkpoint_ns"), found.get("langgraph_node"))


def graph_node(path: object, node: object) -> str | None:
    """The node that a checkpoint's path ``team:5f…|writer:09…|agent:3e…``, from the outermost to the innermost, is about.

    The innermost that is not a prebuilt agent's own: those have the same names in all of them.

    >>> graph_node("team:5f|writer:09|agent:3e", "agent"), graph_node("agent:3e", "agent")
    ('writer', 'agent')
    """
    for part in reversed(path.split("|") if isinstance(path, str) else []):
        name = part.partition(":")[0]
        if name and name not in PREBUILT_NODES:
            return name
    return node if isinstance(node, str) and node else None


def tool_use(span: Span) -> ToolUse | None:
    """The tool use of a tool's span; None for any other span."""
    if role_of(span) != "tool":
        return None
    own = span.attributes
    name = first_text(own, TOOL_NAMES) or span.name.removeprefix("execute_tool ")
    return ToolUse(
        span_id=span.id,
        name=name,
        arguments=next((found for key in TOOL_ARGUMENTS if (found := written(own.get(key))) is not None), None),
        result=_result(own),
        call_id=first_text(own, TOOL_CALL_IDS),
        error=error_of(span),
        started_ns=span.started_ns,
        finished_ns=span.finished_ns,
    )


def error_of(span: Span) -> str | None:
    """The span's error, in one text; None where it did not fail.

    Its status says whether; an exception that somebody recorded and caught is no failure of the span.
    """
    if span.status != "error":
        return None
    for event in reversed(span.events):
        table = event.get("attributes")
        if event.get("name") == "exception" and isinstance(table, dict):
            parts = [text_of(table, "exception.type"), text_of(table, "exception.message")]
            told = ": ".join(part for part in parts if part)
            if told:
                return told
    return span.status_message or text_of(span.attributes, "error.type") or "error"


def model_of(span: Span) -> str:
    """The model that a model call asked for, else the one that answered; '' where neither is named."""
    return first_text(span.attributes, ("gen_ai.request.model", "llm.model_name", "gen_ai.response.model")) or ""


def usage_of(span: Span) -> JSON:
    """prompt_tokens and sampled_tokens of a model call, those that are known."""
    usage: JSON = {}
    for name, keys in (("prompt_tokens", PROMPT_TOKENS), ("sampled_tokens", SAMPLED_TOKENS)):
        counts = (span.attributes.get(key) for key in keys)
        known = (count for count in counts if isinstance(count, int | float) and not isinstance(count, bool))
        count = next((count for count in known if 0 <= count < 1e9), None)  # NaN is in no range
        usage |= {} if count is None else {name: int(count)}
    return usage


def text_of(table: Mapping[str, Any], key: str) -> str | None:
    """The text under `key`; None where there is none, or something else."""
    value = table.get(key)
    return value if isinstance(value, str) else None


def json_of(table: Mapping[str, Any], key: str) -> Any:
    """The value under `key`, read where it is JSON in a text; None where there is none, or a text that is no JSON."""
    return read_json(table.get(key))


def read_json(text: Any) -> Any:
    """The JSON value in a text, None where it is none; what is no text as it is."""
    if not isinstance(text, str):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def first_text(table: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first text, of at least one character, under one of `keys`."""
    return next((found for key in keys if (found := text_of(table, key))), None)


def written(value: Any) -> str | None:
    """A text as it stands, anything else as JSON; None for None, and for what is no JSON."""
    if value is None or isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return None


def plain_result(value: Any) -> str | None:
    """A tool's result, without the wrappers that frameworks put around it.

    >>> plain_result({"type": "text", "text": "42"}), plain_result({"content": "42", "tool_name": "add"}),
    plain_result([1]) ('42', '42', '[1]')
    """
    if isinstance(value, dict):
        inner = value.get("text") if value.get("type") == "text" else None
        if inner is None and {"content", "tool_name"} <= value.keys():
            inner = value["content"]
        if isinstance(inner, str):
            return inner
    return "null" if value is None else written(value)


def _result(own: Mapping[str, Any]) -> str | None:
    value = next((own[key] for key in TOOL_RESULTS if own.get(key) is not None), None)
    read = read_json(value)
    # a text that is no JSON is the result itself; so are texts such as 42 or "a", which are JSON by accident
    if value is None or (isinstance(value, str) and not isinstance(read, dict | str)):
        return value
    return plain_result(read)
