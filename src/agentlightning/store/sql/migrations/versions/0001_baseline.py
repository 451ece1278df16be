"""The first schema. Later revisions change it; what has been released is never edited."""

from __future__ import annotations

from alembic import op

from agentlightning.store.sql.tables import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    metadata.create_all(op.get_bind(), checkfirst=False)
