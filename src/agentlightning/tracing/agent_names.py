"""Names the agents of calls that did not say whose they are, from the spans around them.

Calls of this system's own workers say it themselves. A program that is traced by OpenTelemetry says within which span it
calls, and sends that span later: where selection by agent needs a name, it is read from there. The record is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentlightning.adapters.span_tree import SpanTree
from agentlightning.records import Call, Span
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import by_attempt


async def named_calls(store: LightningStore, calls: Sequence[Call]) -> list[Call]:
    """The calls, those that lack an agent with the one that their span is within; reads spans only where one lacks it."""
    nameless = {call.rollout_id for call in calls if call.agent is None and call.span_id is not None}
    if not nameless:
        return list(calls)
    return name_calls(calls, await store.spans(sorted(nameless)))


def name_calls(calls: Sequence[Call], spans: Sequence[Span]) -> list[Call]:
    """`named_calls` without a store. A call whose span was never recorded, or is nobody's, stays without a name."""
    trees = {place: SpanTree(found) for place, found in by_attempt(spans).items()}
    return [_named(call, trees.get((call.rollout_id, call.attempt))) for call in calls]


def _named(call: Call, tree: SpanTree | None) -> Call:
    if tree is None or call.agent is not None or call.span_id is None:
        return call
    span = tree.get(call.span_id)
    agent = tree.agent(span) if span is not None else None
    return call if agent is None else replace(call, agent=agent)
