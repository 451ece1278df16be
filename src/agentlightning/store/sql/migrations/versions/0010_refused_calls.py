"""Leads from version 9: rollouts say whether they failed because a model call was refused, and refused calls are found fast.

Of rollouts that ended already nobody knows; they count as not refused, as they did.
"""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column(
        "rollouts",
        sqlalchemy.Column("refused", sqlalchemy.Boolean(), nullable=False, server_default=sqlalchemy.false()),
    )
    refused = sqlalchemy.text("name = 'gateway.refused_calls'")
    op.create_index("spans_refused", "spans", ["rollout_id"], sqlite_where=refused, postgresql_where=refused)
