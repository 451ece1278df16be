"""Clients: the hook by which an edge answers requests that carry a client's token in place of an attempt's key.

The app makes what ``--clients`` names, once, and the proxy hands it those requests. Without it they are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.gateway.authentication import Authentication
from agentlightning.gateway.limits import CallLimits
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.store.base import LightningStore
from agentlightning.store.tokens import Token

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
