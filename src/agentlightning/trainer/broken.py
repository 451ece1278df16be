"""What was broken in the spans of a step's rollouts, as numbers of the step. `record.py` drives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentlightning.engines.base import Metrics
from agentlightning.store.base import BROKEN, BROKEN_SPANS, LightningStore, broken_counts
from agentlightning.types import Rollout


async def broken_spans(store: LightningStore, rollouts: Sequence[Rollout]) -> Metrics:
    """broken_spans and broken_spans_CAUSE: counts; nothing where no rollout's warning tells of any, so that usually no
    span is read."""
    causes: Counter[str] = Counter()
    for rollout in rollouts:  # one at a time: an attempt may have many megabytes of spans
        for span in await store.spans([rollout.id]) if BROKEN in (rollout.warning or "") else ():
            if span.name == BROKEN_SPANS and span.attempt == rollout.attempt:
                causes.update(broken_counts(span.attributes))
    if not causes:
        return {}
    by_cause = {f"broken_spans_{cause}": float(count) for cause, count in causes.items()}
    return {"broken_spans": float(causes.total())} | by_cause
