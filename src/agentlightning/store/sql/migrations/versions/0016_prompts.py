"""Leads from version 15: rollouts have the versions of their prompt templates. Those before had none."""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    op.add_column("rollouts", sqlalchemy.Column("prompts", text, nullable=False, server_default="{}"))
