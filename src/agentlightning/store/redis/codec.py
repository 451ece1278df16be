"""Records as they are kept in Redis: JSON of what scripts and people may look at, MessagePack of calls, spans and credit.

Pure functions, driven by reads.py and store.py. A rollout is a hash: ``new`` is the rollout as it was enqueued and never
changes, ``now`` the fields that do, ``place`` its position among the finished, ``consumed`` the step that consumed it and
the outcome, ``summary`` what lists show of it once it has finished.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import msgspec
import orjson

from agentlightning.errors import InputError
from agentlightning.records import Attempt, Call, Metric, Rollout
from agentlightning.store import codec
from agentlightning.store.summaries import RolloutSummary, failure_of, task_key, title_of

T = TypeVar("T")

ROLLOUT = ("new", "now", "place", "consumed")
"""Fields of a rollout's hash, as they are read."""
CHANGING = (
    *(
        "state",
        "attempt",
        "lost",
        "started_ns",
        "finished_ns",
        "reward",
        "calls",
        "error",
        "warning",
        "refused",
        "gave_up",
        "cause",
    ),
    "prompts",
)
MAX_INT = 2**63


@dataclass(frozen=True, slots=True)
class Stored:
    """A rollout, and the text from which its changing fields were read."""

    rollout: Rollout
    now: bytes


class CallTotals(msgspec.Struct, array_like=True):
    """The part of a call that is counted when its attempt ends."""

    prompt_tokens: int
    sampled_tokens: int
    fork: bool
    agent: str | None
    finished_ns: int


@functools.cache
def _decoder(kind: Hashable) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode


def read(kind: type[T], row: bytes) -> T:
    """The record, or list of records, that `dump` wrote."""
    found: T = _decoder(cast(Hashable, kind))(row)
    return found


def dump(value: Any, name: str) -> bytes:
    """JSON; InputError that names the field where the value is not JSON, or has integers that no database would hold."""
    if is_dataclass(value):
        for field in fields(value):
            if type(number := getattr(value, field.name)) is int:
                whole(number)
    return codec.dump(value, name).encode()


def whole(value: int) -> str:
    """An integer as text; InputError where no database would hold it."""
    if not -MAX_INT <= value < MAX_INT:
        raise InputError(f"expected integers of at most 64 bits, got {value}")
    return str(int(value))


def packed(row: Iterable[Any]) -> bytes:
    """MessagePack of a row; InputError for integers that no database would hold."""
    values = tuple(row)
    for value in values:
        if type(value) is int:
            whole(value)
    try:
        return msgspec.msgpack.encode(values)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise InputError(f"expected text of whole characters and numbers: {error}") from None


def unpacked(records: codec.RecordCodec[T], row: bytes) -> T:
    """The record of a packed row."""
    return records.of_row(msgspec.msgpack.decode(row))


def pairs(flat: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """Names and values of a hash."""
    return ((name.decode(), value) for name, value in zip(flat[::2], flat[1::2], strict=True))


def changing(rollout: Rollout) -> bytes:
    """The fields of a rollout that change."""
    return dump({name: getattr(rollout, name) for name in CHANGING}, "rollout")


def read_rollout(row: Sequence[bytes | None]) -> Stored | None:
    """Reads the values of the fields ROLLOUT."""
    new, now, place, consumed = row
    if new is None or now is None:
        return None
    changes = orjson.loads(now)
    if place is not None:
        changes["finished_seq"] = int(place)
    if consumed is not None:
        changes["outcome"] = consumed.decode().partition(" ")[2]
    return Stored(replace(read(Rollout, new), **changes), now)


def new_summary(rollout: Rollout, totals: Sequence[CallTotals]) -> bytes:
    """The summary of a rollout that has finished, without its place and what consumes it."""
    return msgspec.msgpack.encode(
        RolloutSummary(
            **{name: getattr(rollout, name) for name in _SHARED},
            task_key=task_key(rollout.task),
            title=title_of(rollout.task),
            turns=len(totals),
            prompt_tokens=sum(each.prompt_tokens for each in totals),
            sampled_tokens=sum(each.sampled_tokens for each in totals),
            forks=sum(each.fork for each in totals),
            agents=sorted({each.agent for each in totals if each.agent}),
            attempts=rollout.attempt,
            failure=failure_of(rollout.state, rollout.error, rollout.warning, rollout.refused),
            outcome=None,
            finished_ns=rollout.finished_ns or 0,
            finished_seq=0,
            duration_s=((rollout.finished_ns or 0) - rollout.started_ns) / 1e9 if rollout.started_ns else 0.0,
        )
    )


_SHARED = (
    *("id", "run_id", "mode", "step", "state", "group_id", "replica", "reward", "lost"),
    *("refused", "cause", "created_ns"),
)
_SUMMARY = msgspec.msgpack.Decoder(RolloutSummary)


def read_summary(row: Sequence[bytes | None]) -> RolloutSummary | None:
    """Reads the values of summary, place and consumed."""
    summary, place, consumed = row
    if summary is None or place is None:
        return None
    outcome: Any = None if consumed is None else consumed.decode().partition(" ")[2]
    return replace(_SUMMARY.decode(summary), finished_seq=int(place), outcome=outcome)


def read_attempt(row: Sequence[bytes]) -> Attempt:
    """Reads the values of known and expires."""
    return replace(read(Attempt, row[0]), lease_expires_ns=int(row[1]))


def call_totals(call: Call) -> bytes:
    prompt_tokens = call.prompt_tokens + int(call.usage.get("prompt_tokens") or 0)
    sampled_tokens = int(call.usage.get("sampled_tokens") or 0)
    if call.replayed_id is None:  # what a fork replayed was sampled for another rollout
        sampled_tokens += len(call.sampled_ids)
    fork = call.fork_cause is not None
    return msgspec.msgpack.encode(CallTotals(prompt_tokens, sampled_tokens, fork, call.agent, call.finished_ns))


read_totals = msgspec.msgpack.Decoder(CallTotals).decode


def read_metrics(first: int, rows: Sequence[bytes], undone: Sequence[bytes]) -> list[Metric]:
    """Metrics whose places begin with `first`. `undone`: of each time that steps were undone, the last step kept and the
    number of metrics until then."""
    marks = [tuple(map(int, entry.split())) for entry in undone]
    found = []
    for seq, row in enumerate(rows, start=first):
        known = orjson.loads(row)
        abandoned = known["abandoned"] or any(known["step"] > after and seq <= last for after, last in marks)
        value = float("nan") if known["value"] is None else float(known["value"])
        found.append(Metric(**{**known, "value": value, "seq": seq, "abandoned": abandoned}))
    return found
