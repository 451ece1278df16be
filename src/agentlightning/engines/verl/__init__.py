"""The engine `verl`: sampling and learning on verl, on one machine or on many, with our loop in charge."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """AgentLoopManager, by which verl's trainer is in charge: it is made of the trainer's parts, above the engines."""
    if name == "AgentLoopManager":
        return importlib.import_module("agentlightning.trainer.verl_agent_loop").AgentLoopManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
