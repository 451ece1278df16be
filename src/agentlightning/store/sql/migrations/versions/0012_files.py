"""Leads from version 11: images of requests are kept as files, and so is what all of a run needs."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.drop_index("image_uses_by_image", "image_uses")
    op.rename_table("images", "files")
    op.rename_table("image_uses", "file_uses")
    op.create_index("file_uses_by_file", "file_uses", ["run_id", "hash"])
