"""ServedPolicy: a policy whose weights are another trainer's, and which is served at a URL already.

A run has it as its engine where verl's trainer learns. It starts nothing and learns nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, ForwardingEngine
from agentlightning.engines.setup import EngineSetup
from agentlightning.engines.support import Support
from agentlightning.engines.verl.options import support
from agentlightning.errors import ConfigError, EngineError


class ServedPolicy(ForwardingEngine):
    """The engine with the option `url`: where the token path is served."""

    device = "verl's"
    support: Support = support(reference=False)

    def __init__(self, setup: EngineSetup) -> None:
        setup.expect_only("options", "listen", "advertise", "key_env")
        if set(setup.config.options) != {"url"}:
            raise ConfigError(f"engine.options: expected the key url alone, got {sorted(setup.config.options)}")
        self._url = str(setup.config.options["url"])
        self._config = setup.config

    async def start(self) -> Mapping[str, Endpoints]:
        urls = self._config.advertise or [self._url]
        return {DEFAULT_POLICY: Endpoints(urls=urls, seeded=False, key_env=self._config.key_env)}

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def pids(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        """Nothing was started."""

    async def restart_learner(self) -> None:
        raise EngineError("what learns is not started by this engine")

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        if operation != "publish":  # whoever trains it publishes too, and names the versions
            raise EngineError(f"{operation}: the trainer that serves {self._url} learns, not this engine")
