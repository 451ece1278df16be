"""Rows and types: how the words of types.py are written into columns and read back.

Pure functions, driven by the SQL verbs. Nested values are JSON text; token ids are int32 arrays and logprobs float32
arrays, both little-endian as every machine that runs this is.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.errors import InputError
from agentlightning.types import (
    Call,
    Metric,
    NewRollout,
    Resource,
    RetryPolicy,
    Reward,
    Rollout,
    Run,
    Sampling,
    Span,
    VersionSpan,
)

if TYPE_CHECKING:
    from sqlalchemy import Row  # agent machines have none, and use `text` and `dump`

    AnyRow = Row[*tuple[Any, ...]]

IDS_A_QUERY = 10_000
"""Below SQLite's bound of 32766 parameters in a statement."""


def chunks(ids: Sequence[str]) -> Iterator[list[str]]:
    """The distinct ids, sorted, in parts that fit a statement; results of the parts in turn are sorted too."""
    ordered = sorted(set(ids))
    for start in range(0, len(ordered), IDS_A_QUERY):
        yield ordered[start : start + IDS_A_QUERY]


def dump(value: Any, name: str) -> str:
    """JSON text; InputError that names the field where the value is not JSON."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InputError(f"{name}: expected JSON: {error}") from None


def text(value: str | None) -> str | None:
    """Text that any database takes: what a program printed may hold halves of characters and NULs."""
    if value is None or (value.isascii() and "\0" not in value):
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "�")


def rollout_row(new: NewRollout, rollout_id: str, now_ns: int) -> dict[str, Any]:
    return {
        "id": rollout_id,
        "run_id": new.run_id,
        "task": dump(new.task, "task"),
        "group_id": new.group_id,
        "replica": new.replica,
        "mode": new.mode,
        "step": new.step,
        "sampling": dump(new.sampling, "sampling"),
        "retry": dump(new.retry, "retry"),
        "priority": new.priority,
        "state": "queued",
        "attempt": 0,
        "lost": 0,
        "created_ns": now_ns,
    }


def read_rollout(row: AnyRow) -> Rollout:
    fields = dict(row._mapping)
    fields["task"] = orjson.loads(fields["task"])
    fields["sampling"] = Sampling(**orjson.loads(fields["sampling"]))
    fields["retry"] = read_retry(fields["retry"])
    return Rollout(**fields)


def read_retry(value: str) -> RetryPolicy:
    fields = orjson.loads(value)
    fields["retry_on"] = tuple(fields["retry_on"])
    return RetryPolicy(**fields)


def read_run(row: AnyRow) -> Run:
    fields = dict(row._mapping)
    del fields["finished"]
    fields["config"] = orjson.loads(fields["config"])
    fields["summary"] = orjson.loads(fields["summary"])
    return Run(**fields)


def call_row(call: Call) -> tuple[Any, ...]:
    """In the order of the table's columns."""
    if len(call.logprobs) != len(call.sampled_ids):
        raise InputError(
            f"logprobs: expected one for each of {len(call.sampled_ids)} sampled_ids of call {call.id}, "
            f"got {len(call.logprobs)}"
        )
    if not math.isfinite(sum(call.logprobs)):
        raise InputError(f"logprobs: expected finite numbers, call {call.id} has others")
    return (
        call.id,
        call.run_id,
        call.rollout_id,
        call.attempt,
        call.parent_id,
        _packed("i", call.suffix_ids, "suffix_ids"),
        _packed("i", call.sampled_ids, "sampled_ids"),
        _packed("f", call.logprobs, "logprobs"),
        dump(call.versions, "versions"),
        call.prompt_tokens,
        call.policy,
        text(call.model),
        call.protocol,
        dump(call.sampling, "sampling"),
        call.history_hash,
        call.request_hash,
        dump(call.messages, "messages"),
        dump(call.answer, "answer"),
        None if call.tools is None else dump(call.tools, "tools"),
        call.fork_cause,
        call.context_only,
        dump(call.asked, "asked") if call.asked else "{}",
        dump(call.usage, "usage") if call.usage else "{}",
        call.agent,
        call.finish_reason,
        call.started_ns,
        call.finished_ns,
        call.span_id,
    )


def read_call(row: AnyRow) -> Call:
    fields = dict(row._mapping)
    for name, code in (("suffix_ids", "i"), ("sampled_ids", "i"), ("logprobs", "f")):
        numbers: array[Any] = array(code)
        numbers.frombytes(fields[name])
        fields[name] = numbers.tolist()
    fields["versions"] = [VersionSpan(**span) for span in orjson.loads(fields["versions"])]
    fields["sampling"] = Sampling(**orjson.loads(fields["sampling"]))
    fields["messages"] = orjson.loads(fields["messages"])
    for name in ("answer", "asked", "usage"):
        fields[name] = orjson.loads(fields[name])
    if fields["tools"] is not None:
        fields["tools"] = orjson.loads(fields["tools"])
    return Call(**fields)


def span_row(span: Span) -> tuple[Any, ...]:
    return (
        span.id,
        span.run_id,
        span.rollout_id,
        span.attempt,
        text(span.name),
        span.parent_id,
        dump(span.attributes, "attributes"),
        span.started_ns,
        span.finished_ns,
        span.trace_id,
        span.kind,
        span.status,
        text(span.status_message),
        dump(span.events, "events") if span.events else "[]",
    )


def read_span(row: AnyRow) -> Span:
    fields = dict(row._mapping)
    for name in ("attributes", "events"):
        fields[name] = orjson.loads(fields[name])
    return Span(**fields)


def reward_row(reward: Reward, value: float, now_ns: int) -> tuple[Any, ...]:
    return (
        reward.id,
        reward.run_id,
        reward.rollout_id,
        reward.attempt,
        value,
        text(reward.name),
        reward.call_id,
        reward.source,
        reward.created_ns or now_ns,
    )


def metric_row(metric: Metric, now_ns: int) -> tuple[Any, ...]:
    value = float(metric.value)
    return (
        metric.run_id,
        metric.step,
        metric.name,
        value if math.isfinite(value) else None,
        metric.created_ns or now_ns,
        metric.abandoned,
    )


def read_metric(row: AnyRow) -> Metric:
    fields = dict(row._mapping)
    if fields["value"] is None:
        fields["value"] = math.nan
    return Metric(**fields)


def read_resource(row: AnyRow) -> Resource:
    fields = dict(row._mapping)
    fields["value"] = orjson.loads(fields["value"])
    return Resource(**fields)


def _packed(code: str, numbers: Sequence[float], name: str) -> bytes:
    try:
        return array(code, numbers).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError(f"{name}: expected {'32-bit integers' if code == 'i' else 'numbers'}: {error}") from None
