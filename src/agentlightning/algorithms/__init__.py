"""How rewards become updates. Numbers in, numbers out: no I/O, no torch."""

from agentlightning.algorithms.lightning_rl import LightningRL, Plan

__all__ = ["LightningRL", "Plan"]
