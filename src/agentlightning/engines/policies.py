"""PolicyEngines: several policies as one engine, each with an engine of its own.

The trainer drives it like any engine; every operation goes to the engine of the policy that it names. Knows nothing of what
those engines are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, Engine, ForwardingEngine, together
from agentlightning.engines.support import Support
from agentlightning.errors import EngineError


class PolicyEngines(ForwardingEngine):
    """Engines by the alias of their policy; none where a run has no policy, and then only to be started and closed."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)

    @property
    def support(self) -> Support:
        """Capabilities that all of them have."""
        known = [engine.support for engine in self._engines.values()]
        first = asdict(known[0])
        for other in known[1:]:
            first = {name: value & getattr(other, name) for name, value in first.items() if name != "engine"}
        return Support(**{**first, "engine": " and ".join(sorted({one.engine for one in known}))})

    @property
    def device(self) -> str:
        return ", ".join(sorted({engine.device for engine in self._engines.values()} - {""}))

    async def start(self) -> dict[str, Endpoints]:
        """Start all of them, side by side. What one raises ends the others."""
        try:
            started = await together(engine.start() for engine in self._engines.values())
        except BaseException:
            await self.close()
            raise
        return {alias: own[DEFAULT_POLICY] for alias, own in zip(self._engines, started, strict=True)}

    async def watch(self) -> None:
        await together(engine.watch() for engine in self._engines.values())

    def pids(self) -> dict[str, int]:
        """Of all of them, each name after its policy's."""
        return {
            f"{alias} {name}": pid for alias, engine in self._engines.items() for name, pid in engine.pids().items()
        }

    async def close(self) -> None:
        await _all([engine.close() for engine in self._engines.values()])

    async def restart_learner(self) -> None:
        """All of them: whoever lost one goes back to a checkpoint, and the others with it."""
        await _all([engine.restart_learner() for engine in self._engines.values()])

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        engine = self._engines.get(policy)
        if engine is None:
            raise EngineError(
                f"policy: {policy!r} is not known to the engine; expected one of {', '.join(self._engines)}"
            )
        return await getattr(engine, operation)(*arguments)


async def _all(operations: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them to their ends, then the first error."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
