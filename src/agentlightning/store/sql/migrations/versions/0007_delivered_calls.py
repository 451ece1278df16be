"""Leads from version 6: calls say whether they were delivered, and steps which records they learn from.

Of calls that are recorded already nobody knows; they count as delivered, as they did. Steps that are open go on reading all
that their rollouts have.
"""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column(
        "calls", sqlalchemy.Column("delivered", sqlalchemy.Boolean(), nullable=False, server_default=sqlalchemy.true())
    )
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    op.add_column("consumption", sqlalchemy.Column("inputs", text))
