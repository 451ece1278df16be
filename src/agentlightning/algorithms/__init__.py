"""Algorithms turn rewards into updates. Numbers in, numbers out: no I/O, no torch."""

from agentlightning.algorithms.lightning_rl import LightningRL, UpdatePlan

__all__ = ["LightningRL", "UpdatePlan"]
