"""Leads from version 14: the credit of a call has the entropy at each of its tokens.

The table is made anew: what it has is for screens, of a run's latest steps, and a column without a default cannot be added
where rows are.
"""

from __future__ import annotations

import sqlalchemy
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    text = sqlalchemy.Text().with_variant(sqlalchemy.Text(collation="C"), "postgresql")
    whole = sqlalchemy.Integer().with_variant(sqlalchemy.BigInteger(), "postgresql")
    op.drop_table("credit")
    op.create_table(
        "credit",
        sqlalchemy.Column("run_id", text, nullable=False),
        sqlalchemy.Column("step", whole, nullable=False),
        sqlalchemy.Column("rollout_id", text, sqlalchemy.ForeignKey("rollouts.id"), nullable=False),
        sqlalchemy.Column("call_id", text, nullable=False),
        sqlalchemy.Column("policy", text, nullable=False),
        sqlalchemy.Column("credit", sqlalchemy.Double(), nullable=False),
        sqlalchemy.Column("advantage", sqlalchemy.Double(), nullable=False),
        sqlalchemy.Column("return_", sqlalchemy.Double()),
        sqlalchemy.Column("weight", sqlalchemy.Double(), nullable=False),
        sqlalchemy.Column("trained_tokens", whole, nullable=False),
        sqlalchemy.Column("token_advantages", sqlalchemy.LargeBinary(), nullable=False),
        sqlalchemy.Column("token_ratios", sqlalchemy.LargeBinary(), nullable=False),
        sqlalchemy.Column("token_entropies", sqlalchemy.LargeBinary(), nullable=False),
        sqlalchemy.Column("clip_share", sqlalchemy.Double()),
        sqlalchemy.PrimaryKeyConstraint("rollout_id", "call_id"),
    )
    op.create_index("credit_by_step", "credit", ["run_id", "step"])
