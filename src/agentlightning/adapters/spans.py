"""Spans of any framework to model calls: who made each, what the model read and what it answered. Pure.

Reward functions, imports of traces and the views on a rollout drive it. Broken spans cost themselves alone
(`span_tree.py`); what a span does not say is None, and why a call cannot be learned from is told
(`ModelCall.missing`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TypeVar

from agentlightning.adapters.semantics import (
    ToolUse,
    error_of,
    model_of,
    read_json,
    role_of,
    tool_use,
    usage_of,
)
from agentlightning.adapters.span_messages import completion_of, finish_reason_of, prompt_of, tools_of
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.records import JSON, Span

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One model call, as far as somebody recorded it."""

    span_id: str
    agent: str | None = None
    model: str = ""
    messages: list[JSON] | None = None
    """The whole prompt in the form of Chat Completions."""
    completion: JSON | None = None
    """The assistant message."""
    tools: list[JSON] | None = None
    finish_reason: str = "stop"
    usage: JSON = field(default_factory=dict)
    """prompt_tokens and sampled_tokens, those that are known."""
    error: str | None = None
    """Reason why the call failed."""
    mended: bool = False
    """The prompt was not recorded and was put together from the calls and tools before; see `mended`."""
    started_ns: int = 0
    finished_ns: int = 0

    @property
    def missing(self) -> str | None:
        """The reason why it cannot be trained on; None where it can."""
        if self.error is not None:
            return "the call failed"
        if not self.messages:
            return "its prompt was not recorded"
        if self.completion is None or not (self.completion.get("content") or self.completion.get("tool_calls")):
            return "its answer was not recorded"
        return None


def model_calls(tree: SpanTree) -> list[ModelCall]:
    """The model calls in order of time, one for each that was made.

    A call that several layers of a framework recorded, each within the other, is one: the innermost span counts, and
    what it lacks is taken from those around it. Prompts that were not recorded are put together; see `mended`.
    """
    models = [span for span in tree.spans if role_of(span) == "model"]
    outer = {parent.id for span in models if (parent := tree.parent(span)) is not None}
    layers = [
        list(takewhile(lambda layer: role_of(layer) == "model", tree.lineage(span)))
        for span in models
        if span.id not in outer
    ]
    calls = sorted((_model_call(each, tree) for each in layers), key=lambda one: (one.started_ns, one.span_id))
    return mended(calls, tree)


def tool_uses(tree: SpanTree) -> list[ToolUse]:
    """The tools that ran, in order of time."""
    return [use for span in tree.spans if (use := tool_use(span)) is not None]


def mended(calls: Sequence[ModelCall], tree: SpanTree) -> list[ModelCall]:
    """The calls, in order of time, with prompts that were not recorded put together where the trace tells all of them.

    Some instrumentations record the messages of an agent's first call alone. The next call of the same agent then
    read these, the first completion and the results of its tool calls, which tools' spans tell: by the id of the tool
    call, or where spans have none by the tool's name, first those that ran with the same arguments, then in order.
    Where a completion called no tool, or a result is missing, somebody said something that is not recorded, and the
    prompts from there on stay unknown.
    """
    uses: defaultdict[str | None, list[ToolUse]] = defaultdict(list)
    for use in tool_uses(tree):
        span = tree.get(use.span_id)
        uses[_scope(tree, span)].append(use)
    last: dict[str | None, ModelCall] = {}
    result = []
    for call in calls:
        scope = _scope(tree, tree.get(call.span_id))
        before = last.get(scope)
        if call.messages is None and before is not None and before.missing is None:
            assert before.messages is not None  # missing says so
            assert before.completion is not None
            read = _replies(
                before, [use for use in uses[scope] if use.finished_ns <= max(call.started_ns, before.finished_ns)]
            )
            if read is not None:
                completion, replies = read
                call = replace(
                    call,
                    messages=[*before.messages, completion, *replies],
                    tools=call.tools or before.tools,
                    mended=True,
                )
        last[scope] = call
        result.append(call)
    return result


def _replies(call: ModelCall, uses: Sequence[ToolUse]) -> tuple[JSON, list[JSON]] | None:
    """The completion of a call with an id for each of its tool calls, and the messages with their results; None where one
    of these is unknown."""
    assert call.completion is not None
    asked = call.completion.get("tool_calls") or []
    since = [use for use in uses if use.started_ns >= call.started_ns]
    named, replies = [], []
    for place, one in enumerate(asked):
        name = one["function"]["name"]
        fits = [use for use in since if use.call_id and use.call_id == one["id"]]
        if not fits:
            fits = [use for use in since if use.name == name and (use.call_id is None or not one["id"])]
            fits.sort(key=lambda use: not _same_arguments(use.arguments, one["function"]["arguments"]))
        if not fits or (fits[0].result is None and fits[0].error is None):
            return None
        since.remove(fits[0])
        identity = one["id"] or fits[0].call_id or f"call_{call.span_id}_{place}"
        named.append({**one, "id": identity})
        content = fits[0].result if fits[0].result is not None else f"Error: {fits[0].error}"
        replies.append({"role": "tool", "content": content, "tool_call_id": identity})
    return ({**call.completion, "tool_calls": named}, replies) if replies else None


def _same_arguments(ran: str | None, asked: str) -> bool:
    return ran is not None and (ran == asked or ((read := read_json(ran)) is not None and read == read_json(asked)))


def _scope(tree: SpanTree, span: Span | None) -> str | None:
    """The span of the agent around a call, which tells one agent's calls from another's."""
    found = tree.agent_span(span) if span is not None else None
    return None if found is None else found.id


def _model_call(layers: Sequence[Span], tree: SpanTree) -> ModelCall:
    """The call that these spans tell of, the innermost first."""
    span = layers[0]
    completion = _first(completion_of(layer) for layer in layers)
    return ModelCall(
        span_id=span.id,
        agent=tree.agent(span),
        model=_first(model_of(layer) or None for layer in layers) or "",
        messages=_first(prompt_of(layer) for layer in layers),
        completion=completion,
        tools=_first(tools_of(layer) for layer in layers),
        finish_reason=finish_reason_of(span, completion),
        usage=_first(usage_of(layer) or None for layer in layers) or {},
        error=error_of(span),
        started_ns=span.started_ns,
        finished_ns=span.finished_ns,
    )


def _first(found: Iterator[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)
