"""The tables of the SQL stores, whose constraints make wrong states impossible to write; creation of the schema.

Times are integers (ns), ids text, token ids and logprobs little-endian int32 and float32 arrays, everything nested is JSON
text. The constraints promise: a (run, group, replica) is one rollout, with at most one running attempt, and a place in the
order of finished rollouts if and only if it is in a final state; calls, spans and rewards belong to attempts that exist, and
parents come before their children; a rollout is consumed at most once, by a step of its own run, and never for
evaluation. A new database is made without Alembic, whose one
revision makes the same.
"""

from __future__ import annotations

import secrets
import typing
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from agentlightning import records
from agentlightning.errors import StoreError
from agentlightning.records import Call, Metric, Reward, WorkerStatus
from agentlightning.store.codec import ARRAYS, scalar
from agentlightning.store.gateway_events import COUNTED_EVENTS
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.sql.database import Database
from agentlightning.store.summaries import RolloutSummary
from agentlightning.store.tokens import Token, TokenRole

SCHEMA_VERSION = 1
"""The last of migrations/versions."""

RUNNING: sa.ColumnElement[str] = sa.literal_column("'running'")
"""A literal, not a parameter: only so can a planner prove that a partial index applies."""

metadata = sa.MetaData()

_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # only INTEGER is a rowid there
_Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")  # ids sort by time only where bytes decide
_Int = sa.Integer().with_variant(sa.BigInteger(), "postgresql")  # SQLite's INTEGER has 64 bits


_KEYS = {"run_id": "runs.id", "rollout_id": "rollouts.id", "parent_id": "calls.id", "call_id": "calls.id"}
_COUNTERS = ("version", "parent", "finished_seq")


def _one_of(column: str, values: Any) -> sa.CheckConstraint:
    """The column holds one of the values of this Literal."""
    allowed = ", ".join(f"'{value}'" for value in typing.get_args(values))
    return sa.CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_is_known")


def _run() -> sa.Column[str]:
    return sa.Column("run_id", _Text, sa.ForeignKey("runs.id"), nullable=False)


def _of_attempt() -> sa.ForeignKeyConstraint:
    """Key of what belongs to an attempt. Its run is named without a key: deleting a run would look for it in every call."""
    return sa.ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"])


def _columns(kind: type, keys: Collection[str] = (), without: Collection[str] = ()) -> list[sa.Column[Any]]:
    """A column for each field of a record; those named in `keys` refer to the table of what they name."""
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name not in without}
    return [
        sa.Column(
            name,
            _type(kind, name, hint),
            *([sa.ForeignKey(_KEYS[name])] if name in keys else []),
            primary_key=name == "id" and kind not in (Reward, RolloutSummary, WorkerStatus),
            nullable=scalar(hint)[1] or (kind, name) == (Metric, "value"),  # not a finite number
        )
        for name, hint in hints.items()
    ]


def _type(kind: type, name: str, hint: Any) -> Any:
    plain, _ = scalar(hint)
    if (kind, name) in ARRAYS:
        return sa.LargeBinary()
    if plain is int:
        return sa.BigInteger() if name.endswith("_ns") or name in _COUNTERS else _Int
    return {float: sa.Double(), bool: sa.Boolean()}.get(plain, _Text)  # type: ignore[arg-type]


meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", _Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("key", _Text, primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("outcome", sa.LargeBinary),  # MessagePack; NULL where doing it again does the same
    sa.Column("created_ns", sa.BigInteger, nullable=False, index=True),
)
"""The outcome of a request, written by the transaction that produced it: see store/request.py. So transactions of
PostgreSQL have a row, too: after a lost connection it tells whether the last commit took place."""

runs = sa.Table(
    "runs",
    metadata,
    *_columns(records.Run),
    sa.Column("finished", sa.BigInteger, nullable=False, server_default="0"),  # the last finished_seq given
    _one_of("state", records.RunState),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    *_columns(records.Rollout, keys=["run_id"], without=["outcome"]),  # which stands in consumption
    sa.UniqueConstraint("run_id", "group_id", "replica"),
    sa.UniqueConstraint("run_id", "finished_seq"),
    sa.UniqueConstraint("id", "run_id", "mode"),  # what consumption refers to
    _one_of("mode", records.Mode),
    _one_of("state", records.RolloutState),
    sa.CheckConstraint(
        "(finished_seq IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled'))", name="finished_has_its_place"
    ),
)
sa.Index(
    "rollouts_by_state", rollouts.c.run_id, rollouts.c.state, rollouts.c.priority.desc(), rollouts.c.id, rollouts.c.mode
)

rollout_summaries = sa.Table(
    "rollout_summaries",
    metadata,
    *_columns(RolloutSummary, keys=["run_id"]),
    sa.PrimaryKeyConstraint("run_id", "finished_ns", "id"),
    sa.UniqueConstraint("id"),
    sa.ForeignKeyConstraint(["id"], ["rollouts.id"]),
    _one_of("mode", records.Mode),
    _one_of("state", records.RolloutState),
    sqlite_with_rowid=False,  # a run's lie side by side, so that a filter without an index reads nothing else
)
"""One narrow row a finished rollout, and nothing of its payloads: whatever filters rollouts reads these alone."""
SUMMARY_ORDERS = ("reward", "step", "turns", "sampled_tokens", "duration_s")
SUMMARY_KEYS = ("task_key", "group_id", "finished_seq")
for _name in SUMMARY_ORDERS:
    sa.Index(f"summaries_by_{_name}", rollout_summaries.c.run_id, rollout_summaries.c[_name], rollout_summaries.c.id)
for _name in SUMMARY_KEYS:
    sa.Index(f"summaries_by_{_name}", rollout_summaries.c.run_id, rollout_summaries.c[_name])

attempts = sa.Table(
    "attempts",
    metadata,
    *_columns(records.Attempt, keys=["rollout_id"]),
    sa.Column("token", _Text, nullable=False),
    sa.PrimaryKeyConstraint("rollout_id", "attempt"),
    _one_of("state", records.AttemptState),
    _one_of("cause", records.Cause),
    sqlite_with_rowid=False,
)
sa.Index(
    "attempts_one_running",
    attempts.c.rollout_id,
    unique=True,
    sqlite_where=attempts.c.state == RUNNING,
    postgresql_where=attempts.c.state == RUNNING,
)
sa.Index(
    "attempts_by_lease",
    attempts.c.lease_expires_ns,
    sqlite_where=attempts.c.state == RUNNING,
    postgresql_where=attempts.c.state == RUNNING,
)

workers = sa.Table(
    "workers", metadata, *_columns(WorkerStatus, keys=["run_id"]), sa.PrimaryKeyConstraint("run_id", "id")
)

calls = sa.Table(
    "calls",
    metadata,
    *_columns(Call, keys=["parent_id"]),
    _of_attempt(),
    sa.CheckConstraint("length(logprobs) = length(sampled_ids)", name="one_logprob_a_sampled_token"),
)
sa.Index("calls_by_attempt", calls.c.rollout_id, calls.c.attempt)
_HAS_PARENT = calls.c.parent_id.is_not(None)
sa.Index(
    "calls_by_parent", calls.c.parent_id, sqlite_where=_HAS_PARENT, postgresql_where=_HAS_PARENT
)  # to delete calls

files = sa.Table(
    "files",
    metadata,
    _run(),
    sa.Column("hash", _Text, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("run_id", "hash"),
)

file_uses = sa.Table(
    "file_uses",
    metadata,
    sa.Column("rollout_id", _Text, sa.ForeignKey("rollouts.id"), nullable=False),
    sa.Column("run_id", _Text, nullable=False),
    sa.Column("hash", _Text, nullable=False),
    sa.PrimaryKeyConstraint("rollout_id", "hash"),
    sa.ForeignKeyConstraint(["run_id", "hash"], ["files.run_id", "files.hash"]),
)
sa.Index("file_uses_by_file", file_uses.c.run_id, file_uses.c.hash)  # to delete files

spans = sa.Table("spans", metadata, *_columns(records.Span), _of_attempt())
sa.Index("spans_by_rollout", spans.c.rollout_id, spans.c.started_ns)
OF_GATEWAY: sa.ColumnElement[bool] = spans.c.name.in_([sa.literal_column(f"'{name}'") for name in COUNTED_EVENTS])
sa.Index("spans_of_gateway", spans.c.rollout_id, sqlite_where=OF_GATEWAY, postgresql_where=OF_GATEWAY)

rewards = sa.Table(
    "rewards",
    metadata,
    *_columns(Reward, keys=["call_id"]),
    _of_attempt(),
    sa.Column("seq", _Serial, primary_key=True, autoincrement=True),
    sa.UniqueConstraint("id"),
    _one_of("source", records.RewardSource),
)
sa.Index("rewards_by_rollout", rewards.c.rollout_id, rewards.c.attempt)
_OF_CALL = rewards.c.call_id.is_not(None)
sa.Index("rewards_by_call", rewards.c.call_id, sqlite_where=_OF_CALL, postgresql_where=_OF_CALL)  # to delete calls

resource_versions = sa.Table(
    "resource_versions",
    metadata,
    _run(),
    sa.Column("name", _Text, nullable=False),
    sa.Column("last", sa.BigInteger, nullable=False),  # only ever counts up, so that no version is used twice
    sa.PrimaryKeyConstraint("run_id", "name"),
)

resources = sa.Table(
    "resources",
    metadata,
    *_columns(records.Resource, keys=["run_id"]),
    sa.PrimaryKeyConstraint("run_id", "name", "version"),
    sa.ForeignKeyConstraint(["run_id", "name"], ["resource_versions.run_id", "resource_versions.name"]),
)

IS_NEWEST = sa.and_(
    resource_versions.c.run_id == resources.c.run_id,
    resource_versions.c.name == resources.c.name,
    resource_versions.c.last == resources.c.version,
)
"""Joins the newest version of each resource."""

metrics = sa.Table(
    "metrics",
    metadata,
    *_columns(Metric, keys=["run_id"], without=["seq"]),
    sa.Column("seq", _Serial, primary_key=True, autoincrement=True),
    sqlite_autoincrement=True,  # who follows metrics relies on a seq that is never used twice
)
sa.Index("metrics_by_name", metrics.c.run_id, metrics.c.step, metrics.c.name)
sa.Index("metrics_by_series", metrics.c.run_id, metrics.c.name, metrics.c.step)
sa.Index("metrics_by_seq", metrics.c.run_id, metrics.c.seq)

steps = sa.Table(
    "steps",
    metadata,
    sa.Column("id", _Serial, primary_key=True, autoincrement=True),
    _run(),
    sa.Column("step", _Int, nullable=False),
    sa.Column("state", _Text, nullable=False),
    sa.Column("version", sa.BigInteger),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("id", "run_id"),
    sa.UniqueConstraint("run_id", "step"),
    _one_of("state", records.StepState),
    sa.CheckConstraint("state <> 'closed' OR version IS NOT NULL", name="closed_has_a_version"),
)

consumption = sa.Table(
    "consumption",
    metadata,
    sa.Column("rollout_id", _Text, primary_key=True),
    sa.Column("run_id", _Text, nullable=False),
    sa.Column("mode", _Text, nullable=False, server_default="train"),
    sa.Column("step_id", _Serial, nullable=False),
    sa.Column("position", _Int, nullable=False),
    sa.Column("outcome", _Text, nullable=False),
    sa.Column("inputs", _Text),  # JSON
    sa.ForeignKeyConstraint(["rollout_id", "run_id", "mode"], ["rollouts.id", "rollouts.run_id", "rollouts.mode"]),
    sa.ForeignKeyConstraint(["step_id", "run_id"], ["steps.id", "steps.run_id"]),
    sa.UniqueConstraint("step_id", "position"),
    sa.CheckConstraint("mode = 'train'", name="evaluation_is_never_consumed"),
    _one_of("outcome", records.Outcome),
)

checkpoints = sa.Table(
    "checkpoints", metadata, *_columns(records.Checkpoint, keys=["run_id"]), sa.PrimaryKeyConstraint("run_id", "step")
)

credit = sa.Table(
    "credit",
    metadata,
    *_columns(records.CallCredit, keys=["rollout_id"]),
    sa.PrimaryKeyConstraint("rollout_id", "call_id"),
)
sa.Index("credit_by_step", credit.c.run_id, credit.c.step)  # to delete what is old

tokens = sa.Table(
    "tokens",
    metadata,
    *_columns(Token),  # its run is no foreign key: a trainer's token is made before its run
    sa.Column("secret_hash", _Text, nullable=False),
    sa.UniqueConstraint("secret_hash"),
    _one_of("role", TokenRole),
)
sa.Index("tokens_by_run", tokens.c.run_id)

model_versions = sa.Table(
    "model_versions",
    metadata,
    *_columns(ModelVersion),  # its run is no foreign key: entries stay when their run is deleted
    sa.PrimaryKeyConstraint("name", "number"),
    sa.UniqueConstraint("run_id", "policy", "step"),
)


model_aliases = sa.Table(
    "model_aliases",
    metadata,
    *_columns(ModelAlias),
    sa.PrimaryKeyConstraint("name", "alias"),
    sa.ForeignKeyConstraint(["name", "number"], ["model_versions.name", "model_versions.number"]),
)

# --- creation ---------------------------------------------------------------------------------------------------------


def prepare_schema(connection: sa.Connection, database: Database) -> bytes:
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
    connection.execute(sa.update(meta).where(proof).values(value=str(version).encode()))
    secret = sa.select(meta.c.value).where(meta.c.key == "signing_secret")
    return bytes(connection.execute(secret).scalar_one())


def _read_version(connection: sa.Connection) -> int | None:
    if not sa.inspect(connection).has_table("meta"):
        return None
    known = sa.select(meta.c.value).where(meta.c.key == "schema_version")
    value = connection.execute(known).scalar()
    return None if value is None else int(value)


def _create(connection: sa.Connection) -> bytes:
    metadata.create_all(connection, checkfirst=False)  # a question for each table took longer than making it
    known = {"schema_version": str(SCHEMA_VERSION).encode(), "signing_secret": secrets.token_bytes(32)}
    connection.execute(sa.insert(meta), [{"key": key, "value": value} for key, value in known.items()])
    return known["signing_secret"]
