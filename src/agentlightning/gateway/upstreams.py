"""Upstreams: which policy a run samples from, and the token path to the engines that serve it.

Driven by the proxy. One HTTP session for all engines, without a cap on connections. An engine that refuses or drops the
connection may be restarting: the request is repeated, with a growing pause, until a deadline, as long as none of its tokens
has been handed on. Knows nothing of protocols, messages or attempts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from agentlightning.errors import EngineError
from agentlightning.protocols.neutral import Refusal
from agentlightning.protocols.sse import EventReader
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore
from agentlightning.types import JSON, Resource, VersionSpan

POLICY_AGE_S = 5.0
"""Another server may publish: what is known of a run's policy is read again after this long."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that serves."""

    alias: str
    model: str
    endpoints: list[str]
    seed: int
    renderer: Renderer


@dataclass(slots=True)
class Sampled:
    """What an engine sampled, whole or so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    versions: list[VersionSpan] = field(default_factory=list)

    def add(self, data: Any) -> list[int]:
        """Take in one response or chunk; returns its ids. Raises EngineError where it is not of the expected shape."""
        try:
            choice = data["choices"][0]
            ids = choice["token_ids"]
            self.ids += ids
            self.logprobs += [one["logprob"] for one in choice["logprobs"]["content"]] if ids else []
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                self.stop_reason = choice.get("stop_reason")
            spans = choice.get("weight_versions")
            if spans:
                self.versions = [VersionSpan(version=int(s["version"]), start=s["start"], end=s["end"]) for s in spans]
        except (KeyError, IndexError, TypeError, ValueError) as cause:
            raise EngineError(f"the engine answered in an unknown form: {type(cause).__name__}: {cause}") from cause
        if len(self.ids) != len(self.logprobs):
            raise EngineError(f"the engine gave {len(self.logprobs)} logprobs for {len(self.ids)} sampled ids")
        return list(ids)


class Upstreams:
    """The engines behind the policies of all runs."""

    def __init__(
        self,
        store: LightningStore,
        load_renderer: Callable[[str], Renderer] = Renderer,
        patience_s: float = 30.0,
    ) -> None:
        self._store = store
        self._load_renderer = load_renderer
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0
        self._policies: dict[str, tuple[float, dict[str, Policy]]] = {}
        self._renderers: dict[str, asyncio.Task[Renderer]] = {}

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        if self._session is not None:
            await self._session.close()

    def forget(self, run_id: str) -> None:
        """The policies of this run changed."""
        self._policies.pop(run_id, None)

    async def policies(self, run_id: str) -> dict[str, Policy]:
        """The policies of a run by alias."""
        known = self._policies.get(run_id)
        if known is not None and time.monotonic() - known[0] < POLICY_AGE_S:
            return known[1]
        resources = await self._store.resources(run_id)
        policies = {r.name: await self._policy(r) for r in resources if r.kind == "policy"}
        self._policies[run_id] = (time.monotonic(), policies)
        return policies

    async def policy(self, run_id: str, model: str) -> Policy:
        """The policy that `model` means: the only one, or the one of that name. Raises Refusal."""
        policies = await self.policies(run_id)
        if len(policies) == 1:
            return next(iter(policies.values()))
        if not policies:
            raise Refusal("no policy serves this run yet", status=503, type="server_error", code="no_policy")
        for policy in policies.values():
            if model in (policy.alias, policy.model):
                return policy
        names = ", ".join(sorted(policy.model for policy in policies.values()))
        raise Refusal(f"model: no policy is named {model!r}; expected one of {names}", status=404, param="model")

    async def generate(self, run_id: str, policy: Policy, request: JSON) -> Sampled:
        """Sample to the end. Raises Refusal, or EngineError where the engine's answer cannot be read."""
        patience = _Patience(self._patience_s)
        while True:
            try:
                async with self._post(policy, request) as response:
                    body = await response.read()
                    if response.status != 200:
                        raise _refused(response.status, body)
                    sampled = Sampled()
                    sampled.add(_json(body))
                    return sampled
            except UNREACHABLE as cause:
                await patience.wait(cause)
                policy = await self._current(run_id, policy)

    async def stream(self, run_id: str, policy: Policy, request: JSON, sampled: Sampled) -> AsyncIterator[list[int]]:
        """Sample, yielding ids as they come; `sampled` then holds all of it. Raises as `generate` does."""
        patience = _Patience(self._patience_s)
        while True:
            try:
                async with self._post(policy, request) as response:
                    if response.status != 200:
                        raise _refused(response.status, await response.read())
                    async for data in _events(response):
                        if ids := sampled.add(_json(data)):
                            yield ids
                if sampled.finish_reason is None:
                    raise aiohttp.ClientPayloadError("the stream ended before the answer did")
                return
            except UNREACHABLE as cause:
                if sampled.ids:
                    raise Refusal(
                        "the engine went away in the middle of an answer",
                        status=502,
                        type="server_error",
                        code="engine_lost",
                    ) from cause
                await patience.wait(cause)
                policy = await self._current(run_id, policy)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _policy(self, resource: Resource) -> Policy:
        value = resource.value
        endpoints = value.get("endpoints")
        if not (isinstance(endpoints, list) and endpoints and isinstance(value.get("tokenizer"), str)):
            raise EngineError(
                f"the policy resource {resource.name!r} is not complete: expected endpoints (at least one) and tokenizer"
            )
        folder = value["tokenizer"]
        loading = self._renderers.get(folder)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = asyncio.create_task(asyncio.to_thread(self._load_renderer, folder))
            self._renderers[folder] = loading
        return Policy(
            alias=resource.name,
            model=str(value.get("model") or resource.name),
            endpoints=[str(endpoint).rstrip("/") for endpoint in endpoints],
            seed=int(value.get("seed", 0)),
            renderer=await asyncio.shield(loading),
        )

    async def _current(self, run_id: str, policy: Policy) -> Policy:
        return (await self.policies(run_id)).get(policy.alias, policy)

    def _post(self, policy: Policy, request: JSON) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                headers={"content-type": "application/json"},
                skip_auto_headers=("user-agent", "accept-encoding", "accept"),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        self._turn += 1
        endpoint = policy.endpoints[self._turn % len(policy.endpoints)]
        return self._session.post(f"{endpoint}/inference/v1/generate", data=orjson.dumps(request))


class _Patience:
    """Pauses between repetitions, until a deadline."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = FIRST_PAUSE_S

    async def wait(self, cause: Exception) -> None:
        """Pause; Refusal where it would last past the deadline."""
        if time.monotonic() + self._pause > self._deadline:
            raise Refusal(
                f"no engine of the policy can be reached: {type(cause).__name__}: {cause}",
                status=503,
                type="server_error",
                code="engine_unreachable",
            ) from cause
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


class _Away(ConnectionError):
    """The engine answers, but not now."""


def _refused(status: int, body: bytes) -> Exception:
    """What a refusal of the engine means: bad input is the agent's, busy and away is repeated, the rest is the engine's."""
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message, code = body[:200].decode(errors="replace"), None
    if status in (429, 502, 503, 504):
        return _Away(f"HTTP {status}: {message}")
    if status in (400, 413, 422):
        too_long = code == "context_length_exceeded" or "context" in message.lower() or "too long" in message.lower()
        code = "context_length_exceeded" if too_long else code
        return Refusal(message, param="messages" if too_long else None, code=code if isinstance(code, str) else None)
    return Refusal(f"the engine failed: {message}", status=502, type="server_error", code="engine_failed")


def _json(data: bytes) -> Any:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as cause:
        raise EngineError(f"the engine answered with something that is not JSON: {cause}") from cause
    if isinstance(value, dict) and "error" in value:
        raise _refused(502, data)
    return value


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    reader = EventReader()
    async for chunk in response.content.iter_any():
        for data in reader.feed(chunk):
            if data != b"[DONE]":
                yield data
