"""Leads from version 19: rollouts that continue another one, and calls that were answered from its record."""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    op.add_column("rollouts", sqlalchemy.Column("fork", text, nullable=True))
    op.add_column("calls", sqlalchemy.Column("replayed_id", text, nullable=True))
