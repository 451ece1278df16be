"""SessionApi: what a serving key may do beside model calls: name its sessions, end them, and say how good they were.

Driven by the proxy for requests that carry a serving key. Feedback is a reward of the session's rollout at any time, also
after its end; what users said in words is kept beside it where the run records. Knows no engine and no wire format.
"""

from __future__ import annotations

import time
import uuid

import orjson
from uuid_utils import uuid7

from agentlightning.errors import ConfigError
from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.authentication import Authentication, ServerKeyError
from agentlightning.gateway.gateway_span import gateway_span
from agentlightning.gateway.limits import CallLimits
from agentlightning.gateway.sessions.recorder import Recorder
from agentlightning.gateway.sessions.sessions import OpenSession, UserSessions
from agentlightning.protocols.base import ApiError, read_object
from agentlightning.records import JSON, Metric, Reward, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.rules import reward_number
from agentlightning.store.tokens import Token

FEEDBACK = "gateway.feedback"
"""Name of the span with what a user said of a session in words."""
SERVED_REWARD = "serve/reward"
"""Metric of every score, whose step is the number of the version that it is about: who follows it hears of feedback."""
MAX_FEEDBACK_CHARS = 10_000

_ACTS = {"": ("GET",), "reward": ("POST",), "finish": ("POST",)}


class SessionApi:
    """Use from one event loop."""

    def __init__(
        self,
        store: LightningStore,
        sessions: UserSessions,
        recorder: Recorder,
        authentication: Authentication,
        limits: CallLimits,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._authentication = authentication
        self._limits = limits
        self.sessions = sessions

    async def token(self, incoming: AgentRequest) -> Token:
        """The serving key of a request. Raises ApiError where it opens no served model."""
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

    async def session(self, token: Token, incoming: AgentRequest) -> OpenSession:
        """The session of a model call, by its header or its body. Raises what `UserSessions.of` does, and
        LimitReachedError where it would be a new one of a key that has used what it may."""
        data: JSON | None = None
        if incoming.method != "POST" and incoming.session is None:  # who only looks opens nothing
            raise ApiError("x-agl-session: is required here: the id of the session that is meant", status=422)
        if incoming.session is None and incoming.method == "POST" and incoming.is_json:
            data = await self._read(token, incoming)
        return await self.sessions.of(token, incoming, data, lambda: self._limits.check_key(token))

    def knows(self, route: str, method: str) -> bool:
        """True where `answer` serves a request."""
        name, _, act = _parts(route)
        return route == "reward" or (bool(name) and method in _ACTS.get(act, ()))

    async def answer(self, token: Token, incoming: AgentRequest, reply: AgentResponse) -> None:
        """Answer a request that `knows` is true of. Raises ApiError, RewardError and StoreError."""
        route = incoming.route or ""
        name, _, act = _parts(route)
        if route == "reward":
            name, act = incoming.session or "", "reward"
            if not name:
                raise ApiError("x-agl-session: is required here; or POST /v1/sessions/{id}/reward", status=422)
        rollout = await self.sessions.find(token, name)
        reply.session = str(rollout.task["session"]).encode()
        if act == "finish":
            rollout = await self.sessions.finish(rollout)
        elif act == "reward":
            data = await self._read(token, incoming)
            await self._reward(rollout, data, incoming)
            rollout = await self.sessions.find(token, name)
        await reply.whole(200, orjson.dumps(_shown(rollout)))

    async def _read(self, token: Token, incoming: AgentRequest) -> JSON:
        """The body of a request, within what its key may hold at a time."""
        admission = self._limits.enter_client(token.id, incoming.length)
        try:
            return read_object(await incoming.body(admission.take))
        finally:
            admission.leave()

    async def _reward(self, rollout: Rollout, data: JSON, incoming: AgentRequest) -> None:
        for name in data.keys() - {"score", "feedback"}:
            raise ApiError(f"{name}: not known; known are score and feedback", status=422, param=name)
        if "score" not in data:
            raise ApiError('score: expected {"score": <a finite number>}, got none', status=422, param="score")
        words = data.get("feedback")
        if words is not None and (not isinstance(words, str) or len(words) > MAX_FEEDBACK_CHARS):
            raise ApiError(
                f"feedback: expected a text of at most {MAX_FEEDBACK_CHARS} characters", status=422, param="feedback"
            )
        score = reward_number(data["score"], "score")
        key = incoming.idempotency_key
        reward = Reward(
            id=str(uuid7()) if key is None else str(uuid.uuid5(uuid.UUID(rollout.id), key)),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=rollout.attempt,
            value=score,
            source="posted",
            created_ns=time.time_ns(),
        )
        if words and (kept := await self._recorder.text(rollout, words)) is not None:
            await self._store.append_spans([gateway_span(rollout, rollout.attempt, FEEDBACK, {"feedback": kept})])
        await self._store.record_feedback([reward])
        await self._store.log_metrics(
            [Metric(run_id=rollout.run_id, step=rollout.step, name=SERVED_REWARD, value=score)]
        )


def _parts(route: str) -> tuple[str, str, str]:
    """(session's id, slash, act) of a route; an empty id for another.

    >>> _parts("sessions/anna/reward"), _parts("sessions/anna"), _parts("models")
    (('anna', '/', 'reward'), ('anna', '', ''), ('', '', ''))
    """
    first, _, rest = route.partition("/")
    return rest.partition("/") if first == "sessions" else ("", "", "")


def _shown(rollout: Rollout) -> JSON:
    """The session as its client sees it."""
    return {
        "object": "session",
        "id": rollout.task["session"],
        "model": rollout.task["model"],
        "open": rollout.state == "running",
        "reward": rollout.reward,
    }
