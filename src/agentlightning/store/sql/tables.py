"""The tables of the SQL stores, whose constraints make wrong states impossible to write.

Driven by the methods beside it; decides nothing. Times are integers (ns), ids text, token ids and logprobs little-endian
int32 and float32 arrays, everything nested is JSON text. What the constraints promise:

- a (run, group, replica) is one rollout; a rollout has at most one running attempt, and a place in the order of finished
  rollouts if and only if it is in a final state;
- calls, spans and rewards belong to attempts that exist; a call's parent is recorded before it (that it is one of the same
  rollout, record.py sees to);
- an image of a run is kept once, and as long as a rollout uses it;
- a rollout is consumed at most once, by a step of its own run, and never if it is an evaluation rollout;
- a step is the only one of its number;
- an entry of the audit log stays as it was written;
- an alias is of a model version that exists.
"""

from __future__ import annotations

import secrets
import typing
from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    event,
    insert,
    inspect,
    literal_column,
    select,
    update,
)

from agentlightning.errors import StoreError
from agentlightning.records import (
    Attempt,
    AttemptState,
    Call,
    CallCredit,
    Checkpoint,
    Metric,
    Mode,
    Outcome,
    Resource,
    Reward,
    RewardSource,
    Rollout,
    RolloutState,
    Run,
    RunState,
    Span,
    StepState,
    WorkerStatus,
)
from agentlightning.store.audit import AuditEntry
from agentlightning.store.codec import ARRAYS, scalar
from agentlightning.store.gateway_events import BROKEN_SPANS, REFUSED_CALLS, UNKNOWN_ROUTE
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.sql.database import Database
from agentlightning.store.summaries import RolloutSummary
from agentlightning.store.tokens import Token, TokenRole

SCHEMA_VERSION = 1
"""The last of migrations/versions."""

RUNNING: ColumnElement[str] = literal_column("'running'")
"""A literal, not a parameter: only so can a planner prove that a partial index applies."""

metadata = MetaData()

_Serial = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER is a rowid there
_Text = Text().with_variant(Text(collation="C"), "postgresql")  # ids sort by time only where bytes decide
_Int = Integer().with_variant(BigInteger(), "postgresql")  # SQLite's INTEGER has 64 bits


_KEYS = {"run_id": "runs.id", "rollout_id": "rollouts.id", "parent_id": "calls.id", "call_id": "calls.id"}
_COUNTERS = ("version", "parent", "finished_seq")


def _one_of(column: str, values: Any) -> CheckConstraint:
    """The column holds one of the values of this Literal."""
    allowed = ", ".join(f"'{value}'" for value in typing.get_args(values))
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_is_known")


def _run() -> Column[str]:
    return Column("run_id", _Text, ForeignKey("runs.id"), nullable=False)


def _of_attempt() -> ForeignKeyConstraint:
    """Key of what belongs to an attempt. Its run is named without a key: deleting a run would look for it in every call."""
    return ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"])


def _columns(kind: type, keys: Collection[str] = (), without: Collection[str] = ()) -> list[Column[Any]]:
    """A column for each field of a record; those named in `keys` refer to the table of what they name."""
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name not in without}
    return [
        Column(
            name,
            _type(kind, name, hint),
            *([ForeignKey(_KEYS[name])] if name in keys else []),
            primary_key=name == "id" and kind not in (Reward, RolloutSummary, WorkerStatus),
            nullable=scalar(hint)[1] or (kind, name) == (Metric, "value"),  # not a finite number
        )
        for name, hint in hints.items()
    ]


def _type(kind: type, name: str, hint: Any) -> Any:
    plain, _ = scalar(hint)
    if (kind, name) in ARRAYS:
        return LargeBinary()
    if plain is int:
        return BigInteger() if name.endswith("_ns") or name in _COUNTERS else _Int
    return {float: Double(), bool: Boolean()}.get(plain, _Text)  # type: ignore[arg-type]


meta = Table(
    "meta",
    metadata,
    Column("key", _Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    Column("key", _Text, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("outcome", LargeBinary),  # MessagePack; NULL where doing it again does the same
    Column("created_ns", BigInteger, nullable=False, index=True),
)
"""The outcome of a request, written by the transaction that produced it: see store/audit.py. So transactions of
PostgreSQL have a row, too: after a lost connection it tells whether the last commit took place."""

runs = Table(
    "runs",
    metadata,
    *_columns(Run),
    Column("finished", BigInteger, nullable=False, server_default="0"),  # the last finished_seq given
    _one_of("state", RunState),
)

rollouts = Table(
    "rollouts",
    metadata,
    *_columns(Rollout, keys=["run_id"], without=["outcome"]),  # which stands in consumption
    UniqueConstraint("run_id", "group_id", "replica"),
    UniqueConstraint("run_id", "finished_seq"),
    UniqueConstraint("id", "run_id", "mode"),  # what consumption refers to
    _one_of("mode", Mode),
    _one_of("state", RolloutState),
    CheckConstraint(
        "(finished_seq IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled'))", name="finished_has_its_place"
    ),
)
Index(
    "rollouts_by_state", rollouts.c.run_id, rollouts.c.state, rollouts.c.priority.desc(), rollouts.c.id, rollouts.c.mode
)

rollout_summaries = Table(
    "rollout_summaries",
    metadata,
    *_columns(RolloutSummary, keys=["run_id"]),
    PrimaryKeyConstraint("run_id", "finished_ns", "id"),
    UniqueConstraint("id"),
    ForeignKeyConstraint(["id"], ["rollouts.id"]),
    _one_of("mode", Mode),
    _one_of("state", RolloutState),
    sqlite_with_rowid=False,  # a run's lie side by side, so that a filter without an index reads nothing else
)
"""One narrow row a finished rollout, and nothing of its payloads: whatever filters rollouts reads these alone."""
SUMMARY_ORDERS = ("reward", "step", "turns", "sampled_tokens", "duration_s")
SUMMARY_KEYS = ("task_key", "group_id", "finished_seq")
for _name in SUMMARY_ORDERS:
    Index(f"summaries_by_{_name}", rollout_summaries.c.run_id, rollout_summaries.c[_name], rollout_summaries.c.id)
for _name in SUMMARY_KEYS:
    Index(f"summaries_by_{_name}", rollout_summaries.c.run_id, rollout_summaries.c[_name])

attempts = Table(
    "attempts",
    metadata,
    *_columns(Attempt, keys=["rollout_id"]),
    Column("token", _Text, nullable=False),
    PrimaryKeyConstraint("rollout_id", "attempt"),
    _one_of("state", AttemptState),
    sqlite_with_rowid=False,
)
Index(
    "attempts_one_running",
    attempts.c.rollout_id,
    unique=True,
    sqlite_where=attempts.c.state == RUNNING,
    postgresql_where=attempts.c.state == RUNNING,
)
Index(
    "attempts_by_lease",
    attempts.c.lease_expires_ns,
    sqlite_where=attempts.c.state == RUNNING,
    postgresql_where=attempts.c.state == RUNNING,
)

workers = Table("workers", metadata, *_columns(WorkerStatus, keys=["run_id"]), PrimaryKeyConstraint("run_id", "id"))

calls = Table(
    "calls",
    metadata,
    *_columns(Call, keys=["parent_id"]),
    _of_attempt(),
    CheckConstraint("length(logprobs) = length(sampled_ids)", name="one_logprob_a_sampled_token"),
)
Index("calls_by_attempt", calls.c.rollout_id, calls.c.attempt)
_HAS_PARENT = calls.c.parent_id.is_not(None)
Index("calls_by_parent", calls.c.parent_id, sqlite_where=_HAS_PARENT, postgresql_where=_HAS_PARENT)  # to delete calls

files = Table(
    "files",
    metadata,
    _run(),
    Column("hash", _Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("run_id", "hash"),
)

file_uses = Table(
    "file_uses",
    metadata,
    Column("rollout_id", _Text, ForeignKey("rollouts.id"), nullable=False),
    Column("run_id", _Text, nullable=False),
    Column("hash", _Text, nullable=False),
    PrimaryKeyConstraint("rollout_id", "hash"),
    ForeignKeyConstraint(["run_id", "hash"], ["files.run_id", "files.hash"]),
)
Index("file_uses_by_file", file_uses.c.run_id, file_uses.c.hash)  # to delete files

spans = Table("spans", metadata, *_columns(Span), _of_attempt())
Index("spans_by_rollout", spans.c.rollout_id, spans.c.started_ns)
_EVENTS = (BROKEN_SPANS, REFUSED_CALLS, UNKNOWN_ROUTE)
OF_GATEWAY: ColumnElement[bool] = spans.c.name.in_([literal_column(f"'{name}'") for name in _EVENTS])
"""Spans that count when an attempt ends."""
Index("spans_of_gateway", spans.c.rollout_id, sqlite_where=OF_GATEWAY, postgresql_where=OF_GATEWAY)

rewards = Table(
    "rewards",
    metadata,
    *_columns(Reward, keys=["call_id"]),
    _of_attempt(),
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    UniqueConstraint("id"),
    _one_of("source", RewardSource),
)
Index("rewards_by_rollout", rewards.c.rollout_id, rewards.c.attempt)
_OF_CALL = rewards.c.call_id.is_not(None)
Index("rewards_by_call", rewards.c.call_id, sqlite_where=_OF_CALL, postgresql_where=_OF_CALL)  # to delete calls

resource_versions = Table(
    "resource_versions",
    metadata,
    _run(),
    Column("name", _Text, nullable=False),
    Column("last", BigInteger, nullable=False),  # only ever counts up, so that no version is used twice
    PrimaryKeyConstraint("run_id", "name"),
)

resources = Table(
    "resources",
    metadata,
    *_columns(Resource, keys=["run_id"]),
    PrimaryKeyConstraint("run_id", "name", "version"),
    ForeignKeyConstraint(["run_id", "name"], ["resource_versions.run_id", "resource_versions.name"]),
)

metrics = Table(
    "metrics",
    metadata,
    *_columns(Metric, keys=["run_id"], without=["seq"]),
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    sqlite_autoincrement=True,  # who follows metrics relies on a seq that is never used twice
)
Index("metrics_by_name", metrics.c.run_id, metrics.c.step, metrics.c.name)
Index("metrics_by_series", metrics.c.run_id, metrics.c.name, metrics.c.step)
Index("metrics_by_seq", metrics.c.run_id, metrics.c.seq)

steps = Table(
    "steps",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    _run(),
    Column("step", _Int, nullable=False),
    Column("state", _Text, nullable=False),
    Column("version", BigInteger),
    Column("created_ns", BigInteger, nullable=False),
    UniqueConstraint("id", "run_id"),
    UniqueConstraint("run_id", "step"),
    _one_of("state", StepState),
    CheckConstraint("state <> 'closed' OR version IS NOT NULL", name="closed_has_a_version"),
)

consumption = Table(
    "consumption",
    metadata,
    Column("rollout_id", _Text, primary_key=True),
    Column("run_id", _Text, nullable=False),
    Column("mode", _Text, nullable=False, server_default="train"),
    Column("step_id", _Serial, nullable=False),
    Column("position", _Int, nullable=False),
    Column("outcome", _Text, nullable=False),
    Column("inputs", _Text),  # JSON
    ForeignKeyConstraint(["rollout_id", "run_id", "mode"], ["rollouts.id", "rollouts.run_id", "rollouts.mode"]),
    ForeignKeyConstraint(["step_id", "run_id"], ["steps.id", "steps.run_id"]),
    UniqueConstraint("step_id", "position"),
    CheckConstraint("mode = 'train'", name="evaluation_is_never_consumed"),
    _one_of("outcome", Outcome),
)

checkpoints = Table(
    "checkpoints", metadata, *_columns(Checkpoint, keys=["run_id"]), PrimaryKeyConstraint("run_id", "step")
)

credit = Table(
    "credit",
    metadata,
    *_columns(CallCredit, keys=["rollout_id"]),
    PrimaryKeyConstraint("rollout_id", "call_id"),
)
Index("credit_by_step", credit.c.run_id, credit.c.step)  # to delete what is old

tokens = Table(
    "tokens",
    metadata,
    *_columns(Token),  # its run is no foreign key: a trainer's token is made before its run
    Column("secret_hash", _Text, nullable=False),
    UniqueConstraint("secret_hash"),
    _one_of("role", TokenRole),
)
Index("tokens_by_run", tokens.c.run_id)

audit = Table(
    "audit",
    metadata,
    *_columns(AuditEntry, without=["seq"]),
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    sqlite_autoincrement=True,
)
Index("audit_by_run", audit.c.run_id, audit.c.seq)

model_versions = Table(
    "model_versions",
    metadata,
    *_columns(ModelVersion),  # its run is no foreign key: entries stay when their run is deleted
    PrimaryKeyConstraint("name", "number"),
    UniqueConstraint("run_id", "policy", "step"),
)


model_aliases = Table(
    "model_aliases",
    metadata,
    *_columns(ModelAlias),
    PrimaryKeyConstraint("name", "alias"),
    ForeignKeyConstraint(["name", "number"], ["model_versions.name", "model_versions.number"]),
)

_KEPT = "the audit log is only ever added to"
AUDIT_IS_KEPT = {
    "sqlite": [
        f"CREATE TRIGGER audit_keeps_{name} BEFORE {act} BEGIN SELECT RAISE(ABORT, '{_KEPT}'); END"
        for name, act in (
            ("update", "UPDATE ON audit"),
            ("delete", "DELETE ON audit"),
            # INSERT OR REPLACE deletes without asking the trigger for DELETE.
            ("replaced", "INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE seq = NEW.seq)"),
        )
    ],
    "postgresql": [
        f"CREATE FUNCTION audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{_KEPT}'; END $$",
        "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
        " FOR EACH STATEMENT EXECUTE FUNCTION audit_is_kept()",
    ],
}
"""Statements that make a database refuse every change of the audit log, by dialect."""
for _dialect, _statements in AUDIT_IS_KEPT.items():
    for _statement in _statements:
        event.listen(audit, "after_create", DDL(_statement).execute_if(dialect=_dialect))  # type: ignore[no-untyped-call]


# --- creation ---------------------------------------------------------------------------------------------------------


def prepare_schema(connection: Connection, database: Database) -> bytes:
    """Create the tables where there are none, refuse another version; returns the signing secret. In one transaction."""
    version = _read_version(connection)
    if version is None:
        database.enter_schema(connection)  # several may start at once
        version = _read_version(connection)
    if version is None:
        return _create(connection)
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{database.name}: its schema has version {version}, this program needs {SCHEMA_VERSION}; choose another "
            "place for the store, or use the version of agentlightning that made it"
        )
    # A database that cannot be written is refused now, not at the first call.
    proof = meta.c.key == "schema_version"
    connection.execute(update(meta).where(proof).values(value=str(version).encode()))
    secret = select(meta.c.value).where(meta.c.key == "signing_secret")
    return bytes(connection.execute(secret).scalar_one())


def _read_version(connection: Connection) -> int | None:
    if not inspect(connection).has_table("meta"):
        return None
    known = select(meta.c.value).where(meta.c.key == "schema_version")
    value = connection.execute(known).scalar()
    return None if value is None else int(value)


def _create(connection: Connection) -> bytes:
    metadata.create_all(connection, checkfirst=False)  # a question for each table took longer than making it
    known = {"schema_version": str(SCHEMA_VERSION).encode(), "signing_secret": secrets.token_bytes(32)}
    connection.execute(insert(meta), [{"key": key, "value": value} for key, value in known.items()])
    return known["signing_secret"]
