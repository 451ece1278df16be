"""What was broken in the spans of a step's rollouts, as numbers of the step. `record.py` drives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentlightning.engines.base import Metrics
from agentlightning.store.base import BROKEN, BROKEN_SPANS, LightningStore
from agentlightning.types import Rollout


async def broken_spans(store: LightningStore, rollouts: Sequence[Rollout]) -> Metrics:
    """broken_spans and broken_spans_CAUSE: counts; nothing where no rollout's warning tells of any, so that usually no
    span is read."""
    told = {rollout.id: rollout.attempt for rollout in rollouts if BROKEN in (rollout.warning or "")}
    causes: Counter[str] = Counter()
    for span in await store.spans(list(told)) if told else ():
        if span.name == BROKEN_SPANS and span.attempt == told[span.rollout_id]:
            causes.update(span.attributes)
    if not causes:
        return {}
    by_cause = {f"broken_spans_{cause}": float(count) for cause, count in causes.items()}
    return {"broken_spans": float(causes.total())} | by_cause
