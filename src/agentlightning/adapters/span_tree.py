"""The spans of one trace as a tree, whatever state they arrived in. Pure.

Programs export what they like: spans whose parents never came, spans twice, parents that go round in a circle. Such a
span stays, and only what is broken is lost: a parent that is not there is none, of two spans of one id the one that
ended later counts, a circle is cut at its earliest span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from agentlightning.adapters.semantics import agent_of, role_of
from agentlightning.records import Call, Span


class SpanTree:
    """Spans by start time, each with its recorded parent."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._by_id: dict[str, Span] = {}
        for span in spans:
            known = self._by_id.get(span.id)
            if known is None or known.finished_ns < span.finished_ns:
                self._by_id[span.id] = span
        self.spans = sorted(self._by_id.values(), key=lambda span: (span.started_ns, span.finished_ns, span.id))
        """Parents before children that start in the same nanosecond is not promised."""
        self._parents = {span.id: span.parent_id for span in self.spans if span.parent_id in self._by_id}
        self._cut_circles()
        self._agents = [span for span in self.spans if role_of(span) == "agent" and agent_of(span)]

    def get(self, span_id: str) -> Span | None:
        """The span of this id."""
        return self._by_id.get(span_id)

    def parent(self, span: Span) -> Span | None:
        """The recorded parent."""
        parent = self._parents.get(span.id)
        return None if parent is None else self._by_id[parent]

    def lineage(self, span: Span) -> Iterator[Span]:
        """The span, its parent, and so on outwards."""
        node: Span | None = span
        while node is not None:
            yield node
            node = self.parent(node)

    def rows(self, calls: Iterable[Call]) -> Iterator[tuple[int, Span | Call]]:
        """Spans and the model calls that were made in them, each with its depth: parents before children, by start."""
        children: dict[str | None, list[Span | Call]] = {}
        for span in self.spans:
            children.setdefault(self._parents.get(span.id), []).append(span)
        for call in calls:
            children.setdefault(call.span_id if call.span_id in self._by_id else None, []).append(call)
        for own in children.values():
            own.sort(key=lambda one: (one.started_ns, one.id), reverse=True)
        waiting = [(0, one) for one in children.get(None, [])]
        while waiting:
            depth, one = waiting.pop()
            yield depth, one
            if isinstance(one, Span):
                waiting += [(depth + 1, child) for child in children.get(one.id, [])]

    def root(self, span: Span) -> Span:
        """The outermost recorded span around this one."""
        *_, last = self.lineage(span)
        return last

    def agent_span(self, span: Span) -> Span | None:
        """The innermost span around this one, itself included, that names an agent; see `agent`."""
        top = span
        for top in self.lineage(span):
            if agent_of(top) is not None:
                return top
        return self._adopted(top) if top.parent_id is not None else None

    def agent(self, span: Span) -> str | None:
        """The agent that did what the span tells; None where nothing recorded says so.

        The innermost span around it that names one. Where the way up ends at a parent that was never exported, the
        agent whose span encloses it in time, in the same trace; None where several do that do not enclose each other:
        they ran side by side, and it may be either's.
        """
        found = self.agent_span(span)
        return None if found is None else agent_of(found)

    def _adopted(self, orphan: Span) -> Span | None:
        around = [
            agent
            for agent in self._agents
            if agent.trace_id == orphan.trace_id
            and agent.id != orphan.id
            and agent.started_ns <= orphan.started_ns
            and agent.finished_ns >= orphan.finished_ns
        ]
        around.sort(key=lambda agent: agent.finished_ns - agent.started_ns)
        nested = all(
            outer.started_ns <= inner.started_ns and outer.finished_ns >= inner.finished_ns
            for inner, outer in pairwise(around)
        )
        return around[0] if around and nested else None

    def _cut_circles(self) -> None:
        place = {span.id: number for number, span in enumerate(self.spans)}
        done: set[str] = set()
        for span in self.spans:
            path: list[str] = []
            node = span.id
            while node not in done and node in self._parents:
                done.add(node)
                path.append(node)
                node = self._parents[node]
            if node in path:
                earliest = min(path[path.index(node) :], key=place.__getitem__)
                del self._parents[earliest]
