"""Cost of a run: what its training steps used up, added up from the metrics that each step records.

``agl runs show`` and the console's page of a run draw on it. Reads seven metrics, and no rollout. Evaluations are not
counted, nor attempts that were repeated: no step records them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agentlightning.store.base import LightningStore
from agentlightning.store.summaries import MAX_POINTS, bucket_width

COSTS: Mapping[str, str] = {
    "cost/agent_s": "agent seconds",
    "cost/prompt_tokens": "prompt tokens",
    "cost/sampled_tokens": "sampled tokens",
    "cost/fork_agent_s": "agent seconds of forks",
    "cost/fork_sampled_tokens": "sampled tokens of forks",
    "cost/external_tokens": "tokens of external models",
}
"""Names of the amounts, by metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Amounts so far."""

    amounts: dict[str, float]
    """By name; those that no step has recorded are left out."""
    estimated: bool
    """Of a run with more than MAX_POINTS steps only every n-th was read, and stands for n."""


async def read_cost(store: LightningStore, run_id: str) -> RunCost:
    """The cost of a run. NotFoundError where there is no such run."""
    series = await store.series(run_id, list(COSTS), max_points=MAX_POINTS)
    steps = [points[end].step for points in series.values() for end in (0, -1) if points]
    width = bucket_width(min(steps), max(steps), MAX_POINTS) if steps else 1
    sums = {metric: width * math.fsum(point.value for point in points) for metric, points in series.items()}
    amounts = {name: sums[metric] for metric, name in COSTS.items() if metric in sums}
    return RunCost(amounts=amounts, estimated=width > 1)


def amount_text(value: float) -> str:
    """An amount as people read it.

    >>> amount_text(1234567.0), amount_text(0.0123), amount_text(0.0)
    ('1,234,567', '0.0123', '0')
    """
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"
