"""Adds tokens, and the audit log with what keeps it as it was written."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, Text, UniqueConstraint

revision = "0006"
down_revision = "0005"

_KEPT = "the audit log is only ever added to"
_SQLITE = [
    f"CREATE TRIGGER audit_keeps_{name} BEFORE {act} BEGIN SELECT RAISE(ABORT, '{_KEPT}'); END"
    for name, act in (
        ("update", "UPDATE ON audit"),
        ("delete", "DELETE ON audit"),
        # INSERT OR REPLACE deletes without asking the trigger for DELETE.
        ("replaced", "INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE seq = NEW.seq)"),
    )
]
_POSTGRESQL = [
    f"CREATE FUNCTION audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{_KEPT}'; END $$",
    "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
    " FOR EACH STATEMENT EXECUTE FUNCTION audit_is_kept()",
]
_Text = Text().with_variant(Text(collation="C"), "postgresql")
_Serial = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "tokens",
        Column("id", _Text, primary_key=True),
        Column("name", _Text, nullable=False),
        Column("role", _Text, nullable=False),
        Column("run_id", _Text),
        Column("created_ns", BigInteger, nullable=False),
        Column("expires_ns", BigInteger),
        Column("revoked_ns", BigInteger),
        Column("secret_hash", _Text, nullable=False),
        UniqueConstraint("secret_hash"),
        CheckConstraint("role IN ('admin', 'trainer', 'worker', 'reader')", name="role_is_known"),
    )
    op.create_index("tokens_by_run", "tokens", ["run_id"])
    op.create_table(
        "audit",
        Column("created_ns", BigInteger, nullable=False),
        Column("actor", _Text, nullable=False),
        Column("action", _Text, nullable=False),
        Column("subject", _Text, nullable=False),
        Column("run_id", _Text),
        Column("detail", _Text, nullable=False),
        Column("seq", _Serial, primary_key=True, autoincrement=True),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_run", "audit", ["run_id", "seq"])
    for statement in _POSTGRESQL if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.get_bind().exec_driver_sql(statement)
