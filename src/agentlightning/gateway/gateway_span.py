"""gateway_span: the span by which the gateway itself tells an attempt's record of an event: a refused call, an unknown
route, a reached limit, a deleted response. Knows no store: the caller appends it."""

from __future__ import annotations

import time

from uuid_utils import uuid7

from agentlightning.records import JSON, Rollout, Span


def gateway_span(rollout: Rollout, attempt: int, name: str, attributes: JSON, error: str | None = None) -> Span:
    """Make a span of this moment; `error` is the message of one that tells of an error."""
    now = time.time_ns()
    return Span(
        id=str(uuid7()),
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=attempt,
        name=name,
        attributes=attributes,
        started_ns=now,
        finished_ns=now,
        status="unset" if error is None else "error",
        status_message=error or "",
    )
