"""Leads from version 8: calls keep the fields of their request that a stored response repeats.

Responses that are recorded already had none kept: they are fetched with the defaults.
"""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    op.add_column("calls", sqlalchemy.Column("request_fields", text, nullable=False, server_default="{}"))
