"""AttemptAir: AIR's rules over an attempt that has just ended; their rewards reach the store with the attempt's end.

A worker drives it, for function and command agents alike: all it looks at is what the store has of the attempt. The rules
come from the run's configuration in the store, so that workers anywhere judge alike. What a rule says is `tracing.air`'s.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from agentlightning.config.agent import AirConfig
from agentlightning.config.base import parse_settings
from agentlightning.errors import AgentError, AgentLightningError, ConfigError, StoreError
from agentlightning.records import JSON, Finish, Reward
from agentlightning.runner.failure import bounded
from agentlightning.runner.user_code import load
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import find_run
from agentlightning.tracing.air import Air, air_of

RULES_TIMEOUT_S = 60.0
"""Seconds that rules of the user's own may take over one attempt."""


@dataclass(frozen=True, slots=True)
class AttemptAir:
    """The rules of one run, and the store that has the record."""

    air: Air
    store: LightningStore
    threads: Executor
    """A user's own rules are called in it: they must not block the worker's loop."""

    async def add_rewards(self, finish: Finish) -> Finish:
        """With the rewards that the attempt's calls earned. A lost attempt has none: its record may not be whole.

        Where a rule of the user's own raises, a successful attempt ends as failed, with the rule's name; where the store
        cannot be read, any attempt ends as lost.
        """
        if finish.state == "lost":
            return finish
        try:
            earned = await self._earned(finish)
        except StoreError as error:
            return replace(finish, state="lost", rewards=(), error=f"AIR could not read the attempt's record: {error}")
        except (AgentLightningError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            said = str(error) or "a rule of AIR raised CancelledError"
            if finish.state == "succeeded":
                return replace(finish, state="failed", error=bounded(said), cause="verifier")
            return replace(finish, error=bounded(said if finish.error is None else f"{finish.error}\n{said}"))
        return replace(finish, rewards=(*finish.rewards, *earned))

    async def _earned(self, finish: Finish) -> list[Reward]:
        rollout_id, attempt = finish.lease.rollout_id, finish.lease.attempt
        calls = await self.store.calls([rollout_id], attempt)
        spans = [span for span in await self.store.spans([rollout_id]) if span.attempt == attempt]
        if not self.air.own:
            return self.air.rewards(calls, spans)
        judged = asyncio.get_running_loop().run_in_executor(self.threads, self.air.rewards, calls, spans)
        try:
            return await asyncio.wait_for(judged, RULES_TIMEOUT_S)
        except TimeoutError:
            raise AgentError(f"air.rules: {', '.join(self.air.own)} took longer than {RULES_TIMEOUT_S:g} s") from None


def load_air(table: JSON) -> Air | None:
    """The rules of an ``[air]`` table, the user's own loaded; None where it has none. ConfigError, AgentError."""
    config = parse_settings(AirConfig, table, "air")
    return air_of(config, _own_rule)


def _own_rule(spec: str) -> Callable[..., Any]:
    rule = load(spec, ("step", "earlier"), "rule")
    if inspect.iscoroutinefunction(rule):
        raise ConfigError(f"rule {spec!r}: expected a plain function (step, earlier), got a coroutine function")
    return rule


async def air_of_run(run_id: str, store: LightningStore, threads: Executor) -> AttemptAir | None:
    """Returns the AIR rules of a run; None where its configuration has no rules.

    NotFoundError where there is no such run, ConfigError and AgentError where a rule cannot be loaded here.
    """
    table: Any = (await find_run(store, run_id)).config.get("air")
    air = load_air(table) if isinstance(table, dict) else None
    return None if air is None else AttemptAir(air, store, threads)
