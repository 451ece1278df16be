"""Refusals: model calls that the gateway does not serve, recorded on their attempt, so that whoever looks at a rollout reads
which calls were refused before anybody guesses.

Driven by the proxy, before the agent gets the answer: an agent cannot end because of a refusal that is not durable. A span
of its own (`REFUSED_CALLS`) holds the fields, the count and one example; the store sums them when the attempt ends. Bounded:
after the first refusals of an attempt only each doubling of their number is written, whatever a looping agent sends, and the
first one after a call that was answered, so that the record knows which came last.
"""

from __future__ import annotations

import re

from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.gateway_span import gateway_span
from agentlightning.protocols.base import ApiError
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import MAX_REASON_CHARS, OUTGROWN, REFUSED_CALLS

MAX_SINGLE = 16
"""Refusals of an attempt that are recorded each by itself; later ones are, when their number has doubled."""

MAX_MESSAGE_CHARS = 500
"""Bound of the example."""

NOT_REFUSALS = frozenset({401, 403, 408, 409, 410, 429, 499})
"""Statuses that say nothing of the request: whose it is, when it came, how many there were, that its sender went away."""

_PLACE = re.compile(r"[.\[].*", re.DOTALL)


async def record_refusal(store: LightningStore, attempt: TrackedAttempt, refusal: ApiError) -> None:
    """Records a refused model call; does nothing for failures of ours and what is not about the request."""
    if not 400 <= refusal.status < 500 or refusal.status in NOT_REFUSALS:
        return
    attempt.refused += 1
    attempt.unrecorded_refusals += 1
    doubled = not attempt.refused & (attempt.refused - 1)
    if attempt.refused > MAX_SINGLE and not doubled and attempt.ends_refused:
        return
    attempt.ends_refused = True
    count, attempt.unrecorded_refusals = attempt.unrecorded_refusals, 0
    message = refusal.message[:MAX_MESSAGE_CHARS]
    told = {"fields": refused_fields(refusal), "count": count, "status": refusal.status, "message": message}
    await store.append_spans([gateway_span(attempt.rollout, attempt.number, REFUSED_CALLS, told, message)])


def refused_fields(refusal: ApiError) -> str:
    """Returns the top-level fields that a refusal names, without places in lists, or the code or status where it names none.

    >>> refused_fields(ApiError("…", param="messages[3].content[0]"))
    'messages'
    >>> refused_fields(ApiError("…", fields=("tools[0]", "tools[7]", "top_a")))
    'tools + top_a'
    >>> refused_fields(ApiError("…", param="messages", code="context_length_exceeded"))
    'context_length_exceeded'
    >>> refused_fields(ApiError("…", status=413, code="body_too_large"))
    'body_too_large'
    """
    if refusal.code == OUTGROWN:  # no field is wrong
        return OUTGROWN
    named = refusal.fields or (() if refusal.param is None else (refusal.param,))
    names = dict.fromkeys("".join(filter(str.isprintable, _PLACE.sub("", name))) for name in named)
    told = " + ".join(name for name in names if name)
    return (told or refusal.code or f"HTTP {refusal.status}")[:MAX_REASON_CHARS]
