"""Leads from version 10: images of requests, kept by the hash of their bytes, and where they stand in prompts."""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    op.add_column("calls", sqlalchemy.Column("images", text, nullable=False, server_default="[]"))
    op.create_table(
        "images",
        sqlalchemy.Column("run_id", text, sqlalchemy.ForeignKey("runs.id"), nullable=False),
        sqlalchemy.Column("hash", text, nullable=False),
        sqlalchemy.Column("data", sqlalchemy.LargeBinary(), nullable=False),
        sqlalchemy.PrimaryKeyConstraint("run_id", "hash"),
    )
    op.create_table(
        "image_uses",
        sqlalchemy.Column("rollout_id", text, sqlalchemy.ForeignKey("rollouts.id"), nullable=False),
        sqlalchemy.Column("run_id", text, nullable=False),
        sqlalchemy.Column("hash", text, nullable=False),
        sqlalchemy.PrimaryKeyConstraint("rollout_id", "hash"),
        sqlalchemy.ForeignKeyConstraint(["run_id", "hash"], ["images.run_id", "images.hash"]),
    )
    op.create_index("image_uses_by_image", "image_uses", ["run_id", "hash"])
