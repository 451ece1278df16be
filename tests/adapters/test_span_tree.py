"""Trees of spans, whole and broken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from span_samples import a_span, agent, model

from agentlightning.adapters.span_tree import SpanTree
from agentlightning.records import Span


def test_a_call_is_the_innermost_agents_around_it_and_of_agents_side_by_side_none_is_guessed() -> None:
    spans = [agent("team"), agent("writer", "team", at=1), a_span("node", "writer", 2), model("call", "node", 3)]
    assert SpanTree(spans).agent(spans[-1]) == "writer"
    spans = [agent("planner", until=100), model("call", "never", 50)]  # its parent was never exported
    assert SpanTree(spans).agent(spans[1]) == "planner"
    spans = [agent("one", until=100), agent("two", at=10, until=120), model("call", "never", 50)]
    assert SpanTree(spans).agent(spans[2]) is None


def test_a_circle_is_cut_at_its_earliest_span() -> None:
    spans = [a_span("a", "c", 3), a_span("b", "a", 1), a_span("c", "b", 2)]
    tree = SpanTree(spans)
    assert [span.id for span in tree.lineage(spans[2])] == ["c", "b"]
    assert [span.id for span in tree.lineage(spans[0])] == ["a", "c", "b"]


def test_of_two_spans_of_one_id_the_one_that_ended_later_counts() -> None:
    begun, ended = a_span("a", at=5, until=0), a_span("a", at=5, until=9)
    for spans in ([begun, ended], [ended, begun]):
        assert [span.finished_ns for span in SpanTree(spans).spans] == [9]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.none() | st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=14
    )
)
def test_every_tree_ends_and_keeps_every_span(drawn: list[tuple[int, int | None, int, bool]]) -> None:
    spans = [
        (agent if named else model)(str(name), None if parent is None else str(parent), at)
        for name, parent, at, named in drawn
    ]
    tree = SpanTree(spans)
    assert {span.id for span in tree.spans} == {span.id for span in spans}
    for span in tree.spans:
        lineage = [one.id for one in tree.lineage(span)]
        assert len(lineage) == len(set(lineage)) <= len(tree.spans)
        assert tree.root(span).id == lineage[-1]
        tree.agent(span)
    parents = {span.id: span.parent_id for span in tree.spans}
    circles = set()
    for start in parents:
        node: str | None = start
        for _ in parents:  # after so many steps up, whoever has not left the tree is in a circle
            node = parents.get(node) if node is not None else None
        circle, at = set(), node
        while at in parents and at not in circle:
            circle.add(at)
            at = parents[at]
        if node in parents:
            circles.add(frozenset(circle))
    cut = [name for name, parent in parents.items() if parent in parents and tree.parent(by_id(tree, name)) is None]
    assert len(cut) == len(circles)  # a parent that is recorded is kept, but for one of each circle


def by_id(tree: SpanTree, name: str) -> Span:
    found = tree.get(name)
    assert found is not None
    return found
