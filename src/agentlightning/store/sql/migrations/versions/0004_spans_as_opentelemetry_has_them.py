"""Spans have what OpenTelemetry says of them; calls name the span that made them; rewards may come from AIR.

SQLite cannot change a check, so its table of rewards is made anew.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Text, text

revision = "0004"
down_revision = "0003"

_Text = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("calls", Column("span_id", _Text))
    op.add_column("spans", Column("trace_id", _Text))
    for name, default in (("kind", "internal"), ("status", "unset"), ("status_message", ""), ("events", "[]")):
        op.add_column("spans", Column(name, _Text, nullable=False, server_default=default))
    broken = text("name = 'gateway.broken_spans'")
    op.create_index("spans_broken", "spans", ["rollout_id"], sqlite_where=broken, postgresql_where=broken)
    if op.get_context().dialect.name == "sqlite":
        _make_rewards_anew()
    else:
        op.drop_constraint("source_is_known", "rewards", type_="check")
        op.create_check_constraint(
            "source_is_known",
            "rewards",
            "source IN ('return', 'function', 'output', 'emitted', 'posted', 'air', 'rescored')",
        )


def _make_rewards_anew() -> None:
    """SQLite's own procedure: foreign keys off, a new table, the rows, then its name; indexes go with the old one."""
    connection = op.get_bind()
    asked = "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name = 'rewards'"
    indexes = [row[0] for row in connection.exec_driver_sql(asked)]
    connection.exec_driver_sql(f"CREATE TABLE rewards_anew ({_REWARDS})")
    connection.exec_driver_sql("INSERT INTO rewards_anew SELECT * FROM rewards")
    connection.exec_driver_sql("DROP TABLE rewards")
    connection.exec_driver_sql("ALTER TABLE rewards_anew RENAME TO rewards")
    for index in indexes:
        connection.exec_driver_sql(index)


_REWARDS = """
    seq INTEGER NOT NULL,
    id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    value DOUBLE NOT NULL,
    name TEXT NOT NULL,
    call_id TEXT,
    source TEXT NOT NULL,
    created_ns BIGINT NOT NULL,
    PRIMARY KEY (seq),
    FOREIGN KEY(rollout_id, attempt) REFERENCES attempts (rollout_id, attempt),
    CONSTRAINT source_is_known CHECK (source IN ('return', 'function', 'output', 'emitted', 'posted', 'air', 'rescored')),
    UNIQUE (id),
    FOREIGN KEY(call_id) REFERENCES calls (id)
"""
