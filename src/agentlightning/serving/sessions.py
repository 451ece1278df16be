"""UserSessions: users who call with a serving key, each conversation a rollout that keeps one version of the model.

The gateway loads it by ``--clients`` and hands it every request with a serving key. It finds or opens the session and hands
the request back as a call of the session's attempt; from there on nothing knows that there is a user. The version is chosen
when a session opens, and recorded on its rollout in the same transaction, which is the same for all gateways. A session is
kept as long as calls come: its lease is renewed, and has the session's idle time. Feedback is a reward of the rollout at any
time, also after its end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

import orjson
from cachetools import LRUCache
from uuid_utils import uuid7

from agentlightning.config.run import parse_settings
from agentlightning.errors import ConfigError, StoreError
from agentlightning.gateway.access import ServerKeyError
from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import TrackedAttempt, gateway_span
from agentlightning.gateway.proxy import AnswerAttempt, ClientParts
from agentlightning.protocols.base import ApiError, read_object
from agentlightning.records import (
    JSON,
    Finish,
    Lease,
    Metric,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    Sampling,
    WorkerStatus,
)
from agentlightning.serving.settings import ServeConfig
from agentlightning.serving.split import SPLIT_RESOURCE, Split, choose_version, version_alias
from agentlightning.store.base import SESSION_HOLDER, RolloutQuery
from agentlightning.store.rules import reward_number
from agentlightning.store.tokens import Token, session_token

RENEWALS = 4
"""Times that a lease is renewed within its own time, at most."""
MAX_SESSIONS = 65_536
MAX_RUNS = 1024
MAX_ID_CHARS = 200
MAX_FEEDBACK_CHARS = 10_000
FEEDBACK = "gateway.feedback"
"""Name of the span with a user's words about a session."""
SERVED_REWARD = "serve/reward"
"""Metric of every score; its step is the number of the version that it is about."""
ENDED = frozenset({"attempt_over", "unknown_attempt"})
"""Codes of an attempt that takes no more calls: the session begins again."""
_ACTS = {"": "GET", "reward": "POST", "finish": "POST"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """The settings by which a run serves its users, which are fixed for good."""

    model: str
    """Name of the registered model; its versions are policies such as ``support-40``."""
    settings: ServeConfig
    sampling: Sampling


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that this gateway has seen open."""

    id: str
    """As its client gave it, or made here."""
    attempt: TrackedAttempt
    idle_s: float
    renewed_s: float
    """By the monotonic clock."""


class UserSessions:
    """Use from one event loop."""

    def __init__(self, parts: ClientParts) -> None:
        self._store = parts.store
        self._attempts = parts.attempts
        self._watcher = parts.watcher
        self._authentication = parts.authentication
        self._limits = parts.limits
        self._open: LRUCache[tuple[str, str], OpenSession] = LRUCache(MAX_SESSIONS)
        """By token and id."""
        self._runs: LRUCache[str, ServedRun] = LRUCache(MAX_RUNS)
        self._secret: bytes | None = None

    async def model(self, incoming: AgentRequest) -> tuple[str, int]:
        """Name of the model that the request's key opens, and when that began in nanoseconds."""
        token = await self._token(incoming)
        return (await self._served(str(token.run_id))).model, token.created_ns

    async def answer(self, incoming: AgentRequest, reply: AgentResponse, answer_attempt: AnswerAttempt) -> None:
        """Answers a request with a serving key: a call of a session is one of its attempt."""
        token = await self._token(incoming)
        served = await self._served(str(token.run_id))
        route = incoming.route or ""
        first, _, rest = route.partition("/")
        name, _, act = rest.partition("/")
        if route == "reward":
            name, act = incoming.session or "", "reward"
            if not name:
                raise ApiError("x-agl-session: is required here; or POST /v1/sessions/{id}/reward", status=422)
        elif first != "sessions" or not name or incoming.method != _ACTS.get(act):
            session = await self._session(token, served, incoming)
            reply.session = session.id.encode()
            async with self._kept(session):
                await answer_attempt(session.attempt, token)
            return
        await self._act(token, name, act, incoming, reply)

    async def _token(self, incoming: AgentRequest) -> Token:
        try:
            return await self._authentication.client(str(incoming.key))
        except ConfigError as cause:
            known = not isinstance(cause, ServerKeyError)
            raise ApiError(
                str(cause),
                status=403 if known else 401,
                type="permission_error" if known else "authentication_error",
                code="invalid_api_key",
            ) from cause

    async def _served(self, run_id: str) -> ServedRun:
        if run_id not in self._runs:
            found = await self._store.runs([run_id])
            config = found[0].config if found else {}
            if not isinstance(config.get("serve"), dict):
                raise ApiError(f"run {run_id} serves no users", status=404, code="not_served")
            table = dict(config["serve"])
            name = str(table.pop("model", ""))
            try:
                settings = parse_settings(ServeConfig, table, "serve", ".")
            except ConfigError as cause:
                raise ApiError(str(cause), status=502, type="server_error", code="serve_misconfigured") from cause
            model = config.get("model") or {}
            sampling = Sampling(temperature=model.get("temperature", 1.0), max_tokens=model.get("max_tokens"))
            self._runs[run_id] = ServedRun(model=name, settings=settings, sampling=sampling)
        return self._runs[run_id]

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _session(self, token: Token, served: ServedRun, incoming: AgentRequest) -> OpenSession:
        """The session of a request, opened where it is the first. A request that names none is a session of its own; sent
        again under its idempotency key it is the same."""
        named = incoming.session
        if named is None and incoming.method != "POST":  # a look opens nothing
            raise ApiError("x-agl-session: is required here: the id of the session that is meant", status=422)
        if named is None and incoming.is_json:
            named = session_of_body(await self._read(token, incoming))
        if named is None and incoming.idempotency_key is not None:
            named = f"request {incoming.idempotency_key}"
        session_id = shown_id(named) if named is not None else str(uuid7())
        known = self._open.get((token.id, session_id))
        if known is not None and time.monotonic() - known.renewed_s < known.idle_s / RENEWALS:
            try:
                known.attempt = await self._attempts.running((known.attempt.rollout.id, known.attempt.number))
                return known
            except ApiError as over:
                if over.code not in ENDED:
                    raise
        try:
            await self._limits.check_key(token, await self._watcher.resources(str(token.run_id)))
        except (
            ApiError
        ):  # an open one may be called again: the call may be a repetition, which calls' limits let through
            group = session_group(token.id, session_id)
            query = RolloutQuery(run_id=token.run_id, group_ids=[group], states=["running"])
            if not await self._store.rollouts(query):
                raise
        return await self._opened(token, served, session_id)

    async def _opened(self, token: Token, served: ServedRun, session_id: str) -> OpenSession:
        run_id = str(token.run_id)
        resources = await self._watcher.resources(run_id)
        split = _find_split(resources)
        versions = {one.name: one for one in resources if one.kind == "policy" and not one.value.get("released")}
        number = choose_version(session_id, split)
        if version_alias(served.model, number) not in versions:
            number = split.stable  # the canary is still being loaded
        version = versions.get(version_alias(served.model, number))
        asked_s = time.monotonic()
        claim = await self._store.open_session(
            NewRollout(
                run_id=run_id,
                task={"session": session_id, "key": token.id, "model": f"{served.model}@{number}"},
                group_id=session_group(token.id, session_id),
                step=number,
                prompts=dict(version.value.get("prompts") or {}) if version is not None else {},
                sampling=served.sampling,
            ),
            served.settings.idle_s,
        )
        attempt = self._attempts.adopt(claim.rollout, claim.lease.attempt)
        session = OpenSession(session_id, attempt, served.settings.idle_s, asked_s)
        self._open[token.id, session_id] = session
        return session

    @asynccontextmanager
    async def _kept(self, session: OpenSession) -> AsyncIterator[None]:
        """Keeps the session's lease while a call of it is answered, however long that takes."""
        renewing: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        first = loop.call_later(
            session.idle_s / RENEWALS, lambda: renewing.append(loop.create_task(self._renew(session)))
        )
        try:
            yield
        finally:
            first.cancel()
            for task in renewing:
                task.cancel()

    async def _renew(self, session: OpenSession) -> None:
        rollout = session.attempt.rollout
        while True:
            worker = WorkerStatus(
                id=SESSION_HOLDER,
                run_id=rollout.run_id,
                host=socket.gethostname(),
                pid=os.getpid(),
                running=0,
                seen_ns=0,
            )
            asked_s = time.monotonic()
            try:
                [held] = await self._store.heartbeat(worker, [await self._lease(rollout)], session.idle_s)
            except StoreError:
                await asyncio.sleep(1.0)
                continue
            if not held:
                return
            session.renewed_s = asked_s
            await asyncio.sleep(session.idle_s / RENEWALS)

    async def _lease(self, rollout: Rollout) -> Lease:
        if self._secret is None:
            self._secret = await self._store.signing_secret()
        return Lease(rollout_id=rollout.id, attempt=rollout.attempt, token=session_token(self._secret, rollout.id))

    # --- what a client does with a session --------------------------------------------------------------------------

    async def _act(self, token: Token, name: str, act: str, incoming: AgentRequest, reply: AgentResponse) -> None:
        """Shows, ends or rewards a session."""
        rollout = await self._find(token, name)
        reply.session = str(rollout.task["session"]).encode()
        if act == "finish" and rollout.state == "running":
            await self._store.finish([Finish(lease=await self._lease(rollout), state="succeeded")])
            self._attempts.forget({rollout.id})
        elif act == "reward":
            await self._reward(rollout, await self._read(token, incoming), incoming.idempotency_key)
        if act:
            rollout = await self._find(token, name)
        shown = {
            "object": "session",
            "id": rollout.task["session"],
            "model": rollout.task["model"],
            "open": rollout.state == "running",
            "reward": rollout.reward,
        }
        await reply.whole(200, orjson.dumps(shown))

    async def _find(self, token: Token, name: str) -> Rollout:
        """The rollout of a session of this key, the last one where it began again."""
        group = session_group(token.id, shown_id(name))
        found = await self._store.rollouts(RolloutQuery(run_id=token.run_id, group_ids=[group]))
        if not found:
            raise ApiError(f"no session {name[:80]!r} of this key", status=404, code="unknown_session")
        return found[-1]

    async def _read(self, token: Token, incoming: AgentRequest) -> JSON:
        """The body of a request, within what its key may hold at a time."""
        admission = self._limits.enter_client(token.id, incoming.length)
        try:
            return read_object(await incoming.body(admission.take))
        finally:
            admission.leave()

    async def _reward(self, rollout: Rollout, data: JSON, idempotency_key: str | None) -> None:
        for name in data.keys() - {"score", "feedback"}:
            raise ApiError(f"{name}: not known; known are score and feedback", status=422, param=name)
        if "score" not in data:
            raise ApiError('score: expected {"score": <a finite number>}, got none', status=422, param="score")
        words = data.get("feedback")
        if words is not None and (not isinstance(words, str) or len(words) > MAX_FEEDBACK_CHARS):
            sentence = f"feedback: expected a text of at most {MAX_FEEDBACK_CHARS} characters"
            raise ApiError(sentence, status=422, param="feedback")
        score = reward_number(data["score"], "score")
        reward = Reward(
            id=str(uuid7()) if idempotency_key is None else str(uuid.uuid5(uuid.UUID(rollout.id), idempotency_key)),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=rollout.attempt,
            value=score,
            source="posted",
            created_ns=time.time_ns(),
        )
        if idempotency_key is not None and any(
            known.id == reward.id for known in await self._store.rewards([rollout.id])
        ):
            return
        if words:
            await self._store.append_spans([gateway_span(rollout, rollout.attempt, FEEDBACK, {"feedback": words})])
        metric = Metric(run_id=rollout.run_id, step=rollout.step, name=SERVED_REWARD, value=score)
        await self._store.log_metrics([metric])
        await self._store.record_feedback([reward])  # last: a request that was cut off is done again as a whole


def session_of_body(data: JSON) -> str | None:
    """The id in a request's body: ``metadata.session_id``, OpenAI's ``user``, Anthropic's ``metadata.user_id``.

    >>> session_of_body({"user": "anna"}), session_of_body({"metadata": {"user_id": "u-1"}}), session_of_body({})
    ('anna', 'u-1', None)
    """
    metadata = data.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    given = metadata.get("session_id"), data.get("user"), metadata.get("user_id")
    return next((one for one in given if isinstance(one, str) and one), None)


def shown_id(given: str) -> str:
    """The id as it is kept: what is longer than its bound, or cannot be shown, is kept by its hash.

    >>> shown_id("anna"), len(shown_id("x" * 1000)), len(shown_id("a b"))
    ('anna', 64, 64)
    """
    plain = given.isascii() and given.isprintable() and " " not in given and "/" not in given
    return given if plain and len(given) <= MAX_ID_CHARS else sha256(given.encode(errors="replace")).hexdigest()


def session_group(token_id: str, session_id: str) -> str:
    """The group of a session's rollouts: two keys never share one."""
    return f"session:{token_id}:{session_id}"


def _find_split(resources: list[Resource]) -> Split:
    found = next((one for one in resources if one.name == SPLIT_RESOURCE), None)
    if found is None:
        raise ApiError("no version of the model is served yet", status=503, type="server_error", code="no_policy")
    try:
        return parse_settings(Split, dict(found.value), "split", ".")
    except ConfigError as cause:
        raise ApiError(str(cause), status=502, type="server_error", code="split_misconfigured") from cause
