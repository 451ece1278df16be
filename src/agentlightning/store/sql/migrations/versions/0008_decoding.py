"""Leads from version 7: calls say what was applied to the model's logits (a grammar, penalties, cuts).

Of calls that are recorded already it was nothing: such fields were refused.
"""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    op.add_column("calls", sqlalchemy.Column("decoding", text, nullable=False, server_default="{}"))
