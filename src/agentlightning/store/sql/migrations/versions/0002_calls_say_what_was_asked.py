"""Calls keep what else their request asked for, an external model's token counts, and how much of them is context only."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, Text

revision = "0002"
down_revision = "0001"

_Text = Text().with_variant(Text(collation="C"), "postgresql")
_Int = Integer().with_variant(BigInteger(), "postgresql")


def upgrade() -> None:
    op.add_column("calls", Column("context_only", _Int, nullable=False, server_default="0"))
    op.add_column("calls", Column("asked", _Text, nullable=False, server_default="{}"))
    op.add_column("calls", Column("usage", _Text, nullable=False, server_default="{}"))
