"""Settings of several policies: the tables ``[policies.NAME]``, of those that are trained and of opponents that are not.

`run.py` reads them. Knows nothing of engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from agentlightning.config.base import Table
from agentlightning.config.external import external_name


class PolicyConfig(Table):
    """One of several policies: what differs from the tables [model], [algorithm], [engine]."""

    model: str | None = None
    """Hub name or local folder. None: model.path."""
    frozen: bool = False
    """Sampled as it is, and never trained."""
    snapshot_of: str | None = None
    """Never trained, and sampled with the weights that this trained policy had at an earlier checkpoint of the run; before
    its first one with those that it started from."""
    window: int = Field(1, ge=1)
    """Number of the latest checkpoints of which each step draws the one that `snapshot_of` samples."""
    learning_rate: float | None = Field(None, gt=0)
    """None: trainer.learning_rate."""
    algorithm: dict[str, Any] = Field({})
    engine: dict[str, Any] = Field({})

    @property
    def trains(self) -> bool:
        """False for an opponent."""
        return not self.frozen and self.snapshot_of is None


def trained_policies(policies: Mapping[str, PolicyConfig]) -> dict[str, PolicyConfig]:
    """Those that are no opponents."""
    return {alias: own for alias, own in policies.items() if own.trains}


def check_policies(policies: Mapping[str, PolicyConfig], keep_checkpoints: int) -> None:
    """ValueError for a wrong name, and for settings that would have no effect."""
    trained = trained_policies(policies)
    if policies and not trained:
        raise ValueError("policies: expected at least one that is trained, without frozen or snapshot_of")
    for alias, own in policies.items():
        if own.model is not None and external_name(own.model) is not None:
            raise ValueError(f"policies.{alias}.model: expected a model that can be trained, got {own.model!r}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", alias):
            raise ValueError(f"policies.{alias}: expected a name of letters, digits, '.', '_' and '-'")
        if own.trains:
            if own.window != 1:
                raise ValueError(f"policies.{alias}.window: has no effect without snapshot_of")
            continue
        _check_opponent(alias, own)
        if own.snapshot_of is not None:
            if own.snapshot_of not in trained:
                raise ValueError(
                    f"policies.{alias}.snapshot_of: expected a policy that is trained ({', '.join(trained)}), "
                    f"got {own.snapshot_of!r}"
                )
            if own.window > keep_checkpoints:
                raise ValueError(
                    f"policies.{alias}.window: expected at most trainer.keep_checkpoints, {keep_checkpoints}, since "
                    f"older weights are deleted; got {own.window}"
                )


def _check_opponent(alias: str, own: PolicyConfig) -> None:
    why = "frozen" if own.frozen else "snapshot_of"
    if own.frozen and own.snapshot_of is not None:
        raise ValueError(f"policies.{alias}: frozen conflicts with snapshot_of; give one of the two")
    ignored = {"learning_rate": own.learning_rate is not None, "algorithm": bool(own.algorithm)}
    ignored |= {"model": own.model is not None, "window": False} if own.snapshot_of else {"window": own.window != 1}
    for name, given in ignored.items():
        if given:
            raise ValueError(f"policies.{alias}.{name}: has no effect with {why}")
