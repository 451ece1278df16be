"""Leads from version 18: tokens have the role client, too."""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    with op.batch_alter_table("tokens", recreate="auto") as tokens:
        tokens.drop_constraint("role_is_known", type_="check")
        tokens.create_check_constraint("role_is_known", "role IN ('admin', 'trainer', 'worker', 'reader', 'client')")
