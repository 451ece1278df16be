"""Figures of a canary that gets copies of calls: how it did beside the version that answered them.

Driven by controller.py. Read from the spans that gateways record of copies (gateway/policy/shadow_calls.py); decides
nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from agentlightning.config.serve import RoutesConfig
from agentlightning.gateway.sessions.routes import is_shadowed
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.gateway_events import SHADOW_CALL
from agentlightning.store.scan import read_rollouts
from agentlightning.trainer.canary.results import OVERLAP_MS, first_id

MEASURES = {
    "seconds, median": ("seconds", 0.5),
    "seconds, 95 of 100": ("seconds", 0.95),
    "tokens, mean": ("tokens", None),
    "log-probability": ("logprob", None),
}
"""By name the attribute, and the quantile of it; None: the mean."""


async def read_shadow_figures(store: LightningStore, run_id: str, routes: RoutesConfig, started_ns: int) -> JSON:
    """The calls that were copied to the canary since `started_ns`, how many copies were completed, failed, by code, and were
    dropped, and each measure of the completed ones beside that of the same calls as they were served.

    log-probability: mean per token of the served completions, under the version that sampled them and under the canary, of
    the calls that allow it; the difference estimates how far the canary is from what users get now, in nats per token.
    """
    copies: list[JSON] = []
    query = RolloutQuery(run_id=run_id, step=routes.stable, after=first_id(started_ns // 1_000_000 - OVERLAP_MS))
    async for portion in read_rollouts(store, query):
        ids = [one.id for one in portion if is_shadowed(str(one.task.get("session")), routes)]
        for span in await store.spans(ids) if ids else []:
            about = span.attributes if span.name == SHADOW_CALL else {}
            if about.get("version") == routes.canary and span.started_ns >= started_ns:
                copies.append(about)
    completed = [one for one in copies if "error" not in one]
    return {
        "calls": len(copies),
        "completed": len(completed),
        "failed": dict(Counter(str(one["error"]) for one in copies if "error" in one)),
        "dropped": sum(one["dropped"] for one in copies),
        "equal": statistics.fmean(one["equal"] for one in completed) if completed else None,
        "measures": {
            name: {
                side: _summarise([one[prefix + attribute] for one in completed if attribute in one], quantile)
                for side, prefix in (("served", "served_"), ("copy", ""))
            }
            for name, (attribute, quantile) in MEASURES.items()
        },
    }


def _summarise(values: Sequence[float], quantile: float | None) -> float | None:
    """The mean, or a quantile by the nearest rank; None of nothing.

    >>> _summarise([1, 2, 3, 10], 0.5), _summarise([1, 2, 3, 10], 0.95), _summarise([1, 2, 3, 10], None)
    (2, 10, 4.0)
    """
    if not values or quantile is None:
        return statistics.fmean(values) if values else None
    return sorted(values)[min(len(values), math.ceil(quantile * len(values))) - 1]
