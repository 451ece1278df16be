"""Temporal differences on a state graph: each call gets the value of the state it led to, less that of its own state.

After G2PO (2026, "Group-Graph Policy Optimization for Long-Horizon Agentic Reinforcement Learning", arXiv 2606.22995):
equal observations of all rollouts are one node, actions are edges, and an edge's advantage is its TD error; and TIGPO
(2026, arXiv 2609.03383), which keeps the graph across updates. We differ: values are the fixed point of policy evaluation
over the recorded transitions (G2PO: the mean return of a node's visits), states that were seen rarely are drawn to
the value of the states that led to them, earlier steps count less with every step, as the policy moved on, and the
errors are standardised by the advantage rule: within the group by grpo, over the whole step, as in G2PO, by reinforce_pp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from agentlightning.algorithms.credit.keys import observation_key, user_key
from agentlightning.algorithms.credit.rule import Credit, Evidence, credit_rule
from agentlightning.algorithms.credit.state_graph import END, path_of
from agentlightning.algorithms.settings import UnitInterval
from agentlightning.training_types import Trajectory


@credit_rule("graph_td", each="step", needs=("graph",), idle=("forget", "max_states", 0))
def graph_td(
    groups: Sequence[Sequence[Trajectory]],
    evidence: Evidence,
    *,
    gamma: UnitInterval = 1.0,
    prior: NonNegativeFloat = 1.0,
    forget: UnitInterval = 0.9,
    max_states: Annotated[int, Field(ge=0, le=100_000)] = 10_000,
    key: str | None = None,
) -> list[list[Credit]]:
    """r + γ V(next state) - V(state); the last call earns the final reward, and leads to a state of value 0.

    States are equal by `key`, a function ``file.py:name`` of a transition; default: the agent, the task and the last
    observation. `prior` visits draw a state to what led to it; `forget` is how much a visit counts one step later;
    `max_states` of the most visited are kept from step to step (0: none, the graph is of this step alone).

    Rollouts A -> B -> end with reward 1 and A -> C -> end with reward 0, prior = 0: V(A) = 0.5, V(B) = 1, V(C) = 0, so the
    first calls get 0.5 and -0.5, the others 0. With prior = 1: V(B) = (1 + 0.5) / 2, so 0.25 and 0.25. With γ = 1 the
    credits of a rollout add up to its reward less the value of the state that it began in.
    """
    state = observation_key if key is None else user_key(key)
    values = evidence.graph.with_groups(groups, state, forget).values(gamma, prior) | {END: 0.0}
    credits = []
    for group in groups:
        rows = []
        for trajectory in group:
            path = [values[one] for one in path_of(trajectory, state)]
            earned = [transition.reward for transition in trajectory.transitions]
            total = sum(earned) + trajectory.reward
            earned[-1] += trajectory.reward
            changes = [
                reward + gamma * after - before for reward, before, after in zip(earned, path, path[1:], strict=False)
            ]
            rows.append(Credit(values=changes, shares=[0.0] * len(changes), score=total))
        credits.append(rows)
    return credits
