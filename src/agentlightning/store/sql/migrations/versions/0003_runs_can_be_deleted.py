"""Writers number their transactions; a seq of metrics is never used twice; runs can be deleted without reading every call.

What belongs to an attempt no longer refers to its run, which follows from the attempt: deleting a run would look for it in
every call. SQLite cannot drop a foreign key, so its tables are made anew.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Text, text

revision = "0003"
down_revision = "0002"

_Text = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "writers",
        Column("id", _Text, primary_key=True),
        Column("last", BigInteger, nullable=False),
        Column("seen_ns", BigInteger, nullable=False),
    )
    if op.get_context().dialect.name == "sqlite":
        for table, definition in _TABLES.items():
            _make_anew(table, definition)
    else:
        for table in ("calls", "spans", "rewards"):
            op.drop_constraint(f"{table}_run_id_fkey", table, type_="foreignkey")
    op.create_index("metrics_by_seq", "metrics", ["run_id", "seq"])
    for name, table, column in (("calls_by_parent", "calls", "parent_id"), ("rewards_by_call", "rewards", "call_id")):
        given = text(f"{column} IS NOT NULL")
        op.create_index(name, table, [column], sqlite_where=given, postgresql_where=given)


def _make_anew(table: str, definition: str) -> None:
    """SQLite's own procedure: foreign keys off, a new table, the rows, then its name; indexes go with the old one."""
    connection = op.get_bind()
    asked = "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name = ?"
    indexes = [row[0] for row in connection.exec_driver_sql(asked, (table,))]
    connection.exec_driver_sql(f"CREATE TABLE {table}_anew ({definition})")
    columns = [row[1] for row in connection.exec_driver_sql(f"PRAGMA table_info({table}_anew)")]
    named = ", ".join(f'"{column}"' for column in columns)
    connection.exec_driver_sql(f"INSERT INTO {table}_anew ({named}) SELECT {named} FROM {table}")
    connection.exec_driver_sql(f"DROP TABLE {table}")
    connection.exec_driver_sql(f"ALTER TABLE {table}_anew RENAME TO {table}")
    for index in indexes:
        connection.exec_driver_sql(index)


_TABLES = {
    "calls": """
        id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        rollout_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        parent_id TEXT,
        suffix_ids BLOB NOT NULL,
        sampled_ids BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        versions TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        policy TEXT NOT NULL,
        model TEXT NOT NULL,
        protocol TEXT NOT NULL,
        sampling TEXT NOT NULL,
        history_hash TEXT NOT NULL,
        request_hash TEXT NOT NULL,
        messages TEXT NOT NULL,
        answer TEXT NOT NULL,
        tools TEXT,
        fork_cause TEXT,
        context_only INTEGER DEFAULT '0' NOT NULL,
        asked TEXT DEFAULT '{}' NOT NULL,
        usage TEXT DEFAULT '{}' NOT NULL,
        agent TEXT,
        finish_reason TEXT NOT NULL,
        started_ns BIGINT NOT NULL,
        finished_ns BIGINT NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(rollout_id, attempt) REFERENCES attempts (rollout_id, attempt),
        CONSTRAINT one_logprob_a_sampled_token CHECK (length(logprobs) = length(sampled_ids)),
        FOREIGN KEY(parent_id) REFERENCES calls (id)
    """,
    "spans": """
        id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        rollout_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        name TEXT NOT NULL,
        parent_id TEXT,
        attributes TEXT NOT NULL,
        started_ns BIGINT NOT NULL,
        finished_ns BIGINT NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(rollout_id, attempt) REFERENCES attempts (rollout_id, attempt)
    """,
    "rewards": """
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
        CONSTRAINT source_is_known CHECK (source IN ('return', 'function', 'output', 'emitted', 'posted')),
        UNIQUE (id),
        FOREIGN KEY(call_id) REFERENCES calls (id)
    """,
    "metrics": """
        seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL,
        step INTEGER NOT NULL,
        name TEXT NOT NULL,
        value DOUBLE,
        created_ns BIGINT NOT NULL,
        abandoned BOOLEAN NOT NULL,
        FOREIGN KEY(run_id) REFERENCES runs (id)
    """,
}
