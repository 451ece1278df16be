"""Feedback: the words that a reward function gave beside its numbers, kept as a span of the attempt.

The worker writes it before the attempt finishes; screens show it beside the rewards, and a search over prompts reads it of
many rollouts. A span, so that every store carries it as it is; no OTLP exporter can make one of this id.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from agentlightning.errors import RewardError
from agentlightning.records import Rollout, Span
from agentlightning.store.base import LightningStore

FEEDBACK: Literal["reward.feedback"] = "reward.feedback"
"""Name of the span, and of its attribute with the text."""
MAX_FEEDBACK_CHARS = 8192
"""Characters of one attempt's feedback that are kept."""


def feedback_text(given: Any, name: str) -> str:
    """Feedback of a reward function or an agent as it is kept: cut where it is too long. RewardError for anything but a text
    or None.

    >>> feedback_text("wrong year", "feedback"), feedback_text(None, "feedback")
    ('wrong year', '')
    """
    if given is None:
        return ""
    if not isinstance(given, str):
        raise RewardError(f"{name}: expected a text, got {type(given).__name__} {given!r:.80}")
    text = given.encode("utf-8", "replace").decode().replace("\0", "�").strip()  # no store has halves of characters
    return text if len(text) <= MAX_FEEDBACK_CHARS else text[: MAX_FEEDBACK_CHARS - 1] + "…"


def feedback_span(rollout: Rollout, attempt: int, text: str) -> Span:
    """The record of an attempt's feedback; a second one of the same attempt is ignored by stores."""
    now = time.time_ns()
    return Span(
        id=_span_id(rollout.id, attempt),
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=attempt,
        name=FEEDBACK,
        attributes={FEEDBACK: text},
        started_ns=now,
        finished_ns=now,
    )


def attempt_feedback(spans: Iterable[Span]) -> dict[tuple[str, int], str]:
    """The feedback among spans, by rollout and attempt."""
    return {
        (span.rollout_id, span.attempt): str(span.attributes.get(FEEDBACK, ""))
        for span in spans
        if span.id == _span_id(span.rollout_id, span.attempt)
    }


async def read_feedback(store: LightningStore, rollouts: Sequence[Rollout]) -> list[str]:
    """The feedback of each rollout's latest attempt, in their order; '' where there is none."""
    found = attempt_feedback(await store.spans([rollout.id for rollout in rollouts]))
    return [found.get((rollout.id, rollout.attempt), "") for rollout in rollouts]


def _span_id(rollout_id: str, attempt: int) -> str:
    return f"{rollout_id}.{attempt}.{FEEDBACK}"
