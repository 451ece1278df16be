"""Records of types.py as they are written into Redis and read back.

Pure functions, driven by the Redis store. Requests go to the scripts as JSON, in which all numbers that may be large are
text: Lua has doubles only. Calls and spans are MessagePack of the columns of codec.py; a script never looks into them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import orjson

from agentlightning.errors import InputError, RewardError
from agentlightning.records import (
    JSON,
    Attempt,
    Call,
    CallCredit,
    Checkpoint,
    Consumed,
    ConsumedInputs,
    Finish,
    Fork,
    Metric,
    NewRollout,
    Resource,
    RetryPolicy,
    Reward,
    Rollout,
    Run,
    Sampling,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec
from agentlightning.store.audit import AuditEntry
from agentlightning.store.gateway_events import (
    BROKEN_SPANS,
    IGNORED_BASE_URL,
    NO_CALLS,
    REFUSED_CALLS,
    UNKNOWN_ROUTE,
    broken_counts,
    refused_counts,
)
from agentlightning.store.rules import reward_number
from agentlightning.store.sentences import reason
from agentlightning.store.summaries import failure_of, task_key, title_of
from agentlightning.store.summary_types import RolloutSummary
from agentlightning.store.tokens import Token

Request = Any
"""The argument of a script from one caller: lists and dicts of text and small numbers."""

_MAX_INT = 2**63


class _Fixed(msgspec.Struct):
    """Fields of a rollout that never change, and that no script looks at."""

    task: JSON
    sampling: Sampling
    retry: RetryPolicy
    fork: Fork | None = None


_FIXED = msgspec.json.Decoder(_Fixed)


class _Listed(msgspec.Struct, array_like=True):
    """One rollout of a step's list."""

    rollout_id: str
    outcome: Any
    inputs: ConsumedInputs | None = None


_LISTS = msgspec.json.Decoder(list[_Listed])
_ATTEMPTS, _WORKERS = codec.RecordCodec(Attempt), codec.RecordCodec(WorkerStatus)
_TOKENS, _ENTRIES = codec.RecordCodec(Token), codec.RecordCodec(AuditEntry)


def dump(request: Request) -> bytes:
    """JSON of a request; InputError where it holds what JSON cannot."""
    try:
        return orjson.dumps(request)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise InputError(f"expected text and numbers: {error}") from None


def whole(value: int) -> str:
    """An integer as text; InputError where no database would hold it."""
    if not -_MAX_INT <= value < _MAX_INT:
        raise InputError(f"expected integers of at most 64 bits, got {value}")
    return str(int(value))


def nanoseconds(seconds: float) -> str:
    return whole(max(int(seconds * 1e9), 0))


def texts(packed: bytes) -> list[str]:
    """A JSON list of texts."""
    found: list[str] = orjson.loads(packed)
    return found


def pairs(flat: Sequence[Any]) -> dict[str, str]:
    """Names and values that come one after the other, as text."""
    texts = [_text(value) for value in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def raw_pairs(flat: Sequence[Any]) -> dict[str, bytes]:
    """The same, with values as they are kept."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


# --- runs -------------------------------------------------------------------------------------------------------------


def read_run(run_id: str, flat: Sequence[Any], summary: Sequence[Any]) -> Run:
    known = pairs(flat)
    merged = {name: orjson.loads(value) for name, value in pairs(summary).items()}
    return codec.RUNS.of_texts(known, id=run_id, config=orjson.loads(known["config"]), summary=merged)


# --- access -----------------------------------------------------------------------------------------------------------


def read_token(token_id: str, flat: Sequence[Any]) -> Token:
    return _TOKENS.of_texts(pairs(flat), id=token_id)


def read_entry(seq: int, row: bytes) -> AuditEntry:
    created_ns, actor, action, subject, run_id, detail = orjson.loads(row)
    texts = {"created_ns": created_ns, "actor": actor, "action": action, "subject": subject}
    return _ENTRIES.of_texts(texts, seq=seq, run_id=run_id or None, detail=orjson.loads(detail))


# --- rollouts and attempts --------------------------------------------------------------------------------------------


def new_rollout(new: NewRollout, rollout_id: str) -> tuple[dict[str, str], bytes]:
    """The part that scripts look at, and the part that they do not."""
    task = orjson.loads(codec.dump(new.task, "task"))
    row = {
        "id": rollout_id,
        "title": title_of(task),
        "task_key": task_key(task),
        **_texts(new, "run_id", "group_id", "replica", "mode", "step", "priority", "kind"),
        **_texts(new.retry, "max_attempts", "max_lost"),
        "retry_on": f" {' '.join(new.retry.retry_on)} ",
    }
    if new.prompts:
        row["prompts"] = codec.dump(new.prompts, "prompts")
    fixed = {"task": new.task, "sampling": new.sampling, "retry": new.retry, "fork": new.fork}
    return row, codec.dump(fixed, "task").encode()


def queued(new: NewRollout, rollout_id: str, created_ns: int) -> Rollout:
    """The rollout that was just made of this; its task is what a store would give back."""
    return codec.new_rollout(replace(new, task=orjson.loads(orjson.dumps(new.task))), rollout_id, created_ns)


def read_rollout(row: Sequence[Any]) -> Rollout:
    known, fixed = pairs(row[2:]), _FIXED.decode(row[1])
    return codec.ROLLOUTS.of_texts(
        known,
        id=_text(row[0]),
        run_id=known["run"],
        task=fixed.task,
        sampling=fixed.sampling,
        retry=fixed.retry,
        fork=fixed.fork,
        refused=known.get("refused") == "1",
        prompts=orjson.loads(known.get("prompts", "{}")),
    )


def read_summary(rollout_id: bytes, flat: Sequence[Any], totals: Sequence[bytes | None]) -> RolloutSummary:
    """`totals`: of its last attempt: turns, prompt tokens, sampled tokens, forks, agents."""
    known = pairs(flat)
    refused = known.get("refused") == "1"
    turns, prompt_tokens, sampled_tokens, forks = (int(each or 0) for each in totals[:4])
    started_ns = known.get("started_ns")
    return codec.SUMMARIES.of_texts(
        known,
        id=rollout_id.decode(),
        run_id=known["run"],
        reward=float(known["reward"]) if "reward" in known else None,
        turns=turns,
        prompt_tokens=prompt_tokens,
        sampled_tokens=sampled_tokens,
        forks=forks,
        agents=sorted(orjson.loads(totals[4] or b"[]")),
        attempts=int(known["attempt"]),
        refused=refused,
        failure=failure_of(known["state"], known.get("error"), known.get("warning"), refused),
        outcome=known.get("outcome"),
        duration_s=(int(known["finished_ns"]) - int(started_ns)) / 1e9 if started_ns else 0.0,
    )


def read_attempt(rollout_id: str, attempt: int, flat: Sequence[Any]) -> Attempt:
    return _ATTEMPTS.of_texts(pairs(flat), rollout_id=rollout_id, attempt=attempt)


def worker_row(worker: WorkerStatus) -> dict[str, str]:
    return _texts(worker, "id", "run_id", "host", "pid", "running")


def read_worker(run_id: str, worker_id: str, row: bytes) -> WorkerStatus:
    known = dict(zip(("host", "pid", "running", "seen_ns"), orjson.loads(row), strict=True))
    return _WORKERS.of_texts(known, id=worker_id, run_id=run_id)


def finish_row(finish: Finish) -> dict[str, Any]:
    row = {
        "lease": asdict(finish.lease),
        "state": finish.state,
        "silence": codec.text(f"{NO_CALLS}: {finish.diagnosis or IGNORED_BASE_URL}"),
        "rewards": [_last_reward(reward) for reward in finish.rewards],
    }
    for name, value in (("error", finish.error), ("output", finish.output)):
        if value is not None:
            row[name] = codec.text(value)
    return row


# --- the record -------------------------------------------------------------------------------------------------------


def call_row(call: Call) -> tuple[list[Any], bytes]:
    row = codec.call_row(call)
    place = [call.run_id, call.rollout_id, call.attempt, call.id, call.parent_id or ""]
    return [*place, *call_totals(call)], _packed((row[1], *row[4:]))


def call_totals(call: Call) -> tuple[int, int, int, str]:
    """Returns the part of a call in the summary of its rollout: prompt tokens, sampled tokens, forks, and its agent."""
    prompt_tokens = call.prompt_tokens + int(call.usage.get("prompt_tokens") or 0)
    sampled_tokens = int(call.usage.get("sampled_tokens") or 0)
    if call.replayed_id is None:  # what a fork replayed was sampled for another rollout
        sampled_tokens += len(call.sampled_ids)
    return prompt_tokens, sampled_tokens, int(call.fork_cause is not None), call.agent or ""


def read_call(rollout_id: str, attempt: int, call_id: bytes, packed: bytes) -> Call:
    run_id, *values = msgspec.msgpack.decode(packed)
    return codec.CALLS.of_row((call_id.decode(), run_id, rollout_id, attempt, *values))


def span_row(span: Span) -> tuple[list[Any], bytes]:
    row = codec.SPANS.row(span)
    warning = ""
    if span.name == UNKNOWN_ROUTE:
        path = span.attributes.get("path")
        warning = codec.text(reason("unknown_route", NO_CALLS, path)) or ""
    broken = broken_counts(span.attributes) if span.name == BROKEN_SPANS else {}
    refused = refused_counts(span.attributes) if span.name == REFUSED_CALLS else {}
    place = [span.run_id, span.rollout_id, span.attempt, span.id, warning, whole(span.started_ns), broken, refused]
    return place, _packed((row[1], *row[4:]))


def read_span(rollout_id: str, attempt: int, span_id: bytes, packed: bytes) -> Span:
    run_id, *values = msgspec.msgpack.decode(packed)
    return codec.SPANS.of_row((span_id.decode(), run_id, rollout_id, attempt, *values))


def reward_row(reward: Reward) -> list[Any]:
    row = _reward(reward, reward_number(reward.value, reward.name))
    return [reward.run_id, reward.rollout_id, reward.attempt, reward.id, reward.call_id or "", row]


def read_reward(rollout_id: str, attempt: int, reward_id: bytes, row: bytes) -> tuple[int, Reward]:
    """With its place among the attempt's."""
    place, *values = orjson.loads(row)
    known = dict(zip(("created_ns", "value", "name", "call_id", "source", "run_id"), values, strict=True))
    whose = {"id": reward_id.decode(), "rollout_id": rollout_id, "attempt": attempt}
    return place, codec.REWARDS.of_texts(known, call_id=known["call_id"] or None, **whose)


def credit_row(credit: CallCredit) -> tuple[list[str], bytes]:
    place = [credit.run_id, credit.rollout_id, whole(credit.step), credit.call_id]
    return place, _packed(codec.credit_row(credit))


def read_credit(packed: bytes) -> CallCredit:
    return codec.CREDIT.of_row(msgspec.msgpack.decode(packed))


# --- what belongs to a run --------------------------------------------------------------------------------------------


def resource_row(resource: Resource) -> tuple[list[str], bytes]:
    parent = None if resource.parent is None else whole(resource.parent)
    kept = resource.kind, parent, whole(resource.step), codec.dump(resource.value, "value")
    return list(_texts(resource, "run_id", "name", "created_ns").values()), dump(kept)


def read_resource(run_id: str, name: str, version: int, row: bytes) -> Resource:
    created_ns, _, kept = row.partition(b" ")
    kind, parent, step, value = orjson.loads(kept)
    known = {"kind": kind, "step": step, "created_ns": created_ns.decode()}
    version_of = None if parent is None else int(parent)
    return codec.RESOURCES.of_texts(
        known, run_id=run_id, name=name, version=version, value=orjson.loads(value), parent=version_of
    )


def metric_row(metric: Metric) -> list[Any]:
    value = float(metric.value)
    return [
        metric.run_id,
        whole(metric.step),
        metric.name,
        repr(value) if math.isfinite(value) else "nan",
        whole(metric.created_ns) if metric.created_ns else "",
        "1" if metric.abandoned else "",
    ]


def read_metrics(run_id: str, entries: Sequence[Any], undone: Sequence[bytes]) -> list[Metric]:
    """`undone`: of each time that steps were undone, the last step kept and the last metric taken in before."""
    marks = [tuple(map(int, entry.split())) for entry in undone]
    found = []
    for place, flat in entries:
        known = pairs(flat)
        seq, step = int(place.partition(b"-")[0]), int(known["step"])
        abandoned = bool(known["abandoned"]) or any(step > after and seq <= last for after, last in marks)
        found.append(codec.METRICS.of_texts(known, run_id=run_id, abandoned=abandoned, seq=seq))
    return found


def consumed_list(consumed: Sequence[Consumed]) -> list[tuple[Any, ...]]:
    """(rollout, outcome), and the inputs where there are any."""
    return [
        (each.rollout_id, each.outcome) if each.inputs is None else (each.rollout_id, each.outcome, each.inputs)
        for each in consumed
    ]


def read_step(run_id: str, row: Sequence[Any]) -> Step:
    """Reads number, state, version, time, list."""
    step, state, version, created_ns, consumed = row
    return Step(
        run_id=run_id,
        step=int(step),
        state=state,
        consumed=[
            Consumed(rollout_id=each.rollout_id, outcome=each.outcome, inputs=each.inputs)
            for each in _LISTS.decode(consumed)
        ],
        version=int(version) if version else None,
        created_ns=int(created_ns),
    )


def checkpoint_row(checkpoint: Checkpoint) -> dict[str, str]:
    return _texts(checkpoint, "run_id", "step", "path", "version", "created_ns")


def read_checkpoint(run_id: str, step: int, row: bytes) -> Checkpoint:
    path, version, created_ns = orjson.loads(row)
    return Checkpoint(run_id=run_id, step=step, path=path, version=int(version), created_ns=int(created_ns))


def _last_reward(reward: Reward) -> dict[str, str]:
    """A reward that came with a finish. One that is none fails its attempt: user code is never a store's error."""
    try:
        return _reward(reward, reward_number(reward.value, reward.name))
    except RewardError as error:
        return {"refusal": codec.text(str(error)) or ""}


def _reward(reward: Reward, value: float) -> dict[str, str]:
    return _texts(reward, "id", "name", "call_id", "source", "created_ns") | {"value": repr(value)}


def _texts(record: Any, *names: str) -> dict[str, str]:
    """Fields of a record as text: '' for None, and for the time of one that the store is to date."""
    values = {name: getattr(record, name) for name in names}
    if not values.get("created_ns", 1):
        values["created_ns"] = None
    return {name: whole(value) if isinstance(value, int) else value or "" for name, value in values.items()}


def _packed(row: Sequence[Any]) -> bytes:
    for value in row:
        if type(value) is int:
            whole(value)
    return msgspec.msgpack.encode(row)


def _text(value: bytes | str | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
