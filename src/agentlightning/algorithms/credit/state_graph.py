"""State graph: the states that calls were made in, as nodes, and the calls that led from one to another, as edges.

The rule `graph_td` reads values off it; `credit_inputs` keeps it across the steps of a run. Immutable; the same groups in
the same order give the same graph. Knows nothing of what a state is: a key function tells.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from agentlightning.algorithms.credit.keys import Key
from agentlightning.training_types import Trajectory, Transition

END = ""
"""The state after a rollout's last call; its value is 0."""
MAX_SWEEPS = 1000
MIN_VISITS = 1e-3
"""A state that was visited less, its visits discounted, is forgotten."""
TOLERANCE = 1e-10
"""Values are swept until none moves further."""

Edge = tuple[float, float]
"""Visits, with those of earlier steps discounted, and the mean reward of the calls."""


@dataclass(frozen=True, slots=True)
class StateGraph:
    """Visits of edges by state and next state; every state has one."""

    edges: Mapping[str, Mapping[str, Edge]] = field(default_factory=dict)

    def with_groups(self, groups: Sequence[Sequence[Trajectory]], key: Key, forget: float = 1.0) -> StateGraph:
        """The graph with the calls of these groups; earlier visits count `forget` times what they did."""
        faded = {
            state: {following: (visits * forget, reward) for following, (visits, reward) in out.items()}
            for state, out in self.edges.items()
        }
        edges = _only(faded, {state for state, out in faded.items() if _visits(out) >= MIN_VISITS})
        for trajectory in (one for group in groups for one in group):
            states = path_of(trajectory, key)
            for transition, state, following in zip(trajectory.transitions, states, states[1:], strict=False):
                reward = transition.reward + (trajectory.reward if following == END else 0.0)
                visits, mean = edges.setdefault(state, {}).get(following, (0.0, 0.0))
                edges[state][following] = (visits + 1.0, mean + (reward - mean) / (visits + 1.0))
        return StateGraph(edges)

    def bounded(self, max_states: int) -> StateGraph:
        """The most visited states, at most so many, less those that led to others alone."""
        if len(self.edges) <= max_states:
            return self
        by_visits = sorted(self.edges, key=lambda state: (-_visits(self.edges[state]), state))
        return StateGraph(_only(self.edges, set(by_visits[:max_states])))

    def values(self, gamma: float, prior: float) -> dict[str, float]:
        """Value of each state: V(s) = Σ visits × (r + γ V(s')) / Σ visits, drawn to what leads to it by `prior` visits.

        The first is iterative policy evaluation (Sutton & Barto 2018, equation 4.5) over the recorded transitions, to its
        fixed point. Then Ṽ(s) = (n V(s) + prior × P(s)) / (n + prior), with P(s) the mean of (Ṽ(p) - r) / γ over the edges
        p -> s: what s is worth if the call that led to it made no difference. A state that nothing leads to keeps its V.
        P is kept within the range of all V: with γ < 1 a loop that was seen rarely would be drawn beyond all bounds.
        """
        ends = [reward for out in self.edges.values() for to, (_, reward) in out.items() if to == END]
        found = dict.fromkeys(self.edges, statistics.fmean(ends) if ends else 0.0)

        def expected(state: str) -> float:
            out = self.edges[state]
            total = sum(visits * (reward + gamma * found.get(to, 0.0)) for to, (visits, reward) in out.items())
            return total / _visits(out)

        _sweep(found, expected, [*self.edges][::-1])  # later states first: a tree is settled by one sweep
        if not prior or not gamma:
            return found
        plain, leading = dict(found), self._leading()
        low, high = min(plain.values(), default=0.0), max(plain.values(), default=0.0)

        def drawn(state: str) -> float:
            visits, before = _visits(self.edges[state]), leading.get(state)
            if not before:
                return plain[state]
            total = sum(count * (found[origin] - reward) / gamma for origin, (count, reward) in before.items())
            towards = min(high, max(low, total / _visits(before)))
            return (visits * plain[state] + prior * towards) / (visits + prior)

        _sweep(found, drawn, list(self.edges))
        return found

    def _leading(self) -> dict[str, dict[str, Edge]]:
        """Edges by the state that they lead to; those of a state to itself tell nothing."""
        leading: defaultdict[str, dict[str, Edge]] = defaultdict(dict)
        for state, out in self.edges.items():
            for to, edge in out.items():
                if to not in (END, state):
                    leading[to][state] = edge
        return dict(leading)


def path_of(trajectory: Trajectory, key: Key) -> list[str]:
    """The states of a rollout's calls, and the end. A call whose key is None is in a state of its own."""
    return [*(_name(transition, key) for transition in trajectory.transitions), END]


def _name(transition: Transition, key: Key) -> str:
    state = key(transition)
    text = repr(transition.call_id if state is None else state)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _only(edges: Mapping[str, Mapping[str, Edge]], kept: set[str]) -> dict[str, dict[str, Edge]]:
    """The edges among these states, less states that no edge leaves: every state of a graph leads on to the end."""
    while True:
        left = {
            state: {to: edge for to, edge in out.items() if to == END or to in kept}
            for state, out in edges.items()
            if state in kept
        }
        whole = {state: out for state, out in left.items() if out}
        if whole.keys() == kept:
            return whole
        kept = set(whole)


def _visits(edges: Mapping[str, Edge]) -> float:
    return sum(visits for visits, _ in edges.values())


def _sweep(found: dict[str, float], update: Callable[[str], float], order: Sequence[str]) -> None:
    for _ in range(MAX_SWEEPS):
        moved = 0.0
        for state in order:
            value = update(state)
            moved = max(moved, abs(value - found[state]))
            found[state] = value
        if moved <= TOLERANCE:
            return
