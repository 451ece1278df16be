"""Agent Lightning: train the model behind any AI agent without touching the agent.

    import agentlightning as agl

Names are loaded when they are first used: importing the package loads neither torch nor a web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentlightning.algorithms.lightning_rl import LightningRL
    from agentlightning.algorithms.preference import DPO, KTO
    from agentlightning.algorithms.supervised import RFT, SFT, Distill
    from agentlightning.gateway.server import AgentLightningServer
    from agentlightning.runner.agent import LLM, PromptTemplate, emit_reward, rollout
    from agentlightning.runner.client import AgentLightningClient
    from agentlightning.runner.emitters import emit_exception, emit_message, emit_object, operation
    from agentlightning.runner.result import Result
    from agentlightning.store.base import LightningStore
    from agentlightning.store.client import LightningStoreClient
    from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore
    from agentlightning.trainer.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "AgentLightningClient": "runner.client",
    "AgentLightningServer": "gateway.server",
    "DPO": "algorithms.preference",
    "Distill": "algorithms.supervised",
    "InMemoryLightningStore": "store.sql.store",
    "KTO": "algorithms.preference",
    "LLM": "runner.agent",
    "LightningRL": "algorithms.lightning_rl",
    "LightningStore": "store.base",
    "LightningStoreClient": "store.client",
    "PromptTemplate": "runner.agent",
    "RFT": "algorithms.supervised",
    "Result": "runner.result",
    "SFT": "algorithms.supervised",
    "SqlLightningStore": "store.sql.store",
    "Trainer": "trainer.trainer",
    "emit_exception": "runner.emitters",
    "emit_message": "runner.emitters",
    "emit_object": "runner.emitters",
    "emit_reward": "runner.agent",
    "operation": "runner.emitters",
    "rollout": "runner.agent",
}

__all__ = [
    "DPO",
    "KTO",
    "LLM",
    "RFT",
    "SFT",
    "AgentLightningClient",
    "AgentLightningServer",
    "Distill",
    "InMemoryLightningStore",
    "LightningRL",
    "LightningStore",
    "LightningStoreClient",
    "PromptTemplate",
    "Result",
    "SqlLightningStore",
    "Trainer",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "operation",
    "rollout",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentlightning' has no attribute {name!r}")
    try:
        module = import_module(f"agentlightning.{_HOMES[name]}")
    except ModuleNotFoundError as cause:
        extra = "train" if name in ("Trainer",) else "server"
        raise ImportError(
            f"agentlightning.{name} needs {cause.name}; install it with: pip install 'agentlightning[{extra}]'"
        ) from cause
    return getattr(module, name)
