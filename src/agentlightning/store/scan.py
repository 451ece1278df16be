"""Reading a whole run in portions, so that a bounded part of it is in memory; what others ask of any store by its methods.

What is written meanwhile may be seen or not.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from agentlightning.errors import NotFoundError, RewardError
from agentlightning.records import Call, Metric, Reward, Rollout, Run, Span, Step
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.codec import portions
from agentlightning.store.models import ModelVersion, parse_reference

R = TypeVar("R", Call, Span, Reward)

MAX_ROLLOUTS = 200  # most rollouts of a portion
MAX_CALLS = 1000  # most calls of a portion, as far as rollouts tell before they are read
MAX_STEPS = 20
MAX_METRICS = 5000
MAX_IMAGES = 16  # most images of one request: each may have megabytes


async def find_run(store: LightningStore, run_id: str) -> Run:
    """The run of this id. NotFoundError where the store has none."""
    found = await store.runs([run_id])
    if not found:
        raise NotFoundError(f"{run_id}: no such run; see: agl runs list")
    return found[0]


async def find_model_version(store: LightningStore, reference: str, where: str = "model") -> ModelVersion:
    """The version that ``NAME@NUMBER`` or ``NAME@ALIAS`` names now. InputError, which names `where` it stands, for other
    text; NotFoundError where the store has none."""
    name, number, alias = parse_reference(reference, where)
    if alias is not None:
        named = [one.number for one in await store.aliases(name) if one.alias == alias]
        if not named:
            raise NotFoundError(f"{where}: no such alias: {reference}; see: agl models list {name}")
        number = named[0]
    for version in await store.models(name):
        if version.number == number:
            return version
    raise NotFoundError(f"{where}: no such model version: {reference}; see: agl models list")


async def read_rollouts(store: LightningStore, query: RolloutQuery) -> AsyncIterator[list[Rollout]]:
    """Rollouts that match, at most `query.limit`, in id order and in portions whose calls can be held in memory."""
    left = math.inf if query.limit is None else query.limit
    while left > 0 and (page := await store.rollouts(replace(query, limit=int(min(left, MAX_ROLLOUTS))))):
        for portion in portions(page, lambda rollout: max(1, rollout.calls) * max(1, rollout.attempt), MAX_CALLS):
            yield portion
        query, left = replace(query, after=page[-1].id), left - len(page)


async def read_calls(store: LightningStore, rollouts: Sequence[Rollout]) -> list[Call]:
    """The calls of every attempt of these rollouts."""
    found: list[Call] = []
    for number in range(1, max((rollout.attempt for rollout in rollouts), default=0) + 1):
        found += await store.calls([rollout.id for rollout in rollouts if rollout.attempt >= number], number)
    return found


def by_attempt(records: Iterable[R]) -> defaultdict[tuple[str, int], list[R]]:
    """Records by the rollout and the attempt that they belong to."""
    found: defaultdict[tuple[str, int], list[R]] = defaultdict(list)
    for record in records:
        found[record.rollout_id, record.attempt].append(record)
    return found


async def read_steps(store: LightningStore, run_id: str, after: int | None = None) -> AsyncIterator[list[Step]]:
    """All steps of the run, or those later than `after`, in order."""
    while page := await store.steps(run_id, after, MAX_STEPS):
        yield page
        after = page[-1].step


async def read_metrics(store: LightningStore, run_id: str) -> AsyncIterator[list[Metric]]:
    """All metrics of the run in the order in which the store took them in."""
    after = 0
    while page := await store.follow_metrics(run_id, after, 0.0, MAX_METRICS):
        yield page
        after = page[-1].seq


async def read_images(store: LightningStore, calls: Iterable[Call]) -> dict[str, bytes]:
    """The files of the images of these calls by hash, as far as they are kept."""
    named: defaultdict[str, set[str]] = defaultdict(set)
    for call in calls:
        named[call.run_id].update(image.hash for image in call.images)
    found: dict[str, bytes] = {}
    for run_id, hashes in named.items():
        wanted = sorted(hashes)
        for start in range(0, len(wanted), MAX_IMAGES):
            found |= await store.files(run_id, wanted[start : start + MAX_IMAGES])
    return found


# --- feedback: the words of a reward function, kept as a span of the attempt, which no OTLP exporter can make --------------

FEEDBACK: Literal["reward.feedback"] = "reward.feedback"  # name of the span, and of its attribute with the text
MAX_FEEDBACK_CHARS = 8192  # characters of one attempt's feedback that are kept


def feedback_text(given: Any, name: str) -> str:
    """Feedback of a reward function or an agent as it is kept: '' for None, cut where it is too long. RewardError for
    anything but a text or None."""
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
