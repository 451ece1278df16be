"""Upstreams: which policy a run samples from, and the token path to the engines that serve it.

Driven by calls.py. One HTTP session for all engines, without a cap on connections. An engine that refuses or drops the
connection may be restarting: the request is repeated, elsewhere where there is an elsewhere, with a growing pause, until a
deadline, as long as none of its tokens has been handed on. Knows nothing of protocols, messages or attempts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from agentlightning.errors import EngineError
from agentlightning.gateway.balancer import Balancer
from agentlightning.gateway.engine_faces import PATHS, EngineAnswer, Face, Sampled, body, read_answer
from agentlightning.gateway.holds import Holds
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.news import News
from agentlightning.protocols.neutral import Refusal
from agentlightning.protocols.sse import EventReader
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore
from agentlightning.types import JSON, Resource

POLICY_AGE_S = 5.0
"""Another server may publish: what is known of a run's policy is read again after this long, where no news come."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that serves."""

    alias: str
    run_id: str
    version: int
    """Of the resource: what an engine that stamps no versions has sampled with."""
    model: str
    endpoints: list[str]
    renderer: Renderer
    seed: int | None = 0
    """Of the run; None where the engine takes no seeds."""
    served_model: str | None = None
    """The name by which the engine knows the model, where that is not the alias."""
    face: Face | None = None
    """How the engine is spoken to; None: found out, once for each endpoint."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Whether the engine's log-probabilities are of the distribution it drew from, or of the bare logits."""
    sampling_policy: Literal["refuse", "force"] = "refuse"
    """What becomes of a call that asks for sampling no trainer could account for."""
    key_env: str | None = None
    """Variable of this server's environment with the endpoints' key."""

    def check_sampling(self, temperature: float, top_p: float) -> str | None:
        """Why tokens drawn so could not be trained on; None where they can.

        The trainer divides logits by the temperature and accounts for nothing else.
        """
        if top_p < 1:
            return f"top_p {top_p:g} cannot be trained on: the trainer accounts for the temperature only; use 1"
        if self.logprobs == "raw" and temperature not in (0.0, 1.0):
            return (
                f"temperature {temperature:g} cannot be trained on: the engine gives raw log-probabilities; use 1, or start "
                "vLLM with --logprobs-mode processed_logprobs and leave `logprobs` out of the policy"
            )
        return None


class Upstreams:
    """The engines behind the policies of all runs."""

    def __init__(
        self,
        store: LightningStore,
        metrics: GatewayMetrics,
        load_renderer: Callable[[str], Renderer] = Renderer,
        patience_s: float = 30.0,
        *,
        news: News,
    ) -> None:
        self._store = store
        self._news = news
        self._metrics = metrics
        self._load_renderer = load_renderer
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None
        self._balancer = Balancer()
        self._idle = asyncio.Event()
        """Set whenever an engine has nothing in flight any more."""
        self._holds = Holds(store, news)
        self._faces: dict[str, Face] = {}
        self._policies: dict[str, tuple[float, dict[str, Policy]]] = {}
        self._forgotten = 0
        """How often something was: what was read while something was is not remembered."""
        self._renderers: dict[str, asyncio.Task[Renderer]] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        metrics.watch_engines(self._balancer.states)

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        for reading in self._waiting.values():
            reading.cancel()
        if self._session is not None:
            await self._session.close()

    def forget(self, run_id: str) -> None:
        """The resources of this run changed: read again before its next call, and now where calls are held."""
        self._policies.pop(run_id, None)
        self._forgotten += 1
        if run_id not in self._waiting and self._holds.any(run_id):
            reading = asyncio.ensure_future(self._read_again(run_id))
            self._waiting[run_id] = reading
            reading.add_done_callback(lambda _: self._waiting.pop(run_id, None))

    async def policies(self, run_id: str) -> dict[str, Policy]:
        """The policies of a run by alias."""
        known = self._policies.get(run_id)
        self._news.follow(run_id)
        if known is not None and (self._news.is_followed(run_id) or time.monotonic() - known[0] < POLICY_AGE_S):
            return known[1]
        forgotten = self._forgotten
        resources = await self._store.resources(run_id)
        self._holds.learn(run_id, resources)
        policies = {r.name: await self._policy(r) for r in resources if r.kind == "policy"}
        if forgotten == self._forgotten:
            self._policies[run_id] = (time.monotonic(), policies)
        self._balancer.keep(
            {url for _, known in self._policies.values() for p in known.values() for url in p.endpoints}
        )
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

    async def generate(self, policy: Policy, request: JSON, affinity: str) -> Sampled:
        """Sample to the end; `request` is in the form of vLLM's /inference/v1/generate, `affinity` names the attempt.

        Raises Refusal, or EngineError where the engine's answer cannot be read.
        """
        patience = _Patience(self._patience_s)
        while True:
            try:
                async with self._asked(policy, request, affinity) as (face, response):
                    answer = _read(await response.read())
                    sampled = Sampled()
                    sampled.add(answer, face, policy.version)
                    return sampled
            except UNREACHABLE as cause:
                await patience.wait(cause)
                policy = await self._current(policy)

    async def stream(self, policy: Policy, request: JSON, sampled: Sampled, affinity: str) -> AsyncIterator[list[int]]:
        """Sample, yielding ids as they come; `sampled` then holds all of it. Raises as `generate` does."""
        patience = _Patience(self._patience_s)
        while True:
            try:
                async with self._asked(policy, request, affinity) as (face, response):
                    async for data in _events(response):
                        if ids := sampled.add(_read(data), face, policy.version):
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
                policy = await self._current(policy)

    async def drained(self, policy: Policy) -> None:
        """Returns when no call of this server is in flight at the policy's engines; after `hold`, before new weights."""
        while any(load for url, _, load in self._balancer.states() if url in policy.endpoints):
            self._idle.clear()
            await self._idle.wait()

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _policy(self, resource: Resource) -> Policy:
        value = resource.value
        endpoints = value.get("endpoints")
        if not (isinstance(endpoints, list) and endpoints and isinstance(value.get("tokenizer"), str)):
            raise EngineError(
                f"the policy resource {resource.name!r} is not complete: expected endpoints (at least one) and tokenizer"
            )
        for name, known in _WORDS.items():
            if value.get(name) not in (None, *known):
                raise EngineError(
                    f"the policy resource {resource.name!r}: {name}: expected one of {', '.join(known)}, "
                    f"got {value[name]!r}"
                )
        folder = value["tokenizer"]
        loading = self._renderers.get(folder)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = asyncio.create_task(asyncio.to_thread(self._load_renderer, folder))
            self._renderers[folder] = loading
        seed = value.get("seed", 0)
        return Policy(
            alias=resource.name,
            run_id=resource.run_id,
            version=resource.version,
            model=str(value.get("model") or resource.name),
            endpoints=[str(endpoint).rstrip("/") for endpoint in endpoints],
            renderer=await asyncio.shield(loading),
            seed=None if seed is None else int(seed),
            served_model=value.get("served_model"),
            face=value.get("face"),
            logprobs=value.get("logprobs") or "processed",
            sampling_policy=value.get("sampling_policy") or "refuse",
            key_env=value.get("key_env"),
        )

    async def _current(self, policy: Policy) -> Policy:
        return (await self.policies(policy.run_id)).get(policy.alias, policy)

    async def _read_again(self, run_id: str) -> None:
        await self.policies(run_id)

    @asynccontextmanager
    async def _asked(
        self, policy: Policy, request: JSON, affinity: str
    ) -> AsyncIterator[tuple[Face, aiohttp.ClientResponse]]:
        """The answer of an engine, begun, with the face it was asked in. Raises what `_refused` makes of a refusal."""
        if self._holds.is_held(policy.run_id, policy.alias):
            with self._metrics.held.track_inprogress():
                await self._holds.released(policy.run_id, policy.alias)
            policy = await self._current(policy)
        engine = self._balancer.choose(policy.endpoints, affinity)
        engine.in_flight += 1
        try:
            face = policy.face or self._faces.get(engine.url)
            if face is None:
                face = self._faces[engine.url] = await self._find_face(policy, engine.url)
            data = orjson.dumps(body(request, face, policy.served_model or policy.alias))
            url = f"{engine.url}{PATHS[face]}"
            async with self._http().post(url, data=data, headers=_headers(policy), allow_redirects=False) as response:
                if response.status != 200:
                    raise _refused(response.status, await response.read(), response.headers)
                if engine.failures:
                    self._balancer.answered(engine)
                yield face, response
        except UNREACHABLE:
            self._balancer.failed(engine)
            raise
        finally:
            engine.in_flight -= 1
            if not engine.in_flight:
                self._idle.set()

    async def _find_face(self, policy: Policy, url: str) -> Face:
        """Ask for generate with nothing in it: whoever has the route complains about the request."""
        path = PATHS["generate"]
        async with self._http().post(
            f"{url}{path}", data=b"{}", headers=_headers(policy), allow_redirects=False
        ) as reply:
            if reply.status in (429, 502, 503, 504):
                raise _refused(reply.status, await reply.read(), reply.headers)
            return "completions" if reply.status in (403, 404, 405, 501) else "generate"

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                skip_auto_headers=("user-agent", "accept-encoding", "accept"),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


_WORDS: dict[str, tuple[str, ...]] = {
    "face": ("generate", "completions"),
    "logprobs": ("processed", "raw"),
    "sampling_policy": ("refuse", "force"),
}


def _headers(policy: Policy) -> dict[str, str]:
    if policy.key_env is None:
        return _JSON_HEADERS
    key = os.environ.get(policy.key_env)
    if not key:
        raise Refusal(
            f"the policy's endpoints need a key: expected it in the server's environment as {policy.key_env}",
            status=502,
            type="server_error",
            code="no_engine_key",
        )
    return {**_JSON_HEADERS, "authorization": f"Bearer {key}"}


_JSON_HEADERS = {"content-type": "application/json"}


class _Patience:
    """Pauses between repetitions, until a deadline."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = FIRST_PAUSE_S

    async def wait(self, cause: Exception) -> None:
        """Pause; Refusal where it would last past the deadline."""
        pause = max(self._pause, cause.retry_after_s if isinstance(cause, _Away) else 0.0)
        if time.monotonic() + pause > self._deadline:
            raise Refusal(
                f"no engine of the policy can be reached: {type(cause).__name__}: {cause}",
                status=503,
                type="server_error",
                code="engine_unreachable",
            ) from cause
        await asyncio.sleep(pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


class _Away(ConnectionError):
    """The engine answers, but not now."""

    retry_after_s = 0.0


def _refused(status: int, data: bytes, headers: Any) -> Exception:
    """What a refusal of the engine means: bad input is the agent's, busy and away is repeated, the rest is the engine's."""
    try:
        error = orjson.loads(data)["error"]
        message, code = str(error["message"]), error.get("code")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message, code = data[:200].decode(errors="replace"), None
    if status in (429, 502, 503, 504):
        away = _Away(f"HTTP {status}: {message}")
        wait = headers.get("retry-after", "")
        away.retry_after_s = float(wait) if wait.isdigit() else 0.0
        return away
    if status in (400, 413, 422):
        said = message.lower()
        too_long = code == "context_length_exceeded" or any(words in said for words in _TOO_LONG)
        code = "context_length_exceeded" if too_long else code
        return Refusal(message, param="messages" if too_long else None, code=code if isinstance(code, str) else None)
    return Refusal(f"the engine failed: {message}", status=502, type="server_error", code="engine_failed")


_TOO_LONG = ("context", "too long", "maximum model length")
"""How engines say that a prompt does not fit."""


def _read(data: bytes) -> EngineAnswer:
    answer = read_answer(data)
    if answer.error is not None:
        raise _refused(502, data, {})
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    reader = EventReader()
    async for chunk in response.content.iter_any():
        for data in reader.feed(chunk):
            if data != b"[DONE]":
                yield data
