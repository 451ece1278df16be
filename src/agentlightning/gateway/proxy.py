"""The proxy: what agents call, by route: model calls in every protocol, models, stored responses, rewards, traces.

Driven by the ASGI app for paths under ``/r/{rollout}/{attempt}/v1`` (Google's protocol: ``…/v1beta``) and, with a key,
under ``/v1``. It finds who calls and which model is meant, and puts whatever goes wrong into the shape of the protocol in
use. A call of the policy goes to policy/calls.py, one of a configured external model to external_calls.py, traces to
otlp.py, which answers in OTLP's own terms.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import orjson
from cachetools import LRUCache
from uuid_utils import uuid7

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.config.prompts import PromptRuleConfig, PromptsConfig
from agentlightning.config.run import parse_settings, private_fields, public_task
from agentlightning.errors import AgentLightningError, ConfigError, EngineError, InputError, ModelError, StoreError
from agentlightning.gateway.access import Authentication
from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt, gateway_span, record_failure, record_refusal
from agentlightning.gateway.external_calls import ExternalCalls
from agentlightning.gateway.external_client import ExternalModel
from agentlightning.gateway.limits import CallLimits, LimitReachedError
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.otlp import TraceReceiver
from agentlightning.gateway.policy.calls import PolicyCalls
from agentlightning.gateway.policy.engine_router import EngineRouter
from agentlightning.gateway.policy.response_decoder import AgentCall, send_end
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.protocols import (
    chat,
    completions,
    embeddings,
    generate_content,
    messages,
    responses,
    tokens,
)
from agentlightning.protocols.base import ApiError, WireFormat, call_id, read_object
from agentlightning.protocols.system_prompts import prompt_name, replace_system
from agentlightning.records import JSON, Reward, Rollout
from agentlightning.rendering.renderer import RenderError
from agentlightning.runtime import json_text
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import OUTGROWN, UNKNOWN_ROUTE
from agentlightning.store.rules import MAX_REWARDS, reward_name, reward_number
from agentlightning.store.templates import TemplateReader
from agentlightning.store.tokens import Token, is_token

log = logging.getLogger(__name__)

PROMPT_FIELDS = {
    completions.NAME: "prompt",
    responses.NAME: "input",
    generate_content.NAME: "contents",
    tokens.NAME: "prompt_ids",
}
"""By protocol the field that holds the prompt, where that is not `messages`."""


AnswerAttempt = Callable[[TrackedAttempt, Token], Awaitable[None]]
"""Answers the request as a call of this attempt, within the limits of the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParts:
    """The parts of a gateway that answering clients takes."""

    store: LightningStore
    attempts: AttemptCache
    watcher: ResourceWatcher
    authentication: Authentication
    limits: CallLimits


class Clients(Protocol):
    """Answers clients."""

    async def model(self, incoming: AgentRequest) -> tuple[str, int]:
        """Name of the model that the request's token opens, and when that began in nanoseconds."""

    async def answer(self, incoming: AgentRequest, reply: AgentResponse, answer_attempt: AnswerAttempt) -> None:
        """Answers a request. Raises ApiError and the errors of the store."""


MakeClients = Callable[[ClientParts], Clients]


OTHER_POSTS = frozenset(
    ("reward", "tokens/logprobs", "messages/count_tokens", "models:countTokens", "responses/input_tokens")
)


class Proxy:
    """Answers agents."""

    def __init__(
        self,
        store: LightningStore,
        *,
        attempts: AttemptCache,
        engine_router: EngineRouter,
        external: ExternalCalls,
        calls: PolicyCalls,
        metrics: GatewayMetrics,
        traces: TraceReceiver,
        limits: CallLimits,
        clients: Clients | None,
        watcher: ResourceWatcher,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._engine_router = engine_router
        self._external = external
        self._calls = calls
        self._metrics = metrics
        self._traces = traces
        self._limits = limits
        self._clients = clients
        self._watcher = watcher
        self._prompts = PromptRules(store)
        self._wires: dict[str, WireFormat] = {
            "chat/completions": chat,
            "completions": completions,
            "responses": responses,
            "messages": messages,
            "embeddings": embeddings,
            "models:generateContent": generate_content,
            "models:streamGenerateContent": generate_content,
            "tokens/generate": tokens,
        }

    async def __call__(self, incoming: AgentRequest, reply: AgentResponse) -> None:
        """Answer one request; whatever goes wrong becomes an error in the protocol's shape."""
        wire = self._wires.get(incoming.route or "") or self._wire(incoming)
        try:
            if self._is_probe(incoming):
                await reply.whole(200, b'{"status":"ok"}')
            elif incoming.route == "traces" and incoming.method == "POST":
                await self._traces.answer(incoming, reply)
            elif incoming.named is None and incoming.key is not None and is_token(incoming.key):
                await self._answer_client(wire, incoming, reply)
            else:
                owner = await self._attempts.identify(incoming.named, incoming.key, incoming.client)
                attempt = await self._attempts.running(owner[:2])
                if owner.judge:
                    incoming.agent = JUDGE
                else:
                    attempt.key = incoming.key or ""
                await self._answer(wire, attempt, incoming, reply)
        except (ApiError, InputError) as cause:
            await self._refuse(wire, reply, _as_refusal(cause))
        except AgentLightningError as cause:
            await self._refuse(wire, reply, _as_failure(cause, cause.http_status))
        except Exception:
            log.exception("a request to %s failed", incoming.path)
            sentence = "the gateway failed; its log says why"
            await self._refuse(wire, reply, ApiError(sentence, status=500, type="server_error", code="internal"))

    def _is_probe(self, incoming: AgentRequest) -> bool:
        """True for a program that looks whether its base URL, or a route, is there."""
        route, head = incoming.route, incoming.method == "HEAD"
        if route == "":
            return head or incoming.method == "GET"
        return head and (route in self._wires or route in OTHER_POSTS or _named_model(route or "") is not None)

    def _wire(self, incoming: AgentRequest) -> WireFormat:
        """The protocol that a route belongs to, for calls and for errors."""
        route = incoming.route or ""
        if route.startswith(("models:", "v1beta/")):
            return generate_content
        if route.startswith("models"):
            named = {name for name, _ in incoming.headers}
            if b"x-goog-api-key" in named:  # Google's SDKs list models under /v1, too
                return generate_content
            return messages if b"anthropic-version" in named else chat
        return self._wires.get(route.partition("/")[0]) or chat

    async def _refuse(self, wire: WireFormat, reply: AgentResponse, refusal: ApiError) -> None:
        failed = refusal.status >= 500
        self._metrics.call(wire.NAME, "failed" if failed else "refused")
        log.log(logging.WARNING if failed else logging.INFO, "refused: %d %s", refusal.status, refusal)
        if not reply.started:
            await reply.whole(refusal.status, wire.error(refusal), headers=_retry_headers(refusal))
        elif reply.failed is not None:
            await reply.end(reply.failed(refusal))

    async def _answer_client(self, wire: WireFormat, incoming: AgentRequest, reply: AgentResponse) -> None:
        """Answers a request with a client's token."""
        if self._clients is None:
            sentence = "this server serves no users; start one with: agl serve --policy NAME@ALIAS"
            raise ApiError(sentence, status=404, code="not_served")
        if incoming.method == "GET" and (named := _named_model(incoming.route or "")) is not None:
            model, since_ns = await self._clients.model(incoming)
            await _show_models(wire, [model], named, since_ns // 10**9, reply)
            return

        async def answer_attempt(attempt: TrackedAttempt, token: Token) -> None:
            await self._answer(wire, attempt, incoming, reply, token)

        await self._clients.answer(incoming, reply, answer_attempt)

    async def _answer(
        self,
        wire: WireFormat,
        attempt: TrackedAttempt,
        incoming: AgentRequest,
        reply: AgentResponse,
        token: Token | None = None,
    ) -> None:
        """Answers a request of an attempt, within its limits."""
        try:
            resources = await self._watcher.resources(attempt.rollout.run_id)
            admission = await self._limits.enter(
                attempt.rollout,
                attempt.number,
                incoming.length,
                resources=resources,
                token=token,
                judge=incoming.agent == JUDGE,
            )
            call = AgentCall(wire, attempt, admission, incoming, reply, resources)
            try:
                if incoming.method == "POST" and incoming.route in self._wires:
                    try:
                        await self._call(call)
                    except (ApiError, InputError) as cause:
                        if isinstance(cause, LimitReachedError):
                            raise
                        refusal = _of_prompt(_as_refusal(cause), PROMPT_FIELDS.get(wire.NAME, "messages"))
                        await record_refusal(self._store, attempt, refusal)
                        await record_failure(self._store, attempt, refusal)
                        raise refusal from cause
                    except Exception as cause:
                        await record_failure(self._store, attempt, cause)
                        raise
                    attempt.ends_refused = attempt.ends_failed = False
                else:
                    await self._answer_other(call)
            finally:
                admission.leave()
        except LimitReachedError as reached:
            await self._limits.leave_span(attempt.rollout, attempt.number, reached)
            raise

    async def _call(self, call: AgentCall) -> None:
        """Answers a model call."""
        incoming, attempt = call.request, call.attempt
        body = await incoming.body(call.admission.take)
        data = await self._with_prompt(call, read_object(body))
        if incoming.prompt:
            body = json_text.dumps(data)
        if call.wire is generate_content:
            data = generate_content.with_route(data, incoming.model or "", **_google_stream(incoming))
        elif incoming.model is not None:
            data = {**data, "model": incoming.model}
        model = data.get("model")
        external: ExternalModel | None = None
        for resource in call.resources:
            if resource.kind == "external":
                known = self._external.directory.models(attempt.rollout.run_id, call.resources)
                external = known.find(model) if isinstance(model, str) else None
                break
        try:
            if external is not None:
                await self._external.answer(external, call, data, body)
                return
            data = await self._calls.stored.dereference(call.wire.NAME, attempt, data)
            await self._calls.answer(call, data)
        except ApiError as reached:
            if call.reply.started or not (await self._ends(call, reached)):
                raise
            attempt.ended_by = reached
            await self._limits.leave_span(attempt.rollout, attempt.number, reached)
            self._metrics.call(call.wire.NAME, "ended")
            await send_end(call, call.wire.parse(data, trained=external is None), reached)

    async def _ends(self, call: AgentCall, reached: ApiError) -> bool:
        """True where the refusal of a call is to be the end of its agent instead."""
        total = isinstance(reached, LimitReachedError) and reached.final
        if not (total or reached.code == OUTGROWN) or call.wire.NAME in (embeddings.NAME, tokens.NAME):
            return False
        return call.request.agent != JUDGE and await self._attempts.ends_at_limit(call.attempt)

    async def _answer_other(self, call: AgentCall) -> None:
        """Answers what is no model call: counts, log-probabilities, rewards, models, stored responses."""
        attempt, incoming, reply = call.attempt, call.request, call.reply
        route, get = incoming.route or "", incoming.method == "GET"
        if get and (named := _named_model(route)) is not None:
            await self._models(call, named)
        elif get and route.startswith("responses/"):
            for name in incoming.query:
                if name.removesuffix("[]") in ("include", "stream", "starting_after"):
                    sentence = f"{name}: a stored response is returned as its request asked; leave it out"
                    raise ApiError(sentence, param=name, code="unsupported_value")
            await reply.whole(200, await self._calls.stored.fetch(call, route.removeprefix("responses/")))
        elif incoming.method != "POST" or route not in OTHER_POSTS:
            await self._unknown(attempt, incoming)
        elif route == "reward":
            await self._reward(attempt, await incoming.body(call.admission.take), reply)
        else:
            data = read_object(await incoming.body(call.admission.take))
            if route == "tokens/logprobs":
                await self._calls.score(call, data)
            elif route == "messages/count_tokens":
                data = await self._with_prompt(call, {"max_tokens": 1, **data})
                await reply.whole(200, messages.count(await self._calls.count(call, data)))
            elif route == "models:countTokens":
                data = await self._with_prompt(call, generate_content.count_request(data))
                data = generate_content.with_route(data, incoming.model or "")
                await reply.whole(200, generate_content.count(await self._calls.count(call, data)))
            else:
                data = await self._with_prompt(call, data)
                data = await self._calls.stored.dereference(call.wire.NAME, attempt, data)
                counted = await self._calls.count(call, data)
                await reply.whole(200, orjson.dumps({"object": "response.input_tokens", "input_tokens": counted}))

    async def _with_prompt(self, call: AgentCall, data: JSON) -> JSON:
        """The request with the system prompt that a rule of the run has for it, which `AgentRequest.prompt` then has."""
        run_id = call.attempt.rollout.run_id
        known = self._prompts.known.get(run_id)
        if known is None or known[0]:
            data, call.request.prompt = await self._prompts.apply(call.wire, data, call.attempt, call.request.agent)
        return data

    # --- everything else --------------------------------------------------------------------------------------------

    async def _models(self, call: AgentCall, name: str) -> None:
        run_id, created_s = call.attempt.rollout.run_id, call.attempt.rollout.created_ns // 10**9
        names = [policy.model for policy in (await self._engine_router.policies(run_id, call.resources)).values()]
        names += self._external.directory.models(run_id, call.resources).exact
        await _show_models(call.wire, names, name, created_s, call.reply)

    async def _reward(self, attempt: TrackedAttempt, body: bytes, reply: AgentResponse) -> None:
        data = read_object(body)
        name = reward_name(data.get("name", "reward"))
        if (why := await self._attempts.reward_refusal(attempt, name)) is not None:
            raise ApiError(why, status=403, type="permission_error", code="rewards_not_allowed")
        if "value" not in data:
            raise ApiError('value: expected {"value": <a finite number>}, got none', status=422, param="value")
        named = data.get("call_id")
        if named is not None:
            named = call_id(named) if isinstance(named, str) else ""
            if not await self._has_call(attempt, named):
                raise ApiError("call_id: expected the id of a call of this attempt", status=422, param="call_id")
        if attempt.posted >= MAX_REWARDS:
            sentence = f"an attempt can hold at most {MAX_REWARDS} rewards"
            raise ApiError(sentence, status=422, final=True)
        attempt.posted += 1
        reward = Reward(
            id=str(uuid7()),
            run_id=attempt.rollout.run_id,
            rollout_id=attempt.rollout.id,
            attempt=attempt.number,
            value=reward_number(data["value"], "value"),
            name=name,
            call_id=named,
            source="posted",
            created_ns=time.time_ns(),
        )
        await self._store.record_rewards([reward])
        await reply.whole(200, orjson.dumps({"id": reward.id, "value": reward.value}))

    async def _has_call(self, attempt: TrackedAttempt, name: str) -> bool:
        if attempt.knows(name):
            return True
        return any(call.id == name for call in await self._store.calls([attempt.rollout.id], attempt.number))

    async def _unknown(self, attempt: TrackedAttempt, incoming: AgentRequest) -> None:
        """Refuse it. Where it could have been a model call, its rollout is told; who only looks (GET, HEAD) makes none."""
        if incoming.method == "POST" and attempt.leaves_span(UNKNOWN_ROUTE):
            asked = {"path": incoming.path, "method": incoming.method}
            await self._store.append_spans([gateway_span(attempt.rollout, attempt.number, UNKNOWN_ROUTE, asked)])
        if (incoming.route or "").split("/")[:2] == ["v1beta", "interactions"]:
            raise ApiError(
                "interactions: not served here; call models/MODEL:generateContent (client.models.generate_content), which "
                "gives the same completions",
                status=404,
                code="unknown_route",
            )
        base = incoming.base_url(incoming.named)
        raise ApiError(
            f"no route {incoming.method} {incoming.path}: the base URL of an OpenAI client is {base} (it ends in /v1), "
            "that of an Anthropic client ends before /v1; routes under /v1 are chat/completions, completions, "
            "responses, messages, messages/count_tokens, embeddings, tokens/generate, tokens/logprobs, "
            "models, reward and traces; Google's calls are under /v1beta/models",
            status=404,
            code="unknown_route",
        )


def _named_model(route: str) -> str | None:
    """The model that GET models/{name} asks for, '' for all of them; None for another route."""
    base, _, name = route.removeprefix("v1beta/").partition("/")
    return name if base == "models" else None


async def _show_models(wire: WireFormat, names: list[str], name: str, created_s: int, reply: AgentResponse) -> None:
    """Send the list of models, or the one of this name."""
    shapes = {module.NAME: module for module in (messages, generate_content)}
    shape = shapes.get(wire.NAME, chat)
    if not name:
        await reply.whole(200, shape.models(names, created_s))
    elif name in names:
        await reply.whole(200, shape.model(name, created_s))
    else:
        known = ", ".join(names) or "none yet"
        raise ApiError(f"no model is named {name!r}; known are {known}", status=404, param="model")


def _google_stream(incoming: AgentRequest) -> dict[str, bool]:
    """The form of a response of Google's protocol: streamed, and then as one JSON array in place of events. Raises
    ApiError."""
    alt = incoming.query.get("alt", "json")
    if alt not in ("json", "sse"):
        raise ApiError(f"alt: expected sse or json, got {alt!r}", param="alt")
    return {"streamed": incoming.route == "models:streamGenerateContent", "as_array": alt == "json"}


def _as_refusal(cause: ApiError | InputError) -> ApiError:
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, RenderError):
        return ApiError(str(cause), param=cause.param)
    if isinstance(cause, ModelError):  # the policy's, and no agent's
        return _as_failure(cause, 500)
    return ApiError(str(cause), status=cause.http_status)


def _as_failure(cause: AgentLightningError, status: int) -> ApiError:
    codes = {EngineError: "invalid_engine_response", StoreError: "store_unavailable"}
    code = next((code for kind, code in codes.items() if isinstance(cause, kind)), "internal")
    return ApiError(str(cause), status=status, type="server_error", code=code)


def _of_prompt(refusal: ApiError, field: str) -> ApiError:
    """A refusal of the prompt by the request's own field for it, where it has the engine's or the renderer's."""
    path = refusal.param or ""
    holder = path.partition("[")[0]
    if holder not in ("token_ids", "content_parts", "messages") or holder == field:
        return refusal
    told = copy(refusal)
    inner = f"{field}: {refusal.message}"
    told.message = re.sub(rf"^{path}\b", field, refusal.message) if holder == path else inner
    told.param = field
    return told


def _retry_headers(refusal: ApiError) -> tuple[tuple[bytes, bytes], ...]:
    """Headers that tell clients when to try again, or, for the SDKs of OpenAI and Anthropic, not to."""
    if refusal.final:
        return ((b"x-should-retry", b"false"),)
    return () if refusal.retry_after_s is None else ((b"retry-after", str(refusal.retry_after_s).encode()),)


# --- prompt rules -------------------------------------------------------------------------------------------------------

MAX_RUNS = 1024


class PromptRules:
    """Use from one event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._templates = TemplateReader(store)
        self.known: LRUCache[str, tuple[tuple[PromptRuleConfig, ...], tuple[str, ...]]] = LRUCache(MAX_RUNS)
        """Rules of a run and the private fields of its tasks, which are fixed for good."""

    async def apply(
        self, wire: WireFormat, data: JSON, attempt: TrackedAttempt, agent: str | None
    ) -> tuple[JSON, JSON]:
        """The request with the system prompt that it is to have, and what the record says of that; {} where no rule is for
        it. Raises ApiError where the rule's template cannot be rendered, and the errors of the store."""
        rules, private = await self._rules_of(attempt.rollout.run_id)
        agent = agent or prompt_name(replace_system(wire.NAME, data, "")[1] or "")
        rule = next((rule for rule in rules if rule.applies(agent)), None) if agent != JUDGE else None
        if rule is None:
            return data, {}
        name = rule.template
        text = attempt.prompts.get(name)
        if text is None:
            shown = replace(attempt.rollout, task=public_task(attempt.rollout.task, private))
            text = attempt.prompts[name] = await self._rendered(name, shown)
        changed, replaced = replace_system(wire.NAME, data, text)
        if replaced is None:
            return data, {}
        return changed, {"template": name, "version": attempt.rollout.prompts[name], "replaced": replaced}

    async def _rules_of(self, run_id: str) -> tuple[tuple[PromptRuleConfig, ...], tuple[str, ...]]:
        """The rules of a run and the private fields of its tasks."""
        if run_id not in self.known:
            found = await self._store.runs([run_id])
            table = found[0].config.get("prompts") if found else None
            try:
                prompts = parse_settings(PromptsConfig, table if isinstance(table, dict) else {}, f"run {run_id}")
                private = private_fields(found[0].config if found else {})
            except ConfigError as cause:
                raise _misconfigured(f"prompts: {cause}") from cause
            self.known[run_id] = prompts.rules, private
        return self.known[run_id]

    async def _rendered(self, name: str, rollout: Rollout) -> str:
        try:
            return (await self._templates.of(rollout)).text(name)
        except InputError as cause:
            raise _misconfigured(f"prompts.rules: {cause}") from cause


def _misconfigured(sentence: str) -> ApiError:
    return ApiError(sentence, status=500, type="server_error", code="prompts_misconfigured", final=True)
