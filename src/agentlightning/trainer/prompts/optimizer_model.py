"""OptimizerModel: the model that writes new texts, asked through the gateway as an agent would ask it.

Each request is a rollout of a run beside the search's own, OPTIMIZER_RUN: a search that is run again from its start finds
its answer in the store and pays nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import httpx

from agentlightning.config.prompts import POLICY, model_name
from agentlightning.config.run import Config
from agentlightning.errors import ConflictError, EngineError
from agentlightning.records import JSON, Call, Claim, Finish, NewRollout, Resource, RetryPolicy, Rollout, Sampling
from agentlightning.runner.attempt import status_here
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.code_loader import is_code, load_function
from agentlightning.store.base import LightningStore
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.prompts.store_search import SearchUsage, message_text, usage_of

OPTIMIZER_RUN = "{run_id}-optimizer"
"""Id of the run that keeps what the model of a search was asked."""
MAX_TRIES = 5
"""Requests for one answer, beside those that the gateway makes."""
TIMEOUT_S = 900.0
"""Seconds for one answer, and the lease of who asks: one that was killed is waited for by nobody."""
ANTHROPIC_MAX_TOKENS = 8192
"""Tokens of one answer in a protocol that has no request without a bound."""


OptimizerAnswer = tuple[str, SearchUsage]
Answer = Callable[[str, str, int], Awaitable[OptimizerAnswer]]
"""Of a request, its purpose and number: the recorded answer, else a new one, recorded. AgentLightningError where there is
none."""


class GatewayModel:
    """The optimiser model behind a gateway. Use from one event loop, after `open`."""

    def __init__(
        self, store: LightningStore, run_id: str, client: httpx.AsyncClient, model: str, protocol: str = "openai"
    ) -> None:
        """run_id: that of the search. client: its base URL is the gateway's."""
        self._store = store
        self._search = run_id
        self.run_id = OPTIMIZER_RUN.format(run_id=run_id)
        self._client = client
        self._model = model
        self._protocol = protocol
        self.first_pause_s = 1.0
        """Between the first two tries; then it doubles."""
        self._claiming = asyncio.Lock()
        self._answers: dict[str, asyncio.Future[OptimizerAnswer]] = {}

    async def open(self, resources: list[Resource]) -> None:
        """Make the run, or go on with it, with the models of the search's run: copies of `resources` that are policies or
        external models."""
        if await self._store.runs([self.run_id]):
            await self._store.update_run(self.run_id, state="running")
        else:
            await self._store.create_run(f"optimizer {self._search}", {}, self.run_id)
        known = {one.name: one.value for one in await self._store.resources(self.run_id)}
        changed = [
            Resource(run_id=self.run_id, name=one.name, kind=one.kind, value=one.value)
            for one in resources
            if one.kind in ("policy", "external") and known.get(one.name) != one.value
        ]
        if changed:
            await self._store.put_resources(changed)

    async def close(self) -> None:
        """The run as finished; it goes on with the search."""
        await self._store.update_run(self.run_id, state="finished")

    async def ask(self, prompt: str, purpose: str, number: int) -> OptimizerAnswer:
        """As of `Answer`. EngineError."""
        group = f"{purpose}:{hashlib.sha256(prompt.encode()).hexdigest()}:{number}"
        asking = self._answers.get(group)
        if asking is None:  # equal requests side by side are one
            asking = self._answers[group] = asyncio.ensure_future(self._ask(group, prompt))
        try:
            return await asking
        except BaseException:
            self._answers.pop(group, None)
            raise

    async def _ask(self, group: str, prompt: str) -> OptimizerAnswer:
        for replica in count():
            async with self._claiming:
                new = NewRollout(
                    run_id=self.run_id,
                    task={"prompt": prompt},
                    group_id=group,
                    replica=replica,
                    mode="eval",
                    sampling=Sampling(),
                    retry=RetryPolicy(max_attempts=1, timeout_s=TIMEOUT_S),
                )
                [rollout] = await self._store.enqueue([new])
                if rollout.state in ("failed", "cancelled"):
                    continue
                if (found := await self._recorded(rollout)) is not None:
                    return found
                if rollout.state != "queued":
                    # Who asked was killed before there was an answer. Cancelled, so that one that comes after all is never
                    # taken for the one that the search went on with.
                    await self._store.cancel([rollout.id])
                    continue
                claim = await self._claim(rollout)
            return await self._send(claim, prompt)
        raise AssertionError  # a further replica is always to be had

    async def _claim(self, rollout: Rollout) -> Claim:
        """The lease of this rollout; of others that a killed process left in the queue, the leases run out."""
        while claims := await self._store.claim(status_here("optimizer", self.run_id, 0), lease_s=TIMEOUT_S):
            if claims[0].rollout.id == rollout.id:
                return claims[0]
        raise ConflictError(f"{self.run_id}: another process asks the model of this search; end it first")

    async def _recorded(self, rollout: Rollout) -> OptimizerAnswer | None:
        """The first answer of the first attempt that has one: one that was killed after it is followed by others."""
        for attempt in range(1, rollout.attempt + 1):
            calls: list[Call] = await self._store.calls([rollout.id], attempt)
            if answers := [call for call in calls if call.learnable]:
                return message_text(answers[0].completion), usage_of(calls)
        return None

    async def _send(self, claim: Claim, prompt: str) -> OptimizerAnswer:
        problem, backoff = "", Backoff(self.first_pause_s, max_s=8.0)
        for number in range(MAX_TRIES):
            if number:
                await backoff.sleep()
            try:
                response = await self._client.post(**self._request(claim, prompt))
                problem = "" if response.status_code == 200 else f"{response.status_code} {response.text:.300}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if problem and response.status_code != 429 and response.status_code < 500:
                    break  # a refusal, which more tries will not change
            # Read from the record, also where the response was lost on its way: what is used is what is found again.
            found = await self._recorded(claim.rollout)
            if found is not None:
                await self._store.finish([Finish(lease=claim.lease, state="succeeded")])
                return found
            problem = problem or "its answer is not recorded"
        sentence = f"optimize.model: {self._model} gives no answer: {problem}"
        await self._store.finish([Finish(lease=claim.lease, state="failed", error=sentence)])
        raise EngineError(sentence)

    def _request(self, claim: Claim, prompt: str) -> dict[str, Any]:
        root = f"/r/{claim.rollout.id}/{claim.lease.attempt}/v1"
        body: JSON = {"model": self._model, "messages": [{"role": "user", "content": prompt}]}
        path = "chat/completions"
        if self._protocol == "anthropic":
            path, body["max_tokens"] = "messages", ANTHROPIC_MAX_TOKENS
        return {"url": f"{root}/{path}", "json": body, "headers": {"Authorization": f"Bearer {claim.key}"}}


async def open_model(config: Config, run_id: str, processes: Processes, stack: AsyncExitStack) -> Answer:
    """The model that writes new texts; `stack` closes it. ConfigError where code cannot be loaded."""
    optimize = config.optimize
    assert optimize is not None  # nobody asks without
    if is_code(optimize.model):
        write = load_function(optimize.model, ("prompt", "purpose", "number"), "optimize.model")

        async def answer(prompt: str, purpose: str, number: int) -> OptimizerAnswer:
            return await write(prompt, purpose, number), SearchUsage()

        return answer
    if optimize.model == POLICY:
        model, protocol = str(processes.policy["model"]), "openai"
    else:
        external = config.external[optimize.model]
        model, protocol = model_name(optimize.model, external), external.protocol
    client = httpx.AsyncClient(base_url=processes.server_url, timeout=TIMEOUT_S, trust_env=False)
    await stack.enter_async_context(client)
    asked = GatewayModel(processes.store, run_id, client, model, protocol)
    await asked.open(await processes.store.resources(run_id))
    stack.push_async_callback(asked.close)
    return asked.ask
