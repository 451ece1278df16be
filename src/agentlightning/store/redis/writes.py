"""Transactions on Redis: runs and rollouts, attempts, the record, models, and the end of data.

Generators that the writer drives (transactions.py), for the methods of store.py. Beside the documents of codec.py there are
indexes, which commands of the same transaction keep: ``s:RUN:MODE:STATE`` and ``queue:RUN`` of rollouts, ``leases`` by the
microsecond in which they run out, ``held:RUN:WORKER``, ``g:RUN:GROUP`` by replica, ``finished:RUN`` by place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import orjson

from agentlightning.records import (
    JSON,
    Attempt,
    Call,
    CallCredit,
    Lease,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    Run,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec as records
from agentlightning.store import rules
from agentlightning.store.gateway_events import COUNTED_EVENTS
from agentlightning.store.models import ModelAlias, ModelVersion, changed_version, next_number
from agentlightning.store.redis import codec
from agentlightning.store.redis.codec import CallTotals, Stored, dump, read, whole
from agentlightning.store.redis.connection import (
    Command,
    Reply,
)
from agentlightning.store.redis.reads import MODES, STATES
from agentlightning.store.redis.transactions import Reads, Transaction, peek, together
from agentlightning.store.rules import refusal, run_ids
from agentlightning.store.tokens import Token
from agentlightning.store.waiting import QUEUED, RESOURCES

FOR_EVER = 2**62
"""Wakes everybody, whatever number its listener waits for."""
MAX_IDS_TRIED = 16
MAX_DELETED_PER_TRANSACTION = 200
"""Rollouts that one transaction deletes: a few milliseconds, during which others wait."""


# --- runs and rollouts ------------------------------------------------------------------------------------------------


def create_run(t: Transaction, name: str, config: JSON, run_id: str | None, binds: str | None) -> Reads[str]:
    token: Token | None = None
    if binds is not None:
        [row] = yield from t.read(("HGET", "tokens", binds))
        token = None if row is None else read(Token, row)
        if token is None or token.run_id is not None or token.revoked_ns is not None:
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
    run = Run(id=chosen, name=name, state="running", config=config, created_ns=t.now_ns, updated_ns=t.now_ns)
    t.write("HSET", f"run:{chosen}", "alive", 1, "run", dump(run, "config"), "finished", 0)
    t.write("ZADD", "runs", 0, f"{t.now_ns:020}:{chosen}")
    t.write("SADD", "active", chosen)
    if token is not None:
        t.write("HSET", "tokens", token.id, dump(replace(token, run_id=chosen), "token"))
    return t.once(chosen)


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
        require_templates([rollout for _, rollout in new]),
        peek(*[("HGET", group, replica) for group, replica in places]),
    )
    ids = {place: known_id.decode() for place, known_id in zip(places, known, strict=True) if known_id is not None}
    existing = yield from stored_rollouts(ids.values())
    found = {place: existing[each].rollout for place, each in ids.items() if each in existing}
    for place, (rollout_id, rollout) in zip(places, new, strict=True):
        if place not in found:
            made = found[place] = records.new_rollout(rollout, rollout_id, t.now_ns)
            t.check(("HGET", *place), None)
            put_new(t, made)
            t.write("ZADD", f"queue:{made.run_id}", -made.priority, made.id)
    for run_id in {rollout.run_id for _, rollout in new}:
        t.tell(QUEUED, run_id)
    return [found[place] for place in places]


def put_new(t: Transaction, rollout: Rollout) -> None:
    t.write("HSET", f"g:{rollout.run_id}:{rollout.group_id}", rollout.replica, rollout.id)
    t.write("HSET", f"r:{rollout.id}", "new", dump(rollout, "task"), "now", codec.changing(rollout))
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


def require_templates(new: Sequence[NewRollout]) -> Reads[None]:
    """NotFoundError where a rollout names a prompt template, or a version of one, that its run does not have."""
    pins = sorted({(rollout.run_id, *pin) for rollout in new for pin in rollout.prompts.items()})
    rows = yield [("HGET", f"resources:{run_id}", f"{version} {name}") for run_id, name, version in pins]
    for pin, row in zip(pins, rows, strict=True):
        if row is None or read(Resource, row).kind != "prompt_template":
            raise refusal("no_template", *pin)


def newest_templates(run_id: str) -> Reads[dict[str, int]]:
    [flat] = yield from peek(("HGETALL", f"versions:{run_id}"))
    newest = [(name, int(version)) for name, version in codec.pairs(flat)]
    rows = yield [("HGET", f"resources:{run_id}", f"{version} {name}") for name, version in newest]
    kinds = [None if row is None else read(Resource, row).kind for row in rows]
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
        newest_templates(worker.run_id),
    )
    known = None if row is None else read(WorkerStatus, row)
    t.write("HSET", *place, dump(replace(worker, seen_ns=t.now_ns), "worker"))
    if known is not None and rules.is_successor(worker, known.host, known.pid):
        [held] = yield from peek(("SMEMBERS", f"held:{worker.run_id}:{worker.id}"))
        lost = yield from stored_rollouts(each.decode() for each in sorted(held))
        for attempt in (yield from attempts(lost.values())):
            end(t, attempt, rules.restarted(worker.id), None)
        if lost:
            return None
    claimed: list[tuple[Rollout, str]] = []
    taken = t.group.taken[worker.run_id]
    width = 1 + len(codec.ROLLOUT)
    for start in range(0, len(flat), width):
        stored = None if flat[start] in taken else codec.read_rollout(flat[start + 1 : start + width])
        if len(claimed) == limit:
            break
        if stored is not None:
            taken.add(flat[start])
            lease = f"{token}{len(claimed):x}"
            claimed.append((_start(t, stored, newest, worker.id, lease, lease_s), lease))
            t.write("ZREM", f"queue:{worker.run_id}", stored.rollout.id)
    if claimed:
        t.once([[rollout.id, lease] for rollout, lease in claimed])
    return claimed


def _start(
    t: Transaction, stored: Stored, newest: Mapping[str, int], holder: str, token: str, lease_s: float
) -> Rollout:
    before = stored.rollout
    begun = rules.pinned(replace(before, attempt=before.attempt + 1), newest)
    started_ns = before.started_ns or t.now_ns
    after = _change(t, stored, state="running", attempt=begun.attempt, started_ns=started_ns, prompts=begun.prompts)
    lease(t, after, holder, token, lease_s)
    return after


def lease(t: Transaction, rollout: Rollout, holder: str, token: str, lease_s: float) -> None:
    known = Attempt(
        rollout_id=rollout.id,
        attempt=rollout.attempt,
        state="running",
        worker_id=holder,
        lease_expires_ns=0,
        started_ns=t.now_ns,
    )
    t.write("SADD", f"held:{rollout.run_id}:{holder}", rollout.id)
    extend(t, rollout, lease_s, "known", dump(known, "attempt"), "token", token)


def extend(t: Transaction, rollout: Rollout, lease_s: float, *others: str | bytes) -> None:
    expires_ns = whole(t.now_ns + max(int(lease_s * 1e9), 0))
    t.write("HSET", f"a:{rollout.id}:{rollout.attempt}", "expires", expires_ns, *others)
    t.write("ZADD", "leases", expires_ns[:-3], rollout.id)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The latest attempt of a rollout, with what its end depends on."""

    stored: Stored
    token: str
    known: Attempt | None
    """None where the rollout was never claimed."""
    expires_ns: int
    totals: Sequence[CallTotals]
    rewards_row: bytes | None
    events: Sequence[tuple[str, int, JSON]]

    @property
    def key(self) -> str:
        return f"{self.stored.rollout.id}:{self.stored.rollout.attempt}"

    @property
    def rewards(self) -> list[Reward]:
        return read(list[Reward], self.rewards_row or b"[]")

    @property
    def live(self) -> rules.LiveRollout:
        rollout, worker_id = self.stored.rollout, "" if self.known is None else self.known.worker_id
        known = {name: getattr(rollout, name) for name in ("id", "run_id", "kind", "state", "attempt", "lost", "retry")}
        return rules.LiveRollout(**known, token=self.token, worker_id=worker_id)

    def evidence(self, rewards: Sequence[Reward]) -> rules.AttemptRecord:
        """The record of the attempt, with these rewards."""
        record = rules.AttemptRecord(
            rewards=sorted(rewards, key=lambda reward: reward.created_ns),
            calls=len(self.totals),
            last_call_ns=max((each.finished_ns for each in self.totals), default=0),
        )
        for name, started_ns, attributes in self.events:
            record.add_event(name, started_ns, attributes)
        return record


def distinct(rewards: Iterable[Reward]) -> list[Reward]:
    """Of two of one id the first."""
    found: dict[str, Reward] = {}
    for reward in rewards:
        found.setdefault(reward.id, reward)
    return list(found.values())


def rewards_row(rewards: Iterable[Reward]) -> bytes:
    named = [replace(reward, name=records.text(reward.name) or "") for reward in rewards]
    return b"[" + b",".join([dump(reward, "reward") for reward in named]) + b"]"


def attempts(stored: Iterable[Stored]) -> Reads[list[_Attempt]]:
    found = list(stored)
    keys = [f"{each.rollout.id}:{each.rollout.attempt}" for each in found]
    replies = yield [command for key in keys for command in _record(key)]
    return [_recorded(each, replies[4 * place : 4 * place + 4]) for place, each in enumerate(found)]


def _record(key: str) -> list[Command]:
    known = ("HMGET", f"a:{key}", "token", "known", "expires")
    return [known, ("HVALS", f"n:{key}"), ("GET", f"rw:{key}"), ("HVALS", f"x:{key}")]


def _recorded(stored: Stored, replies: Sequence[Reply]) -> _Attempt:
    (token, known, expires), totals, rewards, events = replies
    return _Attempt(
        stored,
        (token or b"").decode(),
        None if known is None else read(Attempt, known),
        int(expires or 0),
        [codec.read_totals(row) for row in totals],
        rewards,
        sorted((orjson.loads(event) for event in events), key=lambda event: int(event[1])),
    )


def held(leases: Sequence[Lease]) -> Reads[dict[Lease, _Attempt]]:
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


def expire(t: Transaction, until_ns: int | None) -> Reads[int]:
    yield ()  # for the time
    if until_ns is not None and t.now_ns > until_ns:
        return 0
    [late] = yield [("ZRANGEBYSCORE", "leases", "-inf", t.now_ns // 1000)]
    found = yield from stored_rollouts(each.decode() for each in late)
    live = yield from attempts(found.values())
    overdue = [attempt for attempt in live if attempt.expires_ns <= t.now_ns]
    for attempt in overdue:
        t.check(("HGET", f"a:{attempt.key}", "expires"), str(attempt.expires_ns).encode())
        ending = rules.overdue(attempt.live)
        end(t, attempt, ending, attempt.evidence(attempt.rewards) if ending.state == "succeeded" else None)
    return t.once(len(overdue))


def end(t: Transaction, attempt: _Attempt, ending: rules.Ending, evidence: rules.AttemptRecord | None) -> None:
    """Write what becomes of an attempt that ends and of its rollout. evidence: its record, where that matters."""
    change = rules.end_attempt(attempt.live, ending, evidence)
    before = attempt.stored.rollout
    if evidence is not None:
        t.check(("HLEN", f"n:{attempt.key}"), len(attempt.totals))
        t.check(("HLEN", f"x:{attempt.key}"), len(attempt.events))
        t.check(("GET", f"rw:{attempt.key}"), attempt.rewards_row)
    error = records.text(change.error)
    if change.ran and attempt.known is not None:
        output = records.text(change.output)
        known = replace(
            attempt.known,
            state=change.attempt_state,
            cause=change.cause,
            finished_ns=t.now_ns,
            error=error,
            output=output,
        )
        t.write("HSET", f"a:{attempt.key}", "known", dump(known, "attempt"))
        t.write("ZREM", "leases", before.id)
        t.write("SREM", f"held:{before.run_id}:{known.worker_id}", before.id)
    else:
        t.write("ZREM", f"queue:{before.run_id}", before.id)
    after = _change(
        t,
        attempt.stored,
        **{name: getattr(change, name) for name in ("state", "lost", "reward", "calls", "refused", "gave_up", "cause")},
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


def append_spans(t: Transaction, spans: Sequence[tuple[Span, bytes]]) -> Reads[None]:
    yield from _require(t, "spans", [span for span, _ in spans], {})
    for span, row in spans:
        which = f"{span.rollout_id}:{span.attempt}"
        t.write("HSETNX", f"sp:{which}", span.id, row)
        if span.name in COUNTED_EVENTS:
            event = dump([span.name, span.started_ns, span.attributes], "attributes")
            t.write("HSETNX", f"x:{which}", span.id, event)


def record_rewards(t: Transaction, rewards: Sequence[Reward]) -> Reads[list[Reward]]:
    """Returns all rewards of these attempts."""
    keys = sorted({f"{reward.rollout_id}:{reward.attempt}" for reward in rewards})
    _, rows = yield from together(
        _require(t, "rewards", rewards, {reward.id: reward.call_id for reward in rewards}),
        t.read(*[("GET", f"rw:{key}") for key in keys]),
    )
    found = []
    for key, row in zip(keys, rows, strict=True):
        known = read(list[Reward], row or b"[]")
        mine = [each for each in rewards if f"{each.rollout_id}:{each.attempt}" == key]
        named = [replace(each, created_ns=each.created_ns or t.now_ns) for each in mine]
        kept = distinct([*known, *named])
        if len(kept) > len(known):
            t.write("SET", f"rw:{key}", rewards_row(kept))
        found += kept
    return found


def record_feedback(t: Transaction, rewards: Sequence[Reward]) -> Reads[None]:
    found = yield from stored_rollouts(reward.rollout_id for reward in rewards)
    for reward in rewards:
        known = found.get(reward.rollout_id)
        if known is None or known.rollout.run_id != reward.run_id or known.rollout.kind != "session":
            raise refusal("no_session", reward.rollout_id, reward.run_id)
    recorded = yield from record_rewards(t, rewards)
    ended = yield from attempts(each for each in found.values() if each.rollout.state == "succeeded")  # others: then
    for attempt in ended:
        rollout = attempt.stored.rollout
        mine = [one for one in recorded if (one.rollout_id, one.attempt) == (rollout.id, rollout.attempt)]
        rewards_now = attempt.evidence(mine or attempt.rewards).rewards
        after = _change(t, attempt.stored, reward=rules.final_reward(rewards_now))
        t.write("HSET", f"r:{after.id}", "summary", codec.new_summary(after, attempt.totals))


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
        t.write("HSET", f"resources:{resource.run_id}", f"{version} {resource.name}", dump(kept, "value"))
        t.tell(RESOURCES, resource.run_id)
        stored.append([version, kept.created_ns])
    return t.once(stored)


def read_step(t: Transaction, run_id: str, step: int) -> Reads[Step | None]:
    [row] = yield from t.read(("HGET", f"steps:{run_id}", whole(step)))
    return None if row is None else read(Step, row)


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


def put_model(t: Transaction, version: ModelVersion) -> Reads[ModelVersion]:
    if version.revision == 0:
        yield from t.require_runs([version.run_id])
    yield from t.read(("HGET", "meta", "alias_moves"))
    [rows, alias_rows] = yield [("HVALS", "models"), ("HVALS", "aliases")]
    versions = {each.reference: (each, row) for row in rows if (each := read(ModelVersion, row)).name}
    if version.revision:
        known, row = versions.get(version.reference) or (None, None)
        t.check(("HGET", "models", version.reference), row)
        aliases = sorted((read(ModelAlias, each) for each in alias_rows), key=lambda one: one.alias)
        mine = [one for one in aliases if one.name == version.name]
        stored = changed_version(version, known, mine, t.now_ns)
    else:
        place = (f"run_models:{version.run_id}", f"{version.step} {version.policy}")
        [registered] = yield from t.read(("HGET", *place))
        if registered is not None:
            [row] = yield [("HGET", "models", registered)]
            return read(ModelVersion, row)
        named = [one for one, _ in versions.values() if one.name == version.name]
        own = [(one.number, one.step) for one in named if (one.run_id, one.policy) == (version.run_id, version.policy)]
        taken = [one.number for one in named]
        number = next_number(taken, max(own, default=None), version.step)
        stored = replace(version, number=number, revision=1, created_ns=t.now_ns)
        t.check(("HGET", "models", stored.reference), None)
        t.write("HSET", *place, stored.reference)
    t.write("HSET", "models", stored.reference, dump(stored, "version"))
    return stored


def add_token(t: Transaction, token: Token, secret_hash: str, lifetime_s: float | None) -> Reads[list[Any]]:
    """Its id, and the times at which it was made and ends."""
    yield from t.require_runs([token.run_id] if token.run_id is not None else [])
    expires_ns = None if lifetime_s is None else t.now_ns + int(lifetime_s * 1e9)
    kept = replace(token, created_ns=t.now_ns, expires_ns=expires_ns)
    t.write("HSET", "tokens", token.id, dump(kept, "token"))
    t.write("HSET", "token_hashes", secret_hash, token.id)
    return t.once([kept.id, kept.created_ns, kept.expires_ns])


# --- the end of data --------------------------------------------------------------------------------------------------


def drop_files(t: Transaction, rollout: Rollout) -> Reads[None]:
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


def delete_portion(t: Transaction, run_id: str) -> Reads[list[bool]]:
    """Returns whether the run was there, and whether there is more of it. The run itself goes last."""
    [exists, alive] = yield from t.read(("EXISTS", f"run:{run_id}"), ("HGET", f"run:{run_id}", "alive"))
    if not exists:
        return t.once([False, False])
    t.write("SREM", "active", run_id)  # a server without memory lets scripts write that remove something first
    if alive is not None:
        t.write("HDEL", f"run:{run_id}", "alive")  # from now on nobody writes to it
    indexes = [f"s:{run_id}:{mode}:{state}" for mode in MODES for state in STATES]
    members = yield [("ZRANGE", index, 0, MAX_DELETED_PER_TRANSACTION - 1) for index in indexes]
    ids = [each.decode() for found in members for each in found][:MAX_DELETED_PER_TRANSACTION]
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
    yield from drop_files(t, rollout)
    t.write("HDEL", f"g:{rollout.run_id}:{rollout.group_id}", rollout.replica)
    states = [_state_key(replace(rollout, state=state)) for state in STATES]  # it may have another when this is applied
    for index in ("leases", f"queue:{rollout.run_id}", f"finished:{rollout.run_id}", *states):
        t.write("ZREM", index, rollout.id)
    t.write("UNLINK", f"r:{rollout.id}")
    t.write("UNLINK", f"cr:{rollout.id}")


def _delete_rest(t: Transaction, run_id: str) -> Reads[None]:
    [workers, tokens, hashes, row] = yield [
        ("HKEYS", f"workers:{run_id}"),
        ("HVALS", "tokens"),
        ("HGETALL", "token_hashes"),
        ("HGET", f"run:{run_id}", "run"),
    ]
    for worker in workers:
        t.write("UNLINK", f"held:{run_id}:{worker.decode()}")
    own = {token.id for each in tokens if (token := read(Token, each)).run_id == run_id}
    for secret_hash, token_id in codec.pairs(hashes):
        if token_id.decode() in own:
            t.write("HDEL", "token_hashes", secret_hash)
            t.write("HDEL", "tokens", token_id)
    t.write("ZREM", "runs", f"{read(Run, row).created_ns:020}:{run_id}")
    for kind in (
        *("workers", "queue", "finished", "versions", "resources", "metrics", "undone", "steps", "checkpoints"),
        *("credit", "files", "run"),
    ):
        t.write("UNLINK", f"{kind}:{run_id}")
    for about in ("queued", "finished", "resources", "metrics"):
        t.tell(about, run_id, FOR_EVER)
