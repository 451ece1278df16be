"""Leads from version 17: model versions, their aliases and their leases. Runs before have none."""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    whole = sqlalchemy.Integer().with_variant(sqlalchemy.BigInteger(), "postgresql")
    large = sqlalchemy.BigInteger()

    def required(name: str, kind: object) -> sqlalchemy.Column[object]:
        return sqlalchemy.Column(name, kind, nullable=False)  # type: ignore[arg-type]

    op.create_table(
        "model_versions",
        required("name", text),
        required("number", whole),
        required("run_id", text),
        required("policy", text),
        required("step", whole),
        required("resource_version", whole),
        sqlalchemy.Column("parent", text),
        *(required(name, text) for name in ("base_model", "weights", "prompts")),
        *(required(name, text) for name in ("config_hash", "code_hash", "data_hash", "metrics")),
        sqlalchemy.Column("licence", text),
        *(required(name, text) for name in ("tags", "notes")),
        *(required(name, sqlalchemy.Boolean()) for name in ("pinned", "deleted")),
        required("created_ns", large),
        sqlalchemy.PrimaryKeyConstraint("name", "number"),
        sqlalchemy.UniqueConstraint("run_id", "policy", "step"),
    )
    op.create_table(
        "model_aliases",
        required("name", text),
        required("alias", text),
        sqlalchemy.Column("number", whole),
        sqlalchemy.Column("previous", whole),
        required("moved_ns", large),
        sqlalchemy.PrimaryKeyConstraint("name", "alias"),
        sqlalchemy.ForeignKeyConstraint(["name", "number"], ["model_versions.name", "model_versions.number"]),
    )
    op.create_table(
        "model_leases",
        required("name", text),
        required("number", whole),
        required("holder", text),
        required("expires_ns", large),
        sqlalchemy.PrimaryKeyConstraint("name", "number", "holder"),
        sqlalchemy.ForeignKeyConstraint(["name", "number"], ["model_versions.name", "model_versions.number"]),
    )
