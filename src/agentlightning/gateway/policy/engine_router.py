"""EngineRouter: which policy a run samples from, and the token path to the engines that serve it.

Driven by policy/calls.py. An attempt stays with the engine that has its prefix in its cache, until that engine is away or
has clearly more to do than the least busy one. An engine that refuses or drops the connection may be restarting: the
request is repeated, elsewhere where possible, with a growing pause, until a deadline, as long as none of its tokens was
handed on. One that hangs is left for another where there is one. Knows nothing of protocols or messages.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import orjson
from cachetools import LRUCache

from agentlightning.errors import EngineError
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.gateway.http_client import HttpClient, HttpResponse
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.engine_client import (
    GENERATE,
    EngineResponse,
    SampledTokens,
    listed_context,
    read_answer,
)
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.protocols.base import ApiError, EventReader
from agentlightning.records import JSON, Resource, Rollout
from agentlightning.rendering.renderer import Renderer
from agentlightning.runtime.backoff import Backoff
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import OUTGROWN

REMEMBERED = 65_536
"""Attempts whose engine is remembered."""

SLACK = 8
"""An attempt leaves its engine where that has more calls in flight than twice the least busy one's, plus this many: reading
a prefix again costs less than waiting behind so many."""

FIRST_REST_S = 0.5
MAX_REST_S = 15.0


@dataclass(slots=True, eq=False)
class EngineLoad:
    """One endpoint as this server sees it."""

    url: str
    in_flight: int = 0
    away_until: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_REST_S, MAX_REST_S, jitter=0.0))


class Balancer:
    """The load of all engines, by their URLs."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._engines: dict[str, EngineLoad] = {}
        self._places: LRUCache[str, str] = LRUCache(REMEMBERED)

    def choose(self, endpoints: Sequence[str], affinity: str) -> EngineLoad:
        """The engine for a call of the attempt that `affinity` names; one that is away only where all are."""
        engines = []
        for url in endpoints:
            if url not in self._engines:
                self._engines[url] = EngineLoad(url)
            engines.append(self._engines[url])
        if len(engines) == 1:
            return engines[0]
        now = self._now()
        awake = [engine for engine in engines if engine.away_until <= now]
        best = min(awake, key=lambda one: one.in_flight) if awake else min(engines, key=lambda one: one.away_until)
        known = self._places.get(affinity)
        home = next((engine for engine in awake if engine.url == known), None)
        if home is not None and home.in_flight <= 2 * best.in_flight + SLACK:
            best = home
        self._places[affinity] = best.url
        return best

    def failed(self, engine: EngineLoad) -> None:
        """The engine could not be reached, or refused to serve."""
        engine.away_until = self._now() + (engine.backoff.next_s() or MAX_REST_S)

    def answered(self, engine: EngineLoad) -> None:
        """The engine serves."""
        engine.backoff.reset()
        engine.away_until = 0.0

    def keep(self, endpoints: set[str]) -> None:
        """Forget engines that no policy names and that have nothing in flight."""
        for url in [url for url, engine in self._engines.items() if url not in endpoints and not engine.in_flight]:
            del self._engines[url]

    def states(self) -> list[tuple[str, str, int]]:
        """(url, up or down, calls in flight) of every engine, for the metrics."""
        now = self._now()
        return [(one.url, "down" if one.away_until > now else "up", one.in_flight) for one in self._engines.values()]


MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0

CONNECT_TIMEOUT_S = 5.0
PATIENCE_S = 300.0
"""Seconds that all engines of a policy may be away before a call is refused: their host may be restarted, or cut off, and
agents have longer time limits of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that serves."""

    alias: str
    run_id: str
    version: int
    """Version of the resource: stamped where the engine stamps none."""
    model: str
    endpoints: list[str]
    renderer: Renderer
    seed: int | None = 0
    """Seed of the run; None where the engine takes no seeds."""
    served_model: str | None = None
    """The name by which the engine knows the model, where that is not the alias."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Log-probabilities of the distribution that was sampled from (processed), or of the bare logits (raw)."""
    unsupported_params: Literal["error", "drop"] | None = None
    """Treatment of sampling parameters that no trainer could account for; None: an error, save for the temperature and
    top_p, in whose place the run's apply."""
    structured: Literal["mask", "context_only", "refuse"] = "mask"
    """Treatment of calls with a grammar, penalties or cuts: trained under the same mask, context only, or refused (or left
    out, by `unsupported_params`), since the run's engine cannot rebuild masks."""
    images: bool = True
    """False: the run's engine cannot read the images of calls, and such calls are refused."""
    key_env: str | None = None
    """Variable of this server's environment with the endpoints' key."""

    def check_sampling(self, temperature: float, top_p: float) -> str | None:
        """The reason why tokens sampled so cannot be trained on; None where they can.

        The learner divides logits by the temperature, and cuts them by top_p where it rebuilds masks.
        """
        if top_p < 1 and self.structured == "refuse":
            return f"top_p {top_p:g} cannot be trained on: the run's engine cannot account for it in learning; use 1"
        if top_p < 1 and self.structured == "context_only":
            return (
                f"top_p {top_p:g}: nothing would be learned from any call, since the engine cannot rebuild cuts; use 1"
            )
        if top_p < 1 and self.logprobs == "raw":
            return (
                f"top_p {top_p:g} cannot be trained on: the engine gives raw log-probabilities; use 1, or start vLLM with "
                "--logprobs-mode processed_logprobs and leave `logprobs` out of the policy"
            )
        if self.logprobs == "raw" and temperature not in (0.0, 1.0):
            return (
                f"temperature {temperature:g} cannot be trained on: the engine gives raw log-probabilities; use 1, or start "
                "vLLM with --logprobs-mode processed_logprobs and leave `logprobs` out of the policy"
            )
        return None


Tokenizer = str | Mapping[str, str]
"""A folder of this host, or files of the run: SHA-256 by name."""

MAX_LOADED = 64
"""Renderers that are cached."""
MAX_FILES = 64
MAX_BYTES = 256 << 20
"""Of one tokenizer's files in the store; the largest vocabularies take 40 MiB."""


class Renderers:
    """The renderer of every policy, loaded once: of a folder of this host, or of files of the run in the store, which are
    bounded, since they share this host's memory and disk with all other runs."""

    def __init__(
        self, store: LightningStore, load: Callable[[str], Renderer] = Renderer, max_loaded: int = MAX_LOADED
    ) -> None:
        self._store = store
        self._load = load
        self._loading: LRUCache[bytes, asyncio.Task[Renderer]] = LRUCache(max_loaded)
        self._places: weakref.WeakSet[TemporaryDirectory[str]] = weakref.WeakSet()

    def close(self) -> None:
        """Remove the files; a second call does nothing."""
        for place in list(self._places):
            place.cleanup()

    async def find(self, run_id: str, tokenizer: Tokenizer) -> Renderer:
        """The renderer of a run's policy. ModelError where it does not load, EngineError where the store lacks files."""
        key = orjson.dumps(tokenizer, option=orjson.OPT_SORT_KEYS)
        loading = self._loading.get(key)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = self._loading[key] = asyncio.create_task(self._loaded(run_id, tokenizer))
        return await asyncio.shield(loading)

    async def _loaded(self, run_id: str, tokenizer: Tokenizer) -> Renderer:
        if isinstance(tokenizer, str):
            return await asyncio.to_thread(self._load, tokenizer)
        try:
            place = TemporaryDirectory(prefix="agentlightning-tokenizer-", ignore_cleanup_errors=True)
        except OSError as cause:
            raise EngineError(f"the policy's tokenizer: this host has no place for its files: {cause}") from cause
        self._places.add(place)
        try:
            await self._fetch(run_id, tokenizer, Path(place.name))
            renderer = await asyncio.to_thread(self._load, place.name)
        except BaseException:
            place.cleanup()
            raise
        weakref.finalize(renderer, place.cleanup)  # processors and grammars read it when they are first used
        return renderer

    async def _fetch(self, run_id: str, names: Mapping[str, str], folder: Path) -> None:
        """Writes the files into the folder, one in memory at a time."""
        left = MAX_BYTES if len(names) <= MAX_FILES else 0
        for name, expected in names.items():
            if Path(name).name != name or name.startswith("."):
                raise EngineError(f"the policy's tokenizer: expected plain names of files, got {name[:80]!r}")
            data = (await self._store.files(run_id, [expected])).get(expected)
            if data is None or sha256(data).hexdigest() != expected:
                raise EngineError(f"the policy's tokenizer: the store does not have {name[:80]!r} as it was put there")
            left -= len(data)
            if left < 0:
                most = f"{MAX_FILES} files, {MAX_BYTES >> 20} MiB in all"
                raise EngineError(f"the policy's tokenizer: expected at most {most}")
            try:
                await asyncio.to_thread((folder / name).write_bytes, data)
            except (
                OSError,
                ValueError,
            ) as cause:  # as itself it would be taken for the engine's connection, and tried again
                raise EngineError(f"the policy's tokenizer: {name[:80]!r} cannot be written here: {cause}") from cause


class EngineRouter:
    """The engines behind the policies of all runs."""

    def __init__(
        self,
        watcher: ResourceWatcher,
        metrics: GatewayMetrics,
        renderers: Renderers,
        patience_s: float = PATIENCE_S,
        external_keys: ExternalKeys = ExternalKeys(),
    ) -> None:
        self._watcher = watcher
        self._external_keys = external_keys
        self._metrics = metrics
        self._renderers = renderers
        self._patience_s = patience_s
        self._client = HttpClient(CONNECT_TIMEOUT_S)
        self._balancer = Balancer()
        self._contexts: dict[str, int | None] = {}
        """By URL, of the engines that were asked since they were away last."""
        self._policies: dict[str, tuple[list[Resource], dict[str, Policy]]] = {}
        """By run, with the resources that they come from."""
        metrics.watch_engines(self._balancer.states)

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._client.close()
        self._renderers.close()

    def forget(self, run_id: str) -> None:
        """The resources of this run changed, or it is not in use any more."""
        self._policies.pop(run_id, None)

    async def policies(self, run_id: str, resources: list[Resource]) -> dict[str, Policy]:
        """The policies of a run with these resources, by alias."""
        known = self._policies.get(run_id)
        if known is not None and known[0] is resources:
            return known[1]
        policies = {
            r.name: await self._policy(r) for r in resources if r.kind == "policy" and not r.value.get("released")
        }
        self._policies[run_id] = (resources, policies)
        self._balancer.keep(
            {url for _, known in self._policies.values() for p in known.values() for url in p.endpoints}
        )
        return policies

    async def policy(self, rollout: Rollout, model: str, resources: list[Resource]) -> Policy:
        """The policy that `model` means: the only one, or the one of that name; for a session that of its version, whatever
        the model is called. Raises ApiError."""
        policies = await self.policies(rollout.run_id, resources)
        if rollout.kind == "session":
            pinned = policies.get(str(rollout.task["model"]).replace("@", "-"))
            if pinned is None:
                sentence = f"{rollout.task['model']}, the version of this session, is not served; begin another session"
                raise ApiError(sentence, status=503, type="server_error", code="no_policy")
            return pinned
        if len(policies) == 1:
            (only,) = policies.values()
            return only
        if not policies:
            others = [str(name) for one in resources if one.kind == "external" for name in one.value.get("models", ())]
            external = f", and {model[:100]!r} is none of its external models: {', '.join(others)}" if others else ""
            sentence = f"no policy serves this run yet{external}"
            raise ApiError(sentence, status=503, type="server_error", code="no_policy")
        for policy in policies.values():
            if model in (policy.alias, policy.model):
                return policy
        names = ", ".join(sorted(policy.model for policy in policies.values()))
        raise ApiError(f"model: no policy is named {model!r}; expected one of {names}", status=404, param="model")

    async def context(self, policy: Policy) -> int | None:
        """Tokens that prompt and completion may have together; None where no engine says."""
        headers = _JSON_HEADERS if policy.key_env is None else _headers(policy.key_env)
        for url in policy.endpoints:
            with suppress(OSError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    if (context := await self._context(policy, headers, url)) is not None:
                        return context
        return None

    async def generate(self, policy: Policy, request: JSON, affinity: str) -> SampledTokens:
        """Sample to the end; `request` is in the form of vLLM's /inference/v1/generate, `affinity` names the attempt.

        Raises ApiError, or EngineError where the engine's answer cannot be read.
        """
        backoff: Backoff | None = None
        while True:
            try:
                sampled = SampledTokens()
                async with self._respond(policy, request, affinity) as response:
                    sampled.add(_read(await response.read()), policy.version)
                    return sampled
            except OSError as cause:
                backoff = await self._pause(backoff, cause)
                policy = await self._current(policy)

    async def stream(
        self, policy: Policy, request: JSON, sampled: SampledTokens, affinity: str
    ) -> AsyncIterator[list[int]]:
        """Sample, yielding ids as they come; `sampled` then holds all of it. Raises as `generate` does."""
        backoff: Backoff | None = None
        while True:
            try:
                async with self._respond(policy, request, affinity) as response:
                    async for data in _events(response):
                        if ids := sampled.add(_read(data), policy.version):
                            yield ids
                    if sampled.finish_reason is None:
                        raise ConnectionError("the stream ended before the completion did")
                return
            except OSError as cause:
                if sampled.ids:
                    raise ApiError(
                        f"the engine was lost in the middle of a completion: {cause}",
                        status=502,
                        type="server_error",
                        code="engine_lost",
                    ) from cause
                backoff = await self._pause(backoff, cause)
                policy = await self._current(policy)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _policy(self, resource: Resource) -> Policy:
        value = resource.value
        endpoints = value.get("endpoints")
        if not (isinstance(endpoints, list) and endpoints and _is_tokenizer(value.get("tokenizer"))):
            raise EngineError(
                f"the policy resource {resource.name!r} is not complete: expected endpoints (at least one) and tokenizer"
            )
        for name, known in _WORDS.items():
            if value.get(name) not in (None, *known):
                raise EngineError(
                    f"the policy resource {resource.name!r}: {name}: expected one of {', '.join(known)}, "
                    f"got {value[name]!r}"
                )
        if (why := self._external_keys.refusal_of(resource)) is not None:
            raise EngineError(why)
        seed = value.get("seed", 0)
        return Policy(
            alias=resource.name,
            run_id=resource.run_id,
            version=resource.version,
            model=str(value.get("model") or resource.name),
            endpoints=[str(endpoint).rstrip("/") for endpoint in endpoints],
            renderer=await self._renderers.find(resource.run_id, value["tokenizer"]),
            seed=None if seed is None else int(seed),
            served_model=value.get("served_model"),
            logprobs=value.get("logprobs") or "processed",
            unsupported_params=value.get("unsupported_params"),
            structured=value.get("structured") or "mask",
            images=bool(value.get("images", True)),
            key_env=value.get("key_env"),
        )

    async def _current(self, policy: Policy) -> Policy:
        resources = await self._watcher.resources(policy.run_id)
        return (await self.policies(policy.run_id, resources)).get(policy.alias, policy)

    @asynccontextmanager
    async def _respond(self, policy: Policy, request: JSON, affinity: str) -> AsyncIterator[HttpResponse]:
        """The answer of an engine, begun. Raises what `_refused` makes of a refusal."""
        engine = self._balancer.choose(policy.endpoints, affinity)
        headers = _JSON_HEADERS if policy.key_env is None else _headers(policy.key_env)
        engine.in_flight += 1
        try:
            fitting = _fitting(request, await self._context(policy, headers, engine.url))
            data = orjson.dumps({**fitting, "model": policy.served_model or policy.alias})
            async with await self._client.post(f"{engine.url}{GENERATE}", headers, data) as response:
                if response.status != 200:
                    raise _refused(response.status, await response.read(), response.headers)
                if engine.backoff.failures:
                    self._balancer.answered(engine)
                yield response
        except OSError:
            self._balancer.failed(engine)
            self._contexts.pop(engine.url, None)  # another may take its place
            raise
        finally:
            engine.in_flight -= 1

    async def _pause(self, backoff: Backoff | None, cause: OSError) -> Backoff:
        """Pause before the next try. Raises ApiError where it would last past the deadline."""
        backoff = backoff or Backoff(MIN_PAUSE_S, MAX_PAUSE_S, self._patience_s)
        if not await backoff.sleep(cause.retry_after_s if isinstance(cause, _EngineUnavailableError) else 0.0):
            raise ApiError(
                f"no engine of the policy can be reached: {type(cause).__name__}: {cause}",
                status=503,
                type="server_error",
                code="engine_unreachable",
            ) from cause
        return backoff

    async def _context(self, policy: Policy, headers: dict[str, str], url: str) -> int | None:
        """Tokens that prompt and completion may have together, as vLLM, SGLang and our samplers list it with their model;
        None where an engine does not. Raises OSError."""
        if url not in self._contexts:
            async with await self._client.get(f"{url}/v1/models", headers) as response:
                data = await response.read()
            self._contexts[url] = listed_context(data, policy.served_model or policy.alias)
        return self._contexts[url]


def _fitting(request: JSON, context: int | None) -> JSON:
    """The request with a bound of sampled tokens that the context holds: engines refuse a larger one, or know none and have
    a default of their own. Raises ApiError where the prompt fills it."""
    if context is None:
        return request
    prompt, parameters = len(request["token_ids"]), request["sampling_params"]
    if prompt >= context:
        raise ApiError(
            f"the prompt has {prompt} tokens; the model's context is {context}, answer included",
            param="token_ids",
            code=OUTGROWN,
        )
    most = min(parameters.get("max_tokens") or context, context - prompt)
    return {**request, "sampling_params": {**parameters, "max_tokens": most}}


_WORDS: dict[str, tuple[str, ...]] = {
    "logprobs": ("processed", "raw"),
    "unsupported_params": ("error", "drop"),
    "structured": ("mask", "context_only", "refuse"),
}


def _headers(key_env: str) -> dict[str, str]:
    key = os.environ.get(key_env, "").strip()  # as samplers read theirs: a file's line end may come with it
    if not key:
        raise ApiError(
            f"the policy's endpoints need a key: expected it in the server's environment as {key_env}",
            status=502,
            type="server_error",
            code="no_engine_key",
        )
    return {**_JSON_HEADERS, "authorization": f"Bearer {key}"}


_JSON_HEADERS = {"content-type": "application/json"}


class _EngineUnavailableError(ConnectionError):
    """The engine answers, but not now."""

    retry_after_s = 0.0


def _is_tokenizer(value: Any) -> bool:
    named = isinstance(value, dict) and value and all(isinstance(one, str) for one in value.values())
    return isinstance(value, str) or bool(named)


def _refused(status: int, data: bytes, headers: Any) -> Exception:
    """The error for a refusal by the engine: bad input is the agent's, busy or unavailable is retried, the rest is the
    engine's."""
    try:
        error = orjson.loads(data)["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message, code, param = data[:200].decode(errors="replace"), None, None
    if status in (429, 502, 503, 504):
        away = _EngineUnavailableError(f"HTTP {status}: {message}")
        wait = headers.get("retry-after", "")
        away.retry_after_s = float(wait) if wait.isdigit() else 0.0
        return away
    if status in (400, 413, 422):
        said = message.lower()
        too_long = code == "context_length_exceeded" or any(words in said for words in _TOO_LONG)
        code = "context_length_exceeded" if too_long else code
        named = _FIELD.match(message)
        param = "token_ids" if too_long else named[1] if named else param
        message = message.removeprefix("sampling_params.")
        return ApiError(
            message,
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    return ApiError(f"the engine failed: {message}", status=502, type="server_error", code="engine_failed")


_FIELD = re.compile(r"(?:sampling_params\.(?=\w)|(?=[a-z]+_))(\w+)(?=[ :])")
"""The field that an engine's sentence begins with; the request has the sampling parameters by the same names."""

_TOO_LONG = ("context", "too long", "maximum model length")
"""Phrases by which engines report that a prompt does not fit."""


def _read(data: bytes) -> EngineResponse:
    answer = read_answer(data)
    if answer.error is not None:
        raise _refused(502, data, {})
    return answer


async def _events(response: HttpResponse) -> AsyncIterator[bytes]:
    reader = EventReader()
    async for chunk in response.chunks():
        for data in reader.feed(chunk):
            if data != b"[DONE]":
                yield data
