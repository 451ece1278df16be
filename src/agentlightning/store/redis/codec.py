"""Records as they are kept in Redis: JSON of what scripts and people may look at, MessagePack of calls, spans and credit.

Pure functions, driven by reads.py and writes.py. A rollout is a hash: ``new`` is the rollout as it was enqueued and never
changes, ``now`` the fields that do, ``place`` its position among the finished, ``consumed`` the step that consumed it and
the outcome, ``summary`` what lists show of it once it has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from agentlightning.errors import InputError
from agentlightning.records import (
    Attempt,
    Call,
    CallCredit,
    Checkpoint,
    Consumed,
    Metric,
    Resource,
    Reward,
    Rollout,
    Run,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec
from agentlightning.store.audit import AuditEntry
from agentlightning.store.summaries import RolloutSummary, failure_of, task_key, title_of
from agentlightning.store.tokens import Token

ROLLOUT = ("new", "now", "place", "consumed")
"""Fields of a rollout's hash, as they are read."""
CHANGING = (
    *("state", "attempt", "lost", "started_ns", "finished_ns", "reward", "calls", "error", "warning", "refused"),
    "prompts",
)
MAX_INT = 2**63

_ROLLOUT = msgspec.json.Decoder(Rollout)
_RESOURCE, _REWARD = msgspec.json.Decoder(Resource), msgspec.json.Decoder(Reward)
_CONSUMED = msgspec.json.Decoder(list[Consumed])


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


def pairs(flat: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """Names and values of a hash."""
    for position in range(0, len(flat), 2):
        yield flat[position].decode(), flat[position + 1]


def dump(value: Any, name: str) -> bytes:
    """JSON; InputError that names the field where the value is not JSON."""
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


# --- runs and rollouts ------------------------------------------------------------------------------------------------


def read_run(run_id: str, flat: Sequence[bytes], summary: Sequence[bytes]) -> Run:
    known = {name: value.decode() for name, value in pairs(flat)}
    merged = {name: orjson.loads(value) for name, value in pairs(summary)}
    return codec.RUNS.of_texts(known, id=run_id, config=orjson.loads(known["config"]), summary=merged)


def new_rollout(rollout: Rollout) -> bytes:
    for name in ("replica", "step", "priority"):
        whole(getattr(rollout, name))
    return dump(rollout, "task")


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
    return Stored(replace(_ROLLOUT.decode(new), **changes), now)


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


_SHARED = ("id", "run_id", "mode", "step", "state", "group_id", "replica", "reward", "lost", "refused", "created_ns")
_SUMMARY = msgspec.msgpack.Decoder(RolloutSummary)


def read_summary(row: Sequence[bytes | None]) -> RolloutSummary | None:
    """Reads the values of summary, place and consumed."""
    summary, place, consumed = row
    if summary is None or place is None:
        return None
    outcome: Any = None if consumed is None else consumed.decode().partition(" ")[2]
    return replace(_SUMMARY.decode(summary), finished_seq=int(place), outcome=outcome)


def read_attempt(rollout_id: str, attempt: int, row: Sequence[bytes]) -> Attempt:
    """Reads the values of known and expires."""
    return Attempt(rollout_id=rollout_id, attempt=attempt, lease_expires_ns=int(row[1]), **orjson.loads(row[0]))


def worker_row(worker: WorkerStatus, now_ns: int) -> bytes:
    return dump((worker.host, worker.pid, worker.running, now_ns), "worker")


def read_worker(run_id: str, worker_id: str, row: bytes) -> WorkerStatus:
    host, pid, running, seen_ns = orjson.loads(row)
    return WorkerStatus(id=worker_id, run_id=run_id, host=host, pid=pid, running=running, seen_ns=seen_ns)


# --- the record -------------------------------------------------------------------------------------------------------


def call_totals(call: Call) -> bytes:
    prompt_tokens = call.prompt_tokens + int(call.usage.get("prompt_tokens") or 0)
    sampled_tokens = int(call.usage.get("sampled_tokens") or 0)
    if call.replayed_id is None:  # what a fork replayed was sampled for another rollout
        sampled_tokens += len(call.sampled_ids)
    fork = call.fork_cause is not None
    return msgspec.msgpack.encode(CallTotals(prompt_tokens, sampled_tokens, fork, call.agent, call.finished_ns))


read_totals = msgspec.msgpack.Decoder(CallTotals).decode


def read_call(row: bytes) -> Call:
    return codec.CALLS.of_row(msgspec.msgpack.decode(row))


def read_span(row: bytes) -> Span:
    return codec.SPANS.of_row(msgspec.msgpack.decode(row))


def read_credit(row: bytes) -> CallCredit:
    return codec.CREDIT.of_row(msgspec.msgpack.decode(row))


def reward_row(place: int, reward: Reward) -> bytes:
    """With its place among the attempt's, which decides between rewards of one moment."""
    name = codec.text(reward.name) or ""
    whole(reward.created_ns)
    return str(place).encode() + b" " + dump(replace(reward, name=name), "reward")


def read_rewards(rows: Iterable[bytes]) -> list[Reward]:
    """The rewards of an attempt, in the order they were made."""
    found = []
    for row in rows:
        place, _, reward = row.partition(b" ")
        found.append((int(place), _REWARD.decode(reward)))
    return [reward for _, reward in sorted(found, key=lambda each: (each[1].created_ns, each[0]))]


# --- what belongs to a run --------------------------------------------------------------------------------------------


def resource_row(resource: Resource) -> bytes:
    for number in (resource.step, resource.parent or 0, resource.created_ns):
        whole(number)
    return dump(resource, "value")


read_resource = _RESOURCE.decode


def metric_row(metric: Metric) -> bytes:
    whole(metric.step)
    return dump(metric, "metric")


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


def read_step(run_id: str, step: int, row: bytes, consumed: bytes) -> Step:
    state, version, created_ns = orjson.loads(row)
    listed = _CONSUMED.decode(consumed)
    return Step(run_id=run_id, step=step, state=state, consumed=listed, version=version, created_ns=created_ns)


def step_row(step: Step) -> bytes:
    whole(step.version or 0)
    return orjson.dumps((step.state, step.version, step.created_ns))


read_checkpoint = msgspec.json.Decoder(Checkpoint).decode
read_token = msgspec.json.Decoder(Token).decode


def read_entry(seq: int, row: bytes) -> AuditEntry:
    created_ns, actor, action, subject, run_id, detail = orjson.loads(row)
    return AuditEntry(
        seq=seq, created_ns=created_ns, actor=actor, action=action, subject=subject, run_id=run_id, detail=detail
    )
