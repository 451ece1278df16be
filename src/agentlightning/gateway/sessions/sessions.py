"""UserSessions: opens and continues the conversations of users who call with a serving key, each an attempt of its own.

Driven by the proxy, before everything that it does for attempts: from here on a call of a session is a call of an attempt.
The version of the model is chosen when a session opens, and recorded on its rollout by the same transaction, which is the
same for all gateways. A session is kept as long as calls come: its lease is renewed, and has the session's idle time. Knows
no wire format and no engine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from uuid_utils import uuid7

from agentlightning.config.run import parse_settings
from agentlightning.config.serve import ServeConfig
from agentlightning.errors import ConfigError, StoreError
from agentlightning.gateway.asgi_response import AgentRequest
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.gateway.sessions.routes import choose_version, find_routes, is_served, prompts_of, version_alias
from agentlightning.gateway.sessions.session_ids import session_group, session_of_body, shown_id
from agentlightning.protocols.base import ApiError
from agentlightning.records import JSON, Finish, Lease, NewRollout, Rollout, Sampling, WorkerStatus
from agentlightning.store import keys
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.session_store import HOLDER
from agentlightning.store.tokens import Token

RENEWALS = 4
"""Times that a lease is renewed within its own time, at most."""
MAX_SESSIONS = 65_536
MAX_RUNS = 1024

ENDED = frozenset({"attempt_over", "unknown_attempt"})
"""Codes of an attempt that takes no calls any more: the session begins anew."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that this gateway has seen open."""

    id: str
    """As its client gave it, or made here."""
    attempt: TrackedAttempt
    served: ServeConfig
    renewed_s: float
    """By the monotonic clock."""

    @property
    def renewal_s(self) -> float:
        """Seconds between renewals of its lease."""
        return self.served.idle_s / RENEWALS


class UserSessions:
    """Use from one event loop."""

    def __init__(self, store: LightningStore, attempts: AttemptCache, watcher: ResourceWatcher) -> None:
        self._store = store
        self._attempts = attempts
        self._watcher = watcher
        self._open: OrderedDict[tuple[str, str], OpenSession] = OrderedDict()
        """By token and id."""
        self._served: OrderedDict[str, tuple[ServeConfig, Sampling]] = OrderedDict()
        self._secret: bytes | None = None

    async def of(
        self, token: Token, incoming: AgentRequest, data: JSON | None, check_new: Callable[[], Awaitable[None]]
    ) -> OpenSession:
        """The session of a request, opened where it is the first; `data` is its body, where that may name the session.
        `check_new` raises ApiError where no new one may be opened.

        A request that names none is a session of its own; sent again under its idempotency key it is the same. Raises
        ApiError and StoreError.
        """
        named = incoming.session or (session_of_body(data) if data is not None else None)
        if named is None and incoming.idempotency_key is not None:
            named = f"request {incoming.idempotency_key}"
        session_id = shown_id(named) if named is not None else str(uuid7())
        known = self._open.get((token.id, session_id))
        if known is not None and time.monotonic() - known.renewed_s < known.renewal_s:
            self._open.move_to_end((token.id, session_id))
            rollout = known.attempt.rollout
            try:
                known.attempt = await self._attempts.running((rollout.id, known.attempt.number))
                return known
            except ApiError as over:
                if over.code not in ENDED:
                    raise
        try:
            await check_new()
        except ApiError:  # it may be open: what it asks may be a repetition, and is answered by who counts calls
            if not await self._is_open(token, session_id):
                raise
        return await self._opened(token, session_id, incoming)

    @asynccontextmanager
    async def kept(self, session: OpenSession) -> AsyncIterator[None]:
        """Keeps the session's lease while a call of it is answered, however long that takes."""
        renewing: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = loop.call_later(session.renewal_s, lambda: renewing.append(loop.create_task(self._renew(session))))
        try:
            yield
        finally:
            timer.cancel()
            for task in renewing:
                task.cancel()

    async def find(self, token: Token, given_id: str) -> Rollout:
        """The rollout of a session of this key, the last one where it began anew. Raises ApiError where there is none."""
        session_id = shown_id(given_id)
        group = session_group(token.id, session_id)
        found = await self._store.rollouts(RolloutQuery(run_id=token.run_id, group_ids=[group]))
        if not found:
            raise ApiError(f"no session {given_id[:80]!r} of this key", status=404, code="unknown_session")
        return found[-1]

    async def finish(self, rollout: Rollout) -> Rollout:
        """End a session; one that has ended stays as it is."""
        if rollout.state == "running":
            await self._store.finish([Finish(lease=await self._lease(rollout), state="succeeded")])
            self._attempts.forget({rollout.id})
            [rollout] = await self._store.rollouts(RolloutQuery(ids=[rollout.id]))
        return rollout

    async def served(self, run_id: str) -> ServeConfig:
        """The way that a run serves its users, which is fixed for good. Raises ApiError where it serves none."""
        return (await self._settings(run_id))[0]

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _opened(self, token: Token, session_id: str, incoming: AgentRequest) -> OpenSession:
        run_id = str(token.run_id)
        served, sampling = await self._settings(run_id)
        resources = await self._watcher.resources(run_id)
        routes = find_routes(resources)
        number = choose_version(session_id, routes, incoming.headers)
        if number != routes.stable and not is_served(resources, version_alias(served.model, number)):
            number = routes.stable  # the canary is still being loaded
        asked_s = time.monotonic()
        claim = await self._store.open_session(
            NewRollout(
                run_id=run_id,
                task={"session": session_id, "key": token.id, "model": f"{served.model}@{number}"},
                group_id=session_group(token.id, session_id),
                step=number,
                prompts=prompts_of(resources, version_alias(served.model, number)),
                sampling=sampling,
            ),
            served.idle_s,
        )
        attempt = self._attempts.adopt(claim.rollout, claim.lease.attempt)
        session = self._open[token.id, session_id] = OpenSession(session_id, attempt, served, asked_s)
        while len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return session

    async def _is_open(self, token: Token, session_id: str) -> bool:
        group = session_group(token.id, session_id)
        query = RolloutQuery(run_id=token.run_id, group_ids=[group], states=["running"])
        return bool(await self._store.rollouts(query))

    async def _renew(self, session: OpenSession) -> None:
        rollout = session.attempt.rollout
        while True:
            worker = WorkerStatus(
                id=HOLDER, run_id=rollout.run_id, host=socket.gethostname(), pid=os.getpid(), running=0, seen_ns=0
            )
            asked_s = time.monotonic()
            try:
                [held] = await self._store.heartbeat(worker, [await self._lease(rollout)], session.served.idle_s)
            except StoreError:
                await asyncio.sleep(1.0)
                continue
            if not held:
                return
            session.renewed_s = asked_s
            await asyncio.sleep(session.renewal_s)

    async def _lease(self, rollout: Rollout) -> Lease:
        if self._secret is None:
            self._secret = await self._store.signing_secret()
        return Lease(rollout_id=rollout.id, attempt=rollout.attempt, token=keys.session_token(self._secret, rollout.id))

    async def _settings(self, run_id: str) -> tuple[ServeConfig, Sampling]:
        if run_id not in self._served:
            found = await self._store.runs([run_id])
            config = found[0].config if found else {}
            if not isinstance(config.get("serve"), dict):
                raise ApiError(f"run {run_id} serves no users", status=404, code="not_served")
            try:
                served = parse_settings(ServeConfig, config["serve"], "serve", ".")
            except ConfigError as cause:
                raise ApiError(str(cause), status=502, type="server_error", code="serve_misconfigured") from cause
            model = config.get("model") or {}
            sampling = Sampling(temperature=model.get("temperature", 1.0), max_tokens=model.get("max_tokens"))
            self._served[run_id] = served, sampling
            while len(self._served) > MAX_RUNS:
                self._served.popitem(last=False)
        return self._served[run_id]
