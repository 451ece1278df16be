"""Recorder: what is kept of the calls of users: nothing but counts unless the run records, and no secrets where it does.

Driven by whoever appends calls to the store (policy/calls.py, external/calls.py) and by session_api.py; for attempts that
are no sessions it does nothing. The function that redacts is code of the server's operator: a gateway that was not started
with the one that the run names serves no session of it. What it changed loses its token ids, which would spell out what was
taken away, and so does what continues it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.config.serve import ServeConfig
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.sessions.sessions import UserSessions
from agentlightning.protocols.base import ApiError
from agentlightning.records import JSON, Call, Rollout
from agentlightning.store.base import LightningStore

Redact = Callable[[JSON], JSON]
"""Takes what is to be kept of a call, {"messages", "completion", "tools"}, or {"feedback"}; returns the same without what
must not be kept."""


class Recorder:
    """`redactions`: the operator's functions by the names that runs have for them."""

    def __init__(self, store: LightningStore, sessions: UserSessions, redactions: Mapping[str, Redact]) -> None:
        self._store = store
        self._sessions = sessions
        self._redactions = redactions

    async def check(self, served: ServeConfig) -> None:
        """Raises ApiError where this gateway lacks the function without which nothing may be kept."""
        if served.redact is not None and served.redact not in self._redactions:
            raise ApiError(
                f"this gateway was not started with --redact {served.redact}, which the run asks for",
                status=503,
                type="server_error",
                code="redaction_missing",
            )

    async def append_calls(self, attempt: TrackedAttempt, calls: Sequence[Call]) -> None:
        """Make calls durable, as far as they may be kept."""
        if attempt.rollout.kind == "session":
            served = await self._sessions.served(attempt.rollout.run_id)
            calls = [await self._kept(served, attempt, call) for call in calls]
        await self._store.append_calls(calls)

    async def put_files(self, rollout: Rollout, files: Mapping[str, bytes]) -> None:
        """Keep images of calls, where they may be kept as they are."""
        if files and await self.keeps_all(rollout):
            await self._store.put_files(rollout.run_id, rollout.id, files)

    async def keeps_all(self, rollout: Rollout) -> bool:
        """True where whatever a request has may be kept as it is."""
        if rollout.kind != "session":
            return True
        served = await self._sessions.served(rollout.run_id)
        return served.record and served.redact is None

    async def completion(self, rollout: Rollout, given: JSON) -> Any:
        """The completion of a session's call as it may be kept; None where it may not. `given` is what may be kept of a call
        as `Redact` takes it. Raises ApiError where that fails."""
        served = await self._sessions.served(rollout.run_id)
        if not served.record:
            return None
        return (given if served.redact is None else await self._redacted(served.redact, given))["completion"]

    async def text(self, rollout: Rollout, words: str) -> str | None:
        """Words of a user as they may be kept; None where they may not."""
        served = await self._sessions.served(rollout.run_id)
        if not served.record:
            return None
        if served.redact is None:
            return words
        redacted = await self._redacted(served.redact, {"feedback": words})
        return str(redacted.get("feedback") or "")

    async def _kept(self, served: ServeConfig, attempt: TrackedAttempt, call: Call) -> Call:
        if not served.record:
            return _without_tokens(call, {}, attempt)
        if served.redact is None:
            return call
        given: JSON = {"messages": call.messages, "completion": call.completion, "tools": call.tools}
        redacted = await self._redacted(served.redact, given)
        if redacted == given and call.parent_id not in attempt.textual and not call.images:
            return call
        return _without_tokens(call, redacted, attempt)

    async def _redacted(self, name: str, given: JSON) -> JSON:
        """Calls the operator's function with a copy. ApiError where it fails: then nothing is kept and nothing sent."""
        try:
            redacted: Any = await asyncio.to_thread(self._redactions[name], copy.deepcopy(given))
        except Exception as cause:
            sentence = f"{name} failed: {type(cause).__name__}; nothing of the call is kept"
            raise ApiError(sentence, status=500, type="server_error", code="redaction_failed") from cause
        if not isinstance(redacted, dict) or redacted.keys() != given.keys():
            sentence = f"{name}: expected a dict with {', '.join(given)}, got {type(redacted).__name__}"
            raise ApiError(sentence, status=500, type="server_error", code="redaction_failed")
        return redacted


def _without_tokens(call: Call, texts: JSON, attempt: TrackedAttempt) -> Call:
    """The call with these texts alone: later requests do not continue it from the record."""
    attempt.textual.add(call.id)
    sampled = len(call.sampled_ids)
    return replace(
        call,
        parent_id=call.parent_id if texts else None,
        suffix_ids=[],
        sampled_ids=[],
        logprobs=[],
        versions=[],
        history_hash="",
        request_hash="",
        messages=texts.get("messages") or [],
        completion=texts.get("completion") or {},
        tools=texts.get("tools"),
        decoding={},
        overridden_params={},
        request_fields={},
        images=[],
        usage=call.usage if not call.policy else {"sampled_tokens": sampled},
    )
