"""Agent Lightning: train the model behind any AI agent without touching the agent.

    import agentlightning as agl

Names are loaded when they are first used: importing the package loads neither torch nor a web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentlightning.algorithms.lightning_rl import LightningRL
    from agentlightning.algorithms.offline import DPO, KTO, RFT, SFT, Distill
    from agentlightning.analysis.stored_run import load_run
    from agentlightning.config.agent import AgentConfig, AirConfig, AirRuleConfig, RewardConfig
    from agentlightning.config.engine import EngineConfig, PolicyConfig
    from agentlightning.config.external import ExternalModelConfig
    from agentlightning.config.run import (
        DataConfig,
        EvalConfig,
        LimitConfig,
        LimitsConfig,
        ModelConfig,
        StoreConfig,
        TracingConfig,
        TrainerConfig,
    )
    from agentlightning.errors import InfrastructureError, VerifierError
    from agentlightning.gateway.server import AgentLightningServer
    from agentlightning.runner.agent import LLM, emit_reward, prompt, rollout
    from agentlightning.runner.client import AgentLightningClient
    from agentlightning.runner.emitters import emit_exception, emit_message, emit_object, operation
    from agentlightning.runner.result import RolloutResult
    from agentlightning.store.base import LightningStore
    from agentlightning.store.client import LightningStoreClient
    from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore
    from agentlightning.trainer.check import CheckResult
    from agentlightning.trainer.trainer import Trainer
    from agentlightning.trainer.training import TrainResult

__version__ = "0.1.0"

_NAMES = {
    "algorithms.lightning_rl": ("LightningRL",),
    "algorithms.offline": ("DPO", "KTO", "RFT", "SFT", "Distill"),
    "analysis.stored_run": ("load_run",),
    "config.run": (
        *("DataConfig", "EvalConfig", "LimitConfig", "LimitsConfig", "ModelConfig", "StoreConfig", "TracingConfig"),
        "TrainerConfig",
    ),
    "config.agent": ("AgentConfig", "AirConfig", "AirRuleConfig", "RewardConfig"),
    "config.engine": ("EngineConfig", "PolicyConfig"),
    "config.external": ("ExternalModelConfig",),
    "errors": ("InfrastructureError", "VerifierError"),
    "gateway.server": ("AgentLightningServer",),
    "runner.agent": ("LLM", "emit_reward", "prompt", "rollout"),
    "runner.client": ("AgentLightningClient",),
    "runner.emitters": ("emit_exception", "emit_message", "emit_object", "operation"),
    "runner.result": ("RolloutResult",),
    "store.base": ("LightningStore",),
    "store.client": ("LightningStoreClient",),
    "store.sql.store": ("InMemoryLightningStore", "SqlLightningStore"),
    "trainer.check": ("CheckResult",),
    "trainer.trainer": ("Trainer",),
    "trainer.training": ("TrainResult",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "DPO",
    "KTO",
    "LLM",
    "RFT",
    "SFT",
    "AgentConfig",
    "AgentLightningClient",
    "AgentLightningServer",
    "AirConfig",
    "AirRuleConfig",
    "CheckResult",
    "DataConfig",
    "Distill",
    "EngineConfig",
    "EvalConfig",
    "ExternalModelConfig",
    "InMemoryLightningStore",
    "InfrastructureError",
    "LightningRL",
    "LightningStore",
    "LightningStoreClient",
    "LimitConfig",
    "LimitsConfig",
    "ModelConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutResult",
    "SqlLightningStore",
    "StoreConfig",
    "TracingConfig",
    "TrainResult",
    "Trainer",
    "TrainerConfig",
    "VerifierError",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "load_run",
    "operation",
    "prompt",
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
            f"agentlightning.{name} needs {cause.name}; install the extra {extra}, in a clone: pip install '.[{extra}]'"
        ) from cause
    return getattr(module, name)
