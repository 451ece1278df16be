"""AgentLightningClient: take rollouts and report on them without our worker, from any machine that reaches the server.

Thin over `LightningStoreClient`. Whoever drives it sends heartbeats: a lease lasts 30 s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

import uuid_utils

from agentlightning.prompts.rollout_prompts import RolloutPrompts
from agentlightning.records import AttemptEnd, Claim, Finish, WorkerStatus
from agentlightning.runner.agent import LLM, llm_for
from agentlightning.runner.attempt import AttemptContext, status_here
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.store.base import LEASE_S
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.rules import reward_number
from agentlightning.store.templates import TemplateReader


class AgentLightningClient:
    """Claims of one run, over HTTP.

    async with AgentLightningClient(url, key, run_id=run) as client:
        for claim in await client.claim(wait_s=20):
            reward = await my_agent(claim.rollout.task, client.llm(claim))
            await client.finish(claim, reward)
    """

    def __init__(
        self,
        server_url: str,
        server_key: str,
        *,
        run_id: str,
        worker_id: str | None = None,
        model: str = "policy",
    ) -> None:
        self.store = LightningStoreClient(server_url, server_key)
        """The whole store, for what this class does not offer."""
        self._server_url = server_url
        self._run_id = run_id
        self._worker_id = worker_id or f"client-{uuid_utils.uuid7()}"
        self._model = model
        self._connections = ConnectionPool()
        self._templates = TemplateReader(self.store)
        self._held = 0

    async def __aenter__(self) -> Self:
        await self.store.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()
        await self.store.close()

    async def claim(self, limit: int = 1, wait_s: float = 0.0, lease_s: float = LEASE_S) -> list[Claim]:
        """Take up to `limit` queued rollouts, waiting up to `wait_s` seconds for the first."""
        claims = await self.store.claim(self._worker(), limit=limit, lease_s=lease_s, wait_s=wait_s)
        self._held += len(claims)
        return claims

    def llm(self, claim: Claim, prompts: RolloutPrompts = RolloutPrompts()) -> LLM:
        """The model for the agent of this claim; `prompts` are what its `prompt` renders."""
        return llm_for(claim, self._server_url, self._model, self._connections, prompts)

    async def prompts(self, claim: Claim) -> RolloutPrompts:
        """The run's prompt templates, in the versions of this claim's rollout."""
        return await self._templates.of(claim.rollout)

    async def heartbeat(self, claims: Sequence[Claim], lease_s: float = LEASE_S) -> list[bool]:
        """Extend leases; False for each claim that is no longer held: stop working on it."""
        return await self.store.heartbeat(self._worker(), [claim.lease for claim in claims], lease_s=lease_s)

    async def finish(
        self, claim: Claim, reward: float | None = None, state: AttemptEnd = "succeeded", error: str | None = None
    ) -> bool:
        """End an attempt; False where its lease was lost. A reward of None leaves what was posted to decide. A state of
        "failed" is the agent's own failure: what is not, such as a sandbox that could not be had, is "lost"."""
        attempt = AttemptContext(claim, time.monotonic())
        rewards = () if reward is None else (attempt.reward(reward_number(reward), "return"),)
        self._held = max(0, self._held - 1)
        finish = Finish(lease=claim.lease, state=state, rewards=rewards, error=error, exited=state == "failed")
        [held] = await self.store.finish([finish])
        return held

    def _worker(self) -> WorkerStatus:
        return status_here(self._worker_id, self._run_id, self._held)
