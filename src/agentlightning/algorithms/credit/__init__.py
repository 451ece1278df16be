"""Which call earned what: a rule turns a trajectory's reward into one reward per transition.

A rule is a function of a file of its own, named in `CREDIT`. It sees the whole group, since some rules compare rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from agentlightning.algorithms.credit.uniform import uniform
from agentlightning.types import Trajectory

CreditRule = Callable[[Trajectory, Sequence[Trajectory]], list[float]]
"""(trajectory, its group, itself included) -> one reward per transition."""

CREDIT: Mapping[str, CreditRule] = MappingProxyType({"uniform": uniform})
