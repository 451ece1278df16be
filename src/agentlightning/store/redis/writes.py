"""The methods that write, as transactions on Redis: runs and rollouts, the record, what belongs to a run, its end.

Generators that the writer drives (transactions.py); base.py says what they mean. Beside the documents of codec.py there are
indexes, which commands of the same transaction keep: ``s:RUN:MODE:STATE`` and ``queue:RUN`` of rollouts, ``leases`` by the
microsecond in which they run out, ``held:RUN:WORKER``, ``g:RUN:GROUP`` by replica, ``finished:RUN`` by place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import orjson

from agentlightning.records import (
    FINAL_STATES,
    JSON,
    Call,
    CallCredit,
    Checkpoint,
    Consumed,
    Finish,
    Lease,
    Metric,
    Mode,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    RunState,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec as records
from agentlightning.store import rules
from agentlightning.store.audit import AUDITED_KINDS, named_ids, noted_value
from agentlightning.store.base import SESSION_HOLDER
from agentlightning.store.gateway_events import (
    BROKEN_SPANS,
    OUTGROWN,
    REFUSED_CALLS,
    UNKNOWN_ROUTE,
    broken_counts,
    refused_counts,
)
from agentlightning.store.notifier import METRICS, QUEUED, RESOURCES
from agentlightning.store.redis import codec
from agentlightning.store.redis.codec import CallTotals, Stored, whole
from agentlightning.store.redis.connection import Command, Reply
from agentlightning.store.redis.transactions import Reads, Transaction, peek, together
from agentlightning.store.rules import refusal, run_ids
from agentlightning.store.tokens import Token

MODES: tuple[Mode, ...] = ("train", "eval")
STATES: tuple[RolloutState, ...] = ("queued", "running", "succeeded", "failed", "cancelled")
FOR_EVER = 2**62
"""Wakes everybody, whatever number its listener waits for."""
MAX_IDS_TRIED = 16


def note(t: Transaction, action: str, subject: str, run_id: str | None, detail: JSON) -> None:
    """Add an entry to the audit log, in the transaction of the act."""
    entry = (t.now_ns, records.text(t.actor), action, records.text(subject), run_id, detail)
    t.write("RPUSH", "audit", codec.dump(entry, "audit"))


# --- runs -------------------------------------------------------------------------------------------------------------


def create_run(t: Transaction, name: str, config: JSON, run_id: str | None, binds: str | None) -> Reads[str]:
    token: bytes | None = None
    if binds is not None:
        [token] = yield from t.read(("GET", f"token:{binds}"))
        bound = None if token is None else codec.read_token(token)
        if bound is None or bound.run_id is not None or bound.revoked_ns is not None:
            raise refusal("token_has_run", binds)
    else:
        yield ()  # for the time
    chosen = None
    candidates = iter([run_id]) if run_id is not None else run_ids(t.now_ns)
    while chosen is None:
        tried = list(islice(candidates, MAX_IDS_TRIED))
        if not tried:
            raise refusal("run_exists", run_id)
        found = yield [("EXISTS", f"run:{each}") for each in tried]
        chosen = next((each for each, exists in zip(tried, found, strict=True) if not exists), None)
    t.check(("EXISTS", f"run:{chosen}"), 0)
    fields = {"alive": 1, "name": name, "state": "running", "config": codec.dump(config, "config"), "finished": 0}
    fields |= {"created_ns": t.now_ns, "updated_ns": t.now_ns}
    t.write("HSET", f"run:{chosen}", *_flat(fields))
    t.write("ZADD", "runs", 0, f"{t.now_ns:020}:{chosen}")
    t.write("SADD", "active", chosen)
    if token is not None and binds is not None:
        t.write("SET", f"token:{binds}", codec.dump(replace(codec.read_token(token), run_id=chosen), "token"))
        t.write("SADD", f"run_tokens:{chosen}", binds)
    return t.once(chosen)


def update_run(t: Transaction, run_id: str, state: RunState | None, summary: JSON) -> Reads[None]:
    yield from t.require_runs([run_id])
    if state is not None:
        [before] = yield from t.read(("HGET", f"run:{run_id}", "state"))
        if before.decode() != state:
            note(t, "update_run", run_id, run_id, {"from": before.decode(), "to": state})
        t.write("HSET", f"run:{run_id}", "state", state)
        t.write("SADD" if state == "running" else "SREM", "active", run_id)
    t.write("HSET", f"run:{run_id}", "updated_ns", t.now_ns)
    for name, value in summary.items():
        t.write("HSET", f"summary:{run_id}", name, codec.dump(value, "summary"))


# --- rollouts ---------------------------------------------------------------------------------------------------------


def stored_rollouts(ids: Iterable[str]) -> Reads[dict[str, Stored]]:
    """Rollouts by id; those that do not exist are absent."""
    distinct = list(dict.fromkeys(ids))
    rows = yield [("HMGET", f"r:{each}", *codec.ROLLOUT) for each in distinct]
    found = ((each, codec.read_rollout(row)) for each, row in zip(distinct, rows, strict=True))
    return {each: stored for each, stored in found if stored is not None}


def unchanged(t: Transaction, stored: Stored) -> None:
    """The transaction is of the rollout as it was read."""
    t.check(("HGET", f"r:{stored.rollout.id}", "now"), stored.now)


def enqueue(t: Transaction, new: Sequence[tuple[str, NewRollout]]) -> Reads[list[Rollout]]:
    places = [(f"g:{rollout.run_id}:{rollout.group_id}", whole(rollout.replica)) for _, rollout in new]
    *_, known = yield from together(
        t.require_runs([rollout.run_id for _, rollout in new]),
        _require_templates([rollout for _, rollout in new]),
        peek(*[("HGET", group, replica) for group, replica in places]),
    )
    ids = {place: known_id.decode() for place, known_id in zip(places, known, strict=True) if known_id is not None}
    existing = yield from stored_rollouts(ids.values())
    found = {place: existing[each].rollout for place, each in ids.items() if each in existing}
    for place, (rollout_id, rollout) in zip(places, new, strict=True):
        if place not in found:
            made = found[place] = records.new_rollout(rollout, rollout_id, t.now_ns)
            t.check(("HGET", *place), None)
            _put_new(t, made)
            t.write("ZADD", f"queue:{made.run_id}", -made.priority, made.id)
    for run_id in {rollout.run_id for _, rollout in new}:
        t.tell(QUEUED, run_id)
    return [found[place] for place in places]


def _put_new(t: Transaction, rollout: Rollout) -> None:
    t.write("HSET", f"g:{rollout.run_id}:{rollout.group_id}", rollout.replica, rollout.id)
    t.write("HSET", f"r:{rollout.id}", "new", codec.new_rollout(rollout), "now", codec.changing(rollout))
    t.write("ZADD", _state_key(rollout), 0, rollout.id)


def _state_key(rollout: Rollout) -> str:
    return f"s:{rollout.run_id}:{rollout.mode}:{rollout.state}"


def _change(t: Transaction, stored: Stored, **changes: Any) -> Rollout:
    """The rollout with these changes, where it is as it was read."""
    before, after = stored.rollout, replace(stored.rollout, **changes)
    unchanged(t, stored)
    t.write("HSET", f"r:{after.id}", "now", codec.changing(after))
    if after.state != before.state:
        t.write("ZREM", _state_key(before), after.id)
        t.write("ZADD", _state_key(after), 0, after.id)
    return after


def _require_templates(new: Sequence[NewRollout]) -> Reads[None]:
    """NotFoundError where a rollout names a prompt template, or a version of one, that its run does not have."""
    pins = sorted({(rollout.run_id, *pin) for rollout in new for pin in rollout.prompts.items()})
    rows = yield [("HGET", f"resources:{run_id}", f"{version} {name}") for run_id, name, version in pins]
    for pin, row in zip(pins, rows, strict=True):
        if row is None or codec.read_resource(row).kind != "prompt_template":
            raise refusal("no_template", *pin)


def _newest_templates(run_id: str) -> Reads[dict[str, int]]:
    [flat] = yield from peek(("HGETALL", f"versions:{run_id}"))
    newest = [(name, int(version)) for name, version in codec.pairs(flat)]
    rows = yield [("HGET", f"resources:{run_id}", f"{version} {name}") for name, version in newest]
    kinds = [None if row is None else codec.read_resource(row).kind for row in rows]
    return {name: version for (name, version), kind in zip(newest, kinds, strict=True) if kind == "prompt_template"}


# --- attempts ---------------------------------------------------------------------------------------------------------


def claim(
    t: Transaction, worker: WorkerStatus, limit: int, lease_s: float, token: str
) -> Reads[list[tuple[Rollout, str]] | None]:
    """Rollouts and the tokens of their leases; None where a predecessor's leases were given up first, so that what it held
    may be claimed next."""
    place = (f"workers:{worker.run_id}", worker.id)
    fields = [part for name in codec.ROLLOUT for part in ("GET", f"{t.group.prefix}r:*->{name}")]
    first: Command = ("LIMIT", 0, limit * t.group.size, "GET", "#", *fields)
    _, [row], [flat], newest = yield from together(
        t.require_runs([worker.run_id]),
        peek(("HGET", *place)),
        peek(("SORT", f"queue:{worker.run_id}", "BY", "nosort", *first)),
        _newest_templates(worker.run_id),
    )
    known = None if row is None else codec.read_worker(worker.run_id, worker.id, row)
    t.write("HSET", *place, codec.worker_row(worker, t.now_ns))
    if known is not None and rules.is_successor(worker, known.host, known.pid):
        [held] = yield from peek(("SMEMBERS", f"held:{worker.run_id}:{worker.id}"))
        lost = yield from stored_rollouts(each.decode() for each in sorted(held))
        attempts = yield from _attempts(lost.values())
        _end(t, [(attempt, rules.restarted(worker.id), None) for attempt in attempts])
        if lost:
            return None
    mine: list[Stored] = []
    taken = t.group.taken[worker.run_id]
    width = 1 + len(codec.ROLLOUT)
    for start in range(0, len(flat), width):
        if len(mine) == limit:
            break
        stored = None if flat[start] in taken else codec.read_rollout(flat[start + 1 : start + width])
        if stored is not None:
            taken.add(flat[start])
            mine.append(stored)
    if not mine:
        return []
    claimed = []
    for number, stored in enumerate(mine):
        lease = f"{token}{number:x}"
        claimed.append((_start(t, stored, newest, worker.id, lease, lease_s), lease))
        t.write("ZREM", f"queue:{worker.run_id}", stored.rollout.id)
    t.once([[rollout.id, lease] for rollout, lease in claimed])
    return claimed


def _start(
    t: Transaction, stored: Stored, newest: Mapping[str, int], holder: str, token: str, lease_s: float
) -> Rollout:
    before = stored.rollout
    begun = rules.pinned(replace(before, attempt=before.attempt + 1), newest)
    started_ns = before.started_ns or t.now_ns
    after = _change(t, stored, state="running", attempt=begun.attempt, started_ns=started_ns, prompts=begun.prompts)
    _lease(t, after, holder, token, lease_s)
    return after


def _lease(t: Transaction, rollout: Rollout, holder: str, token: str, lease_s: float) -> None:
    known = {"worker_id": holder, "state": "running", "started_ns": t.now_ns}
    t.write("SADD", f"held:{rollout.run_id}:{holder}", rollout.id)
    _extend(t, rollout, lease_s, "known", codec.dump(known, "attempt"), "token", token)


def _extend(t: Transaction, rollout: Rollout, lease_s: float, *others: str | bytes) -> None:
    expires_ns = whole(t.now_ns + max(int(lease_s * 1e9), 0))
    t.write("HSET", f"a:{rollout.id}:{rollout.attempt}", "expires", expires_ns, *others)
    t.write("ZADD", "leases", expires_ns[:-3], rollout.id)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The latest attempt of a rollout, with what its end depends on."""

    stored: Stored
    token: str = ""
    known: JSON = field(default_factory=dict)
    expires_ns: int = 0
    totals: Sequence[CallTotals] = ()
    rewards: Sequence[Reward] = ()
    events: Sequence[JSON] = ()

    @property
    def key(self) -> str:
        return f"{self.stored.rollout.id}:{self.stored.rollout.attempt}"

    @property
    def live(self) -> rules.LiveRollout:
        rollout = self.stored.rollout
        return rules.LiveRollout(
            **{name: getattr(rollout, name) for name in _LIVE},
            token=self.token,
            worker_id=self.known.get("worker_id", ""),
        )

    def evidence(self, brought: Sequence[Reward] = ()) -> rules.AttemptRecord:
        """The record of the attempt, with rewards that come with its end."""
        refused, broken = (_summed(self.events, name) for name in (REFUSED_CALLS, BROKEN_SPANS))
        refused_ns = [
            event["started_ns"]
            for event in self.events
            if event["name"] == REFUSED_CALLS and OUTGROWN not in event["counts"]
        ]
        paths = [event["path"] for event in self.events if event["name"] == UNKNOWN_ROUTE]
        return rules.AttemptRecord(
            rewards=sorted(_distinct((*self.rewards, *brought)), key=lambda reward: reward.created_ns),
            calls=len(self.totals),
            unknown_path=paths[-1] if paths else None,
            refused=refused,
            refused_last=max(refused_ns, default=0) > max((each.finished_ns for each in self.totals), default=0),
            broken=broken,
        )


_LIVE = ("id", "run_id", "kind", "state", "attempt", "lost", "retry")
_End = tuple[_Attempt, rules.Ending, rules.AttemptRecord | None]
"""An attempt that ends, and its record where that matters."""


def _distinct(rewards: Iterable[Reward]) -> list[Reward]:
    """Of two of one id the first."""
    return list({reward.id: reward for reward in reversed([*rewards])}.values())[::-1]


def _summed(events: Iterable[JSON], name: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for event in events:
        if event["name"] == name:
            sums.update(event["counts"])
    return sums


def _attempts(stored: Iterable[Stored]) -> Reads[list[_Attempt]]:
    found = [_Attempt(each) for each in stored]
    replies = yield [command for attempt in found for command in _record(attempt.key)]
    return [_recorded(one.stored, replies[4 * place : 4 * place + 4]) for place, one in enumerate(found)]


def _record(key: str) -> list[Command]:
    return [("HMGET", f"a:{key}", "token", "known", "expires"), *[("HVALS", f"{kind}:{key}") for kind in _RECORDS]]


_RECORDS = ("n", "rw", "x")


def _recorded(stored: Stored, replies: Sequence[Reply]) -> _Attempt:
    (token, known, expires), totals, rewards, events = replies
    return _Attempt(
        stored,
        (token or b"").decode(),
        orjson.loads(known or b"{}"),
        int(expires or 0),
        [codec.read_totals(row) for row in totals],
        codec.read_rewards(rewards),
        sorted((orjson.loads(event) for event in events), key=lambda event: int(event["started_ns"])),
    )


def _held(leases: Sequence[Lease]) -> Reads[dict[Lease, _Attempt]]:
    """The attempts of the leases that are held."""
    stored, found = yield from together(
        peek(*[("HMGET", f"r:{lease.rollout_id}", *codec.ROLLOUT) for lease in leases]),
        peek(*[each for lease in leases for each in _record(f"{lease.rollout_id}:{lease.attempt}")]),
    )
    held = {}
    for place, lease in enumerate(leases):
        rollout = codec.read_rollout(stored[place])
        if rollout is not None and rollout.rollout.state == "running" and rollout.rollout.attempt == lease.attempt:
            attempt = _recorded(rollout, found[4 * place : 4 * place + 4])
            if attempt.live.held_by(lease):
                held[lease] = attempt
    return held


def heartbeat(t: Transaction, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float) -> Reads[list[bool]]:
    place = (f"workers:{worker.run_id}", worker.id)
    _, [row], held = yield from together(t.require_runs([worker.run_id]), peek(("HGET", *place)), _held(leases))
    if row is not None:  # only a claim says who it is, so that a beat never hides a predecessor from it
        known = codec.read_worker(worker.run_id, worker.id, row)
        worker = replace(worker, host=known.host, pid=known.pid)
    t.write("HSET", *place, codec.worker_row(worker, t.now_ns))
    for attempt in held.values():
        unchanged(t, attempt.stored)
        _extend(t, attempt.stored.rollout, lease_s)
    return [lease in held for lease in leases]


def finish(t: Transaction, finishes: Sequence[Finish]) -> Reads[list[bool]]:
    held = yield from _held([finish.lease for finish in finishes])
    named = [
        (held[each.lease].stored.rollout, reward.call_id)
        for each in finishes
        if each.lease in held
        for reward in each.rewards
        if reward.call_id is not None
    ]
    known = yield from recorded_calls(named)
    ends: list[_End] = []
    answers = []
    for each in finishes:
        attempt = held.pop(each.lease, None)
        answers.append(attempt is not None)
        if attempt is not None:
            brought, ending = rules.last_rewards(attempt.live, each, t.now_ns, known)
            for place, reward in enumerate(brought, start=len(attempt.rewards)):
                t.write("HSETNX", f"rw:{attempt.key}", reward.id, codec.reward_row(place, reward))
            ends.append((attempt, ending, attempt.evidence(brought)))
    _end(t, ends)
    return t.once(answers)


def cancel(t: Transaction, rollout_ids: Sequence[str]) -> Reads[int]:
    found = yield from stored_rollouts(sorted(set(rollout_ids)))
    live = yield from _attempts(each for each in found.values() if each.rollout.state not in FINAL_STATES)
    _end(t, [(attempt, rules.cancelled(), None) for attempt in live])
    _note_rollouts(t, "cancel", [attempt.stored.rollout for attempt in live])
    return t.once(len(live))


def _note_rollouts(t: Transaction, action: str, rollouts: Iterable[Rollout]) -> None:
    by_run: dict[str, list[str]] = defaultdict(list)
    for rollout in rollouts:
        by_run[rollout.run_id].append(rollout.id)
    for run_id, ids in sorted(by_run.items()):
        note(t, action, run_id, run_id, named_ids(ids))


def expire(t: Transaction, until_ns: int | None) -> Reads[int]:
    yield ()  # for the time
    if until_ns is not None and t.now_ns > until_ns:
        return 0
    [late] = yield [("ZRANGEBYSCORE", "leases", "-inf", t.now_ns // 1000)]
    found = yield from stored_rollouts(each.decode() for each in late)
    attempts = yield from _attempts(found.values())
    overdue = [attempt for attempt in attempts if attempt.expires_ns <= t.now_ns]
    ends: list[_End] = []
    for attempt in overdue:
        t.check(("HGET", f"a:{attempt.key}", "expires"), str(attempt.expires_ns).encode())
        ending = rules.overdue(attempt.live)
        ends.append((attempt, ending, attempt.evidence() if ending.state == "succeeded" else None))
    _end(t, ends)
    return t.once(len(ends))


def _end(t: Transaction, ends: Sequence[_End]) -> None:
    """Write what becomes of attempts and their rollouts."""
    for attempt, ending, evidence in ends:
        change = rules.end_attempt(attempt.live, ending, evidence)
        before = attempt.stored.rollout
        if evidence is not None:
            counts = len(attempt.totals), len(attempt.rewards), len(attempt.events)
            for kind, count in zip(_RECORDS, counts, strict=True):
                t.check(("HLEN", f"{kind}:{attempt.key}"), count)
        error = records.text(change.error)
        if change.ran:
            known = {**attempt.known, "state": change.attempt_state, "finished_ns": t.now_ns, "error": error}
            known["output"] = records.text(change.output)
            t.write("HSET", f"a:{attempt.key}", "known", codec.dump(known, "attempt"))
            t.write("ZREM", "leases", before.id)
            t.write("SREM", f"held:{before.run_id}:{known['worker_id']}", before.id)
        else:
            t.write("ZREM", f"queue:{before.run_id}", before.id)
        after = _change(
            t,
            attempt.stored,
            **{name: getattr(change, name) for name in ("state", "lost", "reward", "calls", "refused")},
            error=error,
            warning=records.text(change.warning),
            finished_ns=None if change.state == "queued" else t.now_ns,
        )
        if change.state == "queued":
            t.write("ZADD", f"queue:{before.run_id}", -before.priority, before.id)
            t.tell(QUEUED, before.run_id)
        else:
            t.write("HSET", f"r:{before.id}", "summary", codec.new_summary(after, attempt.totals))
            t.write("FINISH", before.run_id, before.id)


# --- sessions ---------------------------------------------------------------------------------------------------------


def open_session(t: Transaction, session: NewRollout, rollout_id: str, token: str, lease_s: float) -> Reads[Rollout]:
    group = f"g:{session.run_id}:{session.group_id}"
    _, _, [count], newest = yield from together(
        t.require_runs([session.run_id]),
        _require_templates([session]),
        peek(("HLEN", group)),  # replicas of sessions are numbered without a gap
        _newest_templates(session.run_id),
    )
    [last_id] = yield [("HGET", group, count - 1)]
    last = yield from stored_rollouts([last_id.decode()] if last_id is not None else [])
    for stored in last.values():
        if stored.rollout.state == "running":
            unchanged(t, stored)
            _extend(t, stored.rollout, lease_s)
            return stored.rollout
    t.check(("HGET", group, count), None)
    queued = records.new_rollout(replace(session, replica=count), rollout_id, t.now_ns)
    new = rules.pinned(replace(queued, state="running", attempt=1, started_ns=t.now_ns), newest)
    _put_new(t, new)
    _lease(t, new, SESSION_HOLDER, token, lease_s)
    return new


def record_feedback(t: Transaction, rewards: Sequence[Reward]) -> Reads[None]:
    found = yield from stored_rollouts(reward.rollout_id for reward in rewards)
    for reward in rewards:
        known = found.get(reward.rollout_id)
        if known is None or known.rollout.run_id != reward.run_id or known.rollout.kind != "session":
            raise refusal("no_session", reward.rollout_id, reward.run_id)
    new = yield from record_rewards(t, rewards)
    ended = yield from _attempts(each for each in found.values() if each.rollout.state == "succeeded")  # others: then
    for attempt in ended:
        t.check(("HLEN", f"rw:{attempt.key}"), len(attempt.rewards))
        rollout = attempt.stored.rollout
        mine = [one for one in new if (one.rollout_id, one.attempt) == (rollout.id, rollout.attempt)]
        after = _change(t, attempt.stored, reward=rules.final_reward(attempt.evidence(mine).rewards))
        t.write("HSET", f"r:{after.id}", "summary", codec.new_summary(after, attempt.totals))


# --- the record -------------------------------------------------------------------------------------------------------


def recorded_calls(named: Sequence[tuple[Rollout, str]]) -> Reads[set[tuple[str, str]]]:
    """(call, rollout) of those calls that are recorded in their rollouts, in whatever attempt."""
    places = [(rollout.id, attempt, call_id) for rollout, call_id in named for attempt in range(1, rollout.attempt + 1)]
    replies = yield [("HEXISTS", f"c:{rollout_id}:{attempt}", call_id) for rollout_id, attempt, call_id in places]
    return {(call_id, rollout_id) for (rollout_id, _, call_id), found in zip(places, replies, strict=True) if found}


def _require(
    t: Transaction, what: str, rows: Sequence[Call | Span | Reward], named: Mapping[str, str | None]
) -> Reads[None]:
    """NotFoundError where an attempt does not exist, or a call that a row names (by its id) in its rollout."""
    attempts = sorted({(row.rollout_id, row.attempt) for row in rows})
    wanted = {(row.rollout_id, row.attempt, name) for row in rows if (name := named.get(row.id)) is not None}
    _, found, here = yield from together(
        t.require_runs([row.run_id for row in rows]),
        peek(*[("EXISTS", f"a:{rollout_id}:{attempt}") for rollout_id, attempt in attempts]),
        peek(*[("HEXISTS", f"c:{rollout_id}:{attempt}", name) for rollout_id, attempt, name in wanted]),
    )
    for place, exists in zip(attempts, found, strict=True):
        if not exists:
            raise refusal("no_attempt", what, *place)
    elsewhere = {(name, rollout_id) for (rollout_id, _, name), known in zip(wanted, here, strict=True) if not known}
    if not elsewhere:
        return
    rollouts = yield from stored_rollouts(rollout_id for _, rollout_id in elsewhere)
    known = yield from recorded_calls([(rollouts[each].rollout, name) for name, each in elsewhere if each in rollouts])
    if elsewhere - known:
        raise refusal("no_call", what)


def append_calls(t: Transaction, calls: Sequence[tuple[Call, bytes]]) -> Reads[None]:
    named: dict[str, str | None] = {}
    coming: dict[str, str] = {}
    for call, _ in calls:
        # Its parent may come before it in this very request.
        here = call.parent_id is not None and coming.get(call.parent_id) == call.rollout_id
        named[call.id] = None if here else call.parent_id
        coming[call.id] = call.rollout_id
    yield from _require(t, "calls", [call for call, _ in calls], named)
    for call, row in calls:
        which = f"{call.rollout_id}:{call.attempt}"
        t.write("HSETNX", f"c:{which}", call.id, row)
        t.write("HSETNX", f"n:{which}", call.id, codec.call_totals(call))


def mark_delivered(
    t: Transaction, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool
) -> Reads[None]:
    key = f"c:{rollout_id}:{attempt}"
    rows = yield from t.read(*[("HGET", key, call_id) for call_id in call_ids])
    for call_id, row in zip(call_ids, rows, strict=True):
        if row is not None:
            marked = replace(codec.read_call(row), delivered=delivered)
            t.write("HSET", key, call_id, codec.packed(records.call_row(marked)))


def append_spans(t: Transaction, spans: Sequence[tuple[Span, bytes]]) -> Reads[None]:
    yield from _require(t, "spans", [span for span, _ in spans], {})
    for span, row in spans:
        which = f"{span.rollout_id}:{span.attempt}"
        t.write("HSETNX", f"sp:{which}", span.id, row)
        if span.name == UNKNOWN_ROUTE:
            event: JSON = {"name": span.name, "path": records.text(str(span.attributes.get("path")))}
        elif span.name in _COUNTED and (counts := _COUNTED[span.name](span.attributes)):
            event = {"name": span.name, "counts": counts}
        else:
            continue
        t.write("HSETNX", f"x:{which}", span.id, codec.dump({**event, "started_ns": span.started_ns}, "attributes"))


_COUNTED = {BROKEN_SPANS: broken_counts, REFUSED_CALLS: refused_counts}


def record_rewards(t: Transaction, rewards: Sequence[Reward]) -> Reads[list[Reward]]:
    """Returns those that are new."""
    keys = [f"rw:{reward.rollout_id}:{reward.attempt}" for reward in rewards]
    _, known, counts = yield from together(
        _require(t, "rewards", rewards, {reward.id: reward.call_id for reward in rewards}),
        peek(*[("HEXISTS", key, reward.id) for key, reward in zip(keys, rewards, strict=True)]),
        peek(*[("HLEN", key) for key in keys]),
    )
    new: dict[str, Reward] = {}
    for position, (reward, key) in enumerate(zip(rewards, keys, strict=True)):
        if not known[position] and reward.id not in new:
            kept = replace(reward, created_ns=reward.created_ns or t.now_ns)
            t.write("HSETNX", key, reward.id, codec.reward_row(counts[position] + len(new), kept))
            new[reward.id] = kept
    return list(new.values())


def put_files(t: Transaction, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> Reads[None]:
    yield from t.require_runs([run_id])
    if rollout_id is not None:
        found = yield from stored_rollouts([rollout_id])
        if rollout_id not in found or found[rollout_id].rollout.run_id != run_id:
            raise refusal("no_file_user", rollout_id, run_id)
    for name, content in sorted(files.items()):
        t.write("HSETNX", f"files:{run_id}", name, content)
        if rollout_id is not None:
            t.write("SADD", f"file_users:{run_id}:{name}", rollout_id)
            t.write("SADD", f"file_uses:{rollout_id}", name)


# --- what belongs to a run --------------------------------------------------------------------------------------------


def put_resources(t: Transaction, resources: Sequence[Resource], after: Mapping[str, int]) -> Reads[list[Any]]:
    """The version and the time of each."""
    yield from t.require_runs([resource.run_id for resource in resources])
    places = list(dict.fromkeys((f"versions:{resource.run_id}", resource.name) for resource in resources))
    found = yield from t.read(*[("HGET", *place) for place in places])
    newest = {place: int(version or 0) for place, version in zip(places, found, strict=True)}
    for resource in resources:
        last, expected = newest[f"versions:{resource.run_id}", resource.name], after.get(resource.name)
        if expected is not None and expected != last:
            raise refusal("resource_changed", resource.name, resource.run_id, last, expected)
    stored = []
    for resource in resources:
        place = (f"versions:{resource.run_id}", resource.name)
        version = newest[place] = newest[place] + 1
        kept = replace(resource, version=version, created_ns=resource.created_ns or t.now_ns)
        t.write("HSET", *place, version)
        t.write("HSET", f"resources:{resource.run_id}", f"{version} {resource.name}", codec.resource_row(kept))
        t.tell(RESOURCES, resource.run_id)
        if resource.kind in AUDITED_KINDS:
            detail = {**noted_value(resource), "kind": resource.kind, "version": version}
            note(t, "put_resources", resource.name, resource.run_id, detail)
        stored.append([version, kept.created_ns])
    return t.once(stored)


def log_metrics(t: Transaction, metrics: Sequence[Metric]) -> Reads[None]:
    yield from t.require_runs([metric.run_id for metric in metrics])
    for metric in metrics:
        kept = replace(metric, value=float(metric.value), created_ns=metric.created_ns or t.now_ns)
        t.write("RPUSH", f"metrics:{metric.run_id}", codec.metric_row(kept))
        t.tell(METRICS, metric.run_id)
    t.once(None)


def open_step(t: Transaction, run_id: str, step: int, consumed: Sequence[Consumed]) -> Reads[Step]:
    yield from t.require_runs([run_id])
    present = rules.present_step((yield from _step(t, run_id, step)), run_id, step, consumed)
    if present is not None:
        return present
    wanted = [each.rollout_id for each in consumed]
    found = yield from stored_rollouts(wanted)
    eaten = yield from t.read(*[("HGET", f"r:{each}", "consumed") for each in found])
    known = {}
    for (rollout_id, stored), eaten_by in zip(found.items(), eaten, strict=True):
        by = None if eaten_by is None else int(eaten_by.decode().partition(" ")[0])
        rollout = stored.rollout
        known[rollout_id] = rules.ListedRollout(run_id=rollout.run_id, mode=rollout.mode, state=rollout.state, step=by)
    rules.check_listed(run_id, step, wanted, known)
    opened = Step(run_id=run_id, step=step, state="open", consumed=list(consumed), created_ns=t.now_ns)
    t.write("HSET", f"steps:{run_id}", whole(step), codec.step_row(opened))
    t.write("HSET", f"consumed:{run_id}", step, codec.dump(opened.consumed, "consumed"))
    for each in consumed:
        t.write("HSET", f"r:{each.rollout_id}", "consumed", f"{step} {each.outcome}")
    return opened


def _step(t: Transaction, run_id: str, step: int) -> Reads[Step | None]:
    [row] = yield from t.read(("HGET", f"steps:{run_id}", whole(step)))
    [consumed] = yield [("HGET", f"consumed:{run_id}", step)]
    return None if row is None else codec.read_step(run_id, step, row, consumed)


def close_step(t: Transaction, run_id: str, step: int, version: int) -> Reads[Step]:
    closed = rules.closed_step((yield from _step(t, run_id, step)), run_id, step, version)
    t.write("HSET", f"steps:{run_id}", step, codec.step_row(closed))
    return closed


def reopen_steps(t: Transaction, run_id: str, after: int) -> Reads[list[Step]]:
    yield from t.require_runs([run_id])
    [numbers, metrics, last] = yield [
        ("HKEYS", f"steps:{run_id}"),
        ("LLEN", f"metrics:{run_id}"),
        ("LINDEX", f"undone:{run_id}", -1),
    ]
    reopened = []
    for number in sorted(int(each) for each in numbers if int(each) > after):
        step = yield from _step(t, run_id, number)
        assert step is not None
        reopened.append(replace(step, state="open", version=None))
        if step.state == "closed":
            t.write("HSET", f"steps:{run_id}", number, codec.step_row(reopened[-1]))
    entry = f"{after} {metrics}"
    if last != entry.encode():
        t.check(("LLEN", f"metrics:{run_id}"), metrics)
        t.write("RPUSH", f"undone:{run_id}", entry)
    return reopened


def put_checkpoint(t: Transaction, checkpoint: Checkpoint) -> Reads[None]:
    yield from t.require_runs([checkpoint.run_id])
    if checkpoint.step < 0:
        raise refusal("negative_step", checkpoint.step, checkpoint.run_id)
    kept = replace(checkpoint, created_ns=checkpoint.created_ns or t.now_ns)
    whole(checkpoint.version)
    t.write("HSET", f"checkpoints:{checkpoint.run_id}", whole(checkpoint.step), codec.dump(kept, "checkpoint"))


def record_credit(t: Transaction, credits: Sequence[tuple[CallCredit, bytes]]) -> Reads[None]:
    alive = yield [("HGET", f"run:{credit.run_id}", "alive") for credit, _ in credits]
    found = yield from stored_rollouts(credit.rollout_id for credit, _ in credits)
    for (credit, row), lives in zip(credits, alive, strict=True):
        stored = found.get(credit.rollout_id)
        if lives is None or stored is None or stored.rollout.run_id != credit.run_id:
            raise refusal("no_credited_rollout", credit.rollout_id, credit.run_id)
        t.check(("HGET", f"run:{credit.run_id}", "alive"), lives)
        t.write("HSET", f"cr:{credit.rollout_id}", credit.call_id, row)
        t.write("ZADD", f"credit:{credit.run_id}", whole(credit.step), credit.rollout_id)


def drop_credit(t: Transaction, run_id: str, before: int) -> Reads[None]:
    old = ("-inf", f"({whole(before)}")
    [ids] = yield [("ZRANGEBYSCORE", f"credit:{run_id}", *old)]
    for each in ids:
        t.write("UNLINK", f"cr:{each.decode()}")
    t.write("ZREMRANGEBYSCORE", f"credit:{run_id}", *old)


# --- the end of data --------------------------------------------------------------------------------------------------


def drop_records(t: Transaction, rollout_ids: Sequence[str]) -> Reads[int]:
    found = yield from stored_rollouts(sorted(set(rollout_ids)))
    for stored in found.values():
        if stored.rollout.state not in FINAL_STATES:
            raise refusal("has_records_to_come", stored.rollout.id, stored.rollout.state)
    which = [f"{id_}:{attempt}" for id_, each in found.items() for attempt in range(1, each.rollout.attempt + 1)]
    counts = yield [("HLEN", f"c:{each}") for each in which]
    rewards = yield [("HGETALL", f"rw:{each}") for each in which]
    for each, flat in zip(which, rewards, strict=True):
        for kind in ("c", "sp", "x"):
            t.write("UNLINK", f"{kind}:{each}")
        for reward_id, row in codec.pairs(flat):
            place, _, _ = row.partition(b" ")
            [reward] = codec.read_rewards([row])
            if reward.call_id is not None:
                t.check(("HGET", f"rw:{each}", reward_id), row)
                t.write("HSET", f"rw:{each}", reward_id, codec.reward_row(int(place), replace(reward, call_id=None)))
    for stored in found.values():
        yield from _drop_files(t, stored.rollout)
        t.write("UNLINK", f"cr:{stored.rollout.id}")
        t.write("ZREM", f"credit:{stored.rollout.run_id}", stored.rollout.id)
    _note_rollouts(t, "drop_records", [stored.rollout for stored in found.values()])
    return t.once(sum(counts))


def _drop_files(t: Transaction, rollout: Rollout) -> Reads[None]:
    """Files go with the last rollout that uses them."""
    [names] = yield [("SMEMBERS", f"file_uses:{rollout.id}")]
    users = [f"file_users:{rollout.run_id}:{name.decode()}" for name in names]
    others = yield [("SMEMBERS", key) for key in users]
    for name, key, those in zip(names, users, others, strict=True):
        t.write("SREM", key, rollout.id)
        if {each.decode() for each in those} <= {rollout.id}:
            t.check(("SCARD", key), len(those))
            t.write("HDEL", f"files:{rollout.run_id}", name)
    t.write("UNLINK", f"file_uses:{rollout.id}")


def delete_portion(t: Transaction, run_id: str, portion: int) -> Reads[list[bool]]:
    """Returns whether the run was there, and whether there is more of it. The run itself goes last."""
    [exists, alive] = yield from t.read(("EXISTS", f"run:{run_id}"), ("HGET", f"run:{run_id}", "alive"))
    if not exists:
        return t.once([False, False])
    t.write("SREM", "active", run_id)  # a server without memory lets scripts write that remove something first
    if alive is not None:
        t.write("HDEL", f"run:{run_id}", "alive")  # from now on nobody writes to it
        note(t, "delete_runs", run_id, run_id, {})
    indexes = [f"s:{run_id}:{mode}:{state}" for mode in MODES for state in STATES]
    members = yield [("ZRANGE", index, 0, portion - 1) for index in indexes]
    ids = [each.decode() for found in members for each in found][:portion]
    if ids:
        found = yield from stored_rollouts(ids)
        for stored in found.values():
            yield from _delete_rollout(t, stored.rollout)
        return t.once([True, True])
    yield from _delete_rest(t, run_id)
    return t.once([True, False])


def _delete_rollout(t: Transaction, rollout: Rollout) -> Reads[None]:
    for attempt in range(1, rollout.attempt + 1):
        for kind in ("a", "c", "n", "sp", "x", "rw"):
            t.write("UNLINK", f"{kind}:{rollout.id}:{attempt}")
    yield from _drop_files(t, rollout)
    t.write("HDEL", f"g:{rollout.run_id}:{rollout.group_id}", rollout.replica)
    for index in ("leases", f"queue:{rollout.run_id}", f"finished:{rollout.run_id}", *_state_keys(rollout)):
        t.write("ZREM", index, rollout.id)
    t.write("UNLINK", f"r:{rollout.id}")
    t.write("UNLINK", f"cr:{rollout.id}")


def _state_keys(rollout: Rollout) -> Iterator[str]:
    for state in STATES:  # it may have another by the time this is applied
        yield f"s:{rollout.run_id}:{rollout.mode}:{state}"


def _delete_rest(t: Transaction, run_id: str) -> Reads[None]:
    [workers, tokens, created_ns] = yield [
        ("HKEYS", f"workers:{run_id}"),
        ("SMEMBERS", f"run_tokens:{run_id}"),
        ("HGET", f"run:{run_id}", "created_ns"),
    ]
    for worker in workers:
        t.write("UNLINK", f"held:{run_id}:{worker.decode()}")
    hashes = yield [("HGET", "secret_hashes", token) for token in tokens]
    for token, secret_hash in zip(tokens, hashes, strict=True):
        t.write("HDEL", "token_hashes", secret_hash)
        t.write("HDEL", "secret_hashes", token)
        t.write("SREM", "tokens", token)
        t.write("UNLINK", f"token:{token.decode()}")
    t.write("ZREM", "runs", f"{int(created_ns):020}:{run_id}")
    for kind in (
        *("workers", "queue", "finished", "versions", "resources", "metrics", "undone", "steps", "consumed"),
        *("checkpoints", "credit", "summary", "run_tokens", "files", "run"),
    ):
        t.write("UNLINK", f"{kind}:{run_id}")
    for about in ("queued", "finished", "resources", "metrics"):
        t.tell(about, run_id, FOR_EVER)


# --- access -----------------------------------------------------------------------------------------------------------


def add_token(t: Transaction, token: Token, secret_hash: str, lifetime_s: float | None) -> Reads[list[Any]]:
    """Its id, and the times at which it was made and ends."""
    yield from t.require_runs([token.run_id] if token.run_id is not None else [])
    expires_ns = None if lifetime_s is None else t.now_ns + int(lifetime_s * 1e9)
    kept = replace(token, created_ns=t.now_ns, expires_ns=expires_ns)
    t.write("SET", f"token:{token.id}", codec.dump(kept, "token"))
    t.write("SADD", "tokens", token.id)
    t.write("HSET", "token_hashes", secret_hash, token.id)
    t.write("HSET", "secret_hashes", token.id, secret_hash)
    if token.run_id is not None:
        t.write("SADD", f"run_tokens:{token.run_id}", token.id)
    detail = {"name": token.name, "role": token.role, "lifetime_s": lifetime_s}
    note(t, "create_token", token.id, token.run_id, detail)
    return t.once([kept.id, kept.created_ns, kept.expires_ns])


def revoke_token(t: Transaction, token_id: str) -> Reads[Token]:
    [row] = yield from t.read(("GET", f"token:{token_id}"))
    if row is None:
        raise refusal("no_token", token_id)
    token = codec.read_token(row)
    if token.revoked_ns is not None:
        return token
    revoked = replace(token, revoked_ns=t.now_ns)
    t.write("SET", f"token:{token_id}", codec.dump(revoked, "token"))
    note(t, "revoke_token", token_id, token.run_id, {"name": token.name, "role": token.role})
    return revoked


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for pair in fields.items() for part in pair]
