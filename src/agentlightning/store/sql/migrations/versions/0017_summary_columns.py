"""Leads from version 16: summaries of finished rollouts by column too, in chunks, those too that finished before."""

from __future__ import annotations

import sqlalchemy
from alembic import op

from agentlightning.store.sql.columns import write_all_chunks

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    whole = sqlalchemy.Integer().with_variant(sqlalchemy.BigInteger(), "postgresql")
    op.create_table(
        "summary_chunks",
        sqlalchemy.Column("run_id", text, sqlalchemy.ForeignKey("runs.id"), nullable=False),
        sqlalchemy.Column("field", text, nullable=False),
        sqlalchemy.Column("chunk", whole, nullable=False),
        sqlalchemy.Column("kind", text, nullable=False),
        sqlalchemy.Column("data", sqlalchemy.LargeBinary(), nullable=False),
        sqlalchemy.PrimaryKeyConstraint("run_id", "field", "chunk"),
    )
    op.create_table(
        "summary_texts",
        sqlalchemy.Column("run_id", text, sqlalchemy.ForeignKey("runs.id"), nullable=False),
        sqlalchemy.Column("field", text, nullable=False),
        sqlalchemy.Column("hash", sqlalchemy.BigInteger(), nullable=False),
        sqlalchemy.Column("text", text, nullable=False),
        sqlalchemy.PrimaryKeyConstraint("run_id", "field", "hash"),
        sqlite_with_rowid=False,
    )
    op.create_index("summaries_by_finished_seq", "rollout_summaries", ["run_id", "finished_seq"])
    write_all_chunks(op.get_bind())
