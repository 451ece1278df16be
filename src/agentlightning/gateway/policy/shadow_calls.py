"""ShadowCalls: copies of the calls of a served model's sessions, which its canary completes and nobody gets.

Driven by policy/calls.py once a call was answered. A copy has the call's exact prompt and sampling parameters. It is
recorded as a span of the session, so that nobody who reads calls meets it: it is in no statistics, counts against no limit
and is not trained on. A copy that cannot be made at once is dropped: nothing waits for one. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import Counter
from dataclasses import dataclass, replace

from agentlightning.config.serve import ROUTES_RESOURCE
from agentlightning.errors import AgentLightningError, EngineError
from agentlightning.gateway.gateway_span import gateway_span
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.decoding import engine_params
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.prompt_scores import token_logprobs
from agentlightning.gateway.policy.response_decoder import ResponseDecoder
from agentlightning.gateway.policy.scoring import PromptScoring
from agentlightning.gateway.policy.streamed_response import PolicyJob
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.gateway.sessions.recorder import Recorder
from agentlightning.gateway.sessions.routes import find_routes, is_shadowed, version_alias
from agentlightning.protocols.base import ApiError, assistant_message
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import SHADOW_CALL

log = logging.getLogger(__name__)

MAX_UNDER_WAY = 16
"""Copies under way in this gateway; each holds its call's prompt and images. A further one is dropped."""
DEADLINE_S = 600.0
"""Time limit of one copy, in seconds."""
MAX_SCORED_TOKENS = 8192
"""Tokens of prompt and completion up to which the canary is asked for the log-probability of the session's completion: it
reads all of them again for that."""


@dataclass(frozen=True, slots=True)
class _Canary:
    """The version that gets a copy."""

    policy: Policy
    number: int


class ShadowCalls:
    """Use from one event loop."""

    def __init__(
        self,
        store: LightningStore,
        watcher: ResourceWatcher,
        engine_router: EngineRouter,
        recorder: Recorder,
        metrics: GatewayMetrics,
    ) -> None:
        self._store = store
        self._watcher = watcher
        self._engine_router = engine_router
        self._scoring = PromptScoring(engine_router)
        self._recorder = recorder
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._dropped: Counter[str] = Counter()
        """By run, the copies that were dropped and that no record tells of yet."""

    def copy(self, job: PolicyJob) -> None:
        """Have the canary complete an answered call, too, where the routes of its run say so; returns at once."""
        if job.replayed or job.attempt.rollout.kind != "session":
            return
        task = asyncio.create_task(self._copy(job), name=f"shadow of call {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up the copies that are under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, job: PolicyJob) -> None:
        try:
            canary = await self._canary(job)
            if canary is None:
                return
            if self._under_way >= MAX_UNDER_WAY:
                self._dropped[job.attempt.rollout.run_id] += 1
                self._metrics.shadow("dropped")
                return
            self._under_way += 1
            try:
                await self._complete(job, canary)
            finally:
                self._under_way -= 1
        except (AgentLightningError, ApiError) as cause:
            log.warning("no copy of call %s is recorded: %s", job.id, cause)
        except Exception:
            log.exception("the copy of call %s failed", job.id)

    async def _canary(self, job: PolicyJob) -> _Canary | None:
        """The canary that gets a copy; None where none does.

        Copied are calls of sessions that the stable version answers and that began after these routes, so that all calls of
        a session are copied, or none.
        """
        rollout = job.attempt.rollout
        resources = await self._watcher.resources(rollout.run_id)
        stored = next((one for one in resources if one.name == ROUTES_RESOURCE), None)
        if stored is None or not stored.value.get("shadow") or rollout.created_ns < stored.created_ns:
            return None
        routes = find_routes([stored])
        if rollout.step != routes.stable or not is_shadowed(str(rollout.task["session"]), routes):
            return None
        name = str(rollout.task["model"]).rpartition("@")[0]
        policy = (await self._engine_router.policies(rollout.run_id)).get(version_alias(name, routes.canary or 0))
        return None if policy is None or routes.canary is None else _Canary(policy, routes.canary)

    async def _complete(self, job: PolicyJob, canary: _Canary) -> None:
        """Sample, compare and record."""
        rollout, own = job.attempt.rollout, job.decoders[0]
        found: JSON = {
            "call_id": job.id,
            "version": canary.number,
            "served_seconds": (job.finished_ns - job.started_ns) / 1e9,
            "served_tokens": len(own.sampled.ids),
        }
        started_ns = time.time_ns()
        try:
            async with asyncio.timeout(DEADLINE_S):
                sampled = await self._sample(job, canary.policy)
        except (ApiError, EngineError, TimeoutError) as cause:
            found["error"] = _error(cause)
            self._metrics.shadow("failed")
            log.warning("the copy of call %s failed: %s", job.id, cause)
        else:
            finished_ns = time.time_ns()
            found["seconds"] = (finished_ns - started_ns) / 1e9
            found["tokens"] = len(sampled.ids)
            found["equal"] = sampled.ids == own.sampled.ids
            self._metrics.shadow("completed", found["seconds"])
            found |= await self._kept(job, canary.policy, sampled)
            found |= await self._scores(job, canary.policy)
        found["dropped"] = self._dropped.pop(rollout.run_id, 0)
        span = replace(gateway_span(rollout, job.attempt.number, SHADOW_CALL, found), started_ns=started_ns)
        await self._store.append_spans([span])

    async def _sample(self, job: PolicyJob, policy: Policy) -> SampledTokens:
        """The canary's first choice for the call's own prompt."""
        if policy.renderer is not job.policy.renderer:
            raise ApiError("the canary has another tokenizer than the version that answers", code="other_tokenizer")
        request = job.engine_request(0)
        parameters = {name: value for name, value in request["sampling_params"].items() if name != "prompt_logprobs"}
        request |= {
            "request_id": f"{job.id}.shadow",
            "model": policy.alias,
            "stream": False,
            "sampling_params": {**parameters, "logprobs": 0},
        }
        return await self._engine_router.generate(policy, request, f"{job.attempt.rollout.id}/{job.attempt.number}")

    async def _kept(self, job: PolicyJob, policy: Policy, sampled: SampledTokens) -> JSON:
        """The canary's completion, where the run records what is said."""
        decoder = ResponseDecoder(policy.renderer, job.request, job.plan.prompt_text, f"{job.id}.shadow")
        decoder.sampled = sampled
        decoder.finish()
        completion = assistant_message(decoder.choice())
        tools = job.request.tools if job.plan.parent is None else None
        given: JSON = {"messages": job.plan.messages, "completion": completion, "tools": tools}
        kept = await self._recorder.completion(job.attempt.rollout, given)
        return {} if kept is None else {"completion": kept}

    async def _scores(self, job: PolicyJob, policy: Policy) -> JSON:
        """Mean log-probability of the tokens that the session got, under the version that sampled them and under the canary.

        Only where the two can be compared at the price of one reading: engines score prompts by the model's own
        distribution.
        """
        own, sampling = job.decoders[0].sampled, job.sampling
        ids = [*job.plan.prompt_ids, *own.ids]
        plain = (sampling.temperature, sampling.top_p) == (1.0, 1.0) and not engine_params(job.decoding)
        if not plain or not own.ids or len(ids) > MAX_SCORED_TOKENS or job.plan.prompt_images:
            return {}
        try:
            async with asyncio.timeout(DEADLINE_S):
                scored = await self._scoring.score_uncounted(policy, ids, 0, job.attempt)
            found = token_logprobs(scored, ids)[-len(own.ids) :]
        except (ApiError, EngineError, TimeoutError) as cause:
            log.warning("call %s is not scored by the canary: %s", job.id, cause)
            return {}
        scores = [one for one in found if one is not None]
        return {"served_logprob": statistics.fmean(own.logprobs), "logprob": statistics.fmean(scores)}


def _error(cause: ApiError | EngineError | TimeoutError) -> str:
    """A code: what an engine says may hold what a user said."""
    if isinstance(cause, ApiError):
        return cause.code or cause.type
    return "invalid_engine_response" if isinstance(cause, EngineError) else "deadline_exceeded"
